"""Runtime for Transformers modules with recurrent layers: hybrids and pure state-space models."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from secondguess.core import Draft, Row
from secondguess.runtime.base import ForwardOutput, HiddenStates
from secondguess.runtime.cached import UNLIMITED
from secondguess.runtime.modules.recurrent_cache import ComputeStates, RecurrentCache, Snapshot
from secondguess.runtime.modules.row_by_row import Probe, RowByRowRuntime
from secondguess.runtime.modules.scans import MAX_RECORDED, recording, replace_functions
from secondguess.runtime.modules.support import unsupported
from secondguess.runtime.slots import CachedRow
from secondguess.runtime.step import ForwardStep
from secondguess.runtime.system.exclusive import exclusive

MAX_REPLAYED = 6
"""Largest number of committed tokens that a pass over a draft runs again.

More of them run in a pass of their own, after which there is a snapshot. Otherwise rounds with
rejections that follow each other would run more and more tokens again.
"""


class RecurrentRuntime(RowByRowRuntime):
    """Runtime over a Transformers module whose layers have recurrent states.

    The cached length of a row is always that of a snapshot of its states. `score` runs the
    committed tokens after it and the draft in one pass, which leaves the snapshot unchanged. If
    the states after the accepted path are known, they are the next snapshot; otherwise the row
    stays at the old one, and the next pass begins with the accepted tokens. The states are known
    at the end of a path, and after each of its tokens if the layers are convolutions or have scans
    that record them (`scans.SCANS`).

    Each branch of a tree runs from the snapshot on. Modules that lose their states in a pass over
    several tokens (Mamba-1) run single tokens after the start of a text.

    Args:
        model: as in `ModuleRuntime`.

    Attributes:
        single_steps: True if only single tokens can follow a cache.
        records_states: False to run accepted tokens again even if states can be recorded.

    Raises:
        UnsupportedModelError: if the states are not in the cache, or several tokens at the start
            of a text give other results than single ones.
    """

    cache: RecurrentCache

    def __init__(self, model: Any) -> None:
        self.single_steps = False
        self.records_states = True
        self._ends: WeakKeyDictionary[CachedRow, dict[int, ComputeStates]] = WeakKeyDictionary()
        """States after the nodes of the draft scored last, -1 for pending, as far as they are known."""
        self.cache_class = _cache_class_of(model)
        replace_functions(model)
        super().__init__(model)

    @exclusive
    def probe(self, tokens: Tensor) -> ForwardOutput:
        self.cache.begin({}, tokens.shape[1])
        return super().probe(tokens)

    @property
    def description(self) -> str:
        return "single tokens" if self.single_steps else super().description

    @exclusive
    def admit(self, rows: Sequence[Row], reuse_limits: Sequence[int | None] | None = None) -> list[int]:
        super().admit(rows, reuse_limits)
        return [self._restore(self.slots[row]) for row in rows]

    @exclusive
    def rewind(self, rows: Sequence[Row], lengths: Sequence[int]) -> None:
        super().rewind(rows, lengths)
        for row in rows:
            self._restore(self.slots[row])

    @exclusive
    def keep(self, rows: Sequence[Row], paths: Sequence[Sequence[int]]) -> None:
        states = [self.slots[row] for row in rows]
        for state in states:
            state.length = len(state.row.tokens)
        super().keep(rows, paths)
        for state, path in zip(states, paths, strict=True):
            self._commit(state, path[-1] if path else -1)
            self._ends.pop(state, None)
            self.cache.prune(state.slot)

    def _score(self, states: Sequence[CachedRow], draft: Draft) -> ForwardOutput:
        scores = super()._score(states, draft)
        for state in states:
            self._commit(state, -1)
        return scores

    def _commit(self, state: CachedRow, last: int) -> None:
        """Move a row from its snapshot to the states after node `last`, if they are known.

        Its length must be that of the text up to this node.
        """
        start = self.cache.restore(state.slot, len(state.row.tokens))
        if (compute_states := self._ends.get(state, {}).get(last)) is not None:
            self.cache.add(state.slot, start, Snapshot(state.length, compute_states))
        state.length = self.cache.restore(state.slot, state.length)

    def _restore(self, state: CachedRow) -> int:
        """Move a row back to its last snapshot within its cached length; return its length."""
        self._ends.pop(state, None)
        state.length = self.cache.restore(state.slot, state.length)
        return state.length

    def _catch_up(self, states: Sequence[CachedRow]) -> list[int]:
        for state in states:
            state.length = min(state.length, len(state.row.tokens) - 1)
            self._restore(state)
        self._prefill([state for state in states if state.num_to_prefill > MAX_REPLAYED])
        return super()._catch_up(states)

    def _prefill_forward(
        self, states: Sequence[CachedRow], tokens: Tensor, with_hidden: bool
    ) -> HiddenStates:
        (state,) = states
        path = range(state.length, state.length + tokens.shape[1])
        is_prompt = path.stop < state.row.num_prompt
        output, known = self._run_from(
            state.slot, state.length, path, tokens[0].tolist(), self.min_logits, is_prompt
        )
        self._add(state.slot, state.length, path.stop, known)
        return output.hidden

    def _run_new_queries(
        self, states: Sequence[CachedRow], num_uncached: Sequence[int], draft: Draft, num_known: int
    ) -> Tensor:
        logits = super()._run_new_queries(states, num_uncached, draft, num_known)
        for state in states:
            self._ends.pop(state, None)  # those of the copy
        return logits

    def _run_branch(
        self,
        state: CachedRow,
        tokens: Sequence[int],
        known: Sequence[int],
        new: Sequence[int],
        num_logits: int,
    ) -> ForwardOutput:
        path = [*known, *new]
        positions = [state.length + query for query in path]
        output, after = self._run_from(
            state.slot, state.length, positions, [tokens[query] for query in path], num_logits
        )
        pending = len(state.row.tokens) - state.length - 1
        ends = {
            query - pending - 1: compute_states
            for query, compute_states in zip(path, after, strict=True)
            if compute_states is not None and query >= pending
        }
        self._ends[state] = self._ends.get(state, {}) | ends
        return output

    def _run_from(
        self,
        slot: int,
        start: int,
        positions: Sequence[int],
        tokens: Sequence[int],
        num_logits: int,
        is_prompt: bool = False,
    ) -> tuple[ForwardOutput, list[ComputeStates | None]]:
        """Run tokens of one path from the snapshot after `start` tokens on; return also the states after each, as far as known.

        Tokens of a prompt run in the module's own scans, as in `generate`; others in scans that record their states.
        """
        states = self.cache.states_at(slot, start)
        width = 1 if self.single_steps else MAX_RECORDED
        if is_prompt and not (self.single_steps and start):
            width = len(tokens)
        outputs: list[ForwardOutput] = []
        known: list[ComputeStates | None] = []
        for first in range(0, len(tokens), width):
            piece = tokens[first : first + width]
            self.cache.begin(states, len(piece), self.records_states and not is_prompt)
            self.cache.place_path(slot, start, positions[: first + len(piece)], len(piece))
            outputs.append(self._run_path(piece, start + first, min(num_logits, len(piece))))
            known += self.cache.states_by_token()
            states = _last(known)()
        hidden = {
            layer: torch.cat([output.hidden[layer] for output in outputs], dim=1)
            for layer in self.hidden_layers
        }
        return ForwardOutput(torch.cat([output.logits for output in outputs], dim=1), hidden), known

    def run(self, tokens: Tensor, step: ForwardStep, num_logits: int, with_hidden: bool) -> ForwardOutput:
        with recording(self.cache.record if self.cache.records else None):
            return super().run(tokens, step, num_logits, with_hidden)

    def _add(self, slot: int, start: int, length: int, known: Sequence[ComputeStates | None]) -> None:
        """Add the states after the last of the tokens from `start` to `length` as a snapshot."""
        self.cache.add(slot, start, Snapshot(length, _last(known)))

    def _probe(self, tokens: Sequence[int], start: int, is_prompt: bool = False) -> Probe:
        stop = start + len(tokens)
        is_prompt = is_prompt or not start
        output, known = self._run_from(0, start, range(start, stop), tokens, len(tokens), is_prompt)
        self._add(0, start, stop, known)
        return Probe(output.logits[0, -len(tokens) :].double(), _last(known)())

    def _require_equal(self, error: float, error_of_single: float) -> None:
        if not self.cache.snapshots[0][-1].states:
            raise unsupported(type(self.model).__name__, "its recurrent states are not in its cache")
        self.single_steps = not self._is_rounding(error)
        if self.single_steps:
            self._require_rounding(
                error_of_single, "single tokens after a cache give other results than one pass"
            )
            self.prefill_chunk = UNLIMITED  # as a second piece of a prompt would run in single tokens


def _last(known: Sequence[ComputeStates | None]) -> ComputeStates:
    """Return the states after the last token, which are always known."""
    assert known[-1] is not None
    return known[-1]


def _cache_class_of(model: Any) -> type[RecurrentCache]:
    """Return the class of the cache; the module of MiniMax accepts only subclasses of its own class."""
    own = getattr(sys.modules[type(model).__module__], "MiniMaxCache", None)
    if own is None:
        return RecurrentCache
    return type("RecurrentMiniMaxCache", (RecurrentCache, own), {"linear_cache": ()})
