"""Recommendation of a drafter and a controller from measured speed-ups, by system name."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import geometric_mean

from secondguess.bench.systems import speculator_name

PLAIN = speculator_name("none")
WORTH_IT = 1.02
"""Least speed-up over plain decoding for which speculation is recommended; less is noise."""

Speedups = Mapping[str, float]
"""Speed-up over plain decoding by system name; that of `PLAIN` is 1."""


def fastest(speedups: Speedups) -> str:
    """Return the fastest system, or plain decoding if no speed-up exceeds `WORTH_IT`."""
    best = max(speedups, key=speedups.__getitem__)
    return best if speedups[best] > WORTH_IT else PLAIN


def one_for_all(speedups: Mapping[int, Speedups]) -> str:
    """Return the one system for a configuration.

    It speeds up the smallest batch size by more than `WORTH_IT`, and is slower than plain decoding at as few batch
    sizes as possible (`losing_sizes`). Of those within `WORTH_IT` of the best of these at the smallest batch size,
    it has the largest geometric mean of speed-ups at the sizes where it gains.
    """
    gaining = {name: gain for name, gain in speedups[min(speedups)].items() if gain > WORTH_IT}
    if not gaining:
        return PLAIN
    num_losing = {name: len(losing_sizes(name, speedups)) for name in gaining}
    candidates = [name for name in gaining if num_losing[name] == min(num_losing.values())]
    best = max(gaining[name] for name in candidates)

    def mean_gain(name: str) -> float:
        gains = [of_size.get(name, 0) for of_size in speedups.values()]
        return geometric_mean(gain for gain in gains if gain >= 1)

    return max((name for name in candidates if gaining[name] >= best / WORTH_IT), key=mean_gain)


def losing_sizes(name: str, speedups: Mapping[int, Speedups]) -> list[int]:
    """Return the batch sizes at which a system is slower than plain decoding, or was not measured."""
    return [size for size, size_speedups in speedups.items() if size_speedups.get(name, 0) < 1]


def recommend(speedups: Mapping[int, Speedups]) -> list[str]:
    """Return lines with the system for a configuration, and its speed next to the fastest of each batch size."""
    chosen = one_for_all(speedups)
    lines = [f"Configuration: {_describe(chosen)}. Its speed relative to plain decoding:"]
    for size, size_speedups in speedups.items():
        best = fastest(size_speedups)
        if best == chosen:
            comparison = "nothing is faster" + (f" by more than {WORTH_IT - 1:.0%}" if best == PLAIN else "")
        elif best == PLAIN:
            comparison = f"nothing is faster than {_describe(best)} by more than {WORTH_IT - 1:.0%}"
        else:
            comparison = f"the fastest is {_describe(best)}, with {size_speedups[best]:.2f}x"
        lines.append(f"- batch size {size}: {size_speedups[chosen]:.2f}x; {comparison}.")
    return lines


def _describe(name: str) -> str:
    if name == PLAIN:
        return "plain decoding (--drafter none)"
    drafter, _, controller = name.removeprefix("secondguess ").rpartition(" ")
    return f"drafter {drafter}, controller {controller}"
