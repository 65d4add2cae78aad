"""Draft distributions passed to controllers: those of the nodes just drawn, never their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy
from numpy.typing import NDArray
from torch import Tensor

from secondguess.sampling.kernels import with_confidences

SMALLEST = numpy.finfo(numpy.float32).tiny
"""Lower bound on probabilities in logarithms."""


class DraftProbs:
    """Draft distributions of one node per row; each summary is computed on first use and cached.

    Args:
        logits: `[row, vocab]`, before sampling settings.
        acceptance_probs: per row, the acceptance probability of the node, given that those before it are
            accepted, from a drafter that was trained to predict it.
        confidences: largest probability per row, if it has been computed.
    """

    def __init__(
        self,
        logits: Tensor,
        acceptance_probs: Sequence[float] | None = None,
        confidences: Sequence[float] | None = None,
    ) -> None:
        self.logits = logits
        self.acceptance_probs = acceptance_probs
        self._confidences = confidences

    @cached_property
    def probs(self) -> Tensor:
        """Probabilities `[row, vocab]`; `confidences` is cheaper."""
        return self.logits.softmax(-1)

    @property
    def acceptance_estimates(self) -> Sequence[float]:
        """Acceptance probability per row: `acceptance_probs`, or else the largest probability."""
        return self.confidences if self.acceptance_probs is None else self.acceptance_probs

    @property
    def confidences(self) -> Sequence[float]:
        """Largest probability per row."""
        # Used after every draft step: `cached_property` would take as long as the computation.
        found = self._confidences
        if found is None:
            _, found = with_confidences(self.logits)
            self._confidences = found
        return found

    @cached_property
    def entropies(self) -> list[float]:
        """Entropy per row, in nats."""
        logs = numpy.log(numpy.maximum(self._host, SMALLEST))
        entropies: list[float] = (-numpy.vecdot(logs, self._host)).tolist()
        return entropies

    @cached_property
    def runners_up(self) -> list[float]:
        """Second largest probability per row."""
        # Two searches for the maximum take a fifth of the time of a partition.
        others = self._host.copy()
        others[numpy.arange(len(others)), others.argmax(-1)] = -1.0
        seconds: list[float] = others.max(-1).tolist()
        return seconds

    @cached_property
    def _host(self) -> NDArray[numpy.floating]:
        values: NDArray[numpy.floating] = self.probs.cpu().numpy()
        return values
