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
STALE = 2.0
"""A plain round is timed anew once the rows have grown by this factor."""
NEAR = 1.3
"""Batch sizes within this factor of one another are told from one another on straight lines."""


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
        nearest = self._nearest(num_rows)
        if nearest is None or max(nearest, num_rows) > NEAR * min(nearest, num_rows):
            return True
        return self._plain[nearest].count < 2 or context > STALE * self._context[nearest]

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
        """Seconds of a round without drafts; from the batch sizes around it where this one is unknown."""
        known = self._plain.get(num_rows)
        if known is not None:
            return known.value
        below = max((size for size in self._plain if size < num_rows), default=None)
        above = min((size for size in self._plain if size > num_rows), default=None)
        if below is None or above is None:
            return self._plain[below if above is None else above].value  # type: ignore[index]
        low, high = self._plain[below].value, self._plain[above].value
        return low + (high - low) * (num_rows - below) / (above - below)

    def _nearest(self, num_rows: int) -> int | None:
        if num_rows in self._plain:
            return num_rows
        return min(self._plain, key=lambda size: abs(size - num_rows), default=None)

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
            nearest = min(self._ratios, key=lambda size: abs(size - num_rows), default=None)
            if nearest is None:
                return 1 + SLOPE * width
            seen = self._ratios[nearest]
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
