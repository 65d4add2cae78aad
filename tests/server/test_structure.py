"""Structured replies, forced tool calls and predictions over HTTP, with the built-in pair."""

from __future__ import annotations

import json

import openai
import pytest

from conftest import openai_client, serving
from secondguess import load
from secondguess.engine import Engine
from secondguess.sampling.grammar import LIMITS
from secondguess.server.schemas import Tool
from secondguess.server.structure import call_schema

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "add_person", "parameters": PERSON}},
    {
        "type": "function",
        "function": {
            "name": "find",
            "parameters": {
                "type": "object",
                "properties": {"key": {"$ref": "#/$defs/key"}},
                "required": ["key"],
                "additionalProperties": False,
                "$defs": {"key": {"enum": ["name", "age"]}},
            },
        },
    },
]
NAMED = {"type": "function", "function": {"name": "find"}}


@pytest.fixture(scope="module")
def client():
    engine = Engine(load())
    with serving(engine) as url, openai_client(url) as client:
        yield client
    engine.close()


def chat(client, **fields):
    return client.chat.completions.create(
        **{
            "model": "builtin",
            "messages": [{"role": "user", "content": "a person"}],
            "max_tokens": 200,
            "seed": 1,
            **fields,
        }
    )


def complete(client, **fields):
    return client.completions.create(
        **{"model": "builtin", "prompt": "x = ", "max_tokens": 60, "seed": 1, **fields}
    )


def schema_format(schema):
    return {"type": "json_schema", "json_schema": {"name": "person", "schema": schema}}


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_json_schema_is_followed_with_and_without_speculation(client, temperature):
    fields = {"response_format": schema_format(PERSON), "temperature": temperature}
    choice = chat(client, **fields).choices[0]
    person = json.loads(choice.message.content)
    assert choice.finish_reason == "stop"
    assert list(person) == ["name", "age"]
    assert isinstance(person["age"], int)
    plain = chat(client, **fields, extra_body={"speculation": "off"})
    assert plain.choices[0].message.content == choice.message.content


def test_a_json_object_is_streamed(client):
    chunks = list(chat(client, response_format={"type": "json_object"}, stream=True, max_tokens=400))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert chunks[-1].choices[0].finish_reason in ("stop", "length")
    if chunks[-1].choices[0].finish_reason == "stop":
        assert isinstance(json.loads(text), dict)
    assert text.startswith("{")


def test_the_parsed_reply_of_a_response_follows_its_format(client):
    form = {"type": "json_schema", "name": "person", "schema": PERSON}
    reply = client.responses.create(
        model="builtin", input="a person", text={"format": form}, max_output_tokens=200
    )
    assert list(json.loads(reply.output_text)) == ["name", "age"]


@pytest.mark.parametrize(
    ("outputs", "texts"),
    [
        ({"regex": "(red|green) [0-9]{2}"}, None),
        ({"grammar": 'start: "yes" | "no"'}, ("yes", "no")),
        ({"json": {"enum": ["a", "b"]}}, ('"a"', '"b"')),
    ],
)
def test_a_completion_follows_its_own_grammar(client, outputs, texts):
    choice = complete(client, extra_body={"structured_outputs": outputs}).choices[0]
    assert choice.finish_reason == "stop"
    if texts is None:
        colour, number = choice.text.split(" ")
        assert colour in ("red", "green")
        assert len(number) == 2
    else:
        assert choice.text in texts


@pytest.mark.parametrize("choice", ["required", NAMED])
@pytest.mark.parametrize("stream", [False, True])
def test_a_forced_call_is_a_call_with_valid_arguments(client, choice, stream):
    reply = chat(client, tools=TOOLS, tool_choice=choice, stream=stream)
    if stream:
        chunks = [chunk.choices[0] for chunk in reply]
        call, *parts = [call for chunk in chunks for call in chunk.delta.tool_calls or ()]
        assert (call.id[:5], call.function.arguments) == ("call_", "")
        assert {(part.index, part.id, part.function.name) for part in parts} == {(0, None, None)}
        assert len(parts) > 1  # arguments come as they are written
        call.function.arguments = "".join(part.function.arguments for part in parts)
        reason = chunks[-1].finish_reason
    else:
        (call,), reason = reply.choices[0].message.tool_calls, reply.choices[0].finish_reason
        assert reply.choices[0].message.content is None
    assert reason == "tool_calls"
    arguments = json.loads(call.function.arguments)
    if choice is NAMED:
        assert call.function.name == "find"
    assert list(arguments) == (["key"] if call.function.name == "find" else ["name", "age"])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": schema_format({"type": "nothing"})}, None),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": schema_format({"const": "x" * 70_000})}, "response_format"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "absent"}}},
            "tool_choice",
        ),
        ({"tools": TOOLS, "tool_choice": NAMED, "response_format": {"type": "json_object"}}, "tool_choice"),
        ({"extra_body": {"structured_outputs": {}}}, "structured_outputs"),
        ({"extra_body": {"structured_outputs": {"regex": "("}}}, None),
        (
            {
                "tool_choice": "required",
            },
            None,
        ),
    ],
)
def test_an_invalid_structure_is_refused_with_the_reason(client, fields, param):
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, **fields)
    assert param is None or caught.value.param == param
    assert "expected" in caught.value.message


def test_references_of_parameters_stay_those_of_the_tool():
    tree = {
        "type": "object",
        "properties": {
            "value": {"$ref": "#/$defs/key"},
            "children": {"type": "array", "items": {"$ref": "#"}},
        },
        "$defs": {"key": {"type": "integer"}},
    }
    names = {"type": "object", "$defs": {"key": {"type": "string"}}}
    tools = [
        Tool.model_validate({"type": "function", "function": {"name": name, "parameters": parameters}})
        for name, parameters in (("tree", tree), ("names", names))
    ]
    of_one, of_two = call_schema(tools[:1]), call_schema(tools)
    assert of_one["properties"]["arguments"]["properties"]["value"] == {
        "$ref": "#/properties/arguments/$defs/key"
    }
    moved = of_two["anyOf"][0]["properties"]["arguments"]["properties"]["children"]["items"]
    assert moved == {"$ref": "#/anyOf/0/properties/arguments"}


def test_predictions_are_drafted_from_and_counted(client):
    fields = {"prompt": "def add(a, b):\n", "temperature": 0, "max_tokens": 48}
    first = complete(client, **fields, extra_body={"report": True})
    text = first.choices[0].text
    prediction = {"type": "content", "content": text}
    second = complete(
        client,
        **fields,
        extra_body={"prediction": prediction, "speculation": {"draft_length": 8}, "report": True},
    )
    assert second.choices[0].text == text
    details = second.usage.completion_tokens_details
    assert details.accepted_prediction_tokens > 30
    rounds = second.secondguess["samples"][0]["num_rounds"]
    assert rounds * 4 <= 48
    assert first.usage.completion_tokens_details.accepted_prediction_tokens == 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_limit_of_the_grammar_during_decoding_is_an_error_and_no_stop(client, monkeypatch, stream):
    monkeypatch.setitem(LIMITS, "step_max_items", 150)
    rule = "many" + str(stream).lower()  # compiled grammars are cached with their limits
    grammar = f'start: {rule}\n{rule}: "a" | {rule} {rule}'
    extra = {"structured_outputs": {"grammar": grammar}, "min_tokens": 60}

    def read():
        return list(complete(client, stream=stream, extra_body=extra))

    with pytest.raises(openai.APIError, match="llguidance") as caught:
        read()
    assert caught.value.code == "grammar_limit"


def test_a_one_of_that_is_refused_is_named_with_the_remedy(client):
    schema = {"oneOf": [{"type": "integer"}, {"type": "number"}]}
    with pytest.raises(openai.BadRequestError, match=r"oneOf .* write anyOf"):
        chat(client, response_format=schema_format(schema))


def test_a_prediction_is_tokenized_once_for_all_samples(monkeypatch):
    from secondguess.engine import generation

    llm, calls, original = load(), [], generation._prediction_tokens
    monkeypatch.setattr(
        generation, "_prediction_tokens", lambda *given: calls.append(given) or original(*given)
    )
    params = llm.sampling(prediction="def f(x):", n=4, temperature=1.0, max_tokens=4)
    rows = generation.Generation(llm, ["def"], [params]).group.rows
    assert len(rows) == 4
    assert len([given for given in calls if isinstance(given[1], str)]) == 1


@pytest.mark.parametrize(
    "fields", [{"structured_outputs": {"choice": ["🙂", 'n"o\\']}}, {"guided_choice": ["yes"]}]
)
def test_one_of_several_texts_is_the_reply(client, fields):
    reply = chat(client, extra_body=fields).choices[0].message.content
    assert reply in ("yes", "🙂", 'n"o\\')


def test_a_schema_of_a_set_is_taken(client):
    schema = {
        "type": "array",
        "items": {"enum": ["a", "b"]},
        "minItems": 1,
        "maxItems": 2,
        "uniqueItems": True,
    }
    reply = chat(client, extra_body={"guided_json": schema}).choices[0].message.content
    assert set(json.loads(reply)) <= {"a", "b"}


def test_the_arguments_of_a_forced_call_are_streamed_in_responses(client):
    tools = [{"type": "function", **tool["function"]} for tool in TOOLS]
    events = list(
        client.responses.create(
            model="builtin", input="x", tools=tools, tool_choice="required", temperature=0, stream=True
        )
    )
    kinds = [event.type.removeprefix("response.") for event in events]
    parts = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert len(parts) > 1
    assert kinds == [
        *("created", "in_progress", "output_item.added"),
        *["function_call_arguments.delta"] * len(parts),
        *("function_call_arguments.done", "output_item.done", "completed"),
    ]
    (item,) = events[-1].response.output
    assert (item.status, item.arguments) == ("completed", "".join(parts))
    assert events[-3].arguments == item.arguments
    assert json.loads(item.arguments)
