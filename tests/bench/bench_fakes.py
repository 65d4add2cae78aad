"""Fake systems with given costs, and statistics of given rounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from secondguess.bench.systems import Run, System
from secondguess.core import Commit, Row
from secondguess.sampling import SamplingParams
from secondguess.stats import Stats


@dataclass
class FakeSystem(System):
    """Writes `text` at a given speed and notes its calls in a log that all systems share."""

    name: str
    log: list[tuple[str, float, int]]
    family: str = "secondguess"
    speculates: bool = False
    speed: float = 10.0
    text: Callable[[Sequence[int]], list[int]] = list
    stats: Stats | None = None
    interrupt_at: int | None = None

    def generate(
        self, prompts: Sequence[Sequence[int]], num_tokens: int, temperature: float, seed: int
    ) -> Run:
        (prompt,) = prompts
        self.log.append((self.name, temperature, seed))
        if self.interrupt_at is not None and len(self.log) > self.interrupt_at:
            raise KeyboardInterrupt
        tokens = [*self.text(prompt), *range(num_tokens)][:num_tokens]
        return Run([tokens], len(tokens) / self.speed, self.stats)


def stats_of(rounds: Sequence[tuple[int, int]], prefill: float = 0.0) -> Stats:
    """Statistics of rounds given as (drafted, accepted)."""
    row = Row([0], SamplingParams())
    stats = Stats()
    for drafted, accepted in rounds:
        stats.count(drafted, drafted, Commit(row, [1] * (accepted + 1), accepted))
    stats.seconds["prefill"] = prefill
    stats.seconds["score"] = 1.0
    return stats


class FakeBatcher(FakeSystem):
    """The same, for several prompts at a time: every row costs as much as a single prompt would."""

    batches = True

    def generate(
        self, prompts: Sequence[Sequence[int]], num_tokens: int, temperature: float, seed: int
    ) -> Run:
        one_by_one = super().generate
        runs = [one_by_one([prompt], num_tokens, temperature, seed) for prompt in prompts]
        return Run([text for run in runs for text in run.texts], sum(run.seconds for run in runs), self.stats)
