"""Costs of rounds, learned from the rounds: T_target(m) and T_draft(k) at the batch size in use.

A round over R rows whose longest draft has w levels (in a chain, nodes) takes `rest(R, w)` seconds beside drafting, and a
draft of k steps over n rows `drafting(part, n, k)`. All but plain rounds is kept in plain rounds of the same moments, so
that a machine that changes its speed changes all costs alike. Drafted rounds that take unexpectedly long (or short) bring
about a few plain ones, which tell whether the machine or the draft is the cause.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

from secondguess.controllers.cost.averages import CostCurve, Line, PlainTime
from secondguess.controllers.cost.disturbance import Disturbance
from secondguess.core import Row

AGE = 64
"""After so many rounds with drafts a plain one is timed again: everything is compared with it."""
FRESH = 8
"""So many drafted rounds after a plain one are compared with it in full; later ones may be slower because the machine is."""
AGE_IF_BUSY = 32
"""The same while other load disturbs the rounds."""
SURPRISE = 1.3
"""Drafted rounds that take this many times as long as expected, or as short, are looked into."""
NUM_SURPRISES, NUM_CHECKS = 4, 2
"""All but one of so many drafted rounds must agree in that; then so many plain rounds are timed."""
NUM_NEW = 3
"""After so many drafts the cost of a part's steps is trusted."""
PAUSE = 16
"""After plain rounds that did not explain it, so many drafted rounds pass before that happens again."""
IMPOSSIBLE = 0.9
"""A pass over a draft cannot take less than this share of a plain round, which then must have become faster."""
NEAR = 1.3
"""Batch sizes within this factor of one another are told from one another on straight lines."""


class RoundTimes:
    """Seconds by batch size, draft length and number of draft steps.

    Attributes:
        context: mean tokens per row in the round under way; None for the average of all rounds.
        disturbance: of plain rounds, by other load on the machine.
    """

    def __init__(self) -> None:
        self.context: float | None = None
        self.disturbance = Disturbance()
        self._plain: dict[int, PlainTime] = {}
        self._curves: dict[int, CostCurve] = {}
        self._steps: dict[Hashable, dict[int, Line]] = {}
        self._reading: dict[Hashable, Line] = {}
        self._num_since_plain = 0
        self._surprises: tuple[float, ...] = ()
        self._num_checks = self._pause = 0

    def needs_plain(self, num_rows: int, context: float) -> bool:
        """Return whether a plain round has to be timed before anything is compared with one.

        Args:
            context: mean tokens per row.
        """
        nearest = num_rows if num_rows in self._plain else self._nearest(num_rows)
        if nearest is None or max(nearest, num_rows) > NEAR * min(nearest, num_rows):
            return True
        known = self._plain[nearest]
        age = AGE_IF_BUSY if self.disturbance.is_busy else AGE
        return (
            self._num_checks > 0
            or known.count < 2
            or not known.knows(context)
            or self._num_since_plain >= age
        )

    def see_plain(self, num_rows: int, context: float, seconds: Sequence[float]) -> bool:
        """Add successive rounds without drafts; return True if the machine has changed its speed or become quiet."""
        plain = self._plain.get(num_rows)
        if plain is None:
            plain = self._plain[num_rows] = PlainTime(context)
        typical = sorted(seconds)[len(seconds) // 2]
        change = plain.add(context, typical, len(seconds))
        changed = change != 1.0
        if changed:
            self.disturbance.restart()
            for other in self._plain.values():
                if other is not plain:
                    other.rescale(change)
        usual = plain.at(context)
        calmed = [self.disturbance.add(each / usual) for each in seconds]
        self.context = context
        self._num_since_plain = 0
        self._end_check(len(seconds), changed)
        return changed or any(calmed)

    def _end_check(self, num_rounds: int, changed: bool) -> None:
        if not self._num_checks:
            return
        self._num_checks = 0 if changed else max(self._num_checks - num_rounds, 0)
        if not self._num_checks and not changed:
            self._pause = PAUSE
            # The machine is as fast as before, so drafted rounds do cost something else.
            for curve in self._curves.values():
                curve.doubt()
            for lines in self._steps.values():
                for line in lines.values():
                    line.doubt()

    def see(self, num_rows: int, width: int, seconds: float) -> None:
        """Add a round with drafts, the time of drafting left out."""
        self._num_since_plain += 1
        curve = self._curves.get(num_rows)
        if curve is None:
            curve = self._curves[num_rows] = CostCurve()
        cost = seconds / self.plain(num_rows)
        if cost < IMPOSSIBLE:
            self._num_checks = NUM_CHECKS
            return
        expected = curve.at(width)
        self._notice(cost / expected)
        if cost <= expected or self._is_fresh:
            curve.add(width, cost)

    @property
    def _is_fresh(self) -> bool:
        return self._num_since_plain <= FRESH

    def _notice(self, ratio: float) -> None:
        """Compare a drafted round with what was expected of it."""
        self.disturbance.add_drafted(ratio)
        self._surprises = (*self._surprises, ratio)[-NUM_SURPRISES:]
        self._pause = max(self._pause - 1, 0)
        if len(self._surprises) == NUM_SURPRISES and not self._pause:
            ordered = sorted(self._surprises)
            if ordered[1] > SURPRISE or ordered[-2] < 1 / SURPRISE:
                self._num_checks, self._surprises = NUM_CHECKS, ()

    def see_steps(self, part: Hashable, num_rows: int, num_steps: int, seconds: float) -> None:
        """Add draft steps that took so long together."""
        seen = self._steps.setdefault(part, {})
        line = seen.get(num_rows)
        if line is None:
            line = seen[num_rows] = Line()
        cost = seconds / self.plain(num_rows)
        if self._is_fresh or line.count < NUM_NEW or cost <= line.start + line.slope * num_steps:
            line.add(num_steps, cost)

    def see_reading(self, part: Hashable, num_tokens: int, seconds: float) -> None:
        """Add the time in which a drafter has prefilled so many tokens."""
        self._reading.setdefault(part, Line()).add(num_tokens, seconds / self._any_plain())

    def reading(self, part: Hashable, num_tokens: int) -> float:
        """Seconds in which a drafter prefills so many tokens; 0 before it was timed."""
        line = self._reading.get(part)
        if line is None or not num_tokens:
            return 0.0
        return (line.start + line.slope * num_tokens) * self._any_plain()

    def _any_plain(self) -> float:
        """Seconds of a plain round at the smallest batch size seen."""
        return self._plain[min(self._plain)].at(None)

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
        plain = self.plain(num_rows)
        if width == 0:
            return plain
        curve = _at_nearest(self._curves, num_rows)
        return plain * (curve or UNKNOWN).at(width)

    def step(self, part: Hashable, num_rows: int) -> float:
        """Seconds of a further draft step over so many rows; 0 before one was seen."""
        line = _at_nearest(self._steps.get(part), num_rows)
        return line.slope * self.plain(num_rows) if line else 0.0

    def drafting(self, part: Hashable, num_rows: int, num_steps: float) -> float:
        """Seconds of a draft of so many steps; 0 before one was seen."""
        line = _at_nearest(self._steps.get(part), num_rows)
        return (line.start + line.slope * num_steps) * self.plain(num_rows) if line else 0.0

    def is_new(self, part: Hashable) -> bool:
        """Return whether too few drafts of a part have been timed to trust their cost."""
        return sum(line.count for line in self._steps.get(part, {}).values()) < NUM_NEW

    def most_rows(self, part: Hashable) -> int:
        """The most rows that a draft step was seen to take; 0 before one was seen."""
        return max(self._steps.get(part, {}), default=0)


UNKNOWN = CostCurve()
Estimate = TypeVar("Estimate", CostCurve, Line)


def _at_nearest(known: Mapping[int, Estimate] | None, num_rows: int) -> Estimate | None:
    """The estimate of the nearest batch size."""
    if not known:
        return None
    return known.get(num_rows) or known[min(known, key=lambda other: abs(other - num_rows))]


def mean_length(rows: Sequence[Row]) -> float:
    """Mean tokens per row."""
    if len(rows) == 1:
        return len(rows[0].tokens)
    return sum([len(row.tokens) for row in rows]) / len(rows)
