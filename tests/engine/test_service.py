"""Requests on the engine's thread: texts, cancellation, deadlines, limits, drain and errors."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import random
import threading
import time
from collections.abc import Iterator

import pytest

from secondguess import LLM, load
from secondguess.checkpoint import memory
from secondguess.engine import (
    DeadlineError,
    DrainingError,
    Engine,
    Event,
    Failed,
    Finished,
    NewPiece,
    QueueFullError,
    Request,
)
from secondguess.errors import BadInputError
from secondguess.sampling import SamplingParams

ENDLESS = SamplingParams(max_tokens=100_000, min_tokens=100_000)


class Client(Request):
    """Request that collects its events."""

    def __init__(self, prompt: str, params: SamplingParams, deadline: float | None = None) -> None:
        super().__init__([prompt], params, deadline)
        self.events: list[Event] = []
        self._ended, self._begun = threading.Event(), threading.Event()

    def receive(self, event: Event) -> None:
        self.events.append(event)
        self._begun.set()
        if not isinstance(event, NewPiece):
            self._ended.set()

    def wait_for_text(self) -> None:
        assert self._begun.wait(60)

    def last_event(self) -> Event:
        assert self._ended.wait(60)
        return self.events[-1]

    def text(self, index: int = 0) -> str:
        pieces = [event for event in self.events if isinstance(event, NewPiece) and event.index == index]
        return "".join(each.piece.text for each in pieces)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return load("builtin", "suffix")


@pytest.fixture
def engine(llm: LLM) -> Iterator[Engine]:
    engine = Engine(llm)
    yield engine
    engine.close()
    assert not llm.target.runtime.num_live_rows


def request(prompt: str = "def add(a, b):", **settings: object) -> Client:
    return Client(prompt, SamplingParams(**{"max_tokens": 12, **settings}))  # type: ignore[arg-type]


def submitted(engine: Engine, request: Client) -> Client:
    engine.submit(request)
    return request


def test_a_refusal_reaches_another_process() -> None:
    error = QueueFullError(4, 2.0)
    copied = pickle.loads(pickle.dumps(error))
    assert (str(copied), copied.retry_after) == (str(error), 2.0)


def test_outputs_and_pieces_are_those_of_generate(engine: Engine, llm: LLM) -> None:
    requests = [
        request(),
        request("import os\n", temperature=1.0, seed=3, n=3),
        request("x = 1\n", temperature=0.7, seed=4, stop=("=",), logprobs=2),
    ]
    clients = [submitted(engine, own) for own in requests]
    for client, each in zip(clients, requests, strict=True):
        event = client.last_event()
        assert isinstance(event, Finished)
        expected = llm.generate(each.prompts[0], each.params)
        expected = expected if isinstance(expected, list) else [expected]
        for output, other in zip(event.outputs, expected, strict=True):
            assert (output.token_ids, output.text) == (other.token_ids, other.text)  # type: ignore[union-attr]
            assert (output.finish_reason, output.index) == (other.finish_reason, other.index)  # type: ignore[union-attr]
            assert client.text(output.index) == output.text
            assert len(output.logprobs) == len(other.logprobs)  # type: ignore[union-attr]


def test_a_cancelled_request_ends_with_its_text_so_far(engine: Engine) -> None:
    client, other = submitted(engine, Client("x", ENDLESS)), submitted(engine, request())
    client.wait_for_text()
    client.cancel()
    client.cancel()
    event = client.last_event()
    assert isinstance(event, Finished)
    assert event.outputs[0].finish_reason is None
    assert event.outputs[0].text.startswith(client.text())
    assert isinstance(other.last_event(), Finished)
    assert engine.status().num_requests <= 1


def test_a_request_that_waits_can_be_cancelled(
    engine: Engine, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llm.shared_batch.scheduler, "max_rows", 1)
    running = submitted(engine, Client("x", ENDLESS))
    running.wait_for_text()
    waiting = submitted(engine, request())
    waiting.cancel()
    event = waiting.last_event()
    assert isinstance(event, Finished)
    assert event.outputs[0].token_ids == []
    running.cancel()


def test_a_request_fails_at_its_deadline(engine: Engine) -> None:
    client = submitted(engine, Client("x", ENDLESS, deadline=time.monotonic() + 0.2))
    event = client.last_event()
    assert isinstance(event, Failed)
    assert isinstance(event.error, DeadlineError)


def test_a_request_finishes_before_its_deadline(engine: Engine) -> None:
    client = submitted(engine, Client("x", SamplingParams(max_tokens=12), deadline=time.monotonic() + 600))
    assert isinstance(client.last_event(), Finished)


def test_more_waiting_requests_than_the_limit_are_refused(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm.shared_batch.scheduler, "max_rows", 1)
    engine = Engine(llm, max_waiting=2)
    running = submitted(engine, Client("x", ENDLESS))
    running.wait_for_text()
    waiting = [submitted(engine, request()) for _ in range(2)]
    with pytest.raises(QueueFullError) as caught:
        engine.submit(request())
    assert caught.value.retry_after > 0
    assert engine.status().num_waiting == 2
    running.cancel()
    assert all(isinstance(client.last_event(), Finished) for client in waiting)
    engine.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_decodes_its_own_requests(engine: Engine, llm: LLM) -> None:
    expected = llm.generate(request().prompts[0], request().params)
    client = submitted(engine, Client("x", ENDLESS))
    client.wait_for_text()

    def decode() -> None:
        assert not engine.status().num_requests
        event = submitted(engine, request()).last_event()
        assert isinstance(event, Finished)
        assert event.outputs[0].token_ids == expected.token_ids  # type: ignore[union-attr]
        engine.close()

    child = multiprocessing.get_context("fork").Process(target=decode, daemon=True)
    child.start()
    child.join(120)
    assert child.exitcode == 0
    client.cancel()
    assert isinstance(client.last_event(), Finished)


def test_a_request_for_which_there_is_no_thread_fails_alone(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(llm)

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="new thread"):
            engine.submit(request())
    assert not engine.status().num_requests
    assert isinstance(submitted(engine, request()).last_event(), Finished)
    engine.close()


def test_a_callback_may_close_the_engine(llm: LLM) -> None:
    engine, closed = Engine(llm), threading.Event()

    class Closing(Request):
        def receive(self, event: Event) -> None:
            if isinstance(event, Finished):
                engine.close()
                closed.set()

    engine.submit(Closing(["x"], SamplingParams(max_tokens=12)))
    assert closed.wait(60)


def test_a_drain_finishes_what_has_begun_and_refuses_the_rest(llm: LLM) -> None:
    engine = Engine(llm)
    client = submitted(engine, request(max_tokens=40))
    client.wait_for_text()
    engine.drain(60)
    event = client.last_event()
    assert isinstance(event, Finished)
    assert event.outputs[0].finish_reason is not None
    assert engine.status().is_draining
    with pytest.raises(DrainingError):
        engine.submit(request())
    engine.close()


def test_a_drain_that_takes_too_long_cancels(llm: LLM) -> None:
    engine = Engine(llm)
    client = submitted(engine, Client("x", ENDLESS))
    client.wait_for_text()
    engine.drain(0.05)
    event = client.last_event()
    assert isinstance(event, Finished)
    assert event.outputs[0].finish_reason is None
    engine.close()


def test_bad_requests_are_refused_by_the_call_itself(engine: Engine) -> None:
    for prompt, params in (
        ("", ENDLESS),
        ("x " * 100_000, ENDLESS),
    ):
        with pytest.raises(BadInputError):
            engine.submit(Request([prompt], params))
    with pytest.raises(BadInputError, match="max_waiting"):
        Engine(engine.llm, max_waiting=0)


def test_an_error_in_a_callback_does_not_end_the_request(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(Request):
        def receive(self, event: Event) -> None:
            raise OSError("the client is gone")

    engine.submit(Broken(["x"], SamplingParams(max_tokens=4)))
    assert isinstance(submitted(engine, request()).last_event(), Finished)
    assert "callback" in caplog.text


def test_an_error_ends_the_request_for_which_it_is_raised(
    engine: Engine, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    score = llm.target.runtime.score

    def failing(rows: list[object], *rest: object) -> object:
        if any(row.params.max_tokens == 13 for row in rows):  # type: ignore[attr-defined]
            raise OSError("broken")
        return score(rows, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(llm.target.runtime, "score", failing)
    good, bad = submitted(engine, request(max_tokens=40)), submitted(engine, request(max_tokens=13))
    event = bad.last_event()
    assert isinstance(event, Failed)
    assert isinstance(event.error, OSError)
    assert isinstance(good.last_event(), Finished)


def test_random_arrivals_and_cancellations_do_not_change_other_texts(engine: Engine, llm: LLM) -> None:
    prompts = ["def add(a, b):", "import os\nimport sys\n", "class Stack:\n", "x = 1\ny = 2\nx = 1\ny ="]
    expected = {prompt: llm.generate(prompt, max_tokens=24).token_ids for prompt in prompts}  # type: ignore[union-attr]
    generator, clients = random.Random(0), []
    for _ in range(40):
        client = submitted(engine, request(generator.choice(prompts), max_tokens=24))
        clients.append(client)
        if generator.random() < 0.3:
            client.cancel()
        if generator.random() < 0.5:
            client.wait_for_text()
    for client in clients:
        event = client.last_event()
        assert isinstance(event, Finished)
        right = expected[client.prompts[0]]  # type: ignore[index]
        output = event.outputs[0]
        assert output.token_ids == right[: len(output.token_ids)]
        assert client.is_cancelled or output.token_ids == right


def test_an_error_in_releasing_rows_ends_the_requests_and_not_the_engine(
    engine: Engine, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = submitted(engine, Client("x", ENDLESS))
    client.wait_for_text()
    with monkeypatch.context() as patched:
        patched.setattr(llm.target.runtime, "release", lambda _: 1 / 0)
        patched.setattr(llm.target.runtime, "score", lambda *_: 1 / 0)
        event = client.last_event()
    assert isinstance(event, Failed)
    llm.target.runtime.release(client.generation.group.rows[0])
    llm.shared_batch.step()
    assert isinstance(submitted(engine, request()).last_event(), Finished)


@pytest.mark.parametrize(("available", "is_reserved"), [(1 << 40, True), (0, False)])
def test_an_engine_makes_room_for_a_usual_load(monkeypatch, available, is_reserved):
    """If memory allows: the cache is then not copied while rows decode."""
    own = load("builtin", "none")
    monkeypatch.setattr(memory, "available_memory", lambda device: available)
    Engine(own).close()
    cache = own.target.runtime.cache
    assert ((cache.num_slots, cache.capacity) == (16, 2048)) == is_reserved
