"""What a tuning has found out so far, and what it may still spend."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from secondguess.bench.planner import Choice, Part, Speed
from secondguess.bench.systems import Models
from secondguess.bench.traces import Trace
from secondguess.bench.tune_config import TuneConfig
from secondguess.bench.tune_costs import Costs
from secondguess.bench.workloads import Workload
from secondguess.stats import Clock


class Budget:
    """Seconds that may be spent, and on what they were spent."""

    def __init__(self, seconds: float, clock: Clock = time.perf_counter) -> None:
        self._clock = clock
        self._start = self._mark = clock()
        self.seconds = seconds
        self.spent: dict[str, float] = {}

    @property
    def elapsed(self) -> float:
        return self._clock() - self._start

    @property
    def left(self) -> float:
        return self.seconds - self.elapsed

    def book(self, what: str) -> float:
        """What passed since the last booking was spent on this; gives its seconds."""
        now = self._clock()
        seconds, self._mark = now - self._mark, now
        self.spent[what] = self.spent.get(what, 0.0) + seconds
        return seconds

    def until(self, share: float) -> Callable[[], bool]:
        """Whether a share of the budget, from now on, has not passed yet."""
        end = self.elapsed + share * self.seconds
        return lambda: self.elapsed < min(end, self.seconds)


@dataclass(frozen=True)
class Verified:
    """One choice that was run, on some of the batches.

    Args:
        predicted: for the very batches that were run.
    """

    choice: Choice
    batch_size: int
    predicted: Speed
    measured: Speed

    @property
    def error(self) -> float:
        """Predicted over measured speed, less 1."""
        return self.predicted.tokens_per_second / self.measured.tokens_per_second - 1


@dataclass
class Findings:
    """Everything that a tuning found out.

    Args:
        predictions: by batch size and choice, over all batches; those with `quantize` where that was looked at.
        parts: by drafter (not those made of several), its guesses.
        costs, int8_costs: seconds of rounds, of the target as it was loaded and with weights in 8 bits.
        notes: what a reader has to know.
        spent: seconds by step.
    """

    config: TuneConfig
    workload: Workload
    models: Models
    traces: list[Trace] = field(default_factory=list)
    predictions: dict[int, dict[Choice, Speed]] = field(default_factory=dict)
    verified: list[Verified] = field(default_factory=list)
    parts: dict[str, Part] = field(default_factory=dict)
    costs: Costs | None = None
    int8_costs: Costs | None = None
    num_passes: int = 0
    notes: list[str] = field(default_factory=list)
    spent: dict[str, float] = field(default_factory=dict)
