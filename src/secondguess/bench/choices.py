"""Choices of drafter and controller, how fast they were, and which of them to recommend."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from secondguess.bench.summary import sum_stats
from secondguess.bench.systems import Run
from secondguess.controllers import CONTROLLERS, make_controller
from secondguess.errors import BadInputError
from secondguess.stats import Stats

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


PLAIN = Choice()


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

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.seconds) or not self.tokens:
            raise BadInputError(
                f"expected tokens and seconds of the same batches, at least one, got {len(self.tokens)} and "
                f"{len(self.seconds)}"
            )

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
    def per_batch(self) -> list[float]:
        """Tokens per second of each batch."""
        return [count / spent for count, spent in zip(self.tokens, self.seconds, strict=True)]

    @property
    def draft_length(self) -> float:
        """Mean drafted nodes per row and round."""
        return self.stats.num_drafted / self.stats.num_rounds if self.stats.num_rounds else 0.0

    def over(self, plain: Speed) -> float:
        """Return the speed-up over another choice."""
        return self.tokens_per_second / plain.tokens_per_second

    def worst_over(self, plain: Speed) -> tuple[float, int]:
        """Return the smallest ratio on one batch, and the index of that batch."""
        ratios = [ours / theirs for ours, theirs in zip(self.per_batch, plain.per_batch, strict=True)]
        worst = min(ratios)
        return worst, ratios.index(worst)


Speeds = Mapping[Choice, Speed]


def group(num_prompts: int, batch_size: int) -> list[tuple[int, ...]]:
    """Return prompts in full batches, each in at least one; the last batch is filled from the first prompts.

    >>> group(3, 2), group(2, 5)
    ([(0, 1), (2, 0)], [(0, 1, 0, 1, 0)])
    """
    return [
        tuple(place % num_prompts for place in range(start, start + batch_size))
        for start in range(0, num_prompts, batch_size)
    ]


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
    smallest = min(speeds)
    of_smallest = speeds[smallest]
    least = WORTH_IT * of_smallest[PLAIN].tokens_per_second
    paying = [
        choice
        for choice, speed in of_smallest.items()
        if choice.speculates and speed.tokens_per_second > least
    ]
    if not paying:
        return PLAIN
    lost = {choice: len(losing_sizes(choice, speeds)) for choice in paying}
    able = [choice for choice in paying if lost[choice] == min(lost.values())]
    near = max(of_smallest[choice].tokens_per_second for choice in able) / WORTH_IT
    return max(
        (choice for choice in able if of_smallest[choice].tokens_per_second >= near),
        key=lambda choice: _mean_gain(choice, speeds),
    )


def losing_sizes(choice: Choice, speeds: Mapping[int, Speeds]) -> list[int]:
    """Return the batch sizes at which a choice is slower than plain decoding, or was not measured."""
    return [size for size, of in speeds.items() if choice not in of or of[choice].over(of[PLAIN]) < 1]


def _mean_gain(choice: Choice, speeds: Mapping[int, Speeds]) -> float:
    lost = losing_sizes(choice, speeds)
    gains = [math.log(of[choice].over(of[PLAIN])) for size, of in speeds.items() if size not in lost]
    return sum(gains) / len(gains)
