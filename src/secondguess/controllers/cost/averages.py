"""Running estimates of costs, robust to rounds that other load on the machine has disturbed.

A plain round is a round without drafts; it is the unit of the costs of drafts.
"""

from __future__ import annotations

from dataclasses import dataclass

AVERAGE_WINDOW = 16
"""Approximate number of values in an average."""
OUTLIER_CLIP = 1.3
"""Upper bound to which a value is clipped, as a multiple of the expected one.

Single slow rounds are outliers. There is no lower bound, as disturbances make no round faster.
"""
FIRST_OUTLIER_CLIP = 2.5
"""The same bound for the first value of a draft length, whose expected value is uncertain."""
NUM_WARMUP = 3
"""Number of first plain rounds of which only the fastest counts.

The first rounds allocate memory and fill caches.
"""
DECAY = 1 - 1 / 96
"""Factor by which the weights of earlier rounds decay per round with drafts."""
MAX_WEIGHT = 24
"""Maximum weight of one draft length, in rounds."""
FIRST_NODE_COST = 0.03
"""Initial cost of one more point of a `CostCurve`, as a share of a plain round; for one row, of a draft token."""
NEIGHBOUR_WEIGHT = 0.1
"""Weight of a round in the costs of the neighbouring draft lengths."""
SPEED_CHANGE = 1.3
"""Factor between plain rounds that indicates that the machine has changed its speed."""
NUM_RECENT = 5
"""Number of recent plain rounds, of which all but one must be slower to indicate such a change."""
FIRST_SLOPE = 0.6
"""Share of the cost per step that is attributed to the step while only one length was seen.

The rest is attributed to the fixed cost of a draft.
"""
LENGTH_TOLERANCE = 1.4
"""Factor by which row lengths may exceed the range seen before plain rounds are timed again.

It is squared once the slope is trusted (`SLOPE_TRUST_RATIO`).
"""
SLOPE_TRUST_RATIO = 2.0
"""Ratio between the longest and shortest row length seen at which the slope is trusted."""
MAX_LENGTH_SHARE = 0.9
"""Maximum share of a plain round of very long rows that grows with their length."""
SHORT_ROW = 128
"""Number of tokens per row at which that share is at most half of it.

Attention takes little time over short rows, and a slope that is learned from them in a few disturbed
rounds would be extrapolated to longer ones.
"""


class Average:
    """Running average of positive values."""

    __slots__ = ("count", "value")

    def __init__(self) -> None:
        self.count = 0
        self.value = 0.0

    def add_first(self, value: float) -> None:
        """Add one of the first values, of which only the smallest counts."""
        self.value = min(value, self.value) if self.count else value
        self.count += 1

    def add(self, value: float) -> float:
        """Add a value; return the weight that it got in the average."""
        if self.count < AVERAGE_WINDOW:
            self.count += 1
        share = 1 / self.count
        self.value += (value - self.value) * share
        return share


class DecayedLine:
    """Least-squares line through recent points, whose weights decay with every further point."""

    __slots__ = ("_xx", "_xy", "weight", "x", "y")

    def __init__(self) -> None:
        self.weight = self.x = self.y = self._xx = self._xy = 0.0

    def add(self, x: float, y: float) -> None:
        self.weight = self.weight * DECAY + 1
        self.x = self.x * DECAY + x
        self.y = self.y * DECAY + y
        self._xx = self._xx * DECAY + x * x
        self._xy = self._xy * DECAY + x * y

    def slope(self, mean: float) -> float:
        """Return the slope, or a share of the `mean` y per x while only one x was seen."""
        spread = self._xx * self.weight - self.x * self.x
        if spread < 1e-6 * self._xx * self.weight:
            return FIRST_SLOPE * mean
        return (self._xy * self.weight - self.x * self.y) / spread

    def shrunk_slope(self) -> float:
        """Return the slope, shrunk towards 0 while the x of few points hardly differ."""
        spread = self._xx * self.weight - self.x * self.x
        return (self._xy * self.weight - self.x * self.y) / (spread + self.x * self.x / (4 * self.weight))

    def reset_weight(self) -> None:
        """Keep the line, but only with the weight of a single point."""
        if self.weight > 1:
            scale = 1 / self.weight
            self.weight = 1.0
            self.x, self.y = self.x * scale, self.y * scale
            self._xx, self._xy = self._xx * scale, self._xy * scale


class LinearCost:
    """Cost of a draft: a fixed cost plus a cost per step.

    Fitted to recent drafts by least squares.

    Args:
        leaves_out_first: whether the first draft is left out, which fills caches and allocates memory.

    Attributes:
        count: number of drafts added.
        start: fixed cost; 0 while unknown.
        slope: cost per step; 0 while unknown.
    """

    __slots__ = ("_leaves_out_first", "_line", "_was_fast", "count", "slope", "start")

    def __init__(self, leaves_out_first: bool = True) -> None:
        self.count = 0
        self._leaves_out_first = leaves_out_first
        self._was_fast = False
        self._line = DecayedLine()
        self.start = self.slope = 0.0

    @property
    def is_known(self) -> bool:
        """True once a draft was not left out."""
        return self._line.weight > 0

    def at(self, num_steps: float) -> float:
        """Return the cost of a draft of `num_steps` steps; 0 while unknown."""
        return self.start + self.slope * num_steps

    def add(self, num_steps: int, cost: float) -> None:
        self.count += 1
        if self.count == 1 and self._leaves_out_first:
            return
        line = self._line
        if line.weight:
            expected = self.at(num_steps)
            is_fast = cost * OUTLIER_CLIP < expected
            if is_fast and self._was_fast:
                line.reset_weight()  # disturbances only make drafts slower: the earlier ones were disturbed
            self._was_fast = is_fast
            cost = min(cost, expected * OUTLIER_CLIP)
        line.add(num_steps, cost)
        mean = line.y / line.x
        self.slope = min(max(line.slope(mean), 0.1 * mean), mean)
        self.start = max(line.y - self.slope * line.x, 0.0) / line.weight

    def reset_weight(self) -> None:
        """Keep the estimate, but only with the weight of a single draft."""
        self._line.reset_weight()


class CostCurve:
    """Cost of a target pass, in plain rounds, by draft length: for one row in levels, in batches in `levels_per_cell`.

    A running average per length, shrunk towards its neighbours and a straight line fitted to all
    lengths. The weight of a length decays while others are drafted, so that a single disturbed
    round does not fix its cost permanently.

    Args:
        is_batch: True for the lengths of all drafts of a batch together. As a drafter is tried on few
            rows first, costs hardly grow with the length until that is seen.
    """

    def __init__(self, is_batch: bool = False) -> None:
        self._is_batch = is_batch
        self._now = 0
        self._cells: dict[int, _LengthCost] = {}
        self._excess = DecayedLine()  # through the costs beyond a plain round
        self._start, self._slope = 0.0, FIRST_NODE_COST

    def at(self, length: int) -> float:
        line = self._line(length)
        total, above = 1.0, 0.0
        for other in (length - 1, length, length + 1):
            cell = self._cells.get(other)
            if cell is not None:
                weight = cell.weight * DECAY ** (self._now - cell.time)
                if other != length:
                    weight *= NEIGHBOUR_WEIGHT
                total += weight
                above += weight * (cell.cost - self._line(other))
        return max(line + above / total, 1.0)

    def clip(self, length: int, cost: float, expected: float) -> float:
        """Return the cost of a pass, clipped to a multiple of the expected one."""
        return min(cost, expected * (OUTLIER_CLIP if length in self._cells else FIRST_OUTLIER_CLIP))

    def add(self, length: int, cost: float, expected: float) -> None:
        """Add the cost of a pass over a draft of this length, given the expected one."""
        self._now += 1
        is_fast = cost * OUTLIER_CLIP < expected
        cost = self.clip(length, cost, expected)
        cell = self._cells.get(length)
        self._fit(length, max(cost - 1, 0.0))
        if cell is None:
            cell = self._cells[length] = _LengthCost(cost)
        # Disturbances only make rounds slower: two fast ones show that the earlier ones were disturbed.
        limit = 1.0 if is_fast and cell.was_fast else MAX_WEIGHT - 1.0
        cell.was_fast = is_fast
        cell.weight = min(cell.weight * DECAY ** (self._now - cell.time), limit) + 1
        cell.time = self._now
        cell.cost += (cost - cell.cost) / cell.weight

    def reset_weight(self) -> None:
        """Keep the estimates, but each only with the weight of a single round."""
        for cell in self._cells.values():
            cell.weight = min(cell.weight, 1.0)

    def _fit(self, length: int, excess: float) -> None:
        line = self._excess
        line.add(length, excess)
        mean = line.y / line.x
        slope = line.shrunk_slope() if self._is_batch else line.slope(mean)
        self._slope = min(max(slope, min(FIRST_NODE_COST, mean)), mean)
        self._start = (line.y - self._slope * line.x) / line.weight

    def _line(self, length: int) -> float:
        return 1 + self._start + self._slope * length


@dataclass(slots=True)
class _LengthCost:
    """Average cost of one draft length, its weight in rounds, and the time of its last update."""

    cost: float
    was_fast: bool = False
    weight: float = 0.0
    time: int = 0


class PlainTime:
    """Seconds of a plain round at one batch size, as a linear function of the rows' mean length.

    The line passes through the running averages of seconds and lengths. Its slope is fitted to
    their joint changes, shrunk towards 0 while lengths have hardly differed, and kept when they
    stop differing.
    """

    __slots__ = (
        "_along",
        "_average",
        "_before",
        "_length",
        "_longest",
        "_recent",
        "_shortest",
        "_slope",
        "_spread",
    )

    def __init__(self, length: float) -> None:
        self._average = Average()
        self._length = self._shortest = self._longest = self._before = length
        self._slope = self._spread = self._along = 0.0
        self._recent: tuple[tuple[float, float], ...] = ()

    @property
    def count(self) -> int:
        return self._average.count

    def at(self, length: float | None) -> float:
        """Return the seconds for rows of this mean length; None stands for the average length."""
        if length is None:
            return self._average.value
        return self._average.value + self._slope * (length - self._length)

    def knows(self, length: float) -> bool:
        """Return whether rows of about this length were seen, or the line is trusted that far."""
        reach = (
            LENGTH_TOLERANCE
            if self._longest < SLOPE_TRUST_RATIO * self._shortest
            else LENGTH_TOLERANCE * LENGTH_TOLERANCE
        )
        return self._shortest <= length * reach and length <= self._longest * reach

    def add(self, length: float, seconds: float, num_rounds: int = 1) -> float:
        """Add a plain round, or the median of several.

        Returns:
            The factor by which the machine has become slower if it has changed its speed, else 1.
        """
        change = self._change(length, seconds, num_rounds) if self._average.count >= NUM_WARMUP else 1.0
        if change == 1.0:
            self._fit(length, seconds)
        else:
            self.rescale(change)
        return change

    def _change(self, length: float, seconds: float, num_rounds: int) -> float:
        """Return the factor by which recent rounds agree to deviate from expected ones, else 1."""
        # The median of several rounds counts twice, so that it outweighs a single round.
        self._recent = (*self._recent, *((length, seconds),) * min(num_rounds, 2))[-NUM_RECENT:]
        ratios = [seconds / self.at(length) for length, seconds in self._recent]
        # Other load can make rounds slower but not faster, so fewer fast rounds are enough. If
        # rows are much shorter (or longer) than before, their length explains why rounds are fast
        # (or slow).
        fast = [ratio for ratio in ratios[-3:] if ratio < 1 / SPEED_CHANGE]
        if len(fast) >= 2 and length * LENGTH_TOLERANCE > self._length:
            return max(fast)
        slow = sorted(ratio for ratio in ratios if ratio > SPEED_CHANGE)
        if len(slow) >= NUM_RECENT - 1 and length < self._length * LENGTH_TOLERANCE:
            return slow[len(slow) // 2]
        return 1.0

    def rescale(self, change: float) -> None:
        """Multiply the expected time by `change`, for all lengths."""
        self._average.value *= change
        self._average.count = NUM_WARMUP
        self._slope *= change
        self._along *= change
        self._recent = ()

    def _fit(self, length: float, seconds: float) -> None:
        average = self._average
        if average.count < NUM_WARMUP:
            average.add_first(seconds)
            self._length += (length - self._length) / average.count
        else:
            known, centre = average.value, self._length
            aside = length - centre
            limit = (known + self._slope * aside) * OUTLIER_CLIP
            if seconds > limit:
                seconds = limit
            self._spread += aside * aside
            self._along += aside * (seconds - known)
            # Old observations lose weight only as new ones arrive: their age is not bounded.
            overweight = self._spread / (AVERAGE_WINDOW * centre * centre)
            if overweight > 1:
                self._along /= overweight
                self._spread /= overweight
            self._length = centre = centre + aside * average.add(seconds)
            slope = self._along / (self._spread + (centre * centre + SHORT_ROW * SHORT_ROW) / 4)
            highest = MAX_LENGTH_SHARE * average.value / (centre + SHORT_ROW)
            self._slope = 0.0 if slope < 0 else min(slope, highest)
        # A single length may be an outlier: it counts as seen once two successive rounds had it.
        self._longest = max(self._longest, min(length, self._before))
        self._shortest = min(self._shortest, max(length, self._before))
        self._before = length
