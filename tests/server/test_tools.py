"""Tools and reasoning over HTTP, for a tokenizer that describes its replies."""

import json

import openai
import pytest
from chat_tokenizer import CALL, TOOL, chat_engine

from conftest import openai_client, serving
from secondguess.server.chat import ChatTemplate, to_conversation
from secondguess.server.model import ServedModel
from secondguess.server.schemas import ChatRequest

MESSAGES = [{"role": "user", "content": "What is 1 + 2?"}]
REPLY = f"<think>I add.</think>Let me see.{CALL}"


@pytest.fixture(scope="module")
def served():
    engine = chat_engine(REPLY)
    with serving(engine) as url, openai_client(url) as client:
        yield engine, client


def chat(client, **fields):
    return client.chat.completions.create(
        **{"model": "chatty", "messages": MESSAGES, "tools": [TOOL], **fields}
    )


def test_calls_and_reasoning_are_parts_of_the_message(served):
    engine, client = served
    reply = chat(client)
    (choice,) = reply.choices
    assert choice.finish_reason == "tool_calls"
    assert (choice.message.content, choice.message.reasoning_content) == ("Let me see.", "I add.")
    (call,) = choice.message.tool_calls
    assert (call.type, call.function.name, json.loads(call.function.arguments)) == (
        "function",
        "add",
        {"a": 1, "b": 2},
    )
    assert 0 < reply.usage.completion_tokens_details.reasoning_tokens < reply.usage.completion_tokens
    assert '"name": "add"' in engine.llm.target.tokenizer.decode(engine.last.prompt)


def test_a_stream_has_the_same_parts(served):
    _, client = served
    chunks = list(chat(client, stream=True, stream_options={"include_usage": True}))
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert "".join(delta.content or "" for delta in deltas) == "Let me see."
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "I add."
    (call,) = [call for delta in deltas for call in delta.tool_calls or ()]
    assert (call.index, call.function.name) == (0, "add")
    assert chunks[-2].choices[0].finish_reason == "tool_calls"
    assert chunks[-1].usage == chat(client).usage


def test_calls_and_results_can_be_sent_back(served):
    engine, client = served
    first = chat(client).choices[0].message
    result = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "3"}
    chat(client, messages=[*MESSAGES, first, result])
    text = engine.llm.target.tokenizer.decode(engine.last.prompt)
    assert "<think>I add.</think>Let me see.<tool_call>" in text
    assert "<|im_start|>tool\n3<|im_end|>" in text


AS_TEXT = "{% for c in m.tool_calls %}[{{ c.function.name + c.function.arguments }}]{% endfor %}"
AS_OBJECT = "{% for c in m.tool_calls %}[{{ c.function.arguments.a }}{{ c.function.name }}]{% endfor %}"
IF_NULL = "{% if m.content is none %}CALLS{% else %}{{ m.content }}|{% endif %}"


@pytest.mark.transformers
@pytest.mark.parametrize("content", [None, ""])
@pytest.mark.parametrize(
    ("turn", "expected"),
    [
        ("{{ m.content + '|' }}" + AS_TEXT, '|[add{"a":  1}]'),  # as DeepSeek V3
        ("{{ m.content + '|' }}" + AS_OBJECT, "|[1add]"),
        ("{{ m.content }}|" + AS_OBJECT, "|[1add]"),
        (IF_NULL.replace("CALLS", AS_TEXT), '[add{"a":  1}]'),  # as DeepSeek R1
        (IF_NULL.replace("CALLS", AS_OBJECT), "[1add]"),
        ("{{ m.content }}|", "|"),
    ],
)
def test_templates_get_earlier_calls_in_the_form_that_they_read(content, turn, expected):
    function = {"name": "add", "arguments": '{"a":  1}'}
    calls = [{"id": "1", "type": "function", "function": function}]
    messages = [
        {"role": "user", "content": "add"},
        {"role": "assistant", "content": content, "tool_calls": calls},
    ]
    template = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}: {% else %}TURN{% endif %}{% endfor %}"
    target = ServedModel.from_llm(chat_engine(REPLY).llm)
    conversation = to_conversation(ChatRequest(messages=messages), None)
    prompt = ChatTemplate(target, template.replace("TURN", turn)).encode(conversation)
    assert target.tokenizer.decode(prompt.ids) == f"add: {expected}"


def test_named_templates_without_a_default_one_format_only_messages_that_they_are_for():
    engine = chat_engine(REPLY)
    tokenizer = engine.llm.target.tokenizer
    tokenizer.chat_template = {"tool_use": tokenizer.chat_template, "rag": "rag"}
    with serving(engine) as url, openai_client(url) as client:
        assert chat(client).choices[0].message.tool_calls
        with pytest.raises(openai.BadRequestError, match=r"named default.*chatty.*named rag, tool_use; use"):
            chat(client, tools=None)
        tokenizer.chat_template = {"default": "default"}
        chat(client, tools=None)
    assert tokenizer.decode(engine.last.prompt) == "default"


def test_tool_choice_none_hides_the_tools(served):
    engine, client = served
    chat(client, tool_choice="none")
    assert "tools:" not in engine.llm.target.tokenizer.decode(engine.last.prompt)


def test_a_variable_of_the_template_can_be_set_and_others_are_refused(served):
    engine, client = served
    chat(client, reasoning_effort="high")
    assert engine.llm.target.tokenizer.decode(engine.last.prompt).endswith("assistant\n<think>")
    with pytest.raises(openai.BadRequestError, match="enable_thinking"):
        chat(client, extra_body={"chat_template_kwargs": {"enable_thinking": True}})
    for name in ("add_generation_prompt", "tools", "messages", "tokenize"):
        with pytest.raises(openai.BadRequestError, match=f"got {name}, which the server sets"):
            chat(client, extra_body={"chat_template_kwargs": {name: False}})
