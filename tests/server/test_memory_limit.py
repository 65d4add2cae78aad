"""Requests that memory can never hold are refused for good (400), others for now (503)."""

import httpx2
import pytest

from checkpoints import write_llama
from conftest import serving
from secondguess import load
from secondguess.checkpoint import memory
from secondguess.engine import Engine
from secondguess.engine.models import MEMORY_SHARE, PROBS_BYTES

HELD = 256
"""Tokens of a request that the pretended memory holds; the model's context is longer."""


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A client of a server, and a function that sets the available memory."""
    path = write_llama(tmp_path_factory.mktemp("model"), seed=0, max_position_embeddings=2**20)
    llm = load(path, "none", dtype="float32", device="cpu")
    enough = (HELD * llm.cache_bytes + llm.target.runtime.vocab_size * PROBS_BYTES) / MEMORY_SHARE
    with pytest.MonkeyPatch.context() as patch:

        def set_available(share):
            llm.target.runtime.free()  # memory that the cache holds is not asked for again
            patch.setattr(memory, "available_memory", lambda device: int(share * enough) + 1)

        set_available(1)
        engine = Engine(llm)
        with serving(engine) as url, httpx2.Client(base_url=url, timeout=20) as http:
            yield http, llm.target.checkpoint.path.rpartition("/")[2], set_available
        engine.close()


def post(served, path="/v1/completions", **fields):
    http, name, _ = served
    return http.post(path, json={"model": name, "temperature": 0, **fields})


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"prompt": [5] * HELD}, "prompt", f"at most {HELD - 1} tokens"),
        ({"prompt": [5] * 250, "max_tokens": 7}, "max_tokens", "at most 6 after a prompt of 250 tokens"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_can_never_fit_is_a_bad_request(served, fields, param, words, stream):
    reply = post(served, **fields, stream=stream)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, param)
    assert words in error["message"]
    assert f"the memory that was free when the server started holds {HELD}" in error["message"]
    assert "retry-after" not in reply.headers


def test_what_fits_just_now_is_decoded_to_the_end_of_the_memory(served):
    reply = post(served, prompt=[5] * 250, min_tokens=HELD - 250).json()
    assert reply["usage"]["completion_tokens"] == HELD - 250
    assert served[0].get("/v1/models").json()["data"][0]["max_model_len"] == HELD


def test_what_fits_later_may_be_sent_again(served):
    served[2](0.001)
    reply = post(served, prompt=[6] * (HELD - 4), max_tokens=2)
    served[2](1)
    assert reply.status_code == 503
    assert reply.json()["error"]["code"] == "out_of_memory"
    assert int(reply.headers["retry-after"]) > 0
