"""Fields of requests are used, accepted because they cannot change the text, or refused by name.

The list of OpenAI's fields is that of its own client; docs/server-fields.md has all of them.
"""

import re
from pathlib import Path
from typing import get_type_hints

import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import response_create_params

DOCUMENTED = Path(__file__).parents[2] / "docs" / "server-fields.md"
USED, ACCEPTED, REFUSED = "used", "accepted", "refused"

# field -> its class, a value that is taken, a value that is refused (an accepted field takes every value)
SHARED = {
    "frequency_penalty": (USED, 0.5, 3),
    "logit_bias": (USED, {"5": 1}, {"x": 1}),
    "model": (USED, "builtin", 5),
    "n": (USED, 2, 0),
    "presence_penalty": (USED, 0.5, 3),
    "seed": (USED, -7, "x"),
    "stop": (USED, ["a", ""], [1]),
    "stream_options": (USED, {"include_usage": True}, {"include_obfuscation": True}),
    "temperature": (USED, 0.5, -1),
    "top_p": (USED, 0, 2),
    "user": (USED, "someone", 5),
    "max_tokens": (USED, 4.0, -2),
}
COMPLETION = SHARED | {
    "best_of": (USED, 1, 2),
    "echo": (USED, True, "yes"),
    "logprobs": (USED, 1, 21),
    "prompt": (USED, "x", []),
    "suffix": (USED, None, 5),
}
CHAT = SHARED | {
    "audio": (REFUSED, None, {"format": "mp3", "voice": "x"}),
    "function_call": (REFUSED, None, "auto"),
    "functions": (REFUSED, None, [{"name": "f"}]),
    "logprobs": (USED, True, 1),
    "max_completion_tokens": (USED, 5, 0),
    "messages": (USED, [{"role": "user", "content": "x"}], []),
    "metadata": (USED, {"a": "b"}, {"a": 1}),
    "modalities": (USED, ["text"], ["text", "audio"]),
    "moderation": (REFUSED, None, {"model": "x"}),
    "parallel_tool_calls": (USED, False, "no"),
    "prediction": (USED, {"type": "content", "content": "x"}, "x"),
    "prompt_cache_key": (ACCEPTED, "key", None),
    "prompt_cache_options": (ACCEPTED, {"mode": "explicit"}, None),
    "prompt_cache_retention": (ACCEPTED, "24h", None),
    "reasoning_effort": (USED, "low", "lots"),
    "response_format": (USED, {"type": "json_object"}, {"type": "yaml"}),
    "safety_identifier": (USED, "someone", 5),
    "service_tier": (ACCEPTED, "flex", None),
    "store": (ACCEPTED, True, None),
    "tool_choice": (USED, None, "auto"),
    "tools": (USED, [{"type": "function", "function": {"name": "f"}}], [{"type": "x"}]),
    "top_logprobs": (USED, None, 5),
    "verbosity": (USED, "medium", "low"),
    "web_search_options": (REFUSED, None, {}),
}
RESPONSE = {
    "access_programs": (REFUSED, None, {}),
    "background": (USED, False, True),
    "background_options": (REFUSED, None, {}),
    "context_management": (REFUSED, None, []),
    "conversation": (REFUSED, None, "conv_1"),
    "image": (REFUSED, None, {}),
    "include": (USED, ["message.output_text.logprobs"], ["reasoning.encrypted_content"]),
    "input": (USED, [{"role": "user", "content": "x"}], 5),
    "instructions": (USED, "x", 5),
    "max_output_tokens": (USED, 5, 0),
    "max_tool_calls": (REFUSED, None, 1),
    "metadata": (USED, {"a": "b"}, {"a": 1}),
    "model": (USED, "builtin", 5),
    "moderation": (REFUSED, None, {"model": "x"}),
    "parallel_tool_calls": (USED, False, "no"),
    "previous_response_id": (REFUSED, None, "resp_1"),
    "prompt": (REFUSED, None, {"id": "x"}),
    "prompt_cache_key": (ACCEPTED, "key", None),
    "prompt_cache_options": (ACCEPTED, {"mode": "explicit"}, None),
    "prompt_cache_retention": (ACCEPTED, "24h", None),
    "reasoning": (USED, {"effort": "low"}, {"effort": "lots"}),
    "safety_identifier": (USED, "someone", 5),
    "service_tier": (ACCEPTED, "flex", None),
    "store": (ACCEPTED, True, None),
    "stream_options": (USED, {"include_obfuscation": False}, {"include_obfuscation": True}),
    "temperature": (USED, 0.5, -1),
    "text": (USED, {"format": {"type": "json_object"}}, {"format": {"type": "yaml"}}),
    "tool_choice": (USED, None, "auto"),
    "tools": (USED, [{"type": "function", "name": "f", "parameters": {}, "strict": True}], [{"type": "x"}]),
    "top_logprobs": (USED, 5, 21),
    "top_p": (USED, 0.5, 2),
    "truncation": (USED, "disabled", "auto"),
    "user": (USED, "someone", 5),
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
def test_a_field_is_taken_or_refused_by_name(http, route, name):
    table, _, base = ROUTES[route]
    _, accepted, wrong = table[name]
    body = {"model": "builtin", "temperature": 0.5, "stream": name == "stream_options", **base}
    reply = http.post(route, json={**body, name: accepted})
    assert reply.status_code == 200, reply.text
    if table[name][0] == ACCEPTED:
        return
    refused = http.post(route, json={**body, name: wrong})
    assert refused.status_code == 400, refused.text
    error = refused.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"].split(".")[0] == name
    assert name in error["message"]


# Fields of other servers -> as above; all routes have them unless `ROUTES_OF` says otherwise.
EXTENSIONS = {
    "top_k": (USED, -1, "x"),
    "min_p": (USED, 0.1, 2),
    "repetition_penalty": (USED, 1.1, -1),
    "min_tokens": (USED, 1, -1),
    "stop_token_ids": (USED, [5], ["x"]),
    "ignore_eos": (USED, False, "x"),
    "structured_outputs": (USED, {"choice": ["a", "b"]}, {"ebnf": "x"}),
    "prompt_logprobs": (USED, 1, 21),
    "timings_per_token": (USED, True, "x"),
    "guided_json": (USED, {"type": "object"}, 5),
    "guided_regex": (USED, "a+", 5),
    "guided_choice": (USED, ["a", "b"], "a"),
    "guided_grammar": (REFUSED, None, "root ::= x"),
    "include_stop_str_in_output": (USED, True, "yes"),
    "skip_special_tokens": (USED, True, False),
    "add_generation_prompt": (USED, False, "x"),
    "continue_final_message": (USED, False, True),
    "chat_template_kwargs": (USED, {"enable_thinking": False}, {"messages": []}),
    **{
        name: (ACCEPTED, value, None)
        for name, value in {
            "cache_salt": "x",
            "kv_transfer_params": {},
            "priority": 3,
            "request_id": "x",
            "spaces_between_special_tokens": False,
            "cache_prompt": True,
            "id_slot": -1,
            "return_progress": True,
            "rid": "x",
            "keep_alive": "5m",
            "ttl": 60,
        }.items()
    },
    **{
        name: (REFUSED, None, value)
        for name, value in {
            "use_beam_search": True,
            "length_penalty": 2.0,
            "logits_processors": ["x"],
            "allowed_token_ids": [5],
            "bad_words": ["x"],
            "truncate_prompt_tokens": 5,
            "chat_template": "x",
            "documents": [],
            "repeat_penalty": 1.1,
            "typical_p": 0.5,
            "mirostat": 1,
            "grammar": "root ::= x",
            "json_schema": {},
            "samplers": ["top_k"],
            "lora": [],
            "ebnf": "x",
            "regex": "a",
            "lora_path": "x",
            "draft_model": "x",
            "think": True,
        }.items()
    },
}
CHATS = "/v1/chat/completions"
ROUTES_OF = {
    **dict.fromkeys(("chat_template_kwargs", "add_generation_prompt", "continue_final_message"), (CHATS,)),
    "prompt_logprobs": ("/v1/completions",),
    "timings_per_token": ("/v1/completions", CHATS),
}


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("name", EXTENSIONS)
def test_a_field_of_another_server_is_taken_or_refused_by_name(http, route, name):
    if route not in ROUTES_OF.get(name, ROUTES):
        pytest.skip(f"a field of {ROUTES_OF[name]}")
    kind, accepted, wrong = EXTENSIONS[name]
    body = {"model": "builtin", "temperature": 0.5, **ROUTES[route][2]}
    reply = http.post(route, json=body if kind == REFUSED else {**body, name: accepted})
    assert reply.status_code == 200, reply.text
    if kind == ACCEPTED:
        return
    refused = http.post(route, json={**body, name: wrong})
    assert refused.status_code == 400, refused.text
    assert name in refused.json()["error"]["message"]


def test_the_table_of_the_documentation_is_this_one():
    rows = re.findall(
        r"^\| `(\w+)` \| ([a-z, ]+) \| (used|accepted|refused) \|", DOCUMENTED.read_text(), re.M
    )
    named = {"completions": COMPLETION, "chats": CHAT, "responses": RESPONSE, "extensions": EXTENSIONS}
    expected = {(place, name): kind for place, table in named.items() for name, (kind, *_) in table.items()}
    found = {(place, name): kind for name, places, kind in rows for place in places.split(", ")}
    assert found == expected


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 2, "temperature": 0},
        {"seed": -1},
        {"max_tokens": -1},
        {"stop": ""},
        {"top_logprobs": 0, "logprobs": False},
        {"structured_outputs": {"json": {"type": "array", "items": {"enum": ["a"]}, "uniqueItems": True}}},
        {"guided_json": '{"type": "array", "uniqueItems": true}'},
        {"tools": None, "parallel_tool_calls": False},
        {"reasoning_effort": "low"},
    ],
    ids=str,
)
def test_values_that_clients_send_are_taken(http, fields):
    reply = http.post("/v1/chat/completions", json={**ROUTES["/v1/chat/completions"][2], **fields})
    assert reply.status_code == 200, reply.text
    assert len(reply.json()["choices"]) == fields.get("n", 1)


@pytest.mark.parametrize("route", ROUTES)
def test_an_unknown_field_is_refused_by_name(http, route):
    base = ROUTES[route][2]
    reply = http.post(route, json={"model": "builtin", **base, "temprature": 1})
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert (error["param"], error["code"]) == ("temprature", "unknown_parameter")
    assert "temperature" in error["message"]


@pytest.mark.parametrize(
    ("route", "name", "meant"),
    [
        ("/v1/completions", "n_predict", "max_tokens"),
        ("/v1/responses", "max_tokens", "max_output_tokens"),
        ("/v1/chat/completions", "repeat_penalty", "repetition_penalty"),
        ("/infill", "max_tokens", "n_predict"),
    ],
)
def test_the_names_of_other_servers_are_translated(http, route, name, meant):
    base = {"input_prefix": "", "input_suffix": ""} if route == "/infill" else ROUTES[route][2]
    reply = http.post(route, json={**base, name: 5})
    assert f"did you mean {meant!r}?" in reply.json()["error"]["message"]
