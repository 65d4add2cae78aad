"""Timing of target passes over m tokens and of draft steps, the inputs of the cost model.

Passes are timed throughout the run, not in one block at the start: `sample` is called after every
batch, and target passes alternate with draft steps as in a round, so that caches and clock speed
are those of the comparison.
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


class ForwardTimer:
    """Timings of target passes and draft steps at one context length.

    Args:
        target: the target's runtime.
        draft_models: draft-model runtimes by name.
        context: token ids of a typical row.
        widths: numbers of tokens m for which a target pass is timed.
        num_sweeps: sweeps over all widths per call of `sample`.
        num_rows: rows of a pass, all with the same context.
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
        """Run every pass and discard the timings, since the first passes allocate memory."""
        self.sample()
        self._target_seconds.clear()
        self._draft_seconds.clear()

    def sample(self) -> None:
        """Time target passes of every width, each after one step of every draft model."""
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
        """Return the median costs so far.

        Args:
            draft_model: model whose draft step is included; None for drafters without a model.
        """
        target = {width: median(seconds) for width, seconds in self._target_seconds.items()}
        return Costs(target, median(self._draft_seconds[draft_model]) if draft_model else 0.0)


def _timed_pass(runtime: Runtime, rows: Sequence[Row], num_tokens: int) -> float:
    """Time one forward pass over `pending` and `num_tokens - 1` nodes of each row, in seconds.

    The KV cache is restored afterwards.
    """
    draft = Draft.chains(
        [repeat_to_length(row.tokens, num_tokens - 1) for row in rows], device=runtime.device
    )
    synchronise(runtime.device)
    start = time.perf_counter()
    runtime.score(rows, draft)
    synchronise(runtime.device)
    seconds = time.perf_counter() - start
    runtime.rewind(rows, [len(row.tokens) - 1 for row in rows])
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
