"""Counters, ratios, and times of phases, in which every second of a round counts once."""

import threading
import time

import pytest
import torch

from secondguess.core import Draft, RoundTime, Row
from secondguess.preparation import preparation_time, preparing
from secondguess.sampling import SamplingParams
from secondguess.stats import PHASES, Stats, StatsRecorder


@pytest.fixture
def clock():
    """Clock that only advances when it is set."""

    class Clock:
        now = 0.0

        def __call__(self) -> float:
            return self.now

        def advance(self, seconds: float) -> None:
            self.now += seconds

    return Clock()


def rows_of(num_rows: int, **settings) -> list[Row]:
    return [Row([1], SamplingParams(**settings)) for _ in range(num_rows)]


def test_counters_by_position():
    recorder, (row, other) = StatsRecorder(), rows_of(2)
    for accepted, num_drafted in (([5, 6], 3), ([], 1), ([5], 1), ([], 0)):
        draft = Draft.chains([[5] * num_drafted, [5]])
        recorder.record([row, other], draft, [row.commit(accepted, 7), other.commit([], 7)])
    stats = recorder.of(row)
    assert (stats.num_rounds, stats.num_tokens, stats.num_drafted, stats.num_accepted) == (4, 7, 5, 3)
    assert stats.drafted_per_position == [3, 1, 1]
    assert stats.accepted_per_position == [2, 1, 0]
    assert stats.acceptance_rate == 3 / 5
    assert stats.acceptance_length == 7 / 4
    assert (recorder.of(other).num_drafted, recorder.of(other).num_accepted) == (4, 0)


def test_totals_are_the_sums_over_all_rows(clock):
    recorder, rows = StatsRecorder(clock), rows_of(2)
    recorder.totals = before = Stats()
    for _ in range(2):
        with recorder.round(rows), recorder.phase("score"):
            clock.advance(3)
        recorder.record(rows, Draft.chains([[5, 5], [5]]), [row.commit([5], 7) for row in rows])
    totals = recorder.totals
    assert (totals.num_rounds, totals.num_tokens, totals.num_drafted, totals.num_accepted) == (4, 8, 6, 4)
    assert (totals.drafted_per_position, totals.accepted_per_position) == ([4, 2], [4, 0])
    assert totals.seconds["score"] == sum(recorder.of(row).seconds["score"] for row in rows) == 12
    assert (before.num_rounds, before.drafted_per_position, before.accepted_per_position) == (0, [], [])


def test_a_tree_counts_all_nodes_and_each_depth_once():
    """The acceptance by position stays a share of rounds, not of nodes."""
    forms = [[-1, -1, 0, 1, -1], [-1, 0, 1, -1, -1]]
    draft = Draft(torch.full((2, 5), 5), torch.tensor(forms), torch.tensor([5, 3]))
    recorder, (tree, chain) = StatsRecorder(), rows_of(2)
    recorder.record([tree, chain], draft, [tree.commit([5], 7), chain.commit([5, 5, 5], 7)])
    recorder.record([tree, chain], draft, [tree.commit([5, 5], 7), chain.commit([], 7)])
    assert (recorder.of(tree).num_drafted, recorder.of(tree).num_accepted) == (10, 3)
    assert recorder.of(tree).drafted_per_position == [2, 2]
    assert recorder.of(tree).accepted_per_position == [2, 1]
    assert recorder.of(tree).acceptance_rate == 3 / 10
    assert recorder.of(chain).num_drafted == 6
    assert recorder.of(chain).drafted_per_position == [2, 2, 2]
    assert recorder.of(chain).accepted_per_position == [1, 1, 1]


def test_nodes_after_a_truncation_are_not_counted():
    recorder, rows = StatsRecorder(), rows_of(1, max_tokens=2)
    recorder.record(rows, Draft.chains([[5, 6, 7]]), [rows[0].commit([5, 6, 7], 8)])
    stats = recorder.of(rows[0])
    assert (stats.num_tokens, stats.num_accepted) == (2, 2)
    assert stats.accepted_per_position == [1, 1, 0]


def test_ratios_without_rounds():
    stats = Stats()
    assert (stats.acceptance_length, stats.tokens_per_second) == (0, 0)
    assert stats.acceptance_rate is None


def test_without_drafts_the_acceptance_rate_is_none():
    plain = Stats(num_rounds=2, num_tokens=2, seconds={"score": 1.0})
    assert str(plain) == "2.0 tokens/s, nothing drafted, 1.00 tokens per target pass"
    assert plain.as_dict()["acceptance_rate"] is None
    rejected = Stats(num_rounds=2, num_tokens=2, num_drafted=3, seconds={"score": 1.0})
    assert str(rejected) == "2.0 tokens/s, acceptance rate 0%, 1.00 tokens per target pass"
    assert rejected.as_dict()["acceptance_rate"] == 0.0


def test_the_seconds_of_a_round_are_those_of_its_phases_and_other(clock):
    recorder, rows = StatsRecorder(clock), rows_of(2)
    with recorder.round(rows):
        clock.advance(1)
        for seconds in (2, 4):
            with recorder.phase("draft"):
                clock.advance(seconds)
        with recorder.phase("score"):
            clock.advance(8)
    with recorder.round(rows[:1]), recorder.phase("score"):
        clock.advance(16)
    assert recorder.of(rows[0]).seconds == dict.fromkeys(PHASES, 0.0) | {"draft": 6, "score": 24, "other": 1}
    assert recorder.of(rows[1]).seconds == dict.fromkeys(PHASES, 0.0) | {"draft": 6, "score": 8, "other": 1}


def test_drafting_is_timed_in_rounds_that_draft(clock):
    """A head listens in every round; what that takes is no draft step."""
    recorder, rows = StatsRecorder(clock), rows_of(2, max_tokens=9)
    for seconds, drafts in ((5, [[7], []]), (3, [[], []]), (2, [[], [7]])):
        with recorder.round(rows), recorder.phase("draft"):
            clock.advance(seconds)
        recorder.record(rows, Draft.chains(drafts), [row.commit([], 8) for row in rows])
    assert [recorder.of(row).drafting_seconds for row in rows] == [5, 2]


def test_the_time_of_the_current_round_counts_from_its_start(clock):
    recorder, rows = StatsRecorder(clock), rows_of(1)
    for _ in range(2):
        with recorder.round(rows):
            clock.advance(1)
            with recorder.phase("prefill"):
                clock.advance(2)
            with recorder.phase("draft"):
                clock.advance(4)
            assert recorder.round_time() == RoundTime(prefill=2, draft=4, total=7)
            clock.advance(8)


def test_learning_from_a_round_counts_as_planning_of_the_next(clock):
    recorder, rows = StatsRecorder(clock), rows_of(1)

    def round_with_plan(planning, learning):
        with recorder.round(rows):
            with recorder.phase("plan"):
                clock.advance(planning)
            clock.advance(8)
            with recorder.phase("plan"):
                time = recorder.round_time()
                clock.advance(learning)
        return time

    assert round_with_plan(1, 2) == RoundTime(prefill=0, draft=0, total=9, plan=1)
    with recorder.round(rows), recorder.phase("prefill"):  # no controller is called
        clock.advance(16)
    assert round_with_plan(4, 0) == RoundTime(prefill=0, draft=0, total=14, plan=6)
    assert round_with_plan(4, 0) == RoundTime(prefill=0, draft=0, total=12, plan=4)
    assert recorder.of(rows[0]).seconds["plan"] == 11


def interrupt_round(recorder, rows, phase, clock):
    """Run a round that is interrupted after 3 seconds of a phase."""

    def run():
        with recorder.round(rows), recorder.phase(phase):
            clock.advance(3)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run()


def test_the_planning_of_a_failed_round_counts_for_no_other(clock):
    recorder, rows = StatsRecorder(clock), rows_of(1)
    interrupt_round(recorder, rows, "plan", clock)
    with recorder.round(rows):
        clock.advance(1)
        assert recorder.round_time() == RoundTime(prefill=0, draft=0, total=1)


def test_a_failed_round_is_counted(clock):
    recorder, rows = StatsRecorder(clock), rows_of(1)
    interrupt_round(recorder, rows, "score", clock)
    assert recorder.of(rows[0]).seconds["score"] == 3


def test_speed_counts_all_seconds():
    stats = Stats(
        num_tokens=10, seconds={"prefill": 1.0, "draft": 1.0, "score": 2.0, "verify": 0.5, "other": 0.5}
    )
    assert stats.tokens_per_second == 2


def test_public_names_of_stats():
    assert list(Stats().as_dict()) == [
        "num_rounds",
        "num_tokens",
        "num_drafted",
        "num_accepted",
        "drafted_per_position",
        "accepted_per_position",
        "accepted_prediction_tokens",
        "rejected_prediction_tokens",
        "seconds",
        "drafting_seconds",
        "num_reused",
        "acceptance_rate",
        "acceptance_length",
        "tokens_per_second",
    ]
    stats = Stats(2, 5, 4, 3, seconds={"score": 2.0})
    assert str(stats) == "2.5 tokens/s, acceptance rate 75%, 2.50 tokens per target pass"


def test_preparation_is_no_part_of_what_a_round_costs():
    recorder, (row,) = StatsRecorder(), rows_of(1)
    with recorder.round([row]):
        with recorder.phase("score"), preparing():
            time.sleep(0.05)
        cost = recorder.round_time()
    assert cost.total < 0.02
    seconds = recorder.of(row).seconds
    assert seconds["score"] < 0.02
    assert seconds["other"] >= 0.05


def test_preparation_is_that_of_a_thread():
    def prepare():
        with preparing():
            time.sleep(0.01)

    before = preparation_time()
    thread = threading.Thread(target=prepare)
    thread.start()
    thread.join()
    assert preparation_time() == before
    prepare()
    assert preparation_time() >= before + 0.01
