"""What a controller is shown of the nodes just drawn: their laws, never their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy
from numpy.typing import NDArray
from torch import Tensor

from secondguess.runtime.native.library import confidences

SMALLEST = numpy.finfo(numpy.float32).tiny
"""Stands in for zero where logarithms are taken."""


class DraftLaws:
    """Draft distributions of one node per row, summarised on demand, each summary computed once.

    Args:
        logits: `[row, vocab]`, before sampling settings.
        foretold: per row, how likely the node is accepted if those before it are, by a drafter that was trained to tell.
    """

    def __init__(self, logits: Tensor, foretold: Sequence[float] | None = None) -> None:
        self.logits = logits
        self.foretold = foretold

    @cached_property
    def probs(self) -> Tensor:
        """Probabilities `[row, vocab]`; the other summaries are cheaper."""
        return self.logits.softmax(-1)

    @property
    def chances(self) -> Sequence[float]:
        """Per row, the best guess at how likely the node is accepted: as foretold, or else the largest probability."""
        return self.confidences if self.foretold is None else self.foretold

    @cached_property
    def confidences(self) -> list[float]:
        """Per row, the largest probability."""
        return confidences(self.logits)

    @cached_property
    def entropies(self) -> list[float]:
        """Per row, the entropy in nats."""
        logs = numpy.log(numpy.maximum(self._host, SMALLEST))
        entropies: list[float] = (-numpy.vecdot(logs, self._host)).tolist()
        return entropies

    @cached_property
    def runners_up(self) -> list[float]:
        """Per row, the second largest probability."""
        # Two searches for the largest take a fifth of the time of a partition.
        others = self._host.copy()
        others[numpy.arange(len(others)), others.argmax(-1)] = -1.0
        seconds: list[float] = others.max(-1).tolist()
        return seconds

    @cached_property
    def _host(self) -> NDArray[numpy.floating]:
        values: NDArray[numpy.floating] = self.probs.cpu().numpy()
        return values
