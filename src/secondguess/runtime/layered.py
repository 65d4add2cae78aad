"""Passes through a model's first layers before the others, for early-exit drafters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from secondguess.core import Draft, Row
from secondguess.errors import BadInputError
from secondguess.runtime.base import ForwardOutput
from secondguess.runtime.slots import CachedRow
from secondguess.runtime.step import ForwardStep


@dataclass(frozen=True)
class PartialForward:
    """Hidden states of a round's queries after the first layers, before the remaining layers run.

    Args:
        rows: rows in the order of their slots.
        lengths: cached tokens of each row, which differ between rounds.
        draft: the nodes that have been run.
        states: `[row, query, width]`, output of the first `num_layers` layers.
        num_layers: number of layers that have been run.
    """

    rows: list[Row]
    lengths: list[int]
    draft: Draft
    states: Tensor
    num_layers: int

    def is_prefix_of(self, states: Sequence[CachedRow], draft: Draft) -> bool:
        """Return whether these queries are a prefix of a draft.

        Rows and cached lengths must be the same, and every node that was run must have kept its
        token and parent.
        """
        num_run = self.states.shape[1] - 1
        if [state.row for state in states] != self.rows or [state.length for state in states] != self.lengths:
            return False
        if num_run > draft.num_nodes:
            return False
        # Padding was run with another position and other ancestors than a node with the same
        # token.
        same = self.draft.mask[:, :num_run].clone()
        for now, then in ((draft.tokens, self.draft.tokens), (draft.parents, self.draft.parents)):
            same &= now[:, :num_run] == then[:, :num_run]
        return bool((same | ~draft.mask[:, :num_run]).all())


def remaining_layers(skipped: Sequence[int], num_layers: int) -> list[int]:
    """Return the layers that remain, counted from 0; refuse layers that do not exist, and to skip all."""
    kept = [index for index in range(num_layers) if index not in set(skipped)]
    if not kept or not all(0 <= index < num_layers for index in skipped):
        raise BadInputError(
            f"expected some of the layers 0 to {num_layers - 1} to be left out, got {list(skipped)}"
        )
    return kept


class LayeredForward(ABC):
    """Forward passes through some layers of a decoder, over the placement of a cache."""

    @abstractmethod
    def run_first(self, tokens: Tensor, step: ForwardStep, num_known: int, num_layers: int) -> Tensor:
        """Run the first layers and return their output `[row, query, width]`.

        Args:
            tokens: `[row, query]`, without the `num_known` queries that these layers have run
                already.
            step: positions and mask of all queries, including those already run.
            num_known: number of queries before `tokens`.
        """

    @abstractmethod
    def run_remaining(
        self,
        tokens: Tensor,
        states: Tensor,
        step: ForwardStep,
        num_layers: int,
        hidden_layers: Sequence[int],
    ) -> ForwardOutput:
        """Run the remaining layers and return the output of the whole forward pass.

        Args:
            tokens: `[row, query]`.
            states: `[row, query, width]`, output of the first `num_layers` layers.
            step: positions and mask of the queries.
            num_layers: number of layers that have been run.
            hidden_layers: layers whose hidden states are returned; none below `num_layers` except the embeddings.
        """
