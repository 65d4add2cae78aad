"""The cost model against values computed by hand, and its timings with a simulated clock."""

from types import SimpleNamespace

import pytest
from bench_fakes import stats_of

from secondguess.bench import costs
from secondguess.bench.costs import Costs, ForwardTimer, predicted_seconds, typical_context
from secondguess.proof.fakes import TableModel, random_probs
from secondguess.stats import Stats

COSTS = Costs(target={1: 10.0, 2: 11.0, 4: 15.0}, draft_step=2.0)


def test_the_cost_of_a_run_is_that_of_its_target_passes_and_draft_steps():
    stats = stats_of([(0, 0), (1, 1), (3, 2), (3, 0), (3, 3)])
    # T(1), then T(2) + 1 step, then three times T(4) + 3 steps
    assert predicted_seconds(stats, COSTS) == pytest.approx(10 + (11 + 2) + 3 * (15 + 6))


def test_acceptance_changes_the_tokens_and_not_the_cost():
    lucky, unlucky = stats_of([(3, 3)] * 5), stats_of([(3, 0)] * 5)
    assert predicted_seconds(lucky, COSTS) == predicted_seconds(unlucky, COSTS)
    assert lucky.num_tokens == 4 * unlucky.num_tokens


def test_without_verification_cost_the_speedup_is_that_of_the_paper():
    """With v = 1 and k nodes per round the speed-up is tau / (k c + 1)."""
    stats = stats_of([(4, 2)] * 10)
    flat = Costs({1: 8.0, 5: 8.0}, draft_step=0.4)
    plain_seconds = stats.num_tokens * 8.0
    tau, c = stats.acceptance_length, flat.cost_ratio
    assert plain_seconds / predicted_seconds(stats, flat) == pytest.approx(tau / (4 * c + 1))


@pytest.mark.parametrize(("width", "seconds"), [(1, 10.0), (2, 11.0), (3, 13.0), (4, 15.0), (6, 19.0)])
def test_costs_are_interpolated_and_extrapolated_linearly(width, seconds):
    assert COSTS.target_pass(width) == pytest.approx(seconds)


def test_curve_and_cost_ratio_are_relative_to_one_token():
    assert COSTS.curve == {1: 1.0, 2: 1.1, 4: 1.5}
    assert COSTS.cost_ratio == 0.2
    assert Costs({1: 10.0}).cost_ratio == 0.0


def test_one_measured_width_is_used_for_all():
    assert Costs({1: 10.0}).target_pass(5) == 10.0


def test_an_empty_run_costs_nothing():
    assert predicted_seconds(Stats(), COSTS) == 0.0


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
    monkeypatch.setattr(costs, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    return now


def test_passes_are_timed(clock):
    target, draft = SlowModel(clock, 10.0, 1.0), SlowModel(clock, 0.5, 0.25)
    probe = ForwardTimer(target, {"small": draft}, context=[0, 1, 2, 3] * 3, widths=(1, 2, 5))
    probe.sample()
    measured = probe.costs("small")
    assert measured.target == pytest.approx({1: 11.0, 2: 12.0, 5: 15.0})
    assert measured.draft_step == pytest.approx(0.75)
    assert probe.costs().draft_step == 0.0


def test_a_pass_has_its_width_even_over_a_short_context(clock):
    target = SlowModel(clock, 10.0, 1.0)
    probe = ForwardTimer(target, {}, context=[0, 1])
    probe.sample()
    assert probe.costs().target == pytest.approx({width: 10.0 + width for width in range(1, 10)})


def test_timing_leaves_no_rows(clock):
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


def test_one_slow_pass_does_not_change_the_median(clock):
    target = SlowModel(clock, 1.0, 0.0)
    probe = ForwardTimer(target, {}, context=[0, 1, 2], widths=(1,))
    probe.sample()
    target.start = 50.0
    probe.sample()
    target.start = 1.0
    probe.sample()
    assert probe.costs().target == {1: 1.0}


def test_the_context_is_half_way_through_a_median_row_and_fits():
    assert len(typical_context([[1] * 10, [2] * 20, [3] * 90], num_tokens=8)) == 20 + 4
    assert len(typical_context([[1, 2, 3]], num_tokens=100)) == 3 + 50
    assert len(typical_context([[1] * 100], num_tokens=8, limit=90)) == 90
    assert len(typical_context([[1] * 10], num_tokens=8, limit=90)) == 14
