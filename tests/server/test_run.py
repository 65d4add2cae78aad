"""`secondguess serve` as a process: address, signals, drain."""

import contextlib
import gc
import os
import re
import signal
import socket
import threading
import time

import anyio
import httpx2
import pytest
from fake_engine import FakeEngine

from forked import start_command
from secondguess.errors import BadInputError
from secondguess.server.app import create_app
from secondguess.server.run import DrainingServer, open_socket, serve_until_signal


@contextlib.contextmanager
def served(*options):
    """Run the command on a free port; yields the process and its URL once it is ready."""
    reader, writer = os.pipe()
    process = start_command(["serve", "--port", 0, *options], [None, None, writer])
    os.close(writer)
    watchdog = threading.Timer(60, process.kill)
    watchdog.start()
    try:
        with open(reader) as errors:
            lines = []
            process.errors = errors  # what follows the address
            for line in errors:
                lines.append(line)
                if found := re.search(r"http://127\.0\.0\.1:(\d+)", line):
                    break
            else:
                pytest.fail("".join(lines))
            yield process, found[0]
    finally:
        watchdog.cancel()
        process.kill()
        process.join()


def test_a_signal_finishes_requests_and_refuses_new_ones(tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("secret\n")
    body = {"model": "builtin", "prompt": "def f(", "max_tokens": 400, "min_tokens": 400, "stream": True}
    with (
        served("--api-key-file", str(keys)) as (process, url),
        httpx2.Client(base_url=url, timeout=60, headers={"Authorization": "Bearer secret"}) as client,
    ):
        assert httpx2.get(f"{url}/v1/models").status_code == 401
        refused = []
        with client.stream("POST", "/v1/completions", json=body) as reply:
            lines = reply.iter_lines()
            next(lines)
            os.kill(process.pid, signal.SIGTERM)
            while (status := client.get("/ready")).status_code != 503:
                time.sleep(0.01)
            refused = client.post("/v1/completions", json={**body, "stream": False})
            assert list(lines)[-2] == "data: [DONE]"
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        assert status.headers["retry-after"]
        client.close()
        process.join(30)
        assert process.exitcode == 0


def test_half_a_request_is_answered_when_the_time_to_drain_is_over(tmp_path):
    with served("--drain-seconds", "1") as (process, url):
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), 30) as connection:
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{")
            assert httpx2.get(f"{url}/health").status_code == 200  # by now the request has begun
            begun = time.monotonic()
            os.kill(process.pid, signal.SIGTERM)
            reply = connection.recv(4096).decode()
        assert reply.startswith("HTTP/1.1 503")
        process.join(30)
        assert process.exitcode == 0
        assert time.monotonic() - begun < 10


def test_senders_are_logged(tmp_path):
    with served() as (process, url):
        body = {"prompt": "x", "max_tokens": 1, "user": "someone"}
        reply = httpx2.post(f"{url}/v1/completions", json=body, headers={"X-Request-Id": "an-id"}, timeout=60)
        assert reply.status_code == 200
        os.kill(process.pid, signal.SIGTERM)
        process.join(30)
        assert any("request an-id" in line and "someone" in line for line in process.errors)


def test_an_address_in_use_is_refused_before_the_model_is_loaded(secondguess_command):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        finished = secondguess_command("serve", "--port", other.getsockname()[1])
    assert finished.code == 2
    assert "choose another --port" in finished.err


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--api-key-file", "/missing/keys"), "/missing/keys"),
        (("--chat-template", "/missing/template"), "/missing/template"),
        (("--chat-template", "/dev/null"), "got an empty file"),
        (("--request-seconds", "-1"), "--request-seconds"),
        (("--drafter", "abacus"), "suffix"),
    ],
)
def test_bad_options_are_refused_in_one_line(secondguess_command, options, named):
    finished = secondguess_command("serve", *options)
    assert finished.code == 2
    assert named in finished.err
    assert finished.err.count("\n") == 1


def test_a_host_that_does_not_exist_is_refused():
    with pytest.raises(BadInputError, match="expected a free address"):
        open_socket("256.0.0.1", 8000)


def test_collections_leave_out_the_objects_of_the_start(monkeypatch):
    counts, engine = [], FakeEngine()
    monkeypatch.setattr(DrainingServer, "run", lambda *_: counts.append(gc.get_freeze_count()))
    with open_socket("127.0.0.1", 0) as opened:
        serve_until_signal(create_app(engine), engine, opened, drain_seconds=1)
    gc.unfreeze()
    assert counts[0] > 10_000


def test_first_requests_find_the_backend_and_the_schema(monkeypatch):
    """Importing the asynchronous backend and making the schema take 30 and 130 ms on the event loop."""
    engine, loaded = FakeEngine(), {}
    app = create_app(engine)
    monkeypatch.setattr(DrainingServer, "run", lambda *_: None)
    monkeypatch.setattr(anyio._core._eventloop, "loaded_backends", loaded)
    assert app.openapi_schema is None
    with open_socket("127.0.0.1", 0) as opened:
        serve_until_signal(app, engine, opened, drain_seconds=1)
    gc.unfreeze()
    assert app.openapi_schema is not None
    assert "asyncio" in loaded
