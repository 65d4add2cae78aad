"""Tokens to prefill between two rounds."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from checkpoints import write_llama
from secondguess import load
from secondguess.core import Row
from secondguess.engine import shared_batch
from secondguess.engine.shared_batch import (
    ARRIVAL_DELAY,
    MAX_DELAY,
    MAX_TOKENS,
    MIN_TOKENS,
    MIN_TOKENS_ALONE,
    PrefillBudget,
    RowGroup,
)
from secondguess.sampling import SamplingParams


def measured(round_seconds: float, token_seconds: float) -> PrefillBudget:
    budget = PrefillBudget()
    budget.add_round(round_seconds)
    budget.add_prefill(100, 100 * token_seconds, num_decoding=0)
    budget.add_prefill(8, 8 * token_seconds, num_decoding=1)
    return budget


def test_a_prefill_alone_ends_in_time_for_a_row_that_arrives() -> None:
    assert measured(0.1, 0.001).max_tokens(0) * 0.001 == pytest.approx(ARRIVAL_DELAY * 0.1)
    assert measured(0.001, 0.001).max_tokens(0) == MIN_TOKENS_ALONE
    assert measured(1.0, 0.001).max_tokens(0) == MAX_TOKENS
    assert PrefillBudget().max_tokens(0) == MAX_TOKENS
    assert measured(0.1, 0.001).max_tokens(0, rows_may_arrive=False) == MAX_TOKENS


def test_short_prompts_do_not_shorten_the_prefill_of_long_ones() -> None:
    budget = measured(0.1, 0.001)
    budget.add_prefill(MIN_TOKENS_ALONE - 1, 1.0, num_decoding=0)
    assert budget.max_tokens(0) == measured(0.1, 0.001).max_tokens(0)


def test_a_prefill_takes_the_maximum_delay_while_rows_decode() -> None:
    tokens = measured(0.1, 0.001).max_tokens(1)
    assert tokens * 0.001 == pytest.approx(MAX_DELAY * 0.1)


def test_what_rows_have_waited_already_is_not_given_to_prefill() -> None:
    budget = measured(0.1, 0.001)
    assert budget.max_tokens(1, spent=0.05) * 0.001 == pytest.approx(MAX_DELAY * 0.1 - 0.05, abs=0.001)
    assert budget.max_tokens(1, spent=1.0) == MIN_TOKENS


def test_rows_that_wait_for_the_prefill_of_others_have_a_share_of_the_time() -> None:
    budget = measured(0.1, 0.001)
    assert budget.max_tokens(8, 1) == budget.max_tokens(8, 2) == budget.max_tokens(8) > 0
    assert budget.max_tokens(8, 5) == pytest.approx(2 * budget.max_tokens(8), abs=1)
    assert budget.max_tokens(1, 16) * 0.001 == pytest.approx(ARRIVAL_DELAY * 0.1)


def test_the_number_of_tokens_is_bounded() -> None:
    assert measured(0.001, 0.001).max_tokens(1) == MIN_TOKENS
    assert measured(10.0, 0.001).max_tokens(1) == MAX_TOKENS
    assert PrefillBudget().max_tokens(1) in (MIN_TOKENS, MAX_TOKENS)


def test_averages_follow_the_measurements() -> None:
    budget = measured(0.1, 0.001)
    for _ in range(30):
        budget.add_prefill(10, 10 * 0.002, num_decoding=1)
    assert budget.max_tokens(1) * 0.002 == pytest.approx(MAX_DELAY * 0.1, rel=0.1)


class SimulatedTime:
    """Clock that only the target's work advances: a round takes a second, a prefilled token a hundredth."""

    def __init__(self, runtime: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        score, prefill = runtime.score, runtime.prefill

        def timed_score(*arguments: Any) -> Any:
            self.now += 1.0
            return score(*arguments)

        def timed_prefill(*arguments: Any, **options: Any) -> Any:
            before = runtime.num_prefilled
            result = prefill(*arguments, **options)
            self.now += (runtime.num_prefilled - before) / 100
            return result

        monkeypatch.setattr(runtime, "score", timed_score)
        monkeypatch.setattr(runtime, "prefill", timed_prefill)
        monkeypatch.setattr(shared_batch, "time", SimpleNamespace(perf_counter=self, monotonic=self))

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("is_bounded", [True, False])
def test_a_long_prompt_delays_no_token_of_other_rows_by_more_than_three_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_bounded: bool
) -> None:
    llm = load(str(write_llama(tmp_path, seed=0, max_position_embeddings=4096)), "none", dtype="float32")
    clock = SimulatedTime(llm.target.runtime, monkeypatch)
    if not is_bounded:
        monkeypatch.setattr(PrefillBudget, "max_tokens", lambda *_: None)
    params = SamplingParams(max_tokens=60, min_tokens=60)
    streams = RowGroup([Row([row, 5, 6], params) for row in range(1, 9)], list)
    late = RowGroup([Row([7, 8] * 1000, params)], list)
    llm.shared_batch.submit(streams)
    for _ in range(5):
        llm.shared_batch.step()
    llm.shared_batch.submit(late)
    lengths, starts = [row.num_output for row in streams.rows], [clock.now] * 8
    delays = []
    while not late.rows[0].num_output:
        llm.shared_batch.step()
        for place, row in enumerate(streams.rows):
            if row.num_output > lengths[place]:
                delays.append(clock.now - starts[place] - 1)
                lengths[place], starts[place] = row.num_output, clock.now
    assert len(delays) >= 8
    assert (max(delays) <= 3) == is_bounded


def test_a_short_prompt_does_not_wait_for_the_end_of_a_long_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = load(str(write_llama(tmp_path, seed=0, max_position_embeddings=8192)), "none", dtype="float32")
    clock = SimulatedTime(llm.target.runtime, monkeypatch)
    params = SamplingParams(max_tokens=20, min_tokens=20)
    llm.generate([5, 6, 7], params)  # measures rounds and prefill
    long, short = RowGroup([Row([7, 8] * 2000, params)], list), RowGroup([Row([9] * 30, params)], list)
    llm.shared_batch.submit(long)
    llm.shared_batch.step()
    arrival = clock.now
    llm.shared_batch.step()  # in progress as the other arrives
    llm.shared_batch.submit(short)
    ends = []
    while not short.rows[0].finished:
        llm.shared_batch.step()
        if short.rows[0].num_output > len(ends):
            ends.append(clock.now)
    assert ends[0] - arrival <= 10
    assert max(after - before for before, after in pairwise(ends)) <= 3
    assert not long.rows[0].num_output


def test_a_stream_of_short_prompts_does_not_stop_a_long_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = load(str(write_llama(tmp_path, seed=0, max_position_embeddings=8192)), "none", dtype="float32")
    clock = SimulatedTime(llm.target.runtime, monkeypatch)
    params = SamplingParams(max_tokens=1)
    llm.generate([5, 6, 7], params)
    long = RowGroup([Row([7, 8] * 1000, params)], list)
    llm.shared_batch.submit(long)
    alone = 2000 / 100
    while not long.rows[0].finished:
        llm.shared_batch.submit(RowGroup([Row([9] * 30, params)], list))
        llm.shared_batch.step()
        assert clock.now < 20 * alone
