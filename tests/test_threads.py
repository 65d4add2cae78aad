"""Calls from several threads on one `LLM`, and abandoned streams."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest

import secondguess
from builtin_cases import with_drafter
from secondguess.api import LLM
from secondguess.core import Commit
from secondguess.round_lock import RoundLock

PROMPTS = (
    "def add(a, b):",
    "for i in range(3):\n    print(i)\nfor i in range(3):\n",
    "class Stack:\n    def push(self, item):\n",
    "import os\nimport sys\n",
    "x = 1\ny = 2\nx = 1\ny =",
)
DRAFTERS = (
    "none", "ngram", "suffix", "model:builtin-draft", "suffix+model:builtin-draft", "early-exit", "medusa",
    "mtp", "eagle", "dspark", "model:builtin-draft,tree=2x2x1", "model:builtin-draft,tree=dynamic,nodes=6",
    "eagle,tree=2x2x1",
)  # fmt: skip
NUM_TOKENS, NUM_CALLS = 6, 40


@pytest.fixture(scope="module")
def pair() -> LLM:
    """The built-in target and draft model, loaded once."""
    return secondguess.load("builtin", "model:builtin-draft")


@pytest.fixture(scope="module")
def plain_texts(pair: LLM) -> list[list[int]]:
    llm = with_drafter(pair, "none")
    return [llm.generate(prompt, max_tokens=NUM_TOKENS).token_ids for prompt in PROMPTS]


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_two_threads_generate_the_same_texts_as_one(
    drafter: str, pair: LLM, plain_texts: list[list[int]]
) -> None:
    llm = with_drafter(pair, drafter)

    def call(number: int) -> bool:
        index = number % len(PROMPTS)
        if number % 10 == 9:
            tokens = [
                token for piece in llm.stream(PROMPTS[index], max_tokens=NUM_TOKENS) for token in piece.tokens
            ]
        else:
            tokens = llm.generate(PROMPTS[index], max_tokens=NUM_TOKENS).token_ids
        return tokens == plain_texts[index]

    with ThreadPoolExecutor(2) as threads:
        equal = list(threads.map(call, range(NUM_CALLS)))
    assert equal.count(True) == NUM_CALLS


def test_streams_in_one_thread_alternate(pair: LLM, plain_texts: list[list[int]]) -> None:
    llm = with_drafter(pair, "suffix+model:builtin-draft")
    streams = [llm.stream(prompt, max_tokens=NUM_TOKENS) for prompt in PROMPTS]
    tokens: list[list[int]] = [[] for _ in PROMPTS]
    for _ in range(NUM_TOKENS):
        for index, stream in enumerate(streams):
            piece = next(stream, None)
            tokens[index] += piece.tokens if piece else []
    assert tokens == plain_texts


def test_an_abandoned_stream_releases_its_row(pair: LLM) -> None:
    llm = with_drafter(pair, "model:builtin-draft")
    stream = llm.stream(PROMPTS[0], max_tokens=NUM_TOKENS)
    next(stream)
    assert llm.target.runtime.num_live_rows
    del stream
    gc.collect()
    assert not llm.target.runtime.num_live_rows


class Loop:
    """Loop that calls a function in every round and records whether it was closed inside a round."""

    def __init__(self, during: object = None) -> None:
        self.closed_in_round: bool | None = None
        self.during = during

    def rounds(self, state: dict[str, bool]) -> Iterator[list[Commit]]:
        try:
            while True:
                state["in_round"] = True
                if callable(self.during):
                    self.during()
                state["in_round"] = False
                yield []
        finally:
            self.closed_in_round = state["in_round"]


def test_a_loop_closed_inside_a_round_of_another_is_closed_after_that_round() -> None:
    """The garbage collector can close an abandoned stream at any moment, in the thread that runs a round."""
    lock, state = RoundLock(), {"in_round": False}
    abandoned = Loop()
    first = abandoned.rounds(state)
    lock.run_round(first)  # type: ignore[arg-type]
    other = Loop(during=lambda: lock.close(first))  # type: ignore[arg-type]
    second = other.rounds(state)
    lock.run_round(second)  # type: ignore[arg-type]
    assert abandoned.closed_in_round is False
    lock.close(second)  # type: ignore[arg-type]
    assert other.closed_in_round is False


def test_a_loop_closed_while_another_is_being_closed_is_closed_after_it() -> None:
    lock, state = RoundLock(), {"in_round": False}
    abandoned = Loop()
    first = abandoned.rounds(state)
    lock.run_round(first)  # type: ignore[arg-type]
    closing: list[bool] = []

    def other() -> Iterator[list[Commit]]:
        try:
            yield []
        finally:
            lock.close(first)  # type: ignore[arg-type]
            closing.append(abandoned.closed_in_round is None)

    second = other()
    lock.run_round(second)  # type: ignore[arg-type]
    lock.close(second)  # type: ignore[arg-type]
    assert closing == [True]
    assert abandoned.closed_in_round is False


def test_an_unfinished_loop_is_not_garbage_collected() -> None:
    lock, state = RoundLock(), {"in_round": False}
    loop = Loop()
    rounds = loop.rounds(state)
    lock.run_round(rounds)  # type: ignore[arg-type]
    del rounds
    gc.collect()
    assert loop.closed_in_round is None


def test_threads_alternate() -> None:
    lock, order = RoundLock(), []

    def rounds(name: str) -> Iterator[list[Commit]]:
        for _ in range(30):
            order.append(name)
            time.sleep(0.002)
            yield []

    def run(name: str) -> None:
        loop = rounds(name)
        while lock.run_round(loop) is not None:  # type: ignore[arg-type]
            pass

    threads = [threading.Thread(target=run, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    both = order[order.index("b") : 60 - order[::-1].index("a")]
    assert sum(first == second for first, second in pairwise(both)) <= 2, "".join(order)


def test_an_error_in_an_abandoned_loop_is_logged_and_does_not_affect_another(
    caplog: pytest.LogCaptureFixture,
) -> None:
    lock = RoundLock()

    def broken() -> Iterator[list[Commit]]:
        try:
            yield []
        finally:
            raise OSError("broken")

    first = broken()
    lock.run_round(first)  # type: ignore[arg-type]
    other = Loop(during=lambda: lock.close(first))  # type: ignore[arg-type]
    assert lock.run_round(other.rounds({"in_round": False})) == []  # type: ignore[arg-type]
    assert "could not be closed" in caplog.text


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_process_decodes_although_a_thread_of_the_parent_holds_the_lock(
    pair: LLM, plain_texts: list[list[int]]
) -> None:
    llm = with_drafter(pair, "none")
    entered, leave = threading.Event(), threading.Event()

    def wait() -> None:
        entered.set()
        assert leave.wait(60)

    holder = threading.Thread(target=llm.round_lock.run_round, args=(Loop(during=wait).rounds({}),))
    holder.start()
    assert entered.wait(10)
    child = os.fork()
    if child == 0:
        equal = llm.generate(PROMPTS[0], max_tokens=NUM_TOKENS).token_ids == plain_texts[0]
        os._exit(0 if equal else 1)
    for _ in range(600):
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            break
        time.sleep(0.1)
    else:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        status = -1
    leave.set()
    holder.join()
    assert status == 0


def test_a_thread_waits_for_the_round_of_another() -> None:
    lock = RoundLock()
    entered, leave = threading.Event(), threading.Event()

    def wait() -> None:
        entered.set()
        assert leave.wait(10)

    first, second = Loop(during=wait).rounds({}), Loop().rounds({})
    slow = threading.Thread(target=lock.run_round, args=(first,))
    slow.start()
    assert entered.wait(10)
    done = threading.Event()
    fast = threading.Thread(target=lambda: (lock.run_round(second), done.set()))  # type: ignore[arg-type]
    fast.start()
    assert not done.wait(0.05)
    leave.set()
    assert done.wait(10)
    slow.join()
    fast.join()


def test_between_rounds_waits_for_the_round_of_another_thread() -> None:
    lock, started, may_end, order = RoundLock(), threading.Event(), threading.Event(), []

    def rounds() -> Iterator[list[Commit]]:
        started.set()
        may_end.wait(10)
        order.append("round")
        yield []

    with ThreadPoolExecutor(2) as pool:
        round_of_one = pool.submit(lock.run_round, rounds())
        assert started.wait(10)

        def reset() -> None:
            with lock.between_rounds():
                order.append("between")

        between = pool.submit(reset)
        time.sleep(0.1)
        may_end.set()
        round_of_one.result(10)
        between.result(10)
    assert order == ["round", "between"]
