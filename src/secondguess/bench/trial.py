"""Some choices run for real, in turns, on batches of rows."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from secondguess.bench.planner import Choice, Speed
from secondguess.controllers import make_controller
from secondguess.controllers.base import Controller
from secondguess.core import Row
from secondguess.decode import Team, decode
from secondguess.drafters.base import Drafter
from secondguess.runtime.base import Runtime
from secondguess.stats import Clock, acceptance_rate_of
from secondguess.verifiers.base import Verifier


@dataclass(frozen=True)
class BatchRun:
    """One batch, from token ids to token ids."""

    num_tokens: int
    seconds: float
    num_rounds: int
    num_drafted: int
    num_accepted: int


@dataclass(frozen=True)
class Trial:
    """Whoever runs choices.

    Args:
        make_drafter: by name.
        make_rows: fresh rows of some prompts.
    """

    target: Runtime
    verifier: Verifier
    make_drafter: Callable[[str], Drafter]
    make_rows: Callable[[Sequence[int]], list[Row]]
    clock: Clock = time.perf_counter

    def run(
        self, choices: Sequence[Choice], batches: Sequence[Sequence[int]], num_passes: int
    ) -> dict[Choice, Speed]:
        """Run every choice on every batch, in reverse order on every second batch and pass (ABBA).

        In each pass a choice has one controller for all batches, as a user's would live; a batch's seconds are the median over
        the passes. Before anything counts, everybody runs the first batch once.
        """
        drafters = {choice: self.make_drafter(choice.drafter) for choice in choices}
        for choice in choices:
            self._decode(choice, drafters[choice], make_controller(choice.controller), batches[0])
        runs: dict[Choice, list[list[BatchRun]]] = {choice: [[] for _ in batches] for choice in choices}
        for number in range(num_passes):
            controllers = {choice: make_controller(choice.controller) for choice in choices}
            for place, batch in enumerate(batches):
                in_order = (number + place) % 2 == 0
                for choice in choices if in_order else reversed(choices):
                    runs[choice][place].append(
                        self._decode(choice, drafters[choice], controllers[choice], batch)
                    )
        return {choice: _speed(of_batches) for choice, of_batches in runs.items()}

    def _decode(
        self, choice: Choice, drafter: Drafter, controller: Controller, batch: Sequence[int]
    ) -> BatchRun:
        rows = self.make_rows(batch)
        team = Team(self.target, drafter, self.verifier, controller)
        start = self.clock()
        for _ in decode(team, rows):
            pass
        seconds = self.clock() - start
        stats = [team.ledger.of(row) for row in rows]
        return BatchRun(
            sum(len(row.output) for row in rows),
            seconds,
            sum(each.num_rounds for each in stats),
            sum(each.num_drafted for each in stats),
            sum(each.num_accepted for each in stats),
        )


def _speed(of_batches: Sequence[Sequence[BatchRun]]) -> Speed:
    everything = [run for runs in of_batches for run in runs]
    drafted = sum(run.num_drafted for run in everything)
    return Speed(
        tuple(round(median(run.num_tokens for run in runs)) for runs in of_batches),
        tuple(median(run.seconds for run in runs) for runs in of_batches),
        acceptance_rate_of(sum(run.num_accepted for run in everything), drafted),
        drafted / sum(run.num_rounds for run in everything),
    )
