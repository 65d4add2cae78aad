"""The cost model against numbers worked out by hand."""

import pytest
from bench_fakes import stats_of

from secondguess.bench.predict import Costs, draft_length_counts, predicted_seconds
from secondguess.errors import BadInputError
from secondguess.stats import Stats

COSTS = Costs(target={1: 10.0, 2: 11.0, 4: 15.0}, draft_step=2.0)


def test_draft_lengths_are_recovered_from_how_many_rounds_reached_each_position():
    stats = stats_of([(0, 0), (1, 1), (3, 2), (3, 0), (3, 3)])
    assert draft_length_counts(stats) == {0: 1, 1: 1, 3: 3}


def test_plain_decoding_is_all_empty_drafts():
    assert draft_length_counts(stats_of([(0, 0)] * 4)) == {0: 4}


def test_a_run_costs_its_target_passes_and_its_draft_steps():
    stats = stats_of([(0, 0), (1, 1), (3, 2), (3, 0), (3, 3)])
    # T(1), then T(2) + 1 step, then three times T(4) + 3 steps
    assert predicted_seconds(stats, COSTS) == pytest.approx(10 + (11 + 2) + 3 * (15 + 6))


def test_acceptance_changes_the_tokens_and_not_the_cost():
    lucky, unlucky = stats_of([(3, 3)] * 5), stats_of([(3, 0)] * 5)
    assert predicted_seconds(lucky, COSTS) == predicted_seconds(unlucky, COSTS)
    assert lucky.num_tokens == 4 * unlucky.num_tokens


def test_a_free_verification_gives_the_formula_of_the_paper():
    """With v = 1 and k nodes per round the speed-up is tau / (k c + 1)."""
    stats = stats_of([(4, 2)] * 10)
    flat = Costs({1: 8.0, 5: 8.0}, draft_step=0.4)
    plain_seconds = stats.num_tokens * 8.0
    tau, c = stats.acceptance_length, flat.cost_ratio
    assert plain_seconds / predicted_seconds(stats, flat) == pytest.approx(tau / (4 * c + 1))


@pytest.mark.parametrize(("width", "seconds"), [(1, 10.0), (2, 11.0), (3, 13.0), (4, 15.0), (6, 19.0)])
def test_costs_between_and_beyond_the_measured_widths_lie_on_straight_lines(width, seconds):
    assert COSTS.target_pass(width) == pytest.approx(seconds)


def test_curve_and_cost_ratio_are_relative_to_one_token():
    assert COSTS.curve == {1: 1.0, 2: 1.1, 4: 1.5}
    assert COSTS.cost_ratio == 0.2
    assert Costs({1: 10.0}).cost_ratio == 0.0


def test_one_measured_width_serves_for_all():
    assert Costs({1: 10.0}).target_pass(5) == 10.0


def test_costs_without_the_unit_are_refused():
    with pytest.raises(BadInputError, match="1 token"):
        Costs({2: 1.0})


def test_nothing_happened_costs_nothing():
    assert predicted_seconds(Stats(), COSTS) == 0.0
