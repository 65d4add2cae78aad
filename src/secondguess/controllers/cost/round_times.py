"""Measured costs of rounds: T_target(m) and T_draft(k) at the batch size in use.

A round over R rows with drafts of n levels in all (in chains, nodes) takes `rests(R, k)[k]` seconds
besides drafting, with k = n / `levels_per_cell(R)`, and a draft of k steps over n rows
`draft_seconds(part, n).at(k)`. Plain rounds (rounds without drafts) are kept in seconds, all other
costs relative to plain rounds of the same time, so that a machine that changes its speed changes
all costs alike. If rounds with drafts take unexpectedly long (or short), a few plain rounds are
timed to find out whether the machine or the draft is the cause.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

from secondguess.controllers.cost.averages import (
    OUTLIER_CLIP,
    Average,
    CostCurve,
    LinearCost,
    PlainTime,
)
from secondguess.controllers.cost.load_detector import LoadDetector
from secondguess.core import Row

MAX_PLAIN_AGE = 64
"""Number of rounds with drafts after which a plain round is timed again."""
FRESH_ROUNDS = 8
"""Number of rounds with drafts after a plain one whose costs always count.

Of later ones, those far above the estimate are left out: the machine may have become slower.
"""
DEVIATION = 1.3
"""Factor between measured and expected time at which rounds with drafts are checked."""
NUM_DEVIATIONS, NUM_CHECKS = 4, 2
"""Number of rounds, all but one of which must deviate, and of plain rounds timed in a check."""
NUM_NEW = 3
"""Number of drafts after which the cost of a drafter's steps is trusted."""
NEGLIGIBLE = 0.1
"""Draft cost, in plain rounds, whose deviations hardly count: it is added to both times."""
CHECK_PAUSE = 16
"""Number of rounds with drafts without another check, after a check that found no change."""
MIN_PASS_COST = 0.9
"""Share of the least known cost of a pass over a draft, at first a plain round, below which plain rounds are timed.

They have probably become faster. If they have not, such passes are cheaper: some processors run a
pass over several tokens in less time than one over a single token.
"""
MAX_PLAN_SHARE = 1 / 32
"""Share of the time that may be spent on planning while nothing is drafted."""
BATCH_SIZE_TOLERANCE = 1.3
"""Maximum factor between batch sizes at which the time of one is estimated from the other's."""


class RoundTimes:
    """Seconds by batch size, draft length and number of draft steps.

    Attributes:
        context: mean tokens per row in the current round; None for the average of all rounds.
        load_detector: statistics of disturbances by other load on the machine.
    """

    def __init__(self) -> None:
        self.context: float | None = None
        self.load_detector = LoadDetector()
        self._plain: dict[int, PlainTime] = {}
        self._plans: dict[tuple[int, bool], Average] = {}
        self._curves: dict[int, CostCurve] = {}
        self._steps: dict[Hashable, dict[int, LinearCost]] = {}
        self._prefill_lines: dict[Hashable, LinearCost] = {}
        self._num_since_plain = 0
        self._has_calmed = False
        self._pass_deviations, self._draft_deviations = Deviations(), Deviations()
        self._num_checks = self._pause = 0
        # Least cost of a pass over a draft, in plain rounds: that a check confirmed, and that began one.
        self._least_cost = self._suspected_cost = 1.0

    def needs_plain(self, num_rows: int, context: float) -> bool:
        """Return whether a plain round has to be timed before costs are compared with it.

        Args:
            num_rows: batch size.
            context: mean tokens per row.
        """
        nearest = num_rows if num_rows in self._plain else self._nearest(num_rows)
        if nearest is None or max(nearest, num_rows) > BATCH_SIZE_TOLERANCE * min(nearest, num_rows):
            return True
        known = self._plain[nearest]
        return (
            self._num_checks > 0
            or known.count < 2
            or not known.knows(context)
            or self._num_since_plain >= MAX_PLAIN_AGE
        )

    def add_plain(self, num_rows: int, context: float, seconds: Sequence[float]) -> bool:
        """Add successive rounds without drafts, given the seconds of each.

        Returns:
            True if the machine has changed its speed or become quiet.
        """
        plain = self._plain.get(num_rows)
        if plain is None:
            plain = self._plain[num_rows] = PlainTime(context)
        typical = sorted(seconds)[len(seconds) // 2]
        change = plain.add(context, typical, len(seconds))
        changed = change != 1.0
        if changed:
            self.load_detector.restart()
            for other in self._plain.values():
                if other is not plain:
                    other.rescale(change)
        usual = plain.at(context)
        has_calmed = self._has_calmed
        for each in seconds:
            has_calmed |= self.load_detector.add(each / usual)
        self._has_calmed = False
        self.context = context
        self._num_since_plain = 0
        self._end_check(len(seconds), changed)
        return changed or has_calmed

    def add_plan(self, num_rows: int, has_drafts: bool, seconds: float) -> float:
        """Add the time of planning a round with or without drafts; return the average.

        Learning from several rounds at once makes the time uneven, so no value is clipped.
        """
        average = self._plans.setdefault((num_rows, has_drafts), Average())
        average.add(seconds)
        return average.value

    def num_unplanned(self, num_rows: int) -> int:
        """Return the number of rounds without a plan after one without drafts, so that planning takes little time."""
        known = self._plans.get((num_rows, False))
        if known is None or not self._plain:
            return 0
        return int(known.value / (MAX_PLAN_SHARE * self.plain(num_rows)))

    def _end_check(self, num_rounds: int, changed: bool) -> None:
        if not self._num_checks:
            return
        self._num_checks = 0 if changed else max(self._num_checks - num_rounds, 0)
        if self._num_checks:
            return
        self._least_cost = 1.0 if changed else min(self._least_cost, self._suspected_cost)
        self._suspected_cost = 1.0
        if not changed:
            self._pause = CHECK_PAUSE
            # The machine is as fast as before, so the costs of drafts have changed.
            for curve in self._curves.values():
                curve.reset_weight()
            for lines in self._steps.values():
                for line in lines.values():
                    line.reset_weight()

    def add(self, num_rows: int, num_levels: int, seconds: float) -> float:
        """Add a round with drafts; return its seconds, clipped if it was disturbed.

        Args:
            num_rows: batch size.
            seconds: duration without drafting and drafter prefill.
        """
        cell = max(round(num_levels / levels_per_cell(num_rows)), 1)
        self._num_since_plain += 1
        curve = self._curves.get(num_rows)
        if curve is None:
            curve = self._curves[num_rows] = CostCurve(is_batch=num_rows > 1)
        plain = self.plain(num_rows)
        cost, expected = seconds / plain, curve.at(cell)
        if cost < MIN_PASS_COST * self._least_cost:
            self._suspected_cost = cost
            self._num_checks = NUM_CHECKS
            return seconds
        self._has_calmed |= self.load_detector.add_drafted(cost / expected)
        self._pause = max(self._pause - 1, 0)
        self._notice(self._pass_deviations, cost / expected)
        clipped = curve.clip(cell, cost, expected)
        if cost <= expected * OUTLIER_CLIP or self._is_fresh:
            curve.add(cell, cost, expected)
        return clipped * plain

    @property
    def _is_fresh(self) -> bool:
        return self._num_since_plain <= FRESH_ROUNDS

    def _notice(self, deviations: Deviations, ratio: float) -> None:
        """Record the ratio of a measured to an expected time; start a check if needed."""
        if deviations.add(ratio) and not self._pause:
            self._num_checks = NUM_CHECKS
            deviations.clear()

    def add_draft_steps(self, part: Hashable, num_rows: int, num_steps: int, seconds: float) -> float:
        """Add draft steps that took `seconds` in total; return these, clipped if they were disturbed."""
        seen = self._steps.setdefault(part, {})
        line = seen.get(num_rows)
        if line is None:
            line = seen[num_rows] = LinearCost(leaves_out_first=not seen)
        plain = self.plain(num_rows)
        cost, expected = seconds / plain, line.at(num_steps)
        is_new = line.count < NUM_NEW
        if not is_new:
            self._notice(self._draft_deviations, (cost + NEGLIGIBLE) / (expected + NEGLIGIBLE))
        if self._is_fresh or is_new or cost <= expected * OUTLIER_CLIP:
            line.add(num_steps, cost)
        return seconds if is_new else min(seconds, expected * OUTLIER_CLIP * plain)

    def add_prefill(self, part: Hashable, num_tokens: int, seconds: float) -> None:
        """Add the time that a drafter took to prefill `num_tokens` tokens."""
        self._prefill_lines.setdefault(part, LinearCost()).add(num_tokens, seconds / self._any_plain())

    def prefill_seconds(self, part: Hashable, num_tokens: int) -> float:
        """Return the seconds a drafter takes to prefill `num_tokens` tokens; 0 while unknown."""
        line = self._prefill_lines.get(part)
        if line is None or not num_tokens:
            return 0.0
        return line.at(num_tokens) * self._any_plain()

    def _any_plain(self) -> float:
        """Return the seconds of a plain round at the batch size that was seen first."""
        return next(iter(self._plain.values())).at(None)

    def plain(self, num_rows: int) -> float:
        """Return the seconds of a round without drafts, interpolated for unknown batch sizes."""
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

    def rests(self, num_rows: int, num_cells: int) -> list[float]:
        """Return the seconds, without drafting, of rounds with drafts of 0, 1, ... `num_cells` times `levels_per_cell` levels.

        A level is taken to add as many seconds to a round at the nearest batch size that was timed.
        """
        plain = self.plain(num_rows)
        size = min(self._curves, key=lambda other: abs(other - num_rows), default=num_rows)
        curve, curve_plain = self._curves.get(size, DEFAULT_CURVE), self.plain(size)
        scale = levels_per_cell(num_rows) / levels_per_cell(size)
        cells = [max(round(cell * scale), 1) for cell in range(1, num_cells + 1)]
        return [plain, *[plain + curve_plain * (curve.at(cell) - 1) for cell in cells]]

    def draft_seconds(self, part: Hashable, num_rows: int) -> LinearSeconds:
        """Return the seconds of drafts over `num_rows` rows; zeros while unknown."""
        lines = self._steps.get(part, {})
        known = [size for size, line in lines.items() if line.is_known]
        if not known:
            return LinearSeconds(0.0, 0.0)
        line, plain = lines[min(known, key=lambda size: abs(size - num_rows))], self.plain(num_rows)
        return LinearSeconds(line.start * plain, line.slope * plain)

    def is_new(self, part: Hashable) -> bool:
        """Return whether too few drafts of a drafter have been timed to trust their cost."""
        lines = self._steps.get(part, {}).values()
        return sum(line.count for line in lines) < NUM_NEW or not any(line.is_known for line in lines)

    @property
    def has_timed_drafts(self) -> bool:
        """True once a target pass over a draft was timed."""
        return bool(self._curves)

    def max_rows(self, part: Hashable) -> int:
        """Return the largest batch in which a draft step was timed; 0 before one was timed."""
        return max(self._steps.get(part, {}), default=0)


class LinearSeconds(NamedTuple):
    """Seconds of a draft.

    Args:
        start: of any draft.
        step: of each of its steps.
    """

    start: float
    step: float

    def at(self, num_steps: float) -> float:
        """Return the seconds of a draft of `num_steps` steps."""
        return self.start + self.step * num_steps


class Deviations:
    """Ratios of measured to expected times in recent rounds."""

    def __init__(self) -> None:
        self._ratios: tuple[float, ...] = ()

    def add(self, ratio: float) -> bool:
        """Add a ratio; return whether all recent ones but one deviate in the same direction."""
        self._ratios = (*self._ratios, ratio)[-NUM_DEVIATIONS:]
        if len(self._ratios) < NUM_DEVIATIONS:
            return False
        ordered = sorted(self._ratios)
        return ordered[1] > DEVIATION or ordered[-2] < 1 / DEVIATION

    def clear(self) -> None:
        self._ratios = ()


DEFAULT_CURVE = CostCurve()


def levels_per_cell(num_rows: int) -> int:
    """Return the number of levels, of all rows together, between the points of a cost curve.

    It is about a quarter of a level per row, and one level in batches of less than 8 rows.
    """
    return max(num_rows // 4, 1)


def mean_length(rows: Sequence[Row]) -> float:
    """Return the mean number of tokens per row."""
    if len(rows) == 1:
        return len(rows[0].tokens)
    return sum([len(row.tokens) for row in rows]) / len(rows)
