"""Measure the costs of whole rounds over one row, through the decoding loop itself.

A round whose draft has w nodes of one part of the drafter takes

    seconds = S + w D + T(w)

with S the time of a draft before its first step, D that of a draft step, and T(w) that of all the
rest: the target's pass, verification and bookkeeping. Draft lengths alternate from round to round,
and the parts that are timed take turns (ABBA), so that all are timed under the same conditions.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
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
LENGTHS = (0, 1, 2, 3, 4, 6, 8, 12)


@dataclass(frozen=True)
class PartCosts:
    """Seconds of rounds drafted by one part of a drafter.

    Args:
        start: a draft before its first step.
        step: one draft step.
        asked_step: one draft step after which the controller is asked.
        rest: everything else in a round, by nodes of the draft, at least one.
    """

    start: float
    step: float
    asked_step: float
    rest: Curve


@dataclass(frozen=True)
class RoundCosts:
    """Seconds of rounds: plain ones, and those of each part of the drafter."""

    plain: float
    parts: Sequence[PartCosts]

    def drafting(self, part: int, length: int, asks: bool, was_ended: bool) -> float:
        """Return the seconds of drafting.

        Args:
            part: part of the drafter.
            length: nodes of the draft.
            asks: True if the controller is asked after each node.
            was_ended: True if the controller ended the draft: it was asked once more.
        """
        if not length:
            return 0.0
        costs = self.parts[part]
        step = costs.asked_step if asks else costs.step
        asking = max(0.0, costs.asked_step - costs.step) if was_ended else 0.0
        return costs.start + length * step + asking

    def rest(self, part: int, length: int) -> float:
        """Return the seconds of everything else in a round."""
        return on_lines(self.parts[part].rest, length) if length else self.plain


def on_lines(curve: Curve, place: int) -> float:
    """Return a curve's value on straight lines through its points, continued beyond them."""
    known = sorted(curve)
    if place in curve or len(known) == 1:
        return curve.get(place, curve[known[0]])
    above = next((point for point in known if point > place), known[-1])
    below = known[max(known.index(above) - 1, 0)]
    above = above if above != below else known[1]
    slope = (curve[above] - curve[below]) / (above - below)
    return curve[below] + slope * (place - below)


class Sweep(Controller):
    """Controller that cycles through draft lengths and records the times of the rounds.

    Args:
        part: part of the drafter that drafts.
        lengths: draft lengths to cycle through.
        asks: True to be asked after each node.

    Attributes:
        records: False to leave rounds out.
        draft: seconds of drafting, by nodes of the draft.
        rest: seconds of everything else except prefill.
    """

    name = "sweep"

    def __init__(self, part: int, lengths: Sequence[int], asks: bool) -> None:
        self.uses_probs = asks
        self.records = True
        self.draft: dict[int, list[float]] = defaultdict(list)
        self.rest: dict[int, list[float]] = defaultdict(list)
        self._part = part
        self._lengths = lengths
        self._number = 0

    def plan(self, rows: Sequence[Row], candidates: Sequence[Sequence[Candidate]]) -> list[Plan]:
        length = self._lengths[self._number % len(self._lengths)]
        self._number += 1
        return [Plan(self._part, length)] * len(rows)

    def keep_drafting(self, rows: Sequence[Row], dists: DraftProbs, depth: int) -> list[bool]:
        # The summary that an adaptive controller would read takes time too.
        return [confidence >= 0 for confidence in dists.confidences]

    def learn(self, rows: Sequence[Row], draft: Draft, verdict: Verdict, time: RoundTime) -> None:
        if self.records:
            self.draft[draft.num_nodes].append(time.draft)
            self.rest[draft.num_nodes].append(time.total - time.draft - time.prefill)


@dataclass(frozen=True)
class Stage:
    """Components whose rounds are timed.

    Args:
        target, drafter, verifier: as in `Components`.
        make_row: returns a new row that does not end while it is timed.
        clock: seconds from some moment on.
    """

    target: Runtime
    drafter: Drafter
    verifier: Verifier
    make_row: Callable[[], Row]
    clock: Clock = time.perf_counter


class Cell:
    """Rounds of one part of a drafter, with or without questions to the controller."""

    def __init__(self, stage: Stage, candidate: Candidate, asks: bool, lengths: Sequence[int]) -> None:
        # Lookups seldom find as much as requested, and any tokens have the same cost.
        drafter = (
            ScriptedDrafter(lambda row: row.tokens[-max(*lengths, 1) :])
            if candidate.deterministic
            else stage.drafter
        )
        self.part, self.asks = candidate.part, asks
        self.sweep = Sweep(candidate.part, lengths, asks)
        self._num_lengths = len(lengths)
        self._make_row = stage.make_row
        recorder = StatsRecorder(stage.clock)
        self._components = Components(stage.target, drafter, stage.verifier, self.sweep, recorder)
        self._warm = False

    def run(self, num_cycles: int) -> None:
        """Time this many rounds of each length; the first ones, which allocate, are not recorded."""
        warm_up = 1 if self._warm else self._num_lengths
        rounds = decode(self._components, [self._make_row()])
        self.sweep.records = False
        for _ in islice(rounds, warm_up):
            pass
        self.sweep.records = True
        for _ in islice(rounds, num_cycles * self._num_lengths):
            pass
        self._warm = True


def measure_round_costs(stage: Stage, lengths: Sequence[int] = LENGTHS, num_cycles: int = 12) -> RoundCosts:
    """Time rounds of every part of the drafter, half of them in reverse order.

    Args:
        stage: components.
        lengths: draft lengths to time; 0 among them.
        num_cycles: rounds of each length.
    """
    candidates = _candidates(stage)
    cells = [
        Cell(stage, candidate, asks, lengths)
        for candidate in candidates
        for asks in ((False,) if candidate.deterministic else (False, True))
    ]
    for cell in (*cells, *reversed(cells)):
        cell.run(-(-num_cycles // 2))
    plain = [
        sum(times) for cell in cells for times in zip(cell.sweep.rest[0], cell.sweep.draft[0], strict=True)
    ]
    parts = [[cell for cell in cells if cell.part == candidate.part] for candidate in candidates]
    return RoundCosts(median(plain), [part_costs(of_part) for of_part in parts])


def part_costs(cells: Sequence[Cell]) -> PartCosts:
    """Return the costs of one part of a drafter, from its cells: unasked, and asked if it has probabilities."""
    rest: dict[int, list[float]] = defaultdict(list)
    lines = []
    for cell in cells:
        for length, seconds in cell.sweep.rest.items():
            rest[length] += seconds if length else []
        lines.append(
            fit_line({length: median(times) for length, times in cell.sweep.draft.items() if length})
        )
    (start, step), (_, asked_step) = lines[0], lines[-1]
    medians = {length: median(seconds) for length, seconds in sorted(rest.items()) if length}
    return PartCosts(start, step, asked_step, medians)


def fit_line(points: Curve) -> tuple[float, float]:
    """Return start and slope of a line through points, neither below 0, robust to outliers (Theil and Sen).

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


def _candidates(stage: Stage) -> list[Candidate]:
    """Return the candidates of the drafter for some row, by part."""
    row = stage.make_row()
    stage.drafter.begin([row])
    try:
        (choices,) = stage.drafter.candidates([row])
    finally:
        stage.drafter.release(row)
    return sorted(choices, key=lambda choice: choice.part)
