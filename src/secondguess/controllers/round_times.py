"""What rounds take, learnt from the rounds themselves: T_target(m) and T_draft(k) at the batch size in use.

A round over R rows whose longest draft has w levels (in a chain, nodes) takes `rest(R, w)` seconds beside drafting, and a
draft of k steps over n rows `drafting(part, n, k)`, so much to start and so much per step. Curves are kept as running
averages that shrug off hiccups, so they follow a growing context and a machine that changes its pace.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable

SLOPE = 0.03
"""What a further node adds to a pass until it is known better, as a share of a plain round."""
NUM_REMEMBERED = 16
"""An average is over about so many values."""
FARTHEST = 1.3
"""A value counts for at most this multiple of what was expected: a hiccup is no news. (Nothing is too fast by accident.)"""
NUM_COLD = 3
"""Of so many first plain rounds the least counts: the first ones allocate and fill caches."""
AGE = 256
"""After so many rounds with drafts a plain one is timed again: everything is compared with it."""
FIRST_SLOPE = 0.6
"""How much of the time per step is taken for the step's own while nothing tells it from what a draft takes to start."""
STALE = 1.4
"""A plain round is timed anew once the rows have grown by this factor."""
NEAR = 1.3
"""Batch sizes within this factor of one another are told from one another on straight lines."""


class Average:
    """A running average of positive values, robust against single large ones.

    Args:
        num_cold: of so many first values the least counts.
    """

    __slots__ = ("_num_cold", "count", "value")

    def __init__(self, num_cold: int = 1) -> None:
        self._num_cold = num_cold
        self.count = 0
        self.value = 0.0

    def add(self, value: float) -> None:
        count = self.count
        if count < NUM_REMEMBERED:
            self.count = count = count + 1
        known = self.value
        if count <= self._num_cold:
            self.value = value if count == 1 or value < known else known
            return
        most = known * FARTHEST
        self.value = known + ((value if value < most else most) - known) / count


class Line:
    """Seconds as a start and so much per step, fitted to what was seen lately by least squares.

    Attributes:
        start: seconds before the first step.
        slope: seconds per step.
    """

    __slots__ = ("_weight", "_x", "_xx", "_xy", "_y", "slope", "start")

    def __init__(self) -> None:
        self._weight = self._x = self._y = self._xx = self._xy = 0.0
        self.start = self.slope = 0.0

    def add(self, num_steps: int, seconds: float) -> None:
        if self._weight >= 2:
            most = (self.start + self.slope * num_steps) * FARTHEST
            if seconds > most:
                seconds = most
        decay = 1 - 1 / (4 * NUM_REMEMBERED)
        self._weight = self._weight * decay + 1
        self._x = self._x * decay + num_steps
        self._y = self._y * decay + seconds
        self._xx = self._xx * decay + num_steps * num_steps
        self._xy = self._xy * decay + num_steps * seconds
        self.slope = self._fitted_slope()
        self.start = max(self._y - self.slope * self._x, 0.0) / self._weight

    def _fitted_slope(self) -> float:
        mean = self._y / self._x
        spread = self._xx * self._weight - self._x * self._x
        if spread < 1e-6 * self._xx * self._weight:
            return FIRST_SLOPE * mean  # only one length was seen: nothing tells the start from the steps
        slope = (self._xy * self._weight - self._x * self._y) / spread
        return min(max(slope, 0.1 * mean), mean)


class RoundTimes:
    """Curves of seconds, by batch size."""

    def __init__(self) -> None:
        self._plain: dict[int, Average] = {}
        self._context: dict[int, float] = {}
        self._ratios: dict[int, dict[int, Average]] = {}
        self._steps: dict[Hashable, dict[int, Line]] = {}
        self._reading: dict[Hashable, Line] = {}
        self._num_since_plain = 0

    @property
    def knows_plain(self) -> bool:
        """Whether any plain round was timed, without which nothing can be compared."""
        return bool(self._plain)

    def needs_plain(self, num_rows: int, context: float) -> bool:
        """Whether a plain round should be timed before anything is compared with one.

        Args:
            context: mean tokens per row.
        """
        nearest = num_rows if num_rows in self._plain else self._nearest(num_rows)
        if nearest is None or max(nearest, num_rows) > NEAR * min(nearest, num_rows):
            return True
        known = self._context[nearest]
        changed = context > STALE * known or known > STALE * context
        return self._plain[nearest].count < 2 or changed or self._num_since_plain >= AGE

    def see_plain(self, num_rows: int, context: float, seconds: float) -> None:
        """A round without drafts."""
        average = self._plain.get(num_rows)
        if average is None:
            average = self._plain[num_rows] = Average(NUM_COLD)
        average.add(seconds)
        self._context[num_rows] = context
        self._num_since_plain = 0

    def see(self, num_rows: int, width: int, seconds: float) -> None:
        """A round with drafts, the time of drafting left out."""
        self._num_since_plain += 1
        seen = self._ratios.setdefault(num_rows, {})
        average = seen.get(width)
        if average is None:
            average = seen[width] = Average()
        average.add(seconds / self.plain(num_rows))

    def see_steps(self, part: Hashable, num_rows: int, num_steps: int, seconds: float) -> None:
        """Draft steps that took so long together."""
        seen = self._steps.setdefault(part, {})
        line = seen.get(num_rows)
        if line is None:
            line = seen[num_rows] = Line()
        line.add(num_steps, seconds)

    def see_reading(self, part: Hashable, num_tokens: int, seconds: float) -> None:
        """What a drafter took to read so many tokens that it had not read yet."""
        self._reading.setdefault(part, Line()).add(num_tokens, seconds)

    def reading(self, part: Hashable, num_tokens: int) -> float:
        """Seconds that a drafter needs to read so many tokens; 0 before it was seen to read."""
        line = self._reading.get(part)
        return line.start + line.slope * num_tokens if line and num_tokens else 0.0

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
        return min(self._plain, key=lambda size: abs(size - num_rows), default=None)

    def rest(self, num_rows: int, width: int) -> float:
        """Seconds of a round but for drafting, whose longest draft has `width` levels."""
        if width == 0:
            return self.plain(num_rows)
        return self.plain(num_rows) * self._ratio(num_rows, width)

    def step(self, part: Hashable, num_rows: int) -> float:
        """Seconds of a further draft step over so many rows; 0 before one was seen."""
        line = self._line(part, num_rows)
        return line.slope if line else 0.0

    def drafting(self, part: Hashable, num_rows: int, num_steps: float) -> float:
        """Seconds of a draft of so many steps; 0 before one was seen."""
        line = self._line(part, num_rows)
        return line.start + line.slope * num_steps if line else 0.0

    def _line(self, part: Hashable, num_rows: int) -> Line | None:
        seen = self._steps.get(part)
        if not seen:
            return None
        return seen.get(num_rows) or seen[min(seen, key=lambda other: abs(other - num_rows))]

    def most_rows(self, part: Hashable) -> int:
        """The most rows that a draft step was seen to take; 0 before one was seen."""
        return max(self._steps.get(part, {}), default=0)

    def _ratio(self, num_rows: int, width: int) -> float:
        """Over a plain round; straight lines between the widths that were seen, from 1 at width 0."""
        seen = self._ratios.get(num_rows)
        if not seen:
            nearest = min(self._ratios, key=lambda size: abs(size - num_rows), default=None)
            if nearest is None:
                return 1 + SLOPE * width
            seen = self._ratios[nearest]
        known = seen.get(width)
        if known is not None:
            return known.value
        widths = sorted(seen)
        place = bisect_left(widths, width)
        low = widths[place - 1] if place else 0
        low_value = seen[low].value if place else 1.0
        if place == len(widths):
            slope = max((low_value - 1) / low, 0.0)
            return low_value + slope * (width - low)
        high = widths[place]
        return low_value + (seen[high].value - low_value) * (width - low) / (high - low)
