"""`examples/ray_serve.py` with two local replicas."""

import importlib.util
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import pytest

ray = pytest.importorskip("ray", reason="needs the extra ray")
pytest.importorskip("ray.serve", reason="needs the extra ray")

EXAMPLE = Path(__file__).parents[2] / "examples" / "ray_serve.py"
URL = "http://127.0.0.1:8123"
pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("ray_serve", EXAMPLE)
    module = sys.modules["ray_serve"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def served(example):
    from ray import cloudpickle, serve

    cloudpickle.register_pickle_by_value(example)
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, configure_logging=False)
    serve.start(http_options={"port": 8123})
    serve.run(example.app)
    with httpx2.Client(base_url=URL, timeout=120) as client:
        yield client
    serve.shutdown()
    ray.shutdown()


def complete(client, prompt, **fields):
    body = {"model": "builtin", "prompt": prompt, "max_tokens": 20, "temperature": 0, **fields}
    return client.post("/v1/completions", json=body)


def test_prefixes_are_compared_in_blocks(example):
    first, second = b"a" * 600, b"a" * 400 + b"b" * 200
    assert len(example.blocks_of(first)) == 2
    assert example.blocks_of(first)[0] == example.blocks_of(second)[0]
    assert example.blocks_of(first)[1] != example.blocks_of(second)[1]
    assert example.blocks_of(b"short") == []


def test_replicas_give_the_same_texts_whole_and_streamed(served):
    expected = complete(served, "def f(x):\n").json()["choices"][0]["text"]
    with ThreadPoolExecutor(8) as pool:
        replies = list(pool.map(lambda _: complete(served, "def f(x):\n").json(), range(16)))
    assert {reply["choices"][0]["text"] for reply in replies} == {expected}
    lines = complete(served, "def f(x):\n", stream=True).text.split("\n\n")
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks if chunk["choices"]) == expected
    assert "data: [DONE]" in lines


def test_errors_and_headers_pass_through(served):
    reply = complete(served, "x", temperature=-1)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "temperature")
    assert reply.headers["x-request-id"]
    assert served.get("/health").json()["status"] == "ok"


def test_requests_that_begin_alike_meet_the_same_cache(served):
    """Both replicas get requests, and each prompt's second request finds its beginning in the cache."""
    prompts = [
        f"# file {name}\n" + f"{name} = {name} + 1\n" * 60 for name in ("alpha", "beta", "gamma", "delta")
    ]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda prompt: complete(served, prompt), prompts))
    for prompt in prompts:
        usage = complete(served, prompt + "print(1)\n").json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] > 0.8 * usage["prompt_tokens"]
