"""The contract of a model that can be speculated on.

A runtime caches, per row, a prefix of `row.tokens`. The loop keeps one invariant: between rounds the target has
cached every committed token of a row but the last, its `pending`. A runtime itself asks for less: `score`
forwards whatever part of `row.tokens` is not cached yet, and that is how a draft model catches up after any verdict.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from secondguess.core import Draft, Row


@dataclass(frozen=True)
class Scores:
    """What one forward says.

    Args:
        logits: `[row, node + 1, vocab]`, float32 or float64; query 0 follows `pending`, query `i + 1` follows
            node `i`. Queries of padding nodes hold finite numbers without meaning.
        hidden: per requested layer `[row, node + 1, width]`, empty when none was requested.
    """

    logits: Tensor
    hidden: dict[int, Tensor]


class Runtime(ABC):
    """A language model with a cache that can be rolled back, for ragged rows that never see each other.

    Attributes:
        vocab_size: width of the logits.
        context_length: positions the model can hold.
        device: where tensors that are handed in should live.
    """

    vocab_size: int
    context_length: int
    device: torch.device

    @abstractmethod
    def begin(self, rows: Sequence[Row]) -> None:
        """Admit rows and cache all of their tokens but the last (in chunks)."""

    @abstractmethod
    def read_up(self, rows: Sequence[Row]) -> None:
        """Cache all tokens of rows but the last (in chunks), where more than that is uncached.

        `score` would do it too, in the forward in which everybody else waits.
        """

    @abstractmethod
    def score(self, rows: Sequence[Row], draft: Draft) -> Scores:
        """One forward over each row's uncached tokens (at least `pending`) and its nodes.

        Afterwards every token of `row.tokens` is cached; the nodes are held until `keep` or `rewind`.
        """

    @abstractmethod
    def keep(self, rows: Sequence[Row], paths: Sequence[Sequence[int]]) -> None:
        """Make the accepted path of the draft scored last part of each row's cache; forget its other nodes.

        To be called before the row's tokens change.
        """

    @abstractmethod
    def rewind(self, rows: Sequence[Row], lengths: Sequence[int]) -> None:
        """Forget what is cached beyond the first `lengths[i]` tokens of row i (less may be cached already)."""

    @abstractmethod
    def end(self, row: Row) -> None:
        """Release what is held for a row; nothing, for one that never began."""
