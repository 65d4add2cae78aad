"""Each error status, in OpenAI's form."""

import json

import openai
import pytest
from fake_engine import CONTEXT, FakeEngine

from conftest import metrics_of, openai_client, serving
from secondguess.engine import DeadlineError
from secondguess.errors import BadInputError, SecondGuessError
from secondguess.server.errors import api_error
from secondguess.server.settings import ServerSettings

BODY = {"model": "builtin", "prompt": "x"}


def error_of(reply, status):
    assert reply.status_code == status, reply.text
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error


def test_a_body_that_is_not_json_or_not_an_object_is_a_bad_request(http):
    headers = {"content-type": "application/json"}
    for content, code in (
        (b"{", "invalid_json"),
        (b"[]", "invalid_value"),
        (b"", "missing_required_parameter"),
    ):
        error = error_of(http.post("/v1/completions", content=content, headers=headers), 400)
        assert error["code"] == code
    reply = http.post(
        "/v1/completions", content=b'{"model": "builtin"}', headers={"content-type": "Application/JSON; x=1"}
    )
    assert error_of(reply, 400)["param"] == "prompt"
    for kind in ({}, {"content-type": "application/x-www-form-urlencoded"}, {"content-type": "text/json"}):
        error = error_of(
            http.post("/v1/completions", content=b'{"model": "builtin", "prompt": "x"}', headers=kind), 400
        )
        assert f"Content-Type: application/json, got {kind.get('content-type', 'none')}" in error["message"]


def test_a_setting_is_named_as_the_field_that_it_comes_from():
    error = api_error(BadInputError("expected draft_with to be none, got 'x'"), {"speculation": None})
    assert (error.param, error.message) == (
        "speculation.drafter",
        "expected speculation.drafter to be none, got 'x'",
    )


def test_a_missing_field_is_named(http):
    error = error_of(http.post("/v1/completions", json={"model": "builtin"}), 400)
    assert (error["param"], error["code"]) == ("prompt", "missing_required_parameter")


USER = {"role": "user", "content": "x"}


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"speculation": {"max_draf": 3}}, "speculation.max_draf", "did you mean 'max_draft'?"),
        ({"speculation": 5}, "speculation", "expected speculation to be 'auto' or 'off', got 5"),
        ({"stream_options": {"include_usag": True}}, "stream_options.include_usag", "'include_usage'?"),
        (
            {"stream_options": {"include_usage": True}},
            "stream_options",
            "expected stream: true together with",
        ),
        (
            {"response_format": {"type": "json_object", "json_schema": {"name": "a", "schema": {}}}},
            "response_format",
            "expected type json_schema together with json_schema, got json_object",
        ),
        ({"messages": [{**USER, "foo": 1}]}, "messages.0.foo", "(known: role, content, name)"),
        (
            {"messages": [{**USER, "role": "robot"}]},
            "messages.0",
            "expected messages.0.role to be one of 'system'",
        ),
        ({"messages": [{**USER, "content": 5}]}, "messages.0.content", "expected messages.0.content to be"),
        ({"messages": [{**USER, "content": [{"type": "t"}]}]}, "messages.0.content.0", "be one of 'text'"),
        ({"messages": [{"content": "x"}]}, "messages.0", "expected a value for messages.0.role"),
        ({"messages": [{**USER, "content": [{"type": "text"}]}]}, "messages.0.content.0.text", "got none"),
    ],
    ids=str,
)
def test_a_nested_field_is_named_with_the_fields_beside_it(http, fields, param, message):
    reply = http.post("/v1/chat/completions", json={"model": "builtin", "messages": [USER], **fields})
    error = error_of(reply, 400)
    assert error["param"] == param
    assert message in error["message"]


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e999"])
def test_numbers_that_are_none_are_refused(http, number):
    content = f'{{"model": "builtin", "prompt": "x", "temperature": {number}}}'
    reply = http.post("/v1/completions", content=content, headers={"content-type": "application/json"})
    assert error_of(reply, 400)["param"] == "temperature"


HALF = "\ud83d"
TOOL = {"type": "function", "function": {"name": "add", "description": HALF}}
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": "\\ud800"}'}}


@pytest.mark.parametrize(
    ("route", "fields", "param"),
    [
        ("/v1/completions", {"prompt": f"{HALF}x"}, "prompt"),
        ("/v1/completions", {"prompt": "x", "model": HALF}, "model"),
        ("/v1/completions", {"prompt": "x", "stop": ["y", HALF]}, "stop.1"),
        ("/v1/completions", {"prompt": "x", "suffix": HALF}, "suffix"),
        ("/v1/completions", {"prompt": "x", "prediction": {"type": "content", "content": HALF}}, "prediction.content"),
        ("/v1/chat/completions", {"messages": [{**USER, "content": HALF}]}, "messages.0.content"),
        ("/v1/chat/completions", {"messages": [USER], "metadata": {HALF: "x"}}, "metadata"),
        (
            "/v1/chat/completions",
            {"messages": [USER], "tools": [TOOL], "tool_choice": "none"},
            "tools.0.function.description",
        ),
        ("/v1/chat/completions", {"messages": [USER, {"role": "assistant", "tool_calls": [CALL]}]}, "messages"),
        ("/v1/responses", {"input": "x", "instructions": HALF}, "instructions"),
        ("/tokenize", {"prompt": HALF, "add_special_tokens": False}, "prompt"),
    ],
)  # fmt: skip
def test_half_of_a_character_is_refused_in_every_field(http, route, fields, param):
    content = json.dumps({"model": "builtin", **fields})
    reply = http.post(route, content=content, headers={"content-type": "application/json"})
    error = error_of(reply, 400)
    assert error["param"] == param
    assert "valid Unicode" in error["message"]


def test_a_body_that_python_cannot_read_is_a_bad_request(http):
    for content in (
        b'{"prompt": ' + b"1" * 5000 + b"}",
        '{"prompt": "x"}'.encode("utf-16"),
        b'{"prompt": "\xed\xa0\x80"}',
    ):
        reply = http.post("/v1/completions", content=content, headers={"content-type": "application/json"})
        assert error_of(reply, 400)["code"] == "invalid_json"


def test_another_model_is_not_found(client):
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="gpt-9", prompt="x")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-9")


def test_another_path_or_method_has_the_form_of_openai(http):
    error_of(http.get("/v1/nothing"), 404)
    error_of(http.get("/v1/completions"), 405)


def test_a_prompt_that_fills_the_context_is_named(http):
    error = error_of(http.post("/v1/completions", json={"model": "builtin", "prompt": [5] * CONTEXT}), 400)
    assert error["code"] == "context_length_exceeded"


def test_a_full_queue_says_when_to_retry(http, engine):
    engine.is_full = True
    reply = http.post("/v1/completions", json=BODY)
    assert error_of(reply, 429)["code"] == "rate_limit_exceeded"
    assert reply.headers["retry-after"] == "3"
    # Before the stream has begun, the status can still tell.
    assert http.post("/v1/completions", json={**BODY, "stream": True}).status_code == 429


def test_a_draining_server_is_not_ready_but_healthy(http, engine):
    assert http.get("/ready").status_code == 200
    engine.is_draining = True
    reply = http.post("/v1/completions", json=BODY)
    assert error_of(reply, 503)["code"] == "draining"
    assert int(reply.headers["retry-after"]) > 0
    error_of(http.get("/ready"), 503)
    assert http.get("/health").status_code == 200


def test_a_passed_deadline_is_an_error(http, engine):
    engine.failure = DeadlineError("the deadline of the request has passed")
    failed = ("vllm:request_success_total", "error")
    before = metrics_of(http).get(failed, 0)
    assert error_of(http.post("/v1/completions", json=BODY), 504)["code"] == "deadline_exceeded"
    assert metrics_of(http)[failed] == before + 1


def test_a_failure_of_the_engine_shows_no_details(http, engine):
    for failure in (RuntimeError("secret"), SecondGuessError("secret")):
        engine.failure = failure
        reply = http.post("/v1/completions", json=BODY)
        error = error_of(reply, 500)
        assert error["type"] == "server_error"
        assert "secret" not in reply.text
        assert "secret" not in http.post("/v1/completions", json={**BODY, "stream": True}).text


def test_an_error_within_a_stream_is_an_event(client, engine):
    engine.failure = RuntimeError("secret")
    with pytest.raises(openai.APIError, match="its log has the cause"):
        list(client.completions.create(**BODY, stream=True))


def test_limits_of_the_server_are_errors_that_name_the_field():
    settings = ServerSettings(
        max_body_bytes=2000,
        max_samples=2,
        max_stop_strings=1,
        max_logit_biases=1,
        max_output_tokens=5,
        max_schema_bytes=50,
    )
    wrong = {
        "n": 3,
        "stop": ["a", "b"],
        "stop_token_ids": [1, 2],
        "logit_bias": {"1": 1, "2": 2},
        "max_tokens": 6,
    }
    with (
        serving(FakeEngine(), settings) as url,
        openai_client(url) as client,
    ):
        for name, value in wrong.items():
            with pytest.raises(openai.BadRequestError) as caught:
                client.completions.create(**BODY, extra_body={name: value})
            assert caught.value.param == name
        assert client.completions.create(**BODY).usage.completion_tokens == 5
        with pytest.raises(openai.APIStatusError) as caught:
            client.completions.create(model="builtin", prompt="x" * 3000)
        assert caught.value.status_code == 413
        tools = [{"type": "function", "function": {"name": "f", "description": "x" * 60}}]
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(
                model="builtin", messages=[{"role": "user", "content": "x"}], tools=tools
            )
        assert caught.value.param == "tools"
