"""Row 13 of the known problems of servers: sleep and wake."""

import gc
import time
import weakref

import httpx2
import pytest

from conftest import metrics_of, openai_client, serving, wait_for
from secondguess import load
from secondguess.engine import DrainingError, Engine, Request
from secondguess.sampling import SamplingParams
from secondguess.server.sleep import SleepingEngine

PROMPT = "def read_lines(path):\n"


@pytest.fixture
def engine():
    engine = SleepingEngine(lambda: Engine(load(controller="fixed:3")), idle_seconds=0.3)
    yield engine
    engine.close()


def test_sleep_and_wake(engine):
    """Texts and acceptance are the same before and after, and no weights stay in memory between."""
    weights = weakref.ref(engine.llm.target.runtime)
    with serving(engine) as url, openai_client(url) as client, httpx2.Client(base_url=url) as http:

        def complete(**fields):
            reply = client.completions.create(
                model="builtin", prompt=PROMPT, max_tokens=40, extra_body={"report": True}, **fields
            )
            sample = reply.secondguess["samples"][0]
            return reply.choices[0].text, sample["num_drafted"], sample["num_accepted"]

        fields = ({"temperature": 0}, {"seed": 3})
        before = [complete(**each) for each in fields]
        assert http.get("/ready").json()["model"] == "loaded"
        wait_for(lambda: engine.status().is_asleep)
        gc.collect()
        assert weights() is None
        for path in ("/health", "/ready"):
            reply = http.get(path)
            assert (reply.status_code, reply.json()["model"]) == (200, "asleep")
        assert 'sleep_state="discard_all"} 1.0' in http.get("/metrics").text
        # Tokens need no weights.
        assert http.post("/tokenize", json={"prompt": PROMPT}).json()["count"] > 0
        assert engine.status().is_asleep
        counted = metrics_of(http)
        assert [complete(**each) for each in fields] == before
        for name in ("secondguess:rounds_total", "vllm:spec_decode_num_draft_tokens_total"):
            assert metrics_of(http)[name,] == 2 * counted[name,] > 0
        assert http.get("/health").json()["model"] == "loaded"
        assert 'sleep_state="awake"} 1.0' in http.get("/metrics").text


def test_a_request_that_runs_keeps_the_models(engine):
    request = Request([PROMPT], SamplingParams(max_tokens=400, min_tokens=400))
    engine.submit(request)
    engine._idle_seconds = 0.001
    while request.generation.group.num_open:
        assert not engine.status().is_asleep
        time.sleep(0.002)
    wait_for(lambda: engine.status().is_asleep)


def test_a_server_is_ready_while_its_models_are_released(engine, monkeypatch):
    found, close = [], Engine.close

    def slow_close(self):
        close(self)
        found.append(engine.status())

    monkeypatch.setattr(Engine, "close", slow_close)
    wait_for(lambda: bool(found))
    assert not found[0].is_draining


def test_a_sleeping_server_drains(engine):
    wait_for(lambda: engine.status().is_asleep)
    engine.drain(1)
    assert engine.status().is_draining
    with pytest.raises(DrainingError):
        engine.submit(Request([PROMPT], SamplingParams()))
