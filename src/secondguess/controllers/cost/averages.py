"""Averages and lines that follow what was measured lately, and shrug off hiccups."""

from __future__ import annotations

NUM_REMEMBERED = 16
"""An average is over about so many values."""
FARTHEST = 1.3
"""A value counts for at most this multiple of what was expected: a hiccup is no news. (Nothing is too fast by accident.)"""
NUM_COLD = 3
"""Of so many first plain rounds the least counts: the first ones allocate and fill caches."""
FIRST_SLOPE = 0.6
"""How much of the time per step is taken for the step's own while nothing tells it from what a draft takes to start."""
STALE = 1.4
"""Plain rounds are timed where rows are longer or shorter than any yet by this factor; by its square, once a slope is trusted."""
TELLING = 2.0
"""The slope of plain rounds is trusted once rows were seen of which one is so many times as long as another."""
MOST_OF_LENGTH = 0.9
"""At most this share of a plain round grows with the rows' length."""


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
        """One more value, which counts for no more than `FARTHEST` allows."""
        if self.count < self._num_cold:
            self.value = value if not self.count or value < self.value else self.value
            self.count += 1
            return
        known = self.value
        most = known * FARTHEST
        if self.count < NUM_REMEMBERED:
            self.count += 1
        self.value = known + ((value if value < most else most) - known) / self.count

    def follow(self, value: float) -> float:
        """One more value, whatever it is; gives the share of the way to it that the average went."""
        if self.count < NUM_REMEMBERED:
            self.count += 1
        share = 1 / self.count
        self.value += (value - self.value) * share
        return share


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


class PlainTime:
    """Seconds of a plain round at one batch size: a line over the rows' mean length.

    The line goes through a running average of seconds at a running average of lengths; its slope is fitted to how the two moved
    together, and drawn towards none while lengths have hardly differed. Where they no longer do, it is not forgotten.
    """

    __slots__ = ("_along", "_before", "_length", "_level", "_longest", "_shortest", "_slope", "_spread")

    def __init__(self, length: float) -> None:
        self._level = Average(NUM_COLD)
        self._length = self._shortest = self._longest = self._before = length
        self._slope = self._spread = self._along = 0.0

    @property
    def count(self) -> int:
        return self._level.count

    def at(self, length: float | None) -> float:
        """Seconds, for rows of this length (None: of the length that they had on average)."""
        if length is None:
            return self._level.value
        return self._level.value + self._slope * (length - self._length)

    def knows(self, length: float) -> bool:
        """Whether rows about this long were seen, or the line can be trusted that far."""
        reach = STALE if self._longest < TELLING * self._shortest else STALE * STALE
        return self._shortest <= length * reach and length <= self._longest * reach

    def add(self, length: float, seconds: float) -> None:
        """A plain round."""
        level = self._level
        if level.count < NUM_COLD:
            level.add(seconds)
            self._length += (length - self._length) / level.count
        else:
            known, centre = level.value, self._length
            aside = length - centre
            most = (known + self._slope * aside) * FARTHEST
            if seconds > most:
                seconds = most
            self._spread += aside * aside
            self._along += aside * (seconds - known)
            # Old news makes way for new, and only for new: how many lengths were seen is bounded, not for how long.
            excess = self._spread / (NUM_REMEMBERED * centre * centre)
            if excess > 1:
                self._along /= excess
                self._spread /= excess
            self._length = centre = centre + aside * level.follow(seconds)
            slope = self._along / (self._spread + centre * centre / 4)
            highest = MOST_OF_LENGTH * level.value / centre
            self._slope = 0.0 if slope < 0 else min(slope, highest)
        # One round far from all others may have been a hiccup: a length counts as seen when two in succession had it.
        self._longest = max(self._longest, min(length, self._before))
        self._shortest = min(self._shortest, max(length, self._before))
        self._before = length
