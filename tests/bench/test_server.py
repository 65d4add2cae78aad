"""A server as a benchmarked system, with a small fake server."""

import json
import threading
from collections import Counter
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace

import pytest

from secondguess.bench.config import BenchConfig
from secondguess.bench.harness import run_bench
from secondguess.bench.server import Server, ServerAddress
from secondguess.errors import BadInputError


class Fake:
    """Responses of a fake server, and the requests that it received."""

    def __init__(self, models=("only",), status=200, answer=None, takes_ignore_eos=True, most_tokens=10**9):
        self.models, self.status, self.answer = models, status, answer
        self.takes_ignore_eos, self.most_tokens = takes_ignore_eos, most_tokens
        self.requests = []
        self.headers = []

    def reply(self, path, body):
        if path == "/v1/models":
            return 200, {"data": [{"id": name} for name in self.models]}
        if path != "/v1/completions":
            return 404, {"error": "no such path"}
        self.requests.append(body)
        if "ignore_eos" in body and not self.takes_ignore_eos:
            return 400, {"error": "unknown field ignore_eos"}
        if self.answer is not None or self.status != 200:
            return self.status, self.answer
        return 200, {"usage": {"completion_tokens": min(body["max_tokens"], self.most_tokens)}}


@contextmanager
def serve(fake):
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.answer(None)

        def do_POST(self):
            self.answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def answer(self, body):
            fake.headers.append(self.headers)
            status, told = fake.reply(self.path, body)
            content = told if isinstance(told, bytes) else json.dumps(told).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def connect(url):
    return Server(ServerAddress.parse(url), SimpleNamespace(decode=lambda ids, **_: " ".join(map(str, ids))))


def test_a_request_asks_for_the_number_of_tokens_and_uses_the_servers_count():
    fake = Fake()
    with serve(fake) as url:
        run = connect(url).generate([5, 6], 7, 0.5, seed=3)
    assert fake.requests == [
        {"model": "only", "prompt": "5 6", "max_tokens": 7, "temperature": 0.5, "seed": 3, "ignore_eos": True}
    ]
    assert (run.num_tokens, run.tokens, run.has_token_ids) == (7, [], False)
    assert 0 < run.seconds < 60
    assert run.tokens_per_second == 7 / run.seconds


def test_a_server_that_refuses_ignore_eos_gets_no_further_requests_with_it():
    fake = Fake(takes_ignore_eos=False)
    with serve(fake) as url:
        server = connect(url)
        assert server.generate([5], 4, 0.0, 0).num_tokens == 4
        server.generate([5], 4, 0.0, 0)
    assert ["ignore_eos" in request for request in fake.requests] == [True, False, False]


def test_a_refusal_for_another_reason_keeps_ignore_eos():
    fake = Fake(status=400, answer={"error": "prompt too long"})
    with serve(fake) as url:
        server = connect(url)
        with pytest.raises(BadInputError):
            server.generate([5], 4, 0.0, 0)
        fake.status, fake.answer = 200, None
        server.generate([5], 4, 0.0, 0)
    assert ["ignore_eos" in request for request in fake.requests] == [True, False, True]


def test_the_key_is_read_from_the_environment(monkeypatch):
    fake = Fake()
    with serve(fake) as url:
        monkeypatch.delenv("OPENAI_API_KEY", raising=False)
        connect(url).generate([5], 1, 0.0, 0)
        monkeypatch.setenv("OPENAI_API_KEY", "secret")
        connect(url).generate([5], 1, 0.0, 0)
    assert [headers.get("Authorization") for headers in fake.headers] == [None, None, *["Bearer secret"] * 2]


def test_without_a_model_name_the_server_must_have_one_model():
    fake = Fake(models=("a", "b"))
    with serve(fake) as url:
        named = connect(f"{url}/v1,model=b")
        named.generate([5], 1, 0.0, 0)
        assert fake.requests[0]["model"] == "b"
        assert (named.name, named.family) == (f"{url[7:]} b", url[7:])
        with pytest.raises(
            BadInputError, match=r"expected one model.*got a, b; name one: --against .*,model=NAME"
        ):
            connect(url)


@pytest.mark.parametrize(
    ("fake", "message"),
    [
        (Fake(status=500, answer={"error": "it is too hot"}), "got status 500: .*it is too hot"),
        (Fake(status=401, answer={}), "OPENAI_API_KEY"),
        (Fake(status=302, answer={}), "got status 302"),
        (Fake(answer=b"<html>hello"), "Invalid JSON.*hello"),
        (Fake(answer={"choices": []}), "a value for usage, got none.*OpenAI-compatible"),
        (Fake(answer=["x"]), "to be an object, got .*OpenAI-compatible"),
        (
            Fake(answer={"usage": {"completion_tokens": 0}}),
            "completion_tokens to be greater than or equal to 1",
        ),
        (
            Fake(answer={"usage": {"completion_tokens": True}}),
            "usage.completion_tokens to be a valid integer",
        ),
    ],
)
def test_an_invalid_response_is_reported_in_one_line(fake, message):
    with serve(fake) as url, pytest.raises(BadInputError, match=message) as caught:
        connect(url).generate([5], 4, 0.0, 0)
    assert "\n" not in str(caught.value)


def test_a_refused_connection_is_reported_in_one_line():
    with serve(Fake()) as url:
        pass
    with pytest.raises(
        BadInputError, match=r"expected an OpenAI-compatible server at .* start it or leave it out"
    ):
        connect(url)


def test_a_server_without_http_is_reported():
    import socket

    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer():
            connection, _ = listener.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(b"220 mail ready\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(BadInputError, match="expected an OpenAI-compatible server"):
            connect(f"http://127.0.0.1:{listener.getsockname()[1]}")
        thread.join()


@pytest.mark.parametrize(
    "text",
    [
        "http://", "http://host:99999", "http://host:x", "http://host?x=1", "http://host,model=",
        "http://host,key=5", "http://host,model=a,model=b", "http://[::1",
    ],
)  # fmt: skip
def test_an_invalid_address_is_refused(text):
    with pytest.raises(BadInputError, match="expected a server as"):
        BenchConfig(against=(text,))


def test_a_password_in_an_address_is_refused():
    with pytest.raises(BadInputError, match="OPENAI_API_KEY") as caught:
        ServerAddress.parse("http://me:hush@host")
    assert "hush" not in str(caught.value)


def test_addresses_are_accepted_with_and_without_a_path():
    for text in ("https://host:8", "https://host:8/", "https://host:8/v1", "https://host:8/v1/completions"):
        assert ServerAddress.parse(text) == ServerAddress("https", "host:8")
    assert ServerAddress.parse("http://host/a/v1,model=org/m").path == "/a"


def test_a_server_runs_beside_our_systems_and_its_lengths_are_reported(tiny_checkpoint, tmp_path):
    fake = Fake(most_tokens=4)
    with serve(fake) as url:
        report = run_bench(
            BenchConfig(
                model=str(tiny_checkpoint),
                drafters=("ngram",),
                against=(url,),
                prompts=("builtin",),
                num_prompts=2,
                num_tokens=6,
                temperatures=(0.0,),
                dtype="float32",
                num_threads=1,
                batch_sizes=(1, 2),
            )
        )
    host = url.removeprefix("http://")
    theirs = report.result(host, 0.0)
    assert (theirs.family, theirs.speculates, theirs.equality, theirs.rounds) == (host, False, None, None)
    assert host in report.result("secondguess ngram", 0.0).against
    assert report.result("secondguess ngram", 0.0).equality is not None
    assert [result.batch_size for result in report.results if result.system == host] == [1]
    told = "\n".join(report.workbench.notes)
    assert f"{host} wrote 4 to 4 tokens instead of 6 in 2 of 2 texts" in told
    assert f"{host}: at batch size 1 only" in told
    # The warm-up and two prompts, in the words of the file and not in token ids.
    prompts = Counter(request["prompt"][:3] for request in fake.requests)
    assert sum(prompts.values()) == 3
    assert all(isinstance(request["prompt"], str) for request in fake.requests)
