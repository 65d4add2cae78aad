"""Runtimes that can run a model's first layers before the others, for early-exit drafters."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from secondguess.core import Draft, Row
from secondguess.errors import BadInputError
from secondguess.runtime.base import ForwardOutput, HiddenStates
from secondguess.runtime.cached import CachedRuntime, build_queries
from secondguess.runtime.slots import CachedRow
from secondguess.runtime.step import ForwardStep
from secondguess.runtime.system.exclusive import exclusive


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


class LayeredRuntime(CachedRuntime):
    """Runtime that keeps the first layers' output for a draft until the remaining layers run."""

    supports_partial_forward = True
    _partial: PartialForward | None = None

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
    def run_remaining_layers(
        self, tokens: Tensor, states: Tensor, step: ForwardStep, num_layers: int
    ) -> ForwardOutput:
        """Run the remaining layers and return the output of the whole forward pass.

        Only called if `hidden_layers` holds no layer below `num_layers` except the embeddings.

        Args:
            tokens: `[row, query]`.
            states: `[row, query, width]`, output of the first `num_layers` layers.
            step: positions and mask of the queries.
            num_layers: number of layers that have been run.
        """

    def _drop_partial_forward(self) -> None:
        # An interrupted round leaves it behind: rows, lengths and draft may match again after the
        # cache has been overwritten.
        self._partial = None

    @exclusive
    def run_first_layers(self, rows: Sequence[Row], draft: Draft, num_layers: int) -> Tensor:
        members = [self.slots[row] for row in rows]
        indices = self._order(members)
        order = None if indices is None else torch.tensor(indices, device=self.device)
        if indices is not None and order is not None:
            members, draft = [members[index] for index in indices], draft.select(order)
        if any(len(state.row.tokens) - state.length != 1 for state in members):
            raise BadInputError(
                "expected rows of which all but the last token is cached, got others; score them first"
            )
        ahead = self._partial
        can_extend = (
            ahead is not None and ahead.num_layers == num_layers and ahead.is_prefix_of(members, draft)
        )
        known = ahead.states if ahead is not None and can_extend else None
        with torch.inference_mode():
            states = self._extend_first_layers(members, draft, known, num_layers)[2]
        lengths = [state.length for state in members]
        self._partial = PartialForward([state.row for state in members], lengths, draft, states, num_layers)
        return states if order is None else states[order.argsort()]

    def _extend_first_layers(
        self, members: Sequence[CachedRow], draft: Draft, known: Tensor | None, num_layers: int
    ) -> tuple[Tensor, ForwardStep, Tensor]:
        """Return a round's tokens, its step and the first layers' output for all its queries."""
        starts = [state.length for state in members]
        queries = build_queries(members, [1] * len(members), draft)
        tokens = queries.tokens
        num_keys = self._pad_keys(max(starts) + draft.num_nodes + 1)
        step = self._step(starts, queries, num_keys)
        num_known = 0 if known is None else known.shape[1]
        if known is not None and num_known == tokens.shape[1]:
            states = known
        else:
            width = tokens.shape[1] - num_known
            self._place(members, [start + num_known for start in starts], width, num_keys)
            states = self.run_first(tokens[:, num_known:], step, num_known, num_layers)
            if known is not None:
                states = torch.cat((known, states), 1)
        self._place(members, starts, tokens.shape[1], num_keys)
        return tokens, step, states

    def _run_queries(
        self, states: Sequence[CachedRow], num_uncached: Sequence[int], draft: Draft
    ) -> tuple[Tensor, HiddenStates]:
        ahead, self._partial = self._partial, None
        if ahead is None or not ahead.is_prefix_of(states, draft):
            return super()._run_queries(states, num_uncached, draft)
        if any(0 < layer % (self.num_layers + 1) < ahead.num_layers for layer in self.hidden_layers):
            # needs hidden states that were not kept
            return super()._run_queries(states, num_uncached, draft)
        tokens, step, read = self._extend_first_layers(states, draft, ahead.states, ahead.num_layers)
        output = self.run_remaining_layers(tokens, read, step, ahead.num_layers)
        return output.logits, output.hidden
