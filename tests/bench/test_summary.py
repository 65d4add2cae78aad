"""Medians, ratios and intervals against values computed by hand."""

import pytest
from bench_fakes import stats_of

from secondguess.bench.summary import compare, median_interval, sum_stats


def test_a_ratio_is_that_of_medians_and_the_worst_one_is_paired():
    ratio = compare([2.0, 4.0, 6.0], [1.0, 4.0, 2.0])
    assert ratio.of_medians == 4.0 / 2.0
    assert ratio.worst == 4.0 / 4.0


def test_prompts_are_resampled_in_pairs():
    """Whatever prompts are drawn, a system that is twice as fast on each of them is twice as fast."""
    baseline = [1.0, 100.0, 7.0, 30.0, 0.5, 3.0]
    ratio = compare([2 * speed for speed in baseline], baseline)
    assert (ratio.low, ratio.high) == (2.0, 2.0)


def test_the_interval_contains_the_ratio_and_widens_with_the_spread():
    baseline = [10.0] * 20
    calm = compare([20.0 + 0.01 * index for index in range(20)], baseline)
    wild = compare([10.0 + index for index in range(20)], baseline)
    for ratio in (calm, wild):
        assert ratio.low <= ratio.of_medians <= ratio.high
    assert wild.high - wild.low > 10 * (calm.high - calm.low)


def test_the_interval_of_a_median_is_the_known_one():
    """For 1..20 the 95 % bootstrap interval of the median is close to the binomial one, [6.5, 14.5]."""
    ratio = compare([float(value) for value in range(1, 21)], [1.0] * 20)
    assert ratio.low == pytest.approx(6.5, abs=1.0)
    assert ratio.high == pytest.approx(14.5, abs=1.0)


def test_the_same_seed_gives_the_same_interval():
    speeds, baseline = [3.0, 5.0, 9.0, 4.0, 6.0, 2.0], [2.0, 2.0, 3.0, 8.0, 1.0, 5.0]
    assert compare(speeds, baseline, seed=5).low is not None
    assert compare(speeds, baseline, seed=5) == compare(speeds, baseline, seed=5)


def test_the_interval_of_one_systems_median():
    low, high = median_interval([float(value) for value in range(1, 21)])
    assert (low, high) == (pytest.approx(6.5, abs=1.0), pytest.approx(14.5, abs=1.0))


@pytest.mark.parametrize("count", [1, 2, 5])
def test_too_few_prompts_have_no_interval(count):
    few, enough = [float(value) for value in range(1, count + 1)], [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    assert median_interval(few) is None
    ratio = compare(few, few)
    assert (ratio.of_medians, ratio.low, ratio.high) == (1.0, None, None)
    assert median_interval(enough) is not None


def test_the_sum_of_statistics_has_every_counter():
    one, other = stats_of([(3, 2), (1, 0)], prefill=0.5), stats_of([(5, 5)], prefill=0.25)
    total = sum_stats([one, other])
    assert total == stats_like(stats_of([(3, 2), (1, 0), (5, 5)]), prefill=0.75, score=2.0)
    assert one.drafted_per_position == [2, 1, 1], "the parts stay as they were"


def stats_like(stats, **seconds):
    stats.seconds.update(seconds)
    return stats
