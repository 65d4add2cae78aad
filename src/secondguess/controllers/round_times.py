"""What rounds take, learnt from the rounds themselves: T_target(m) and T_draft(k) at the batch size in use.

A round over R rows whose longest draft has w nodes takes `rest(R, w)` seconds beside drafting, and a draft step over n
rows `step(part, n)`. Curves are kept as running averages that shrug off hiccups, so they follow a growing context
and a machine that changes its pace.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable

SLOPE = 0.03
"""What a further node adds to a pass until it is known better, as a share of a plain round."""
NUM_REMEMBERED = 16
"""An average is over about so many values."""
FARTHEST = 1.3
"""A value may move an average by at most this factor of it: a hiccup is no news."""
STALE = 1.25
"""A plain round is timed anew once the rows have grown by this factor."""


class Average:
    """A running average of positive values, robust against single large ones."""

    __slots__ = ("count", "value")

    def __init__(self) -> None:
        self.count = 0
        self.value = 0.0

    def add(self, value: float) -> None:
        self.count = min(self.count + 1, NUM_REMEMBERED)
        if self.count == 1:
            self.value = value
            return
        within = min(max(value, self.value / FARTHEST), self.value * FARTHEST)
        self.value += (within - self.value) / self.count


class RoundTimes:
    """Curves of seconds, by batch size."""

    def __init__(self) -> None:
        self._plain: dict[int, Average] = {}
        self._context: dict[int, float] = {}
        self._ratios: dict[int, dict[int, Average]] = {}
        self._steps: dict[Hashable, dict[int, Average]] = {}

    def needs_plain(self, num_rows: int, context: float) -> bool:
        """Whether a plain round should be timed before anything is compared with one.

        Args:
            context: mean tokens per row.
        """
        known = self._plain.get(num_rows)
        return known is None or known.count < 2 or context > STALE * self._context[num_rows]

    def see_plain(self, num_rows: int, context: float, seconds: float) -> None:
        """A round without drafts."""
        self._plain.setdefault(num_rows, Average()).add(seconds)
        self._context[num_rows] = context

    def see(self, num_rows: int, width: int, seconds: float) -> None:
        """A round with drafts, the time of drafting left out."""
        ratio = seconds / self.plain(num_rows)
        self._ratios.setdefault(num_rows, {}).setdefault(width, Average()).add(ratio)

    def see_steps(self, part: Hashable, num_rows: int, num_steps: int, seconds: float) -> None:
        """Draft steps that took so long together."""
        self._steps.setdefault(part, {}).setdefault(num_rows, Average()).add(seconds / num_steps)

    def plain(self, num_rows: int) -> float:
        """Seconds of a round without drafts; from the nearest batch size where this one is unknown."""
        known = self._plain.get(num_rows)
        if known is None:
            known = self._plain[min(self._plain, key=lambda other: abs(other - num_rows))]
        return known.value

    def rest(self, num_rows: int, width: int) -> float:
        """Seconds of a round but for drafting, whose longest draft has `width` nodes."""
        if width == 0:
            return self.plain(num_rows)
        return self.plain(num_rows) * self._ratio(num_rows, width)

    def step(self, part: Hashable, num_rows: int) -> float | None:
        """Seconds of a draft step over so many rows; None before one was seen."""
        seen = self._steps.get(part)
        if not seen:
            return None
        known = seen.get(num_rows)
        if known is None:
            known = seen[min(seen, key=lambda other: abs(other - num_rows))]
        return known.value

    def _ratio(self, num_rows: int, width: int) -> float:
        """Over a plain round; straight lines between the widths that were seen, from 1 at width 0."""
        seen = self._ratios.get(num_rows)
        if not seen:
            return 1 + SLOPE * width
        known = seen.get(width)
        if known is not None and known.count > 2:
            return known.value
        widths = sorted(seen)
        place = bisect_left(widths, width)
        low = widths[place - 1] if place else 0
        low_value = seen[low].value if place else 1.0
        if place == len(widths):
            slope = max((low_value - 1) / low, 0.0)
            return low_value + slope * (width - low)
        high = widths[place]
        if high == low:
            return seen[high].value
        return low_value + (seen[high].value - low_value) * (width - low) / (high - low)
