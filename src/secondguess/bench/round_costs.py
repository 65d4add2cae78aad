"""What whole rounds cost: measured through the loop itself, so that everything that a round does is in them.

A round over R rows, whose longest draft has w nodes, takes

    seconds = sum over draft steps of D(rows in the step) + T(R, w)

with D the time of one draft step and T that of all the rest: the target's pass, judging, bookkeeping. The rows of a
round are cycled through draft lengths, so that all lengths are timed under the same conditions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from secondguess.controllers.base import Controller
from secondguess.controllers.laws import DraftLaws
from secondguess.core import Draft, Plan, Prospect, RoundTime, Row, Verdict
from secondguess.decode import Team, decode
from secondguess.drafters.base import Drafter
from secondguess.runtime.base import Runtime
from secondguess.testing import ScriptedDrafter
from secondguess.verifiers.base import Verifier

Curve = Mapping[int, float]


@dataclass(frozen=True)
class PartCosts:
    """Seconds of rounds drafted by one part of a drafter.

    Args:
        step: of one draft step, by rows in the step.
        asked_step: the same when the controller is asked after each node.
        rest: of everything else in a round, by rows and then by nodes of the longest draft.
    """

    step: Curve
    asked_step: Curve
    rest: Mapping[int, Curve]


@dataclass(frozen=True)
class RoundCosts:
    """Seconds of rounds: plain ones by rows, and by part of the drafter."""

    plain: Curve
    parts: Sequence[PartCosts]

    def drafting(self, steps: Iterable[tuple[int, int]], asks: bool) -> float:
        """Seconds of draft steps, each given as its part and its rows."""
        return sum(
            on_lines(self.parts[part].asked_step if asks else self.parts[part].step, num_rows)
            for part, num_rows in steps
        )

    def rest(self, num_rows: int, width: int, parts: Iterable[int]) -> float:
        """Seconds of everything else, the longest draft having `width` nodes."""
        if width == 0:
            return on_lines(self.plain, num_rows)
        return max(
            on_lines(
                {rows: on_lines(curve, width) for rows, curve in self.parts[part].rest.items()}, num_rows
            )
            for part in parts
        )


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
    """

    name = "sweep"

    def __init__(self, part: int, lengths: Sequence[int], asks: bool) -> None:
        self.reads_laws = asks
        self._part = part
        self._lengths = lengths
        self._number = 0
        self.draft: dict[int, list[float]] = defaultdict(list)
        self.rest: dict[int, list[float]] = defaultdict(list)

    def plan(self, rows: Sequence[Row], prospects: Sequence[Sequence[Prospect]]) -> list[Plan]:
        length = self._lengths[self._number % len(self._lengths)]
        self._number += 1
        return [Plan(self._part, length)] * len(rows)

    def go_on(self, rows: Sequence[Row], laws: DraftLaws, depth: int) -> list[bool]:
        # What an adaptive controller would read takes its time too.
        return [confidence >= 0 for confidence in laws.confidences]

    def forget(self) -> None:
        """Drop what was noted so far: the first rounds allocate."""
        self.draft.clear()
        self.rest.clear()

    def learn(self, rows: Sequence[Row], draft: Draft, verdict: Verdict, time: RoundTime) -> None:
        self.draft[draft.num_nodes].append(time.draft)
        self.rest[draft.num_nodes].append(time.total - time.draft - time.prefill)


@dataclass(frozen=True)
class Stage:
    """Who plays while rounds are timed.

    Args:
        make_rows: makes so many fresh rows that will not end while they are timed.
    """

    target: Runtime
    drafter: Drafter
    verifier: Verifier
    make_rows: Callable[[int], list[Row]]


LENGTHS = (0, 1, 2, 3, 4, 6, 8, 12)


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
    plain: dict[int, float] = {}
    certain = [choice.certain for choice in _choices(stage)]
    steps: list[dict[bool, dict[int, float]]] = [{False: {}, True: {}} for _ in certain]
    rests: list[dict[int, Curve]] = [{} for _ in certain]
    for num_rows in batch_sizes:
        for part, is_certain in enumerate(certain):
            for asks in (False,) if is_certain else (False, True):
                sweep = _sweep(stage, part, num_rows, lengths, num_cycles, asks, is_certain)
                per_node = [
                    seconds / length
                    for length, all_seconds in sweep.draft.items()
                    if length
                    for seconds in all_seconds
                ]
                steps[part][asks][num_rows] = median(per_node)
                rests[part][num_rows] = {
                    length: median(seconds) for length, seconds in sorted(sweep.rest.items()) if length
                }
                plain[num_rows] = median(map(sum, zip(sweep.rest[0], sweep.draft[0], strict=True)))
    parts = [
        PartCosts(step[False], step[True] or step[False], rest)
        for step, rest in zip(steps, rests, strict=True)
    ]
    return RoundCosts(plain, parts)


def _sweep(
    stage: Stage, part: int, num_rows: int, lengths: Sequence[int], num_cycles: int, asks: bool, certain: bool
) -> Sweep:
    # A look-up drafts what it finds, which is seldom as long as asked; what any tokens would cost is what is timed.
    drafter = ScriptedDrafter(lambda row: row.tokens[-max(lengths) :]) if certain else stage.drafter
    sweep = Sweep(part, lengths, asks)
    team = Team(stage.target, drafter, stage.verifier, sweep)
    num_rounds = num_cycles * len(lengths)
    warm_up = len(lengths)
    for number, _ in enumerate(decode(team, stage.make_rows(num_rows)), start=1):
        if number == warm_up:
            sweep.forget()
        if number == warm_up + num_rounds:
            break
    return sweep


def _choices(stage: Stage) -> list[Prospect]:
    """What the drafter's parts say of some row, by part."""
    rows = stage.make_rows(1)
    stage.drafter.begin(rows)
    try:
        (choices,) = stage.drafter.prospects(rows)
    finally:
        stage.drafter.end(rows[0])
    return sorted(choices, key=lambda choice: choice.part)
