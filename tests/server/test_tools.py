"""Tools and reasoning over HTTP, for a tokenizer that describes its replies."""

import json

import openai
import pytest
from chat_tokenizer import CALL, TOOL, chat_engine

from conftest import openai_client, serving
from secondguess.server.conversations import ChatTemplate, to_conversation
from secondguess.server.schemas import ChatRequest
from secondguess.server.served_model import ServedModel

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
    assert '"name": "add"' in engine.llm.target.tokenizer.decode(engine.last_prompt)


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


def test_a_stream_of_content_has_the_origin_of_each_token():
    text = "One, two, three, four and five."
    with serving(chat_engine(text)) as url, openai_client(url) as client:
        reply = client.chat.completions.create(
            model="chatty", messages=MESSAGES, stream=True, extra_body={"report": True}
        )
        choices = [choice.model_dump() for chunk in reply for choice in chunk.choices]
    contents = [choice for choice in choices if choice["delta"]["content"]]
    segments = [part for choice in contents[:-1] for part in choice["secondguess"]["segments"]]
    assert {drafted for _, drafted in segments} == {True, False}
    assert text.startswith("".join(part for part, _ in segments))


@pytest.mark.parametrize("route", ["chat", "stream", "responses"])
def test_without_parallel_calls_the_first_one_alone_is_returned(route):
    with serving(chat_engine(CALL + CALL)) as url, openai_client(url) as client:
        for parallel, count in ((True, 2), (None, 2), (False, 1)):
            fields = {} if parallel is None else {"parallel_tool_calls": parallel}
            if route == "responses":
                tool = TOOL["function"] | {"type": "function"}
                reply = client.responses.create(model="chatty", input="x", tools=[tool], **fields)
                assert reply.parallel_tool_calls is (parallel is not False)
                calls = [item for item in reply.output if item.type == "function_call"]
            elif route == "chat":
                calls = chat(client, **fields).choices[0].message.tool_calls
            else:
                deltas = [chunk.choices[0].delta for chunk in chat(client, stream=True, **fields)]
                calls = [call for delta in deltas for call in delta.tool_calls or ()]
            assert len(calls) == count


def test_a_reply_can_be_sent_back_as_the_client_has_it(served):
    """With the fields that `openai` adds to replies, and those of other clients."""
    engine, client = served
    first = chat(client).choices[0].message.model_dump()
    call = first["tool_calls"][0]
    call["function"]["parsed_arguments"] = {"a": 1, "b": 2}
    first |= {"parsed": None, "index": 0, "id": "msg_1", "tool_calls": [call | {"index": 0}]}
    result = {"role": "tool", "tool_call_id": call["id"], "name": "add", "id": "msg_2"}
    result["content"] = [{"type": "text", "text": "3", "cache_control": {"type": "ephemeral"}}]
    chat(client, messages=[*MESSAGES, first, result])
    assert "<|im_start|>tool\n3<|im_end|>" in engine.llm.target.tokenizer.decode(engine.last_prompt)


@pytest.mark.parametrize("include", [True, False])
@pytest.mark.parametrize("stop", ["add", "me see", '"b": 2}'])
def test_the_parts_of_a_reply_can_end_with_the_stop_string(include, stop):
    reply = f"<think>I add.</think>Let me see.{CALL}"
    before, found, _ = reply.removeprefix("<think>").partition(stop)
    parts = (before + found * include).partition("</think>")
    with serving(chat_engine(reply)) as url, openai_client(url) as client:
        more = {"stop": stop, "extra_body": {"include_stop_str_in_output": include}}
        message = chat(client, **more).choices[0].message
        assert (message.reasoning_content, message.content or "") == (parts[0], parts[2])
        deltas = [chunk.choices[0].delta for chunk in chat(client, stream=True, **more)]
        assert "".join(delta.content or "" for delta in deltas) == parts[2]


def test_calls_and_results_can_be_sent_back(served):
    engine, client = served
    first = chat(client).choices[0].message
    result = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "3"}
    chat(client, messages=[*MESSAGES, first, result])
    text = engine.llm.target.tokenizer.decode(engine.last_prompt)
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


@pytest.mark.transformers
def test_a_template_that_wants_short_identifiers_gets_them():
    """As that of Mistral; the result keeps the identifier of its call."""
    template = (
        "{% for m in messages %}{% set id = m.tool_call_id or (m.tool_calls or [{'id': '123456789'}])[0].id %}"
        "{% if id | length != 9 %}{{ raise_exception('nine characters') }}{% endif %}[{{ id }}]{% endfor %}"
    )
    calls = [{"id": "call_1", "type": "function", "function": {"name": "add", "arguments": "{}"}}]
    messages = [
        {"role": "user", "content": "add"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "content": "3", "tool_call_id": "call_1"},
    ]
    target = ServedModel.from_llm(chat_engine(REPLY).llm)
    conversation = to_conversation(ChatRequest(messages=messages), None)
    prompt = target.tokenizer.decode(ChatTemplate(target, template).encode(conversation).ids)
    user, call, result = prompt.strip("[]").split("][")
    assert (user, len(call), call.isalnum(), result) == ("123456789", 9, True, call)


@pytest.mark.transformers
@pytest.mark.parametrize("role", ["system", "developer", "user"])
@pytest.mark.parametrize("name", ["message.tools", "message['tools']", 'message["tools"]'])
def test_a_template_can_read_tools_as_the_text_of_the_first_message(role, name):
    """As that of Phi-4-mini."""
    template = "{% for message in messages %}<{{ message.role }}>{{ message.content }}"
    template += f"{{% if {name} is defined %}}<|tool|>{{{{ {name} }}}}<|/tool|>{{% endif %}}{{% endfor %}}"
    target = ServedModel.from_llm(chat_engine(REPLY).llm)
    request = ChatRequest(messages=[{"role": role, "content": "add"}], tools=[TOOL])
    prompt = ChatTemplate(target, template).encode(to_conversation(request, None))
    before, found = target.tokenizer.decode(prompt.ids).split("<|tool|>")
    assert before == ("<system>" if role == "user" else "<system>add")
    found, after = found.split("<|/tool|>")
    assert json.loads(found) == [TOOL["function"]]
    assert after == ("<user>add" if role == "user" else "")


@pytest.mark.transformers
def test_calls_are_written_for_a_template_that_does_not_read_them():
    """As that of Phi-4-mini."""
    template = "{% for message in messages %}<{{ message.role }}>{{ message['tools'] or '' }}{{ message.content }}{% endfor %}"
    calls = [
        {"id": "1", "type": "function", "function": {"name": "add", "arguments": arguments}}
        for arguments in ('{"a":1}', "")
    ]
    messages = [
        {"role": "user", "content": "add"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "content": "3", "tool_call_id": "1"},
    ]
    target = ServedModel.from_llm(chat_engine(REPLY).llm)
    conversation = to_conversation(ChatRequest(messages=messages, tools=[TOOL]), None)
    prompt = target.tokenizer.decode(ChatTemplate(target, template).encode(conversation).ids)
    found = prompt.partition("<assistant><|tool_call|>")[2].partition("<|/tool_call|><tool>3")[0]
    assert json.loads(found) == [{"name": "add", "arguments": arguments} for arguments in ({"a": 1}, {})]


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
    assert tokenizer.decode(engine.last_prompt) == "default"


def test_tool_choice_none_hides_the_tools(served):
    engine, client = served
    chat(client, tool_choice="none")
    assert "tools:" not in engine.llm.target.tokenizer.decode(engine.last_prompt)


def test_a_variable_of_the_template_can_be_set_and_one_that_it_does_not_read_is_accepted(served):
    engine, client = served
    chat(client, reasoning_effort="high")
    assert engine.llm.target.tokenizer.decode(engine.last_prompt).endswith("assistant\n<think>")
    chat(client, extra_body={"chat_template_kwargs": {"enable_thinking": True}})
    assert engine.llm.target.tokenizer.decode(engine.last_prompt).endswith("assistant\n")
    for name in ("add_generation_prompt", "tools", "messages", "tokenize"):
        with pytest.raises(openai.BadRequestError, match=f"got {name}, which the server sets"):
            chat(client, extra_body={"chat_template_kwargs": {name: False}})
