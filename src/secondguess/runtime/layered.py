"""Runtimes that can run some of a model's layers now and the others later, for drafters that live in the first ones."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from secondguess.core import Draft, Row
from secondguess.errors import BadInputError
from secondguess.runtime.attention import Step
from secondguess.runtime.base import Hidden, Scores
from secondguess.runtime.cached import CachedRow, CachedRuntime, Output, queries_of


@dataclass(frozen=True)
class Ahead:
    """What the first layers have made of a round's queries before the rest runs.

    Args:
        rows: in the order of their slots.
        lengths: cached tokens of each, which tell one round from the next.
        draft: the nodes that were read.
        states: `[row, query, width]` behind the first `num_layers` layers.
    """

    rows: list[Row]
    lengths: list[int]
    draft: Draft
    states: Tensor
    num_layers: int

    def agrees_with(self, states: Sequence[CachedRow], draft: Draft) -> bool:
        """Whether these queries begin a draft: the same rows as far as before, and every node that was read where it was."""
        num_read = self.states.shape[1] - 1
        if [state.row for state in states] != self.rows or [state.length for state in states] != self.lengths:
            return False
        if num_read > draft.num_nodes:
            return False
        # What was padding when it was read has neither the place nor the ancestors of a node with the same token.
        same = self.draft.mask[:, :num_read].clone()
        for now, then in ((draft.tokens, self.draft.tokens), (draft.parents, self.draft.parents)):
            same &= now[:, :num_read] == then[:, :num_read]
        return bool((same | ~draft.mask[:, :num_read]).all())


def layers_without(skipped: Sequence[int], num_layers: int) -> list[int]:
    """The layers that are left, counted from 0.

    Raises:
        BadInputError: no such layer, or none left.
    """
    kept = [index for index in range(num_layers) if index not in set(skipped)]
    if not kept or not all(0 <= index < num_layers for index in skipped):
        raise BadInputError(
            f"expected some of the layers 0 to {num_layers - 1} to be left out, got {list(skipped)}"
        )
    return kept


class LayeredRuntime(CachedRuntime):
    """Keeps what the first layers said of a draft until the others are asked about it."""

    runs_layers_apart = True
    _ahead: Ahead | None = None

    @abstractmethod
    def run_first(self, tokens: Tensor, step: Step, num_known: int, num_layers: int) -> Tensor:
        """States `[row, query, width]` behind the first layers.

        Args:
            tokens: `[row, query]`, what comes after `num_known` queries that have been through these layers.
            step: of all the queries, also the known ones.
            num_layers: how many layers.
        """

    @abstractmethod
    def run_rest(self, tokens: Tensor, states: Tensor, step: Step, num_layers: int) -> Output:
        """A whole forward's output, begun with `states` behind the first `num_layers` layers.

        Hidden states are wanted of the embeddings and of what comes behind these layers only.
        """

    # A round that was interrupted leaves behind what it read, and rows, lengths and draft may look the same again in a
    # cache that has been written anew since.
    def release(self) -> None:
        self._ahead = None
        super().release()

    def begin(self, rows: Sequence[Row]) -> list[Hidden]:
        self._ahead = None
        return super().begin(rows)

    def end(self, row: Row) -> None:
        self._ahead = None
        super().end(row)

    def rewind(self, rows: Sequence[Row], lengths: Sequence[int]) -> None:
        self._ahead = None
        super().rewind(rows, lengths)

    def read_ahead(self, rows: Sequence[Row], draft: Draft, num_layers: int) -> Tensor:
        slots = torch.tensor([self._states[row].slot for row in rows])
        order = slots.argsort()
        members = [self._states[rows[index]] for index in order.tolist()]
        draft = draft.select(order.to(self.device))
        if any(len(state.row.tokens) - state.length != 1 for state in members):
            raise BadInputError(
                "expected rows of which all but the last token is cached, got others; score them first"
            )
        ahead = self._ahead
        goes_on = ahead is not None and ahead.num_layers == num_layers and ahead.agrees_with(members, draft)
        known = ahead.states if ahead is not None and goes_on else None
        with torch.inference_mode():
            states = self._go_on(members, draft, known, num_layers)[2]
        lengths = [state.length for state in members]
        self._ahead = Ahead([state.row for state in members], lengths, draft, states, num_layers)
        return states[order.argsort()]

    def _go_on(
        self, members: Sequence[CachedRow], draft: Draft, known: Tensor | None, num_layers: int
    ) -> tuple[Tensor, Step, Tensor]:
        """A round's tokens, its step, and the states of all its queries behind the first layers."""
        starts = [state.length for state in members]
        queries = queries_of(members, [1] * len(members), draft)
        tokens = queries.tokens
        num_keys = -(-(max(starts) + draft.num_nodes + 1) // self._key_block) * self._key_block
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

    def _score(self, states: Sequence[CachedRow], draft: Draft) -> Scores:
        ahead, self._ahead = self._ahead, None
        if ahead is None or not ahead.agrees_with(states, draft):
            return super()._score(states, draft)
        if any(0 < layer % (self.num_layers + 1) < ahead.num_layers for layer in self.hidden_layers):
            return super()._score(states, draft)  # somebody else wants states that were not kept
        with torch.inference_mode():
            tokens, step, read = self._go_on(states, draft, ahead.states, ahead.num_layers)
            output = self.run_rest(tokens, read, step, ahead.num_layers)
        for state in states:
            state.length = len(state.row.tokens)
            state.num_nodes = draft.num_nodes
        logits = output.logits if output.logits.dtype == torch.float64 else output.logits.float()
        return Scores(logits, output.hidden)
