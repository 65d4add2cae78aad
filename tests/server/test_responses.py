"""`/v1/responses` with OpenAI's client."""

import json

import openai
import pytest
from chat_tokenizer import CALL, TOOL, chat_engine
from fake_engine import LOGPROB, REPLY

from conftest import openai_client, serving
from secondguess.core import TokenLogprob
from secondguess.server.calls.parsers import Delta
from secondguess.server.responses.output import OutputItems
from secondguess.server.responses.schemas import ResponseRequest
from secondguess.server.schemas import MAX_ENTRIES

FUNCTION = {"type": "function", **TOOL["function"], "strict": False}


def respond(client, **fields):
    return client.responses.create(**{"model": "builtin", "input": "Add two numbers.", **fields})


def prompt_text(engine):
    return engine.llm.target.tokenizer.decode(engine.last_prompt)


def test_a_response_has_text_status_and_usage(client, engine):
    reply = respond(client, instructions="Be brief.", metadata={"a": "b"})
    assert (reply.object, reply.status, reply.output_text) == ("response", "completed", REPLY)
    assert (reply.metadata, reply.store) == ({"a": "b"}, False)
    assert reply.usage.input_tokens == len(engine.last_prompt)
    assert reply.usage.total_tokens == reply.usage.input_tokens + reply.usage.output_tokens
    assert prompt_text(engine) == "# system: Be brief.\n# user: Add two numbers.\n\n"


def test_a_limit_makes_the_response_incomplete(client):
    reply = respond(client, max_output_tokens=2)
    assert (reply.status, reply.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert reply.usage.output_tokens == 2


def test_a_stream_describes_the_same_response(client):
    whole = respond(client)
    events = list(respond(client, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:4]] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == REPLY
    assert events[-1].type == "response.completed"
    assert events[-1].response.output_text == REPLY
    assert events[-1].response.usage == whole.usage
    with client.responses.stream(model="builtin", input="x") as stream:
        assert stream.get_final_response().output_text == REPLY


def test_logprobs_come_if_included(client):
    reply = respond(client, include=["message.output_text.logprobs"], top_logprobs=2)
    found = reply.output[0].content[0].logprobs
    assert {each.logprob for each in found} == {LOGPROB}
    assert len(found[0].top_logprobs) == 2
    assert not respond(client).output[0].content[0].logprobs


def test_a_failure_within_a_stream_is_an_event(client, engine):
    engine.failure = RuntimeError("secret")
    *_, last = respond(client, stream=True)
    assert (last.type, last.response.status) == ("response.failed", "failed")
    assert "secret" not in last.response.error.message


@pytest.fixture(scope="module")
def chatty():
    engine = chat_engine(f"<think>I add.</think>Let me see.{CALL}")
    with serving(engine) as url, openai_client(url) as client:
        yield engine, client


def test_reasoning_text_and_calls_are_items(chatty):
    _, client = chatty
    reply = respond(client, model="chatty", tools=[FUNCTION])
    assert [item.type for item in reply.output] == ["reasoning", "message", "function_call"]
    assert reply.output[0].content[0].text == "I add."
    assert reply.output_text == "Let me see."
    assert json.loads(reply.output[2].arguments) == {"a": 1, "b": 2}
    assert reply.usage.output_tokens_details.reasoning_tokens > 0
    events = list(respond(client, model="chatty", tools=[FUNCTION], stream=True))
    assert [item.type for item in events[-1].response.output] == ["reasoning", "message", "function_call"]
    assert {item.status for item in events[-1].response.output} == {"completed"}
    for place in range(3):
        kinds = [event.type for event in events if getattr(event, "output_index", None) == place]
        assert (kinds[0], kinds[-1]) == ("response.output_item.added", "response.output_item.done")
    done = [event for event in events if event.type == "response.function_call_arguments.done"]
    assert done[0].arguments == reply.output[2].arguments


def test_items_can_be_sent_back(chatty):
    engine, client = chatty
    first = respond(client, model="chatty", tools=[FUNCTION])
    result = {"type": "function_call_output", "call_id": first.output[2].call_id, "output": "3"}
    question = {"role": "user", "content": [{"type": "input_text", "text": "What is 1 + 2?"}]}
    respond(client, model="chatty", tools=[FUNCTION], input=[question, *first.output, result])
    text = prompt_text(engine)
    assert "user\nWhat is 1 + 2?<|im_end|>" in text
    assert text.count("<|im_start|>assistant") == 2
    assert "<think>I add.</think>Let me see.<tool_call>" in text
    assert "<|im_start|>tool\n3<|im_end|>" in text


def test_log_probabilities_of_tokens_without_a_text_of_their_own_are_kept(chatty):
    """Reasoning and special tokens add no content; their log-probabilities come with the next content."""
    engine, client = chatty
    fields = {"model": "chatty", "tools": [FUNCTION], "top_logprobs": 0}
    reply = respond(client, **fields)
    events = list(respond(client, **fields, stream=True))
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    streamed = [each.logprob for event in deltas for each in event.logprobs]
    whole = [each.logprob for each in reply.output[1].content[0].logprobs]
    num_before_call = len(streamed)
    assert streamed == whole[:num_before_call] == [LOGPROB] * num_before_call
    reasoning_and_text = engine.llm.target.tokenizer("<think>I add.</think>Let me see.").input_ids
    assert num_before_call >= len(reasoning_and_text)


def test_log_probabilities_wait_for_their_text():
    items = OutputItems(with_logprobs=True)
    logprobs = [TokenLogprob(token, LOGPROB, {}) for token in range(4)]
    events = [
        *items.add([], logprobs[:1]),
        *items.add([Delta("reasoning", "hm")], logprobs[1:2]),
        *items.add([Delta("content", "yes")], logprobs[2:3]),
        *items.add([], logprobs[3:]),
        *items.close(),
    ]
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert [(each["delta"], len(each["logprobs"])) for each in deltas] == [("yes", 3), ("", 1)]
    assert len(items.items[-1]["content"][0]["logprobs"]) == 4


def test_many_items_are_validated_by_their_type(client):
    item = {"type": "function_call", "call_id": "", "name": "", "arguments": "{}"}
    request = ResponseRequest.model_validate({"model": "builtin", "input": [item] * MAX_ENTRIES})
    assert len(request.input) == MAX_ENTRIES
    with pytest.raises(openai.BadRequestError) as caught:
        respond(client, input=[{**item, "name": 5}])
    assert caught.value.param == "input.0.name"
