"""What rounds take, learnt from the rounds themselves: T_target(m) and T_draft(k) at the batch size in use.

A round over R rows whose longest draft has w levels (in a chain, nodes) takes `rest(R, w)` seconds beside drafting, and a
draft of k steps over n rows `drafting(part, n, k)`, so much to start and so much per step. Curves are kept as running
averages that shrug off hiccups, so they follow a machine that changes its pace; of a plain round it is also learnt how it
grows with the context.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Sequence

from secondguess.controllers.cost.averages import Average, Line, PlainTime
from secondguess.core import Row

SLOPE = 0.03
"""What a further node adds to a pass until it is known better, as a share of a plain round."""
AGE = 256
"""After so many rounds with drafts a plain one is timed again: everything is compared with it."""
NEAR = 1.3
"""Batch sizes within this factor of one another are told from one another on straight lines."""


class RoundTimes:
    """Curves of seconds, by batch size.

    Attributes:
        context: mean tokens per row in the round under way; None for whatever it was on average.
    """

    def __init__(self) -> None:
        self.context: float | None = None
        self._plain: dict[int, PlainTime] = {}
        self._ratios: dict[int, dict[int, Average]] = {}
        self._steps: dict[Hashable, dict[int, Line]] = {}
        self._reading: dict[Hashable, Line] = {}
        self._num_since_plain = 0

    def needs_plain(self, num_rows: int, context: float) -> bool:
        """Whether a plain round should be timed before anything is compared with one.

        Args:
            context: mean tokens per row.
        """
        nearest = num_rows if num_rows in self._plain else self._nearest(num_rows)
        if nearest is None or max(nearest, num_rows) > NEAR * min(nearest, num_rows):
            return True
        known = self._plain[nearest]
        return known.count < 2 or not known.knows(context) or self._num_since_plain >= AGE

    def see_plain(self, num_rows: int, context: float, seconds: float) -> None:
        """A round without drafts."""
        plain = self._plain.get(num_rows)
        if plain is None:
            plain = self._plain[num_rows] = PlainTime(context)
        plain.add(context, seconds)
        self.context = context
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
            return known.at(self.context)
        below = max((size for size in self._plain if size < num_rows), default=None)
        above = min((size for size in self._plain if size > num_rows), default=None)
        if below is None or above is None:
            return self._plain[below if above is None else above].at(self.context)  # type: ignore[index]
        low, high = self._plain[below].at(self.context), self._plain[above].at(self.context)
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


def mean_length(rows: Sequence[Row]) -> float:
    """Mean tokens per row."""
    if len(rows) == 1:
        return len(rows[0].tokens)
    return sum([len(row.tokens) for row in rows]) / len(rows)
