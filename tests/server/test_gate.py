"""Keys, request identifiers, body sizes and CORS."""

import asyncio
import gc
import json
import multiprocessing
import os
import time

import httpx2
import pytest
from fake_engine import CONTEXT, FakeEngine
from fastapi import FastAPI
from starlette.testclient import TestClient

from conftest import wait_for
from secondguess.errors import BadInputError
from secondguess.server.app import create_app
from secondguess.server.bodies import MAX_VALUES, count_values
from secondguess.server.settings import ServerSettings, read_api_keys

BODY = {"model": "builtin", "prompt": "x"}
KEYS = ServerSettings(api_keys=("first-key", "second-key"))
MAX_CALLBACK_SECONDS = 0.05


@pytest.fixture
def callback_seconds(monkeypatch):
    """Processor time of each callback of the event loop, which other load on the machine does not change."""
    run, found = asyncio.Handle._run, []

    def timed(handle):
        begun = time.thread_time()
        run(handle)
        found.append(time.thread_time() - begun)

    monkeypatch.setattr(asyncio.Handle, "_run", timed)
    gc.freeze()  # as the server does at its start
    yield found
    gc.unfreeze()


def app_client(**settings):
    return TestClient(create_app(FakeEngine(), ServerSettings(**settings)))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_an_application_that_has_answered_answers_in_a_forked_process():
    client = app_client()
    assert client.post("/v1/completions", json=BODY).status_code == 200

    def answer():
        assert client.post("/v1/completions", json=BODY).status_code == 200

    child = multiprocessing.get_context("fork").Process(target=answer, daemon=True)
    child.start()
    child.join(30)
    assert child.exitcode == 0


@pytest.mark.parametrize(
    "authorization", [None, "", "Bearer", "Bearer third-key", "Basic first-key", "first-key", "Bearer \x80"]
)
def test_without_a_key_nothing_but_probes_answers(authorization):
    with app_client(api_keys=("first-key", "second-key")) as client:
        headers = {} if authorization is None else {"Authorization": authorization.encode("latin-1")}
        for method, path in (
            ("POST", "/v1/completions"),
            ("GET", "/v1/models"),
            ("POST", "/tokenize"),
            ("GET", "/v1/models/builtin"),
            ("GET", "/playground/model"),
            ("POST", "/playground/markdown"),
        ):
            reply = client.request(method, path, headers=headers, content=b"not read")
            assert reply.status_code == 401
            assert reply.json()["error"]["code"] == "invalid_api_key"
            assert reply.headers["www-authenticate"] == "Bearer"
        for path in ("/health", "/ready", "/metrics", "/docs", "/openapi.json"):
            assert client.get(path).status_code == 200


@pytest.mark.parametrize("prefix", ["/llm", "/health", "/a/b"])
def test_probes_of_a_mounted_application_need_no_key(prefix):
    host = FastAPI()
    host.mount(prefix, create_app(FakeEngine(), KEYS))
    with TestClient(host) as client:
        for path in ("/health", "/ready", "/metrics", "/", "/playground/playground.js"):
            assert client.get(prefix + path).status_code == 200
        for path in ("/v1/models", "/v1/models/builtin"):
            assert client.get(prefix + path).status_code == 401


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_time_limit_of_the_host_cancels_a_request(is_stream):
    engine, sent = FakeEngine(), []
    engine.hold_after = 0
    body = iter([{"type": "http.request", "body": json.dumps({**BODY, "stream": is_stream}).encode()}])

    async def receive():
        return next(body, None) or await asyncio.Event().wait()

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b""}
    scope["headers"] = [(b"content-type", b"application/json")]
    with pytest.raises(TimeoutError):
        asyncio.run(asyncio.wait_for(create_app(engine)(scope, receive, send), 0.3))
    assert not any(message.get("status") == 503 for message in sent)
    wait_for(lambda: engine.last.is_cancelled)


@pytest.mark.parametrize("key", KEYS.api_keys)
def test_every_key_is_accepted(key):
    with app_client(api_keys=KEYS.api_keys) as client:
        reply = client.post("/v1/completions", json=BODY, headers={"Authorization": f"bearer {key}"})
        assert reply.status_code == 200


def test_each_key_is_an_owner_of_outputs_and_is_not_passed_on():
    def owners(*keys, **settings):
        engine = FakeEngine()
        with TestClient(create_app(engine, ServerSettings(**settings))) as client:
            for key in keys:
                client.post("/v1/completions", json=BODY, headers={"Authorization": f"Bearer {key}"})
        return [request.owner for request in engine.requests]

    first, second, again = owners("first-key", "second-key", "first-key", api_keys=KEYS.api_keys)
    assert first == again != second
    assert "key" not in first + second
    assert owners("any", "other") == ["", ""], "without keys all clients are one"


def test_keys_come_from_file_and_environment_and_are_not_shown(tmp_path, monkeypatch):
    path = tmp_path / "keys"
    path.write_text("# comment\none\n\n two \n")
    monkeypatch.setenv("SECONDGUESS_API_KEYS", "two, three")
    assert read_api_keys(path) == ("two", "three", "one")
    assert "three" not in repr(ServerSettings(api_keys=read_api_keys(path)))
    path.write_text("# nothing\n")
    for wrong in (path, tmp_path / "missing"):
        with pytest.raises(BadInputError, match="expected"):
            read_api_keys(wrong)


def test_a_request_keeps_its_identifier_if_it_is_safe():
    with app_client() as client:
        assert client.get("/health", headers={"X-Request-Id": "abc-1"}).headers["x-request-id"] == "abc-1"
        made = client.get("/health", headers={"X-Request-Id": "a b\tc"}).headers["x-request-id"]
        assert made.startswith("req_")
        assert client.get("/nothing").headers["x-request-id"] != made


def test_a_body_without_a_length_is_bounded_too():
    def parts():
        for _ in range(100):
            yield b" " * 100

    with app_client(max_body_bytes=1000) as client:
        reply = client.post("/v1/completions", content=parts(), headers={"content-type": "application/json"})
        assert reply.status_code == 413
        assert reply.json()["error"]["type"] == "invalid_request_error"
        assert client.post("/v1/completions", json=BODY).status_code == 200


def test_hostile_bodies_cost_one_error(http, callback_seconds):
    for body in (
        {f"a{number}": 1 for number in range(20_000)} | BODY,
        {**BODY, "prompt": [5] * 60_000 + ["x"]},
        {**BODY, "prompt": [[5]] * 30_000},
        {**BODY, "logit_bias": {str(number): "x" for number in range(20_000)}},
    ):
        reply = http.post("/v1/completions", json=body)
        assert reply.status_code == 400
        assert len(reply.content) < 2000
    deep = b'{"model": "builtin", "messages": ' + b"[" * 60_000
    assert (
        http.post(
            "/v1/chat/completions", content=deep, headers={"content-type": "application/json"}
        ).status_code
        == 400
    )
    assert max(callback_seconds) < MAX_CALLBACK_SECONDS


@pytest.mark.parametrize(
    "values", ["[],", "{},", "1,", '"",', '{"a":1},', "[[[[[[]]]]]],"], ids=lambda each: each[:-1]
)
def test_a_body_of_many_values_is_refused_before_it_is_parsed(http, callback_seconds, values):
    """A body within the limit of bytes could block the event loop for a second."""
    body = b'{"model": "builtin", "prompt": [' + values.encode() * (10**6 // len(values)) + b"1]}"
    assert count_values(body) > MAX_VALUES + CONTEXT
    reply = http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert (reply.status_code, "JSON values" in reply.json()["error"]["message"]) == (413, True)
    assert max(callback_seconds) < MAX_CALLBACK_SECONDS


@pytest.mark.parametrize(
    "value", [{"a": ['1,2,[{"', "\\", '\\"', "x"], "b,": {"c": [1, [], {}]}}, [], "a,b", [["\\\\"], "[,"]]
)
def test_values_are_counted_outside_of_strings(value):
    def count(each):
        if isinstance(each, dict):
            return 1 + max(2 * len(each) - 1, 0) + sum(count(of) for of in each.values())
        if isinstance(each, list):
            return 1 + max(len(each) - 1, 0) + sum(map(count, each))
        return 0

    assert count_values(json.dumps(value).encode()) == count(value)


def test_a_long_text_with_separators_is_no_body_of_many_values(http):
    reply = http.post("/v1/completions", json={"model": "builtin", "prompt": "[," * 10**5})
    assert reply.json()["error"]["code"] == "context_length_exceeded"


def test_cors_is_off_unless_asked_for():
    origin = {"Origin": "https://example.org"}
    with app_client() as client:
        assert "access-control-allow-origin" not in client.get("/health", headers=origin).headers
    with app_client(cors_origins=("https://example.org",), api_keys=("key",)) as client:
        preflight = {
            **origin,
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization,content-type,x-stainless-arch",
        }
        reply = client.options("/v1/completions", headers=preflight)
        assert (reply.status_code, reply.headers["access-control-allow-origin"]) == (
            200,
            "https://example.org",
        )
        other = client.get("/health", headers={"Origin": "https://other.org"})
        assert "access-control-allow-origin" not in other.headers


def test_senders_are_logged_with_the_identifier(http, caplog):
    caplog.set_level("INFO", logger="secondguess.server.service")
    http.post("/v1/completions", json={**BODY, "user": "line\nbreak"}, headers={"X-Request-Id": "abc"})
    (record,) = [each.getMessage() for each in caplog.records if each.name == "secondguess.server.service"]
    assert record == "request abc: {'user': 'line\\nbreak'}"


def test_a_browser_cannot_send_a_request_in_disguise(http):
    reply = http.post("/v1/completions", content=json.dumps(BODY), headers={"content-type": "text/plain"})
    assert reply.status_code == 400
    assert isinstance(reply, httpx2.Response)
