"""What whole rounds cost: measured through the loop itself, so that everything that a round does is in them.

A round over R rows, whose longest draft has w nodes, takes

    seconds = S(R) + sum over draft steps of D(rows in the step) + T(R, w) + R * upkeep

with S what a draft takes before its first step, D the time of one draft step, T that of all the rest (the target's pass,
judging, bookkeeping) and `upkeep` what look-ups spend per row on knowing the text. The rows of a round are cycled through draft
lengths, and whoever is timed takes turns with the others (ABBA), so that everything is timed under the same conditions.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from secondguess.controllers.base import Controller
from secondguess.controllers.draft_probs import DraftProbs
from secondguess.core import Candidate, Draft, Plan, RoundTime, Row, Verdict
from secondguess.decode import Components, decode
from secondguess.drafters.base import Drafter
from secondguess.proof.fakes import ScriptedDrafter
from secondguess.runtime.base import Runtime
from secondguess.stats import Clock, StatsRecorder
from secondguess.verifiers.base import Verifier

Curve = Mapping[int, float]


@dataclass(frozen=True)
class PartCosts:
    """Seconds of rounds drafted by one part of a drafter.

    Args:
        step: of one draft step, by rows in the step.
        asked_step: the same when the controller is asked after each node.
        rest: of everything else in a round, by rows and then by nodes of the longest draft.
        start: of a draft before its first step, by rows; empty for nothing.
        upkeep: per row in every round, whoever guesses: what a look-up takes to know the text so far.
        reading: per token that a draft model has not read, beyond the two that every first step may read.
        lone_step: of a draft step that one row takes, by rows of the batch: laws are made for all rows, whoever drafts.
            Empty where steps depend on the rows that take them alone.
    """

    step: Curve
    asked_step: Curve
    rest: Mapping[int, Curve]
    start: Curve = field(default_factory=dict)
    upkeep: float = 0.0
    reading: float = 0.0
    lone_step: Curve = field(default_factory=dict)

    def step_of(self, num_active: int, num_rows: int, asks: bool) -> float:
        """Seconds of a step that some rows of a batch take: on a line between one of them and all."""
        curve = self.asked_step if asks else self.step
        if num_active >= num_rows or not self.lone_step:
            return on_lines(curve, num_active)
        lone = on_lines(self.lone_step, num_rows)
        everybody = max(lone, on_lines(self.step, num_rows))
        asking = max(0.0, on_lines(curve, num_rows) - on_lines(self.step, num_rows))
        return asking + lone + (everybody - lone) * (num_active - 1) / (num_rows - 1)


@dataclass(frozen=True)
class RoundCosts:
    """Seconds of rounds: plain ones by rows, and by part of the drafter.

    Args:
        disordered: the same for rows that no longer lie in the cache in their order, because others left the batch (the
            runtime sorts them, and their logits back); None where that makes no difference.
        joining: seconds that parts beside each other cost a round with drafts, by rows; empty for nothing.
    """

    plain: Curve
    parts: Sequence[PartCosts]
    disordered: RoundCosts | None = None
    joining: Curve = field(default_factory=dict)

    def drafting(self, steps: Iterable[tuple[int, int]], asks: bool, batch_size: int = 0) -> float:
        """Seconds of a round's draft steps, each given as its part and its rows.

        Args:
            batch_size: rows of the round; 0 where all of them draft.
        """
        seconds, begun = 0.0, set()
        for part, num_rows in steps:
            costs = self.parts[part]
            if part not in begun and costs.start:
                seconds += on_lines(costs.start, num_rows)
            begun.add(part)
            seconds += costs.step_of(num_rows, batch_size or num_rows, asks)
        return seconds

    def asking(self, part: int, num_rows: int) -> float:
        """Seconds of asking the controller once: a draft that it ends has one more question than its steps hold."""
        costs = self.parts[part]
        return max(0.0, on_lines(costs.asked_step, num_rows) - on_lines(costs.step, num_rows))

    def upkeep(self, num_rows: int) -> float:
        """Seconds that all parts take in every round to know what was written."""
        return num_rows * sum(part.upkeep for part in self.parts)

    def catching_up(self, part: int, num_rows: int, num_unread: int, reads_apart: bool) -> float:
        """Seconds in which a draft model reads text that others wrote.

        Args:
            num_rows: rows that have unread text.
            num_unread: tokens over all of them, but for two of each, which are part of a first step.
            reads_apart: whether it takes a forward of its own.
        """
        costs = self.parts[part]
        return num_unread * costs.reading + (on_lines(costs.step, num_rows) if reads_apart else 0.0)

    def rest(self, num_rows: int, width: int, parts: Iterable[int]) -> float:
        """Seconds of everything else, the longest draft having `width` nodes."""
        if width == 0:
            return on_lines(self.plain, num_rows)
        dearest = max(
            on_lines(
                {rows: on_lines(curve, width) for rows, curve in self.parts[part].rest.items()}, num_rows
            )
            for part in parts
        )
        return dearest + (on_lines(self.joining, num_rows) if self.joining else 0.0)


def on_lines(curve: Curve, place: int) -> float:
    """A curve's value on straight lines through its points, continued beyond them."""
    known = sorted(curve)
    if place in curve or len(known) == 1:
        return curve.get(place, curve[known[0]])
    above = next((point for point in known if point > place), known[-1])
    below = known[max(known.index(above) - 1, 0)]
    above = above if above != below else known[1]
    slope = (curve[above] - curve[below]) / (above - below)
    return curve[below] + slope * (place - below)


class Sweep(Controller):
    """Cycles all rows through draft lengths, and notes what each round took.

    Args:
        part: which part of the drafter guesses.
        lengths: to cycle through.
        asks: whether to be asked after each node.
        lone: only the first row drafts.

    Attributes:
        draft: seconds of drafting, by nodes of the longest draft.
        rest: seconds of everything else, but for a draft model's reading.
    """

    name = "sweep"

    def __init__(self, part: int, lengths: Sequence[int], asks: bool, lone: bool = False) -> None:
        self.uses_probs = asks
        self._lone = lone
        self._part = part
        self._lengths = lengths
        self._number = 0
        self.notes = True
        self.draft: dict[int, list[float]] = defaultdict(list)
        self.rest: dict[int, list[float]] = defaultdict(list)

    def plan(self, rows: Sequence[Row], candidates: Sequence[Sequence[Candidate]]) -> list[Plan]:
        length = self._lengths[self._number % len(self._lengths)]
        self._number += 1
        others = 0 if self._lone else length
        return [Plan(self._part, length), *[Plan(self._part, others)] * (len(rows) - 1)]

    def go_on(self, rows: Sequence[Row], dists: DraftProbs, depth: int) -> list[bool]:
        # What an adaptive controller would read takes its time too.
        return [confidence >= 0 for confidence in dists.confidences]

    def learn(self, rows: Sequence[Row], draft: Draft, verdict: Verdict, time: RoundTime) -> None:
        if self.notes:
            self.draft[draft.num_nodes].append(time.draft)
            self.rest[draft.num_nodes].append(time.total - time.draft - time.prefill)


@dataclass(frozen=True)
class Stage:
    """Who plays while rounds are timed.

    Args:
        make_rows: makes so many fresh rows that will not end while they are timed.
        clock: to time with.
    """

    target: Runtime
    drafter: Drafter
    verifier: Verifier
    make_rows: Callable[[int], list[Row]]
    clock: Clock = time.perf_counter


LENGTHS = (0, 1, 2, 3, 4, 6, 8, 12)


class Cell:
    """One thing to time: a part of a drafter over so many rows, asking its controller or not.

    Args:
        deterministic: the part looks its guesses up.
        disordered: the rows are what is left of a batch that another row has left.
        lone: only the first of the rows drafts.
    """

    def __init__(
        self,
        stage: Stage,
        part: int,
        num_rows: int,
        asks: bool,
        deterministic: bool,
        lengths: Sequence[int],
        disordered: bool = False,
        lone: bool = False,
    ) -> None:
        # A look-up drafts what it finds, which is seldom as long as asked; what any tokens would cost is what is timed.
        drafter = (
            ScriptedDrafter(lambda row: row.tokens[-max(*lengths, 1) :]) if deterministic else stage.drafter
        )
        self.part, self.num_rows, self.asks, self.disordered = part, num_rows, asks, disordered
        self.sweep = Sweep(part, lengths, asks, lone)
        self._num_lengths = len(lengths)
        self._make_new_rows = stage.make_rows
        self._team = Components(stage.target, drafter, stage.verifier, self.sweep, StatsRecorder(stage.clock))
        self._warm = False

    def run(self, num_cycles: int) -> None:
        """Time so many rounds of each length; the very first ones, which allocate, are not noted."""
        warm_up = 1 if self._warm else self._num_lengths
        self.sweep.notes = False
        for number, _ in enumerate(decode(self._team, self._make_rows(self.num_rows)), start=1):
            self.sweep.notes = number >= warm_up
            if number == warm_up + num_cycles * self._num_lengths:
                break
        self._warm = True

    def _make_rows(self, num_rows: int) -> list[Row]:
        if not self.disordered:
            return self._make_new_rows(num_rows)
        rows = self._make_new_rows(num_rows + 1)
        # The first leaves after one round, which is not noted, and the last takes its place in the cache.
        rows[0].params = replace(rows[0].params, max_tokens=1)
        return rows


def in_turns(cells: Sequence[Cell], num_cycles: int, num_turns: int, go_on: Callable[[], bool]) -> int:
    """Run all cells, in reverse order in every second turn; gives the number of turns.

    Args:
        num_cycles: of a cell in one turn.
        go_on: asked after each turn whether there is time for another.
    """
    for turn in range(num_turns):
        for cell in cells if turn % 2 == 0 else reversed(cells):
            cell.run(num_cycles)
        if turn + 1 < num_turns and not go_on():
            return turn + 1
    return num_turns


def measure_round_costs(
    stage: Stage,
    batch_sizes: Sequence[int] = (1,),
    lengths: Sequence[int] = LENGTHS,
    num_cycles: int = 12,
) -> RoundCosts:
    """Time rounds of every length at every batch size; a minute at most for models of 100 tokens a second.

    Args:
        lengths: draft lengths to time; 0 among them.
        num_cycles: rounds of each.
    """
    deterministic = [choice.deterministic for choice in _choices(stage)]
    cells = make_cells(stage, deterministic, batch_sizes, lengths)
    in_turns(cells, 2, -(-num_cycles // 2), lambda: True)
    return RoundCosts(plain_costs(cells), [part_costs(cells, part) for part in range(len(deterministic))])


def make_cells(
    stage: Stage,
    deterministic: Sequence[bool],
    batch_sizes: Sequence[int],
    lengths: Sequence[int] = LENGTHS,
    disordered: bool = False,
) -> list[Cell]:
    """What there is to time of a drafter.

    Args:
        deterministic: by part of the drafter, whether it looks its guesses up.
        disordered: as in `Cell`.
    """
    return [
        Cell(stage, part, num_rows, asks, is_deterministic, lengths, disordered)
        for num_rows in batch_sizes
        for part, is_deterministic in enumerate(deterministic)
        for asks in ((False,) if is_deterministic else (False, True))
    ]


def make_plain_cells(stage: Stage, batch_sizes: Sequence[int], disordered: bool = False) -> list[Cell]:
    """Rounds without drafts, one after the other: after a wide round a plain one finds other caches, and takes longer."""
    lengths = (0,) * len(LENGTHS)
    return [Cell(stage, 0, num_rows, False, True, lengths, disordered) for num_rows in batch_sizes]


def plain_costs(cells: Sequence[Cell]) -> Curve:
    """Seconds of a round without drafts, by rows."""
    rounds: dict[int, list[float]] = defaultdict(list)
    for cell in cells:
        rounds[cell.num_rows] += map(sum, zip(cell.sweep.rest[0], cell.sweep.draft[0], strict=True))
    return {num_rows: median(seconds) for num_rows, seconds in sorted(rounds.items()) if seconds}


def part_costs(cells: Sequence[Cell], part: int = 0) -> PartCosts:
    """What rounds cost that one part drafts for, from the cells of its drafter."""
    starts: dict[int, float] = {}
    steps: dict[bool, dict[int, float]] = {False: {}, True: {}}
    rests: dict[int, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for cell in (cell for cell in cells if cell.part == part):
        for length, seconds in cell.sweep.rest.items():
            if length:
                rests[cell.num_rows][length] += seconds
        drafting = {length: median(all_) for length, all_ in cell.sweep.draft.items() if length}
        start, steps[cell.asks][cell.num_rows] = fit_line(drafting)
        if not cell.asks:
            starts[cell.num_rows] = start
    medians = {
        num_rows: {length: median(seconds) for length, seconds in sorted(by_length.items())}
        for num_rows, by_length in sorted(rests.items())
    }
    return PartCosts(steps[False], steps[True] or steps[False], medians, starts)


def fit_line(points: Curve) -> tuple[float, float]:
    """Start and slope of a line through points, neither below 0, unmoved by a few that are off (Theil and Sen).

    >>> fit_line({1: 3.0, 2: 5.0, 4: 9.0})
    (1.0, 2.0)
    """
    places = sorted(points)
    slopes = [(points[high] - points[low]) / (high - low) for low in places for high in places if low < high]
    slope = max(0.0, median(slopes)) if slopes else 0.0
    start = median(points[place] - slope * place for place in places)
    if start < 0 or not slopes:
        return 0.0, median(points[place] / place for place in places)
    return start, slope


def _choices(stage: Stage) -> list[Candidate]:
    """What the drafter's parts say of some row, by part."""
    rows = stage.make_rows(1)
    stage.drafter.begin(rows)
    try:
        (choices,) = stage.drafter.candidates(rows)
    finally:
        stage.drafter.end(rows[0])
    return sorted(choices, key=lambda choice: choice.part)
