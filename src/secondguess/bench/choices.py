"""Choices of drafter and controller, how fast they were, and which of them to recommend."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from secondguess.bench.costs import Costs, predicted_seconds
from secondguess.bench.summary import sum_stats
from secondguess.bench.systems import Run
from secondguess.controllers import CONTROLLERS, make_controller
from secondguess.stats import Stats
from secondguess.workloads.provenance import public_name

FIXED_LENGTHS = (1, 2, 3, 4, 5, 6, 8)
WORTH_IT = 1.02
"""Least speed-up over plain decoding for which speculation is recommended; less is noise."""


@dataclass(frozen=True)
class Choice:
    """One way to decode.

    Args:
        drafter, controller: by name; the drafter `none` is plain decoding.
        quantize: `int8` for a target in 8 bits, which computes other numbers; None for the target as loaded.
    """

    drafter: str = "none"
    controller: str = "fixed:0"
    quantize: str | None = None

    @property
    def speculates(self) -> bool:
        return self.drafter != "none"

    def __str__(self) -> str:
        """Return the name in reports."""
        name = f"{public_name(self.drafter)} {self.controller}" if self.speculates else "plain"
        return f"{name}, 8 bits" if self.quantize else name


PLAIN = Choice()


@dataclass(frozen=True)
class CostModel:
    """Speed-up by the cost model (Leviathan et al., arXiv 2211.17192, section 3.3) and its quantities.

    Args:
        acceptance_length: tau, tokens per row and target pass.
        cost_ratio: c, seconds per drafted node over those of a plain target pass.
        pass_cost: v, mean cost of a target pass over drafts of these lengths, in plain passes.
        predicted_speedup: tau / (v + c k), over plain decoding without overhead.
    """

    acceptance_length: float
    cost_ratio: float
    pass_cost: float
    predicted_speedup: float


@dataclass(frozen=True)
class Speed:
    """Measured speed of one choice.

    Args:
        tokens, seconds: of each batch, prefill included.
        stats: counters of all rows together.
    """

    tokens: tuple[int, ...]
    seconds: tuple[float, ...]
    stats: Stats

    @classmethod
    def of_runs(cls, runs_of_batches: Sequence[Sequence[Run]]) -> Speed:
        """Speed with the median seconds of each batch over its runs."""
        middle = [sorted(runs, key=lambda run: run.seconds)[len(runs) // 2] for runs in runs_of_batches]
        stats = sum_stats([run.stats for runs in runs_of_batches for run in runs if run.stats is not None])
        return cls(tuple(run.num_tokens for run in middle), tuple(run.seconds for run in middle), stats)

    @property
    def tokens_per_second(self) -> float:
        """All tokens over all seconds."""
        return sum(self.tokens) / sum(self.seconds)

    @property
    def draft_length(self) -> float:
        """Mean drafted nodes per row and round."""
        return self.stats.num_drafted / self.stats.num_rounds if self.stats.num_rounds else 0.0

    def over(self, plain: Speed) -> float:
        """Return the speed-up over another choice."""
        return self.tokens_per_second / plain.tokens_per_second

    def worst_over(self, plain: Speed) -> float:
        """Return the smallest speed-up on one batch."""
        ours, theirs = (
            [count / spent for count, spent in zip(speed.tokens, speed.seconds, strict=True)]
            for speed in (self, plain)
        )
        return min(own / other for own, other in zip(ours, theirs, strict=True))

    def cost_model(self, costs: Costs, batch_size: int) -> CostModel:
        """Return what the cost model predicts from the counters and the measured passes."""
        stats, plain = self.stats, costs.target[1]
        # Drafting seconds are shared by the rows of a batch.
        drafting = batch_size * stats.drafting_seconds / plain
        passes = predicted_seconds(stats, Costs(costs.target)) / plain
        return CostModel(
            stats.acceptance_length,
            drafting / stats.num_drafted if stats.num_drafted else 0.0,
            passes / stats.num_rounds,
            stats.num_tokens / (passes + drafting),
        )


Speeds = Mapping[Choice, Speed]


def controllers_for(deterministic: bool) -> list[str]:
    """Return the names of all controllers that suit a drafter.

    Args:
        deterministic: the drafter has no distributions.
    """
    adaptive = [kind for kind in CONTROLLERS if kind != "fixed"]
    usable = [name for name in adaptive if not (deterministic and make_controller(name).needs_probs)]
    return [*(f"fixed:{length}" for length in FIXED_LENGTHS), *usable]


def fastest(speeds: Speeds) -> list[Choice]:
    """Return the choices that speculate, the fastest first."""
    able = [choice for choice in speeds if choice.speculates]
    return sorted(able, key=lambda choice: -speeds[choice].tokens_per_second)


def recommend(speeds: Mapping[int, Speeds]) -> dict[int, Choice]:
    """Return the fastest choice by batch size; plain decoding where no speed-up exceeds `WORTH_IT`."""
    best = {}
    for batch_size, of_choices in speeds.items():
        (first, *_) = fastest(of_choices) or [PLAIN]
        pays = of_choices[first].over(of_choices[PLAIN]) > WORTH_IT
        best[batch_size] = first if pays else PLAIN
    return best


def one_for_all(speeds: Mapping[int, Speeds]) -> Choice:
    """Return the one choice for a configuration.

    It speeds up the smallest batch size by more than `WORTH_IT`, and is slower than plain decoding at as few batch
    sizes as possible (`losing_sizes`). Of those within `WORTH_IT` of the best of these at the smallest batch size,
    it has the largest geometric mean of speed-ups at the sizes where it gains.
    """
    of_smallest = speeds[min(speeds)]
    gains = {choice: of_smallest[choice].over(of_smallest[PLAIN]) for choice in fastest(of_smallest)}
    paying = [choice for choice, gain in gains.items() if gain > WORTH_IT]
    if not paying:
        return PLAIN
    lost = {choice: len(losing_sizes(choice, speeds)) for choice in paying}
    able = [choice for choice in paying if lost[choice] == min(lost.values())]
    near = [choice for choice in able if gains[choice] >= gains[able[0]] / WORTH_IT]
    return max(near, key=lambda choice: _mean_gain(choice, speeds))


def losing_sizes(choice: Choice, speeds: Mapping[int, Speeds]) -> list[int]:
    """Return the batch sizes at which a choice is slower than plain decoding, or was not measured."""
    return [size for size, of in speeds.items() if choice not in of or of[choice].over(of[PLAIN]) < 1]


def _mean_gain(choice: Choice, speeds: Mapping[int, Speeds]) -> float:
    lost = losing_sizes(choice, speeds)
    gains = [math.log(of[choice].over(of[PLAIN])) for size, of in speeds.items() if size not in lost]
    return sum(gains) / len(gains)
