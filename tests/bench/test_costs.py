"""Timing of passes, with a clock that only forwards move."""

import pytest

from secondguess.bench import costs
from secondguess.bench.costs import ForwardTimer
from secondguess.proof.fakes import TableModel, random_probs


class SlowModel(TableModel):
    """Each forward takes `start` seconds and `per_token` for every token."""

    def __init__(self, clock, start, per_token):
        super().__init__(4, random_probs(4, seed=0))
        self.clock, self.start, self.per_token = clock, start, per_token

    def score(self, rows, draft):
        before = self.num_scored_tokens
        scores = super().score(rows, draft)
        self.clock[0] += self.start + self.per_token * (self.num_scored_tokens - before)
        return scores


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(costs.time, "perf_counter", lambda: now[0])
    return now


def test_passes_cost_what_they_cost(clock):
    target, draft = SlowModel(clock, 10.0, 1.0), SlowModel(clock, 0.5, 0.25)
    probe = ForwardTimer(target, {"small": draft}, context=[0, 1, 2, 3] * 3, widths=(1, 2, 5))
    probe.sample()
    measured = probe.costs("small")
    assert measured.target == pytest.approx({1: 11.0, 2: 12.0, 5: 15.0})
    assert measured.draft_step == pytest.approx(0.75)
    assert probe.costs().draft_step == 0.0


def test_a_pass_is_as_wide_as_it_is_called_even_over_a_short_context(clock):
    target = SlowModel(clock, 10.0, 1.0)
    probe = ForwardTimer(target, {}, context=[0, 1])
    probe.sample()
    assert probe.costs().target == pytest.approx({width: 10.0 + width for width in range(1, 10)})


def test_nothing_is_left_behind(clock):
    target, draft = SlowModel(clock, 1.0, 0.0), SlowModel(clock, 1.0, 0.0)
    probe = ForwardTimer(target, {"small": draft}, context=[0, 1, 2], widths=(1, 3))
    probe.sample()
    probe.sample()
    assert (target.num_live_rows, draft.num_live_rows) == (0, 0)


def test_the_warm_up_does_not_count(clock):
    target = SlowModel(clock, 100.0, 0.0)
    probe = ForwardTimer(target, {}, context=[0, 1, 2], widths=(1,))
    probe.warm_up()
    target.start = 1.0
    probe.sample()
    assert probe.costs().target == {1: 1.0}


def test_one_disturbed_pass_does_not_move_the_median(clock):
    target = SlowModel(clock, 1.0, 0.0)
    probe = ForwardTimer(target, {}, context=[0, 1, 2], widths=(1,), num_sweeps=2)
    probe.sample()
    target.start = 50.0
    probe.sample()
    target.start = 1.0
    probe.sample()
    assert probe.costs().target == {1: 1.0}
