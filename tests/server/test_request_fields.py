"""Every field of OpenAI's requests is honoured or refused by name; the list is that of its own client."""

from typing import get_type_hints

import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import response_create_params

HONOURED, NEUTRAL, REFUSED = "honoured", "neutral", "refused"

# field -> what it is, a value that is accepted, a value that is refused (None: every valid value is accepted)
SHARED = {
    "frequency_penalty": (HONOURED, 0.5, 3),
    "logit_bias": (HONOURED, {"5": 1}, {"x": 1}),
    "model": (HONOURED, "builtin", 5),
    "n": (HONOURED, 2, 0),
    "presence_penalty": (HONOURED, 0.5, 3),
    "seed": (HONOURED, 5, -1),
    "stop": (HONOURED, ["a"], [""]),
    "stream_options": (HONOURED, {"include_usage": True}, {"include_obfuscation": True}),
    "temperature": (HONOURED, 0.5, -1),
    "top_p": (HONOURED, 0.5, 2),
    "user": (HONOURED, "someone", 5),
    "max_tokens": (HONOURED, 5, 0),
}
COMPLETION = SHARED | {
    "best_of": (NEUTRAL, 1, 2),
    "echo": (HONOURED, True, "yes"),
    "logprobs": (HONOURED, 1, 21),
    "prompt": (HONOURED, "x", []),
    "suffix": (REFUSED, None, "x"),
}
CHAT = SHARED | {
    "audio": (REFUSED, None, {"format": "mp3", "voice": "x"}),
    "function_call": (REFUSED, None, "auto"),
    "functions": (REFUSED, None, [{"name": "f"}]),
    "logprobs": (HONOURED, True, 1),
    "max_completion_tokens": (HONOURED, 5, 0),
    "messages": (HONOURED, [{"role": "user", "content": "x"}], []),
    "metadata": (HONOURED, {"a": "b"}, {"a": 1}),
    "modalities": (NEUTRAL, ["text"], ["text", "audio"]),
    "moderation": (REFUSED, None, {"model": "x"}),
    "parallel_tool_calls": (NEUTRAL, True, False),
    "prediction": (HONOURED, {"type": "content", "content": "x"}, "x"),
    "prompt_cache_key": (NEUTRAL, "key", 5),
    "prompt_cache_options": (REFUSED, None, {"mode": "explicit"}),
    "prompt_cache_retention": (NEUTRAL, "in_memory", "24h"),
    "reasoning_effort": (REFUSED, None, "low"),
    "response_format": (HONOURED, {"type": "json_object"}, {"type": "yaml"}),
    "safety_identifier": (HONOURED, "someone", 5),
    "service_tier": (NEUTRAL, "auto", "flex"),
    "store": (NEUTRAL, False, True),
    "tool_choice": (NEUTRAL, None, "auto"),
    "tools": (REFUSED, None, [{"type": "function", "function": {"name": "f"}}]),
    "top_logprobs": (HONOURED, None, 5),
    "verbosity": (NEUTRAL, "medium", "low"),
    "web_search_options": (REFUSED, None, {}),
}
RESPONSE = {
    "access_programs": (REFUSED, None, {}),
    "background": (NEUTRAL, False, True),
    "background_options": (REFUSED, None, {}),
    "context_management": (REFUSED, None, []),
    "conversation": (REFUSED, None, "conv_1"),
    "image": (REFUSED, None, {}),
    "include": (HONOURED, ["message.output_text.logprobs"], ["reasoning.encrypted_content"]),
    "input": (HONOURED, [{"role": "user", "content": "x"}], 5),
    "instructions": (HONOURED, "x", 5),
    "max_output_tokens": (HONOURED, 5, 0),
    "max_tool_calls": (REFUSED, None, 1),
    "metadata": (HONOURED, {"a": "b"}, {"a": 1}),
    "model": (HONOURED, "builtin", 5),
    "moderation": (REFUSED, None, {"model": "x"}),
    "parallel_tool_calls": (NEUTRAL, True, False),
    "previous_response_id": (REFUSED, None, "resp_1"),
    "prompt": (REFUSED, None, {"id": "x"}),
    "prompt_cache_key": (NEUTRAL, "key", 5),
    "prompt_cache_options": (REFUSED, None, {"mode": "explicit"}),
    "prompt_cache_retention": (NEUTRAL, "in_memory", "24h"),
    "reasoning": (REFUSED, None, {"effort": "low"}),
    "safety_identifier": (HONOURED, "someone", 5),
    "service_tier": (NEUTRAL, "auto", "flex"),
    "store": (NEUTRAL, False, True),
    "stream_options": (NEUTRAL, {"include_obfuscation": False}, {"include_obfuscation": True}),
    "temperature": (HONOURED, 0.5, -1),
    "text": (HONOURED, {"format": {"type": "json_object"}}, {"format": {"type": "yaml"}}),
    "tool_choice": (NEUTRAL, None, "auto"),
    "tools": (REFUSED, None, [{"type": "function", "name": "f", "parameters": {}, "strict": False}]),
    "top_logprobs": (HONOURED, 5, 21),
    "top_p": (HONOURED, 0.5, 2),
    "truncation": (NEUTRAL, "disabled", "auto"),
    "user": (HONOURED, "someone", 5),
}
ROUTES = {
    "/v1/responses": (RESPONSE, response_create_params.ResponseCreateParamsBase, {"input": "x"}),
    "/v1/completions": (COMPLETION, completion_create_params.CompletionCreateParamsBase, {"prompt": "x"}),
    "/v1/chat/completions": (
        CHAT,
        chat_params.CompletionCreateParamsBase,
        {"messages": [{"role": "user", "content": "x"}]},
    ),
}


@pytest.mark.parametrize("route", ROUTES)
def test_the_tables_have_every_field_of_openai(route):
    table, params, _ = ROUTES[route]
    assert set(get_type_hints(params)) == set(table)


@pytest.mark.parametrize(
    ("route", "name"), [(route, name) for route, (table, *_) in ROUTES.items() for name in table]
)
def test_a_field_is_honoured_or_refused_by_name(http, route, name):
    table, _, base = ROUTES[route]
    _, accepted, wrong = table[name]
    body = {"model": "builtin", "temperature": 0.5, "stream": name == "stream_options", **base}
    reply = http.post(route, json={**body, name: accepted})
    assert reply.status_code == 200, reply.text
    refused = http.post(route, json={**body, name: wrong})
    assert refused.status_code == 400, refused.text
    error = refused.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"].split(".")[0] == name
    assert name in error["message"]


@pytest.mark.parametrize("route", ROUTES)
def test_an_unknown_field_is_refused_by_name(http, route):
    base = ROUTES[route][2]
    reply = http.post(route, json={"model": "builtin", **base, "temprature": 1})
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert (error["param"], error["code"]) == ("temprature", "unknown_parameter")
    assert "temperature" in error["message"]
