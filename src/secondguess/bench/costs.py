"""Timing the two things that the cost model needs: a target pass over m tokens and one draft step.

Passes are timed between other work and not in one block at the start: `sample` is called once per prompt, and
target passes alternate with draft steps as they do in a round, so that caches and clock speed are those of
the comparison.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from statistics import median

import torch

from secondguess.bench.predict import Costs
from secondguess.core import Draft, Row
from secondguess.runtime.base import Runtime
from secondguess.sampling import SamplingParams


class CostProbe:
    """Collects timings at one context.

    Args:
        target: the target's runtime.
        draft_models: draft-model runtimes by name.
        context: token ids that stand for a typical row.
        widths: the numbers of tokens m to time a target pass for.
        num_sweeps: timings of each per call of `sample`.
        num_rows: rows of the passes, all with the same context.
    """

    def __init__(
        self,
        target: Runtime,
        draft_models: Mapping[str, Runtime],
        context: Sequence[int],
        widths: Sequence[int] = tuple(range(1, 10)),
        num_sweeps: int = 3,
        num_rows: int = 1,
    ) -> None:
        self._target = target
        self._draft_models = dict(draft_models)
        self._context = list(context)
        self._widths = widths
        self._num_sweeps = num_sweeps
        self._num_rows = num_rows
        self._target_seconds: dict[int, list[float]] = defaultdict(list)
        self._draft_seconds: dict[str, list[float]] = defaultdict(list)

    @property
    def context_length(self) -> int:
        return len(self._context)

    def warm_up(self) -> None:
        """Run every pass without keeping its time: the first ones allocate."""
        self.sample()
        self._target_seconds.clear()
        self._draft_seconds.clear()

    def sample(self) -> None:
        """Time every width and every draft step a few times."""
        rows = [Row(list(self._context), SamplingParams(max_tokens=1)) for _ in range(self._num_rows)]
        runtimes = [self._target, *self._draft_models.values()]
        with torch.inference_mode(), ExitStack() as at_the_end:
            for runtime in runtimes:
                runtime.begin(rows)
                for row in rows:
                    at_the_end.callback(runtime.end, row)
            for _ in range(self._num_sweeps):
                self._sweep(rows)

    def _sweep(self, rows: Sequence[Row]) -> None:
        for width in self._widths:
            for name, runtime in self._draft_models.items():
                self._draft_seconds[name].append(_timed_pass(runtime, rows, 1))
            self._target_seconds[width].append(_timed_pass(self._target, rows, width))

    def costs(self, draft_model: str | None = None) -> Costs:
        """Medians so far, with the draft step of one draft model (none: a drafter that runs no model)."""
        target = {width: median(seconds) for width, seconds in self._target_seconds.items()}
        return Costs(target, median(self._draft_seconds[draft_model]) if draft_model else 0.0)


def _timed_pass(runtime: Runtime, rows: Sequence[Row], num_tokens: int) -> float:
    """Seconds of one forward over pending and `num_tokens - 1` nodes of each row; leaves the cache as it was."""
    draft = Draft.chains([stretch(row.tokens, num_tokens - 1) for row in rows], device=runtime.device)
    synchronise(runtime.device)
    start = time.perf_counter()
    runtime.score(rows, draft)
    synchronise(runtime.device)
    seconds = time.perf_counter() - start
    runtime.rewind(rows, [len(row.tokens) - 1 for row in rows])
    return seconds


def stretch(tokens: Sequence[int], length: int) -> list[int]:
    """Exactly so many tokens: cut, or repeated from the start.

    >>> stretch([1, 2, 3], 2), stretch([1, 2, 3], 7)
    ([1, 2], [1, 2, 3, 1, 2, 3, 1])
    """
    return (list(tokens) * (length // len(tokens) + 1))[:length]


def synchronise(device: torch.device) -> None:
    """Wait for queued work, which a clock on the host would miss."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
