"""Rounds that several calls share: isolation of errors, cancellation, pauses and interruptions."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from secondguess import LLM, load
from secondguess.core import Commit, Row
from secondguess.engine.shared_batch import MAX_DELAY, InterruptedRoundError, RowGroup
from secondguess.sampling import SamplingParams

PROMPTS = ([5, 6, 7, 5, 6, 7, 5], [8, 9, 8, 9, 8], [10, 11, 12])
NUM_TOKENS = 10


@pytest.fixture
def llm(tiny_checkpoint: str) -> LLM:
    return load(tiny_checkpoint, "suffix,min=1", dtype="float32")


def group_of(
    *prompts: list[int], receive: Callable[[list[Commit]], Any] = list, eager: bool = True
) -> RowGroup[Any]:
    params = SamplingParams(max_tokens=NUM_TOKENS, min_tokens=NUM_TOKENS)
    return RowGroup([Row(list(prompt), params) for prompt in prompts], receive, eager)


def outputs(llm: LLM, group: RowGroup[Any]) -> list[list[int]]:
    """Decode a group to its end and return the output tokens of its rows."""
    while llm.shared_batch.take(group) is not None:
        pass
    return [row.output for row in group.rows]


@pytest.fixture
def plain(tiny_checkpoint: str) -> list[list[int]]:
    plain = load(tiny_checkpoint, "none", dtype="float32")
    params = SamplingParams(max_tokens=NUM_TOKENS, min_tokens=NUM_TOKENS)
    return [plain.generate(prompt, params).token_ids for prompt in PROMPTS]


def submit(llm: LLM, *groups: RowGroup[Any]) -> None:
    for group in groups:
        llm.shared_batch.submit(group)


def failing_score(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, group: RowGroup[Any], error: BaseException
) -> None:
    """Let every forward pass over a group's rows raise an error."""
    score = llm.target.runtime.score

    def failing(rows: list[Row], *arguments: object) -> object:
        if any(row in rows for row in group.rows):
            raise error
        return score(rows, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(llm.target.runtime, "score", failing)


def test_groups_decode_in_the_same_rounds(
    llm: LLM, plain: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    num_rows, score = [], llm.target.runtime.score
    monkeypatch.setattr(
        llm.target.runtime, "score", lambda rows, *rest: num_rows.append(len(rows)) or score(rows, *rest)
    )
    first, second = group_of(*PROMPTS[:2]), group_of(PROMPTS[2])
    submit(llm, first, second)
    assert [*outputs(llm, first), *outputs(llm, second)] == plain
    assert max(num_rows) == 3


def test_autocast_of_the_caller_changes_no_text(tiny_checkpoint: str, plain: list[list[int]]) -> None:
    """Neither that of a call under it, nor that of later calls."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        llm = load(tiny_checkpoint, f"model:{tiny_checkpoint}", controller="fixed:3", dtype="float32")
        groups = [group_of(*PROMPTS), group_of(*PROMPTS)]
        submit(llm, groups[0])
        assert outputs(llm, groups[0]) == plain
        assert torch.is_autocast_enabled("cpu")
    submit(llm, groups[1])
    assert outputs(llm, groups[1]) == plain


@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0, "seed": 3, "top_k": 5}])
def test_a_default_device_of_the_caller_changes_no_text(
    tiny_checkpoint: str, settings: dict[str, float]
) -> None:
    """The kernels read tensors from the memory of the CPU."""
    llm = load(tiny_checkpoint, "suffix,min=1", dtype="bfloat16")
    expected = llm.generate(PROMPTS[0], max_tokens=NUM_TOKENS, **settings).token_ids
    with torch.device("meta"):
        loaded = load(tiny_checkpoint, "suffix,min=1", dtype="bfloat16")
        found = [each.generate(PROMPTS[0], max_tokens=NUM_TOKENS, **settings) for each in (llm, loaded)]
        assert torch.ones(1).is_meta
    assert [each.token_ids for each in found] == [expected, expected]


class InterruptedLock:
    """Lock whose first acquisition is followed by an exception of a signal handler, as any call in Python may be."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.num_acquired = 0

    def acquire(self, blocking: bool = True) -> bool:
        is_held = self.lock.acquire(blocking)
        self.num_acquired += 1
        if self.num_acquired == 1:
            raise KeyboardInterrupt
        return is_held

    def release(self) -> None:
        self.lock.release()


@pytest.mark.parametrize(
    "call",
    [
        lambda llm: llm.generate(PROMPTS[0], max_tokens=2),
        lambda llm: llm.shared_batch.cancel(group_of(PROMPTS[0])),
    ],
    ids=["generate", "cancel"],
)
def test_an_interrupted_acquisition_leaves_no_lock(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, call: Callable[[LLM], object]
) -> None:
    lock = InterruptedLock()
    monkeypatch.setattr(llm.shared_batch, "_lock", lock)
    with pytest.raises(KeyboardInterrupt):
        call(llm)
    with ThreadPoolExecutor() as pool:
        assert pool.submit(lock.lock.acquire, False).result()


def test_rows_of_one_group_wait_until_all_are_prefilled(
    llm: LLM, plain: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("secondguess.engine.shared_batch.MAX_TOKENS", 4)  # no two prompts in one step
    num_rows, score = [], llm.target.runtime.score
    monkeypatch.setattr(
        llm.target.runtime, "score", lambda rows, *rest: num_rows.append(len(rows)) or score(rows, *rest)
    )
    group = group_of(*PROMPTS)
    submit(llm, group)
    assert outputs(llm, group) == plain
    assert num_rows[0] == len(PROMPTS)


def test_rows_do_not_wait_for_a_prefill_of_their_group_while_another_group_decodes(
    llm: LLM, plain: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("secondguess.engine.shared_batch.MAX_TOKENS", 4)
    rounds, score = [], llm.target.runtime.score
    monkeypatch.setattr(
        llm.target.runtime, "score", lambda rows, *rest: rounds.append(list(rows)) or score(rows, *rest)
    )
    other, group = group_of(PROMPTS[2]), group_of(*PROMPTS[:2])
    submit(llm, other)
    while not other.rows[0].num_output:
        llm.shared_batch.step()
    submit(llm, group)
    assert [*outputs(llm, group), *outputs(llm, other)] == plain
    first = next(rows for rows in rounds if {*group.rows} & {*rows})
    assert other.rows[0] in first
    assert not {*group.rows} <= {*first}


def test_a_group_that_is_not_eager_advances_only_while_its_caller_waits(
    llm: LLM, plain: list[list[int]]
) -> None:
    lazy, eager = group_of(PROMPTS[0], eager=False), group_of(PROMPTS[1])
    submit(llm, lazy)
    llm.shared_batch.take(lazy)
    num_tokens = len(lazy.rows[0].tokens)
    submit(llm, eager)
    assert outputs(llm, eager) == [plain[1]]
    assert len(lazy.rows[0].tokens) == num_tokens
    assert outputs(llm, lazy) == [plain[0]]


def test_a_paused_group_does_not_keep_others_waiting(llm: LLM, plain: list[list[int]]) -> None:
    llm.shared_batch.scheduler.max_rows = 1
    lazy, eager = group_of(PROMPTS[0], eager=False), group_of(PROMPTS[1])
    submit(llm, lazy)
    llm.shared_batch.take(lazy)
    submit(llm, eager)
    assert outputs(llm, eager) == [plain[1]]


def test_an_error_in_a_round_ends_only_the_group_for_which_it_is_raised(
    llm: LLM, plain: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken, others = group_of(PROMPTS[0]), [group_of(PROMPTS[1]), group_of(PROMPTS[2])]
    submit(llm, broken, *others)
    failing_score(llm, monkeypatch, broken, OSError("broken"))
    assert [outputs(llm, group) for group in others] == [[plain[1]], [plain[2]]]
    with pytest.raises(OSError, match="broken"):
        llm.shared_batch.take(broken)
    assert not llm.target.runtime.num_live_rows


def test_an_error_after_the_commit_of_a_round_ends_the_groups_that_lost_it(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = [group_of(PROMPTS[0]), group_of(PROMPTS[1])]
    submit(llm, *groups)
    monkeypatch.setattr(llm.controller, "learn", lambda *_: 1 / 0)
    for group in groups:
        with pytest.raises(ZeroDivisionError):
            llm.shared_batch.take(group)
    assert not llm.target.runtime.num_live_rows


def test_an_error_in_a_prefill_ends_the_groups_that_join(
    llm: LLM, plain: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    early, late = group_of(PROMPTS[0]), group_of(PROMPTS[1])
    submit(llm, early)
    llm.shared_batch.take(early)
    prefill = llm.target.runtime.prefill
    monkeypatch.setattr(llm.target.runtime, "prefill", lambda *_: 1 / 0)
    submit(llm, late)
    with pytest.raises(ZeroDivisionError):
        llm.shared_batch.take(late)
    monkeypatch.setattr(llm.target.runtime, "prefill", prefill)
    assert outputs(llm, early) == [plain[0]]


@pytest.mark.parametrize("method", ["prefill", "admit"])
def test_an_error_of_one_row_that_joins_ends_only_its_call(
    llm: LLM, plain: list[list[int]], monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    early, broken, late = (group_of(prompt) for prompt in (PROMPTS[0], PROMPTS[1], PROMPTS[2]))
    submit(llm, early)
    llm.shared_batch.take(early)
    wrapped = getattr(llm.target.runtime, method)

    def failing(rows: list[Row], *arguments: object, **named: object) -> object:
        if broken.rows[0] in rows:
            raise OSError("broken")
        return wrapped(rows, *arguments, **named)

    monkeypatch.setattr(llm.target.runtime, method, failing)
    submit(llm, broken, late)
    assert [outputs(llm, late), outputs(llm, early)] == [[plain[2]], [plain[0]]]
    with pytest.raises(OSError, match="broken"):
        llm.shared_batch.take(broken)
    assert not llm.target.runtime.num_live_rows


def test_an_error_of_the_receiver_ends_its_group(llm: LLM, plain: list[list[int]]) -> None:
    broken, other = group_of(PROMPTS[0], receive=lambda _: 1 / 0), group_of(PROMPTS[1])
    submit(llm, broken, other)
    assert outputs(llm, other) == [plain[1]]
    with pytest.raises(ZeroDivisionError):
        llm.shared_batch.take(broken)
    assert not llm.target.runtime.num_live_rows


def test_a_group_cancelled_inside_a_round_is_released_after_it(llm: LLM, plain: list[list[int]]) -> None:
    """The garbage collector may close an abandoned stream at any moment."""
    abandoned = group_of(PROMPTS[0])
    live_rows: list[int] = []

    def receive(_: list[Commit]) -> None:
        llm.shared_batch.cancel(abandoned)
        live_rows.append(llm.target.runtime.num_live_rows)

    other = group_of(PROMPTS[1], receive=receive)
    submit(llm, abandoned, other)
    assert llm.shared_batch.take(other) is None
    assert live_rows == [2]
    assert llm.target.runtime.num_live_rows == 1
    while not other.is_done:
        llm.shared_batch.step()
    assert other.rows[0].output == plain[1]


def test_a_group_cancelled_before_it_joins_takes_no_slot(llm: LLM, plain: list[list[int]]) -> None:
    cancelled, other = group_of(PROMPTS[0]), group_of(PROMPTS[1])
    submit(llm, cancelled, other)
    llm.shared_batch.cancel(cancelled)
    assert llm.shared_batch.take(cancelled) is None
    assert outputs(llm, other) == [plain[1]]
    assert cancelled.rows[0].num_output == 0


def test_a_group_cancelled_while_another_thread_is_between_rounds_keeps_no_slot(llm: LLM) -> None:
    """Even if no round follows."""
    group = group_of(PROMPTS[0])
    submit(llm, group)
    llm.shared_batch.take(group)
    with ThreadPoolExecutor(1) as pool, llm.shared_batch.between_rounds():
        pool.submit(llm.shared_batch.cancel, group).result(10)
        assert llm.target.runtime.num_live_rows == 1
    assert llm.target.runtime.num_live_rows == llm.shared_batch.num_admitted == 0


def test_an_interruption_before_the_commit_does_not_affect_other_groups(
    llm: LLM, plain: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted, other = group_of(PROMPTS[0]), group_of(PROMPTS[1])
    submit(llm, interrupted, other)
    llm.shared_batch.step()
    with monkeypatch.context() as patched:
        failing_score(llm, patched, interrupted, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            llm.shared_batch.step()
    llm.shared_batch.cancel(interrupted)
    assert outputs(llm, other) == [plain[1]]


def test_an_interruption_after_the_commit_ends_the_groups_that_lost_it(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = group_of(PROMPTS[0])
    submit(llm, group)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(llm.controller, "learn", interrupt)
    with pytest.raises(KeyboardInterrupt):
        llm.shared_batch.step()
    with pytest.raises(InterruptedRoundError):
        llm.shared_batch.take(group)


def test_no_round_runs_between_rounds(llm: LLM) -> None:
    group, began = group_of(PROMPTS[0]), threading.Event()
    submit(llm, group)
    with ThreadPoolExecutor(1) as pool:
        with llm.shared_batch.between_rounds():
            taking = pool.submit(lambda: (began.set(), llm.shared_batch.take(group)))
            assert began.wait(10)
            time.sleep(0.05)
            assert group.rows[0].num_output == 0
        taking.result(10)
    assert group.rows[0].num_output > 0


def test_a_long_prompt_is_prefilled_in_pieces_while_others_decode(llm: LLM, plain: list[list[int]]) -> None:
    early, late = group_of(PROMPTS[0]), group_of([50 + number % 50 for number in range(120)])
    budget = llm.shared_batch._budget
    budget.add_round(1.0)
    budget.add_prefill(1, 0.1, num_decoding=1)
    submit(llm, early)
    llm.shared_batch.take(early)
    submit(llm, late)
    left = []
    for _ in range(3):
        # far longer than what the rows wait for besides
        budget._round_seconds, budget._token_seconds[True] = 2005.0, 100.0
        llm.shared_batch.step()
        left.append(llm.target.runtime.num_to_prefill(late.rows[0]))
    piece = int(20 * MAX_DELAY)  # a round takes as long as twenty tokens
    assert left == [119 - piece * count for count in (1, 2, 3)]
    assert early.rows[0].num_output >= 4
    assert outputs(llm, early) == [plain[0]]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_process_decodes_although_a_thread_of_the_parent_holds_the_lock(
    llm: LLM, plain: list[list[int]]
) -> None:
    entered, leave = threading.Event(), threading.Event()

    def hold() -> Iterator[None]:
        with llm.shared_batch.between_rounds():
            entered.set()
            assert leave.wait(60)

    holder = threading.Thread(target=hold)
    holder.start()
    assert entered.wait(10)
    child = os.fork()
    if child == 0:
        group = group_of(PROMPTS[0])
        submit(llm, group)
        os._exit(0 if outputs(llm, group) == [plain[0]] else 1)
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


def test_the_last_result_is_not_lost_to_a_caller_that_comes_between_commit_and_delivery(
    llm: LLM, plain: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    group = group_of(PROMPTS[0])
    submit(llm, group)
    early: list[bool] = []
    learn = llm.controller.learn
    monkeypatch.setattr(llm.controller, "learn", lambda *given: early.append(group.is_done) or learn(*given))
    results = []
    while (result := llm.shared_batch.take(group)) is not None:
        results.append(result)
    assert not any(early), "done only after the last result"
    assert [token for commits in results for commit in commits for token in commit.tokens] == plain[0]


def test_an_interruption_of_a_receiver_ends_the_other_groups_whose_commits_are_lost(llm: LLM) -> None:
    def interrupt(_: list[Commit]) -> None:
        raise KeyboardInterrupt

    interrupted, other = group_of(PROMPTS[0], receive=interrupt), group_of(PROMPTS[1])
    submit(llm, interrupted, other)
    with pytest.raises(KeyboardInterrupt):
        llm.shared_batch.step()
    with pytest.raises(InterruptedRoundError):
        llm.shared_batch.take(other)


def test_an_interruption_of_a_prefill_reaches_other_callers_as_an_error(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = group_of(PROMPTS[0])
    submit(llm, group)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(llm.target.runtime, "prefill", interrupt)
    with pytest.raises(KeyboardInterrupt):
        llm.shared_batch.step()
    with pytest.raises(InterruptedRoundError):
        llm.shared_batch.take(group)
