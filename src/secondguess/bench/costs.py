"""Costs of forward passes, and the speed that they allow.

A round that drafts k nodes costs k draft steps and one target pass over k + 1 tokens, so for a run

    predicted seconds = sum over rounds of  T(k + 1) + k * T_draft
                      = T(1) * sum over rounds of  v(k + 1) + k * c

with v(m) = T(m) / T(1) and c = T_draft / T(1) (section 3.3 of Leviathan et al., arXiv 2211.17192,
with the measured cost of verifying m tokens in place of the assumption v = 1). The rest of the time
is overhead.

Passes are timed throughout the run, not in one block at the start: `sample` is called after every
batch, and target passes alternate with draft steps as in a round, so that caches and clock speed
are those of the comparison.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

import torch

from secondguess.core import Draft, Row
from secondguess.runtime.base import Runtime
from secondguess.sampling import SamplingParams
from secondguess.stats import Stats

WIDTHS = tuple(range(1, 10))
"""Numbers of tokens m for which a target pass is timed."""
NUM_SWEEPS = 3
"""Sweeps over all widths per call of `ForwardTimer.sample`."""


@dataclass(frozen=True)
class Costs:
    """Seconds of a target pass over m tokens, by m (1 is required), and of a draft step (0 without a draft model)."""

    target: Mapping[int, float]
    draft_step: float = 0.0

    @property
    def cost_ratio(self) -> float:
        """Cost ratio c: one draft step over one target pass."""
        return self.draft_step / self.target[1]

    @property
    def curve(self) -> dict[int, float]:
        """Relative cost of a pass over m tokens, v(m) = T(m) / T(1)."""
        return {m: self.target[m] / self.target[1] for m in sorted(self.target)}

    def target_pass(self, num_tokens: int) -> float:
        """Return the seconds of a pass over `num_tokens`, inter- or extrapolated linearly."""
        known = sorted(self.target)
        if num_tokens in self.target or len(known) == 1:
            return self.target.get(num_tokens, self.target[1])
        above = next((m for m in known if m > num_tokens), known[-1])
        below = known[known.index(above) - 1]
        slope = (self.target[above] - self.target[below]) / (above - below)
        return self.target[below] + slope * (num_tokens - below)


def predicted_seconds(stats: Stats, costs: Costs) -> float:
    """Return the predicted seconds of a run's rounds (chains), prefill excluded."""
    at_least = [stats.num_rounds, *stats.drafted_per_position, 0]
    return sum(
        (count - longer) * (costs.target_pass(length + 1) + length * costs.draft_step)
        for length, (count, longer) in enumerate(pairwise(at_least))
    )


class ForwardTimer:
    """Timings of target passes over m tokens, for m in `widths`, and of draft steps, after a typical context."""

    def __init__(
        self,
        target: Runtime,
        draft_models: Mapping[str, Runtime],
        context: Sequence[int],
        widths: Sequence[int] = WIDTHS,
    ) -> None:
        self._target, self._draft_models = target, draft_models
        self._context, self._widths = list(context), widths
        self.context_length = len(context)
        self._target_seconds: dict[int, list[float]] = defaultdict(list)
        self._draft_seconds: dict[str, list[float]] = defaultdict(list)

    def warm_up(self) -> None:
        """Run every pass and discard the timings, since the first passes allocate memory."""
        self.sample()
        self._target_seconds.clear()
        self._draft_seconds.clear()

    def sample(self) -> None:
        """Time target passes of every width, each after one step of every draft model."""
        row = Row(list(self._context), SamplingParams(max_tokens=1))
        runtimes = [self._target, *self._draft_models.values()]
        with torch.inference_mode(), ExitStack() as at_the_end:
            for runtime in runtimes:
                runtime.begin([row])
                at_the_end.callback(runtime.release, row)
            for width in NUM_SWEEPS * list(self._widths):
                for name, runtime in self._draft_models.items():
                    self._draft_seconds[name].append(_timed_pass(runtime, row, 1))
                self._target_seconds[width].append(_timed_pass(self._target, row, width))

    def costs(self, draft_model: str | None = None) -> Costs:
        """Return the median costs so far, with the draft step of a draft model if one is named."""
        target = {width: median(seconds) for width, seconds in self._target_seconds.items()}
        return Costs(target, median(self._draft_seconds[draft_model]) if draft_model else 0.0)


def _timed_pass(runtime: Runtime, row: Row, num_tokens: int) -> float:
    """Return the seconds of a pass over `pending` and `num_tokens - 1` nodes of a row; the KV cache is restored."""
    draft = Draft.chains([repeat_to_length(row.tokens, num_tokens - 1)], device=runtime.device)
    synchronise(runtime.device)
    start = time.perf_counter()
    runtime.score([row], draft)
    synchronise(runtime.device)
    seconds = time.perf_counter() - start
    runtime.rewind([row], [len(row.tokens) - 1])
    return seconds


def repeat_to_length(tokens: Sequence[int], length: int) -> list[int]:
    """Return exactly `length` tokens: truncated, or repeated from the start.

    >>> repeat_to_length([1, 2, 3], 2), repeat_to_length([1, 2, 3], 7)
    ([1, 2], [1, 2, 3, 1, 2, 3, 1])
    """
    return (list(tokens) * (length // len(tokens) + 1))[:length]


def synchronise(device: torch.device) -> None:
    """Wait for queued device work, which a clock on the host would not measure."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def typical_context(prompts: Sequence[Sequence[int]], num_tokens: int, limit: int | None = None) -> list[int]:
    """Return prompt tokens, as many as a median row has halfway, at most `limit`."""
    length = int(median(len(prompt) for prompt in prompts)) + num_tokens // 2
    length = length if limit is None else max(1, min(length, limit))
    return repeat_to_length([token for prompt in prompts for token in prompt], length)
