"""Measured times of rounds, all but those of plain rounds relative to plain rounds of the same batch size.

A plain round is a round without drafts. A machine that changes its speed changes all times alike, so relative
times stay valid; if rounds with drafts deviate from what is expected, plain rounds are timed again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from secondguess.core import Row

OUTLIER = 1.2
"""Factor beyond which a time counts as disturbed: it is clipped, and several of them start a check of plain rounds."""
NUM_RECENT = 5
"""Number of recent rounds with drafts, of which all but one must deviate to start a check."""
NUM_TIMED = 2
"""Number of plain rounds that are timed at first and in a check; all are slow if the machine has become slower."""
MAX_AGE = 64
"""Number of rounds with drafts after which a plain round is timed again."""
CONTEXT_TOLERANCE = 1.5
"""Factor by which rows may be longer or shorter than when plain rounds were timed; 64 tokens more are always accepted."""
SIZE_TOLERANCE = 1.3
"""Largest factor between batch sizes at which the time of one is taken from others."""
DECAY = 1 - 1 / 48
"""Factor by which the weight of a time decays with each further one."""
MAX_WEIGHT = 16.0
"""Largest weight of a mean time, in times."""
FIRST_NODE_COST = 0.03
"""Expected share of a plain round that a draft token adds to the target's pass, before any is measured."""
FIRST_TOKEN_COST = 0.004
"""The same for a token of a drafter's prefill."""
FIRST_STEP_SHARE = 0.6
"""Share of the time per step that is attributed to the step, and not to the draft, while one length was seen."""


def nearest(sizes: Iterable[int], size: int) -> int:
    """Return the nearest of some sizes; 0 if there is none."""
    return min(sizes, key=lambda other: abs(other - size), default=0)


class Line:
    """Time as a linear function of a size: least squares over recent times, whose weights decay.

    Args:
        slope: expected slope, to which that of few or equal sizes is shrunk; None for a share of the mean.
    """

    def __init__(self, slope: float | None = None) -> None:
        self._expected_slope = slope
        self._num_fast = 0
        self._weight = self._x = self._y = self._xx = self._xy = 0.0
        self.count = 0
        self.start, self.slope = 0.0, slope or 0.0

    def at(self, size: int) -> float:
        """Return the time at a size."""
        return self.start + self.slope * size

    def clip(self, time: float, expected: float) -> float:
        """Return a time, clipped if other load on the machine disturbed it.

        Disturbances only make times longer: two successive fast ones show that the earlier ones were disturbed.
        """
        self._num_fast = self._num_fast + 1 if time * OUTLIER < expected else 0
        if self._num_fast >= 2:
            self.forget()
        return min(time, expected * OUTLIER)

    def add(self, size: int, time: float) -> None:
        self.count += 1
        self._weight = self._weight * DECAY + 1
        self._x = self._x * DECAY + size
        self._y = self._y * DECAY + time
        self._xx = self._xx * DECAY + size * size
        self._xy = self._xy * DECAY + size * time
        mean = max(self._y / self._x, 0.0)
        expected = FIRST_STEP_SHARE * mean if self._expected_slope is None else self._expected_slope
        ridge = self._xx / self._weight / 4
        spread = self._xx - self._x * self._x / self._weight
        common = self._xy - self._x * self._y / self._weight
        self.slope = min(max((common + ridge * expected) / (spread + ridge), 0.0), mean)
        self.start = max((self._y - self.slope * self._x) / self._weight, 0.0)

    def forget(self) -> None:
        """Keep the line, but with the weight of half a measurement."""
        if self._weight:
            scale = min(0.5 / self._weight, 1.0)
            self._weight, self._x, self._y = self._weight * scale, self._x * scale, self._y * scale
            self._xx, self._xy = self._xx * scale, self._xy * scale


class PassCosts(Line):
    """Time that the nodes of drafts add to the target's pass: a line, corrected where numbers of nodes were seen."""

    def __init__(self, num_rows: int) -> None:
        super().__init__(first_node_cost(num_rows))
        self._cells: dict[int, tuple[float, float]] = {}
        """By number of nodes, the mean time and its weight in measurements."""

    def at(self, size: int) -> float:
        line = super().at(size)
        time, weight = self._cells.get(size, (0.0, 0.0))
        return max(line + (time - line) * weight / (weight + 1), 0.0)

    def add(self, size: int, time: float) -> None:
        super().add(size, max(time, 0.0))
        mean, weight = self._cells.get(size, (0.0, 0.0))
        weight = min(weight, MAX_WEIGHT) + 1
        self._cells[size] = mean, _ = mean + (time - mean) / weight, weight
        # More nodes do not take less time: earlier means that contradict this one were disturbed.
        for other, (time, weight) in self._cells.items():
            fewer, more = (mean, time) if other > size else (time, mean)
            if 1 + fewer > OUTLIER * (1 + more):
                self._cells[other] = time, weight / 2

    def knows(self, size: int) -> bool:
        return size in self._cells

    def forget(self) -> None:
        super().forget()
        self._cells = {size: (time, min(weight, 0.5)) for size, (time, weight) in self._cells.items()}


def first_node_cost(num_rows: int) -> float:
    """Return the expected time of a node, in plain rounds, before any was measured: a batch computes many at once."""
    return FIRST_NODE_COST / max(num_rows / 4, 1)


class PlainTime:
    """Seconds of plain rounds of one batch size: the second shortest of recent ones, as disturbances make them longer.

    Attributes:
        age: number of rounds with drafts since.
    """

    def __init__(self, context: float) -> None:
        self.context = context
        self.age = 0
        self.recent: deque[float] = deque(maxlen=5)

    @property
    def seconds(self) -> float:
        return sorted(self.recent)[len(self.recent) > 2]

    def covers(self, context: float) -> bool:
        low, high = sorted((context, self.context))
        return high <= CONTEXT_TOLERANCE * low + 64

    def add(self, context: float, seconds: float) -> float:
        """Add a plain round; return the factor by which the machine has become slower, 1 if it has not."""
        self.age = 0
        if not self.covers(context):
            self.recent.clear()
        self.context = context
        before = self.seconds if len(self.recent) >= NUM_TIMED else seconds
        self.recent.append(seconds)
        # Nothing makes a single round faster.
        num_changed = 1 if seconds * OUTLIER < before else NUM_TIMED
        latest = list(self.recent)[-num_changed:]
        if num_changed == 1 or (len(self.recent) > NUM_TIMED and min(latest) > OUTLIER * before):
            self.recent = deque(latest, maxlen=5)
            return self.seconds / before
        return 1.0


class RoundTimes:
    """Times of plain rounds, of the target's passes over drafts, of drafts, and of the drafter's prefill."""

    def __init__(self) -> None:
        self._plain: dict[int, PlainTime] = {}
        self._passes: dict[int, PassCosts] = {}
        self._drafts: dict[int, dict[int, Line]] = {}
        self._prefills: dict[int, Line] = {}
        self._pass_ratios: deque[float] = deque(maxlen=NUM_RECENT)
        self._draft_ratios: deque[float] = deque(maxlen=NUM_RECENT)
        self._num_checks = 0

    def needs_plain(self, num_rows: int, context: float) -> bool:
        """Return whether a plain round has to be timed before drafts are compared with it.

        Args:
            context: mean number of tokens per row.
        """
        size = nearest(self._plain, num_rows)
        if not size or max(size, num_rows) > SIZE_TOLERANCE * min(size, num_rows):
            return True
        known = self._plain[size]
        return (
            self._num_checks > 0
            or known.age >= MAX_AGE
            or len(known.recent) < NUM_TIMED
            or not known.covers(context)
        )

    def plain(self, num_rows: int) -> float:
        """Return the seconds of a plain round; between batch sizes that were timed, on a straight line."""
        if num_rows in self._plain:
            return self._plain[num_rows].seconds
        below = max((size for size in self._plain if size < num_rows), default=0)
        above = min((size for size in self._plain if size > num_rows), default=0)
        if not below or not above:
            return self._plain[below or above].seconds
        low, high = self._plain[below].seconds, self._plain[above].seconds
        return low + (high - low) * (num_rows - below) / (above - below)

    def add_plain(self, num_rows: int, context: float, seconds: float) -> bool:
        """Add a plain round; return whether the machine has changed its speed."""
        known = self._plain.setdefault(num_rows, PlainTime(context))
        change = known.add(context, max(seconds, 1e-9))
        if change != 1.0:
            for other in self._plain.values():
                if other is not known:
                    other.age = MAX_AGE
        if self._num_checks:
            self._num_checks = 0 if change != 1.0 else self._num_checks - 1
            if not self._num_checks and change == 1.0:  # not the machine has changed, but the cost of drafts
                self._forget()
        return change != 1.0

    def _forget(self) -> None:
        for costs in self._passes.values():
            costs.forget()
        for lines in self._drafts.values():
            for line in lines.values():
                line.forget()

    def knows_plain(self) -> bool:
        """Return whether a plain round was timed."""
        return bool(self._plain)

    def pass_cost(self, num_rows: int, num_nodes: int) -> float:
        """Return what drafts of so many nodes add to the target's pass over all rows, in plain rounds."""
        if not num_nodes:
            return 0.0
        size = nearest(self._passes, num_rows)
        if not size:
            return first_node_cost(num_rows) * num_nodes
        cost = self._passes[size].at(num_nodes)
        return cost if size == num_rows else cost * self.plain(size) / self.plain(num_rows)

    def knows_passes(self) -> bool:
        """Return whether a pass over a draft was timed."""
        return bool(self._passes)

    def draft_line(self, part: int, num_rows: int) -> Line | None:
        """Return the time of drafts of a part by levels, in plain rounds; None while unknown."""
        lines = self._drafts.get(part, {})
        return lines.get(nearest(lines, num_rows))

    def prefill_cost(self, part: int, num_tokens: int) -> float:
        """Return the time of a drafter's prefill, in plain rounds."""
        line = self._prefills.get(part)
        return FIRST_TOKEN_COST * num_tokens if line is None else line.at(num_tokens)

    def most_rows(self, part: int) -> int:
        """Return the largest number of rows for which a part has drafted at once."""
        return max(self._drafts.get(part, ()), default=0)

    def is_new(self, part: int) -> bool:
        """Return whether too few drafts of a part were timed to rely on their cost."""
        return sum(line.count for line in self._drafts.get(part, {}).values()) < NUM_TIMED

    def add_pass(self, num_rows: int, num_nodes: int, seconds: float) -> float:
        """Add the target's part of a round with drafts; return its time in plain rounds, clipped if it was disturbed."""
        self._plain[nearest(self._plain, num_rows)].age += 1
        time = seconds / self.plain(num_rows)
        self._notice(self._pass_ratios, time / (1 + self.pass_cost(num_rows, num_nodes)))
        costs = self._passes.setdefault(num_rows, PassCosts(num_rows))
        is_known = costs.knows(num_nodes)
        # How far an unknown number of nodes is from the line is uncertain.
        clipped = costs.clip(time, (1 + costs.at(num_nodes)) * (1 if is_known else 2))
        costs.add(num_nodes, (clipped if is_known else time) - 1)
        return clipped

    def add_draft(self, part: int, num_rows: int, num_levels: int, seconds: float, batch: int) -> float:
        """Add the time of a draft; return it in plain rounds, clipped if it was disturbed.

        Args:
            num_rows: number of rows drafted for, of the `batch`.
        """
        time = seconds / self.plain(batch)
        lines = self._drafts.setdefault(part, {})
        line = lines.setdefault(num_rows, Line())
        if line.count >= NUM_TIMED:
            self._notice(self._draft_ratios, (time + 0.1) / (line.at(num_levels) + 0.1))
            time = line.clip(time, line.at(num_levels))
        elif line.count == 1 and time < line.at(num_levels):
            line.forget()  # The first draft allocates memory and fills caches.
        line.add(num_levels, time)
        return time

    def add_prefill(self, part: int, num_tokens: int, num_rows: int, seconds: float) -> float:
        """Add the time of a drafter's prefill; return it in plain rounds."""
        time = seconds / self.plain(num_rows)
        self._prefills.setdefault(part, Line(time / num_tokens)).add(num_tokens, time)
        return time

    def _notice(self, ratios: deque[float], ratio: float) -> None:
        """Add a time relative to the expected one; check plain rounds if all recent ones but one deviate alike."""
        ratios.append(ratio)
        ordered = sorted(ratios)
        if len(ordered) == NUM_RECENT and (ordered[1] > OUTLIER or ordered[-2] < 1 / OUTLIER):
            self._num_checks = NUM_TIMED
            ratios.clear()


def mean_length(rows: Sequence[Row]) -> float:
    """Return the mean number of tokens per row."""
    return sum([len(row.tokens) for row in rows]) / len(rows)
