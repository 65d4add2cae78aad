"""Statistics of a comparison: medians over prompts, ratios, paired worst case, intervals."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np
from numpy.typing import NDArray

from secondguess.stats import Stats

NUM_RESAMPLES = 10_000
MIN_PROMPTS_FOR_INTERVAL = 6
"""Fewest prompts for a 95 % interval of a median.

With n prompts, even the interval from the smallest to the largest value misses the median with
probability 2 / 2^n: 6 % for 5 prompts, 3 % for 6. Bootstrap intervals are narrower still: with one
prompt the width is 0.
"""


@dataclass(frozen=True)
class Ratio:
    """Ratio of two systems' medians over prompts, with its 95 % interval, and the ratio on the worst prompt.

    The interval is that of the percentile bootstrap; None with fewer than `MIN_PROMPTS_FOR_INTERVAL` prompts.
    """

    of_medians: float
    low: float | None
    high: float | None
    worst: float

    def __str__(self) -> str:
        interval = "" if self.low is None else f" [{self.low:.2f}, {self.high:.2f}]"
        return f"{self.of_medians:.2f}x{interval}"


def compare(speeds: Sequence[float], baseline: Sequence[float], seed: int = 0) -> Ratio:
    """Return the ratio of speeds on the same prompts in the same order, which are resampled together."""
    ours, theirs = np.asarray(speeds), np.asarray(baseline)
    resampled = _resampled_medians(ours, seed) / _resampled_medians(theirs, seed)
    low, high = _interval(resampled, len(ours)) or (None, None)
    of_medians = float(np.median(ours) / np.median(theirs))
    return Ratio(of_medians, low, high, worst=float((ours / theirs).min()))


def median_interval(values: Sequence[float], seed: int = 0) -> tuple[float, float] | None:
    """Return the 95 % percentile-bootstrap interval of the median; None with too few values."""
    return _interval(_resampled_medians(np.asarray(values), seed), len(values))


def _interval(resampled: NDArray[np.float64], num_prompts: int) -> tuple[float, float] | None:
    if num_prompts < MIN_PROMPTS_FOR_INTERVAL:
        return None
    low, high = np.quantile(resampled, [0.025, 0.975])
    return float(low), float(high)


def _resampled_medians(values: NDArray[np.float64], seed: int) -> NDArray[np.float64]:
    indices = np.random.default_rng(seed).integers(0, len(values), size=(NUM_RESAMPLES, len(values)))
    medians: NDArray[np.float64] = np.median(values[indices], axis=1)
    return medians


def sum_stats(many: Iterable[Stats]) -> Stats:
    """Return the counters of several rows, summed."""
    total = Stats()
    for stats in many:
        total.num_rounds += stats.num_rounds
        total.num_tokens += stats.num_tokens
        total.num_drafted += stats.num_drafted
        total.num_accepted += stats.num_accepted
        total.num_reused += stats.num_reused
        total.drafted_per_position = _add(total.drafted_per_position, stats.drafted_per_position)
        total.accepted_per_position = _add(total.accepted_per_position, stats.accepted_per_position)
        for phase, seconds in stats.seconds.items():
            total.seconds[phase] += seconds
        total.drafting_seconds += stats.drafting_seconds
    return total


def _add(total: Sequence[int], counts: Sequence[int]) -> list[int]:
    return [sum(pair) for pair in zip_longest(total, counts, fillvalue=0)]
