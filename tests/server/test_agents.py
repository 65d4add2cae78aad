"""Agents' conversations of ten turns, with the request bodies of their clients.

The bodies of LangChain (`langchain-openai` 1.7) and of the Agents SDK (`openai-agents` 0.24) were recorded with a server
that replied with the same calls; only the order of fields is another one.
"""

import json
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import httpx2
import pytest
from chat_tokenizer import chat_engine

from conftest import openai_client, serving
from families import needs_kernels
from secondguess import load
from secondguess.engine import Engine
from test_released import release_of

Json = dict[str, Any]
INSTRUCTIONS = "You answer questions on files. Search first, then read."
QUESTION = "What do the files say?"
TEXT, INTEGER = {"type": "string"}, {"type": "integer", "default": 10}
PARAMETERS = {"search": {"query": TEXT}, "read": {"path": TEXT, "lines": INTEGER}}
DESCRIPTIONS = {"search": "Search the files.", "read": "Read a file."}


class Call(NamedTuple):
    """Call of a tool."""

    name: str
    arguments: str
    identifier: str


@dataclass(frozen=True)
class Turn:
    """Reply, as it came (`items`), the results of its calls by identifier, and what the user says next."""

    text: str
    reasoning: str
    calls: list[Call]
    items: list[Json] = field(default_factory=list)
    results: dict[str, str] = field(default_factory=dict)
    question: str = ""

    @property
    def contents(self):
        """Parts that do not depend on the request."""
        return self.text, self.reasoning, [(call.name, json.loads(call.arguments)) for call in self.calls]


def tools_of_langchain():
    """Return the functions as LangChain describes them."""
    for name, properties in PARAMETERS.items():
        required = [key for key, schema in properties.items() if "default" not in schema]
        schema = {"properties": properties, "required": required, "type": "object"}
        yield {"name": name, "description": DESCRIPTIONS[name], "parameters": schema}


def tools_of_agents():
    """Return the functions as the Agents SDK describes them, with strict schemas."""
    for function in tools_of_langchain():
        name = function["name"]
        properties = {key: schema | {"title": key.title()} for key, schema in PARAMETERS[name].items()}
        strict = {
            "properties": properties,
            "required": [*properties],
            "title": f"{name}_args",
            "additionalProperties": False,
        }
        yield function | {"parameters": function["parameters"] | strict, "strict": True}


def chat_messages(turns):
    """Return the messages of a chat as LangChain and the Agents SDK send them: null for no text beside calls."""
    messages = [{"role": "system", "content": INSTRUCTIONS}, {"role": "user", "content": QUESTION}]
    for turn in turns:
        message = {"role": "assistant", "content": turn.text or None}
        if turn.calls:
            message["tool_calls"] = [
                {
                    "id": call.identifier,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in turn.calls
            ]
        messages.append(message)
        messages += [
            {"role": "tool", "tool_call_id": identifier, "content": result}
            for identifier, result in turn.results.items()
        ]
        if turn.question:
            messages.append({"role": "user", "content": turn.question})
    return messages


def langchain_chat(turns, stream):
    tools = [{"type": "function", "function": function} for function in tools_of_langchain()]
    return {"messages": chat_messages(turns), "stream": stream, "temperature": 0.0, "tools": tools}


def agents_chat(turns, stream):
    tools = [{"type": "function", "function": function} for function in tools_of_agents()]
    return {"messages": chat_messages(turns), "tools": tools, **({"stream": True} if stream else {})}


def response_input(turns, kept):
    """Return the items of a conversation.

    Args:
        turns: those before.
        kept: returns an item of an earlier reply as the client sends it; None to leave it out.
    """
    items = []
    for turn in turns:
        items += [item for item in map(kept, turn.items) if item is not None]
        items += [
            {"type": "function_call_output", "call_id": identifier, "output": result}
            for identifier, result in turn.results.items()
        ]
        if turn.question:
            items.append({"role": "user", "content": turn.question})
    return items


def agents_response(turns, stream):
    """As the Agents SDK: items come back as they were, without their null fields."""

    def kept(item):
        item = {key: value for key, value in item.items() if value is not None}
        if item["type"] == "message":
            parts = [{key: part[key] for key in ("annotations", "text", "type")} for part in item["content"]]
            item["content"] = parts
        return item

    return {
        "include": [],
        "input": [{"role": "user", "content": QUESTION}, *response_input(turns, kept)],
        "instructions": INSTRUCTIONS,
        "tools": [{"type": "function", **function} for function in tools_of_agents()],
        **({"stream": True} if stream else {}),
    }


def langchain_response(turns, stream):
    """As LangChain: of streamed replies, text is left out and calls have no status."""

    def kept(item):
        if item["type"] == "message":
            parts = [
                {"type": "output_text", "text": part["text"], "annotations": []} for part in item["content"]
            ]
            message = {"type": "message", "role": "assistant", "id": item["id"], "content": parts}
            return None if stream else message
        dropped = {"status"} if stream and item["type"] == "function_call" else set()
        return {key: value for key, value in item.items() if key not in dropped and value is not None}

    first = [("system", INSTRUCTIONS), ("user", QUESTION)]
    messages = [{"type": "message", "role": role, "content": text} for role, text in first]
    return {
        "input": [*messages, *response_input(turns, kept)],
        "stream": stream,
        "temperature": 0.0,
        "tools": [{"type": "function", **function} for function in tools_of_langchain()],
    }


def post(http, route, body):
    """Return the reply to a request: the events of a stream, or one object."""
    reply = http.post(route, json=body)
    assert reply.status_code == 200, reply.text
    if not body.get("stream"):
        return [reply.json()]
    lines = [line.removeprefix("data: ") for line in reply.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def ask_chat(build, http, turns, stream, **more):
    """Return the next turn of a chat."""
    found = post(http, "/v1/chat/completions", build(turns, stream) | more)
    choices = [choice for part in found for choice in part["choices"]]
    parts = [choice["delta" if stream else "message"] for choice in choices]
    calls = [call for part in parts for call in part.get("tool_calls") or ()]
    if stream:
        assert [call["index"] for call in calls] == [*range(len(calls))]
    reason = choices[-1]["finish_reason"]
    assert reason == ("tool_calls" if calls else "length" if reason == "length" else "stop")
    text, reasoning = (
        "".join(part.get(field) or "" for part in parts) for field in ("content", "reasoning_content")
    )
    return Turn(text, reasoning, [Call(**call["function"], identifier=call["id"]) for call in calls])


def ask_response(build, http, turns, stream, **more):
    """Return the next turn of a conversation by responses."""
    events = post(http, "/v1/responses", build(turns, stream) | more)
    response = events[-1]["response"] if stream else events[0]
    items = response["output"]
    if stream:
        assert [event["item"] for event in events if event["type"] == "response.output_item.done"] == items
    texts = {
        kind: "".join(part["text"] for item in items if item["type"] == kind for part in item["content"])
        for kind in ("message", "reasoning")
    }
    calls = [
        Call(item["name"], item["arguments"], item["call_id"])
        for item in items
        if item["type"] == "function_call"
    ]
    return Turn(texts["message"], texts["reasoning"], calls, items)


def ask_openai(http, turns, stream, **more):
    """Return the next turn of a chat by OpenAI's client, which sends the messages that it received."""
    messages = chat_messages([])
    for turn in turns:
        results = [
            {"role": "tool", "tool_call_id": identifier, "content": result}
            for identifier, result in turn.results.items()
        ]
        following = [{"role": "user", "content": turn.question}] if turn.question else []
        messages += [*turn.items, *results, *following]
    body = {
        "messages": messages,
        "tools": langchain_chat([], False)["tools"],
        "model": None,
        "extra_body": more,
    }
    with openai_client(str(http.base_url).rstrip("/")) as client:
        body["model"] = client.models.list().data[0].id
        if stream:
            with client.chat.completions.stream(**body) as events:
                for _ in events:
                    pass
                message = events.get_final_completion().choices[0].message
        else:
            message = client.chat.completions.create(**body).choices[0].message
    calls = [Call(call.function.name, call.function.arguments, call.id) for call in message.tool_calls or ()]
    reasoning = getattr(message, "reasoning_content", None) or ""
    return Turn(message.content or "", reasoning, calls, [message.model_dump(exclude_unset=True)])


CLIENTS = {
    "openai": ask_openai,
    "LangChain": partial(ask_chat, langchain_chat),
    "LangChain, responses": partial(ask_response, langchain_response),
    "Agents SDK": partial(ask_chat, agents_chat),
    "Agents SDK, responses": partial(ask_response, agents_response),
}


def result_of(call):
    """Return the result of a call, another one for other arguments."""
    number = len(call.arguments)
    if call.name == "search":
        return f"Found {call.arguments} in notes/{number}.txt and notes/{number + 1}.txt."
    return f"Text of {call.arguments}: chapter {number} explains how the parser reads tokens."


def converse(ask, http, stream, questions, **more):
    """Return the turns of a conversation; after a reply without calls the user asks the next question."""
    turns, questions = [], iter(questions)
    for _ in range(10):
        turn = ask(http, turns, stream, **more)
        results = {call.identifier: result_of(call) for call in turn.calls}
        turns.append(replace(turn, results=results, question="" if results else next(questions, "Go on.")))
    identifiers = [call.identifier for turn in turns for call in turn.calls]
    assert len({*identifiers}) == len(identifiers)
    return turns


def call_text(name, arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def script():
    """Return ten replies and their parts: searches and reads with and without text and reasoning, and an answer."""
    for number in range(9):
        calls = [
            ("search", {"query": f"topic {number}"}),
            ("read", {"path": f"a/{number}.txt", "lines": number}),
        ]
        calls = calls if number % 4 == 3 else calls[number % 2 :][:1]
        text = "Let me see." if number % 3 else ""
        reasoning = "I look." if number % 5 == 1 else ""
        reply = f"<think>{reasoning}</think>" * bool(reasoning) + text
        yield reply + "".join(call_text(*call) for call in calls), (text, reasoning, calls)
    yield "They say <b>nothing</b>.", ("They say <b>nothing</b>.", "", [])


@pytest.fixture(scope="module")
def scripted():
    """Engine with the replies of the script, one per request, and an HTTP client."""
    engine = chat_engine("")
    submit = engine.submit

    def submit_next(request):
        engine.reply = engine.replies[len(engine.requests)]
        submit(request)

    engine.submit = submit_next
    with serving(engine) as url, httpx2.Client(base_url=url, timeout=60, verify=False) as http:
        yield engine, http


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("client", CLIENTS)
def test_ten_turns_of_a_client(scripted, client, stream):
    engine, http = scripted
    engine.replies, expected = zip(*script(), strict=True)
    engine.requests.clear()
    turns = converse(CLIENTS[client], http, stream, [])
    assert [turn.contents for turn in turns] == [*expected]
    prompt = engine.llm.target.tokenizer.decode(engine.last_prompt)
    place = prompt.index(INSTRUCTIONS)
    for turn in turns[:-1]:  # in order: each call, then its result
        for text in [
            *(json.dumps(json.loads(call.arguments)) for call in turn.calls),
            *turn.results.values(),
        ]:
            place = prompt.index(text, place)
    assert engine.llm.target.tokenizer.decode(engine.requests[0].prompts[0]).count('"name": "search"') == 1


QUESTIONS = (
    "Now search the files for the word parser.",
    "Now read the first 5 lines of notes/34.txt.",
    "Now search the files for the word tokenizer.",
    "Now read notes/12.txt.",
    "Summarize what you have found.",
)


@needs_kernels
@pytest.mark.released
@pytest.mark.parametrize("client", ["LangChain", "Agents SDK, responses"])
@pytest.mark.parametrize("name", ["qwen-0.5b", "qwen-1.5b"])
def test_speculation_changes_no_turn_of_a_released_model(name, client, request, tmp_path, monkeypatch):
    monkeypatch.setenv("SECONDGUESS_CACHE", str(tmp_path))
    engine = Engine(load(str(release_of(name, request).path)))
    limit = "max_output_tokens" if "responses" in client else "max_tokens"
    with serving(engine) as url, httpx2.Client(base_url=url, timeout=120, verify=False) as http:
        ask = partial(CLIENTS[client], temperature=0, **{limit: 48})
        plain, *others = [
            [turn.contents for turn in converse(ask, http, stream, QUESTIONS, speculation=speculation)]
            for speculation in ("off", "auto")
            for stream in (False, True)
        ]
    engine.close()
    assert all(turns == plain for turns in others)
    assert name == "qwen-0.5b" or sum(bool(calls) for *_, calls in plain) >= 3, "it calls no tools"
