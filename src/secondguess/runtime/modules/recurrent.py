"""Forward passes of Transformers modules with recurrent layers: hybrids and pure state-space models."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from secondguess.runtime.base import ForwardOutput, HiddenStates
from secondguess.runtime.modules.recurrent_cache import ComputeStates, RecurrentCache, Snapshot
from secondguess.runtime.modules.row_by_row import PathForward, Probe
from secondguess.runtime.modules.scans import MAX_RECORDED, recording, replace_functions
from secondguess.runtime.modules.support import unsupported
from secondguess.runtime.slots import CachedRow
from secondguess.runtime.step import ForwardStep

MAX_REPLAYED = 6
"""Largest number of committed tokens that a pass over a draft runs again.

More of them run in a pass of their own, after which there is a snapshot. Otherwise rounds with
rejections that follow each other would run more and more tokens again.
"""


class RecurrentForward(PathForward):
    """Forward passes of a module whose layers have recurrent states.

    The cached length of a row is always that of a snapshot of its states. A pass over a draft begins with the committed
    tokens after it, and leaves the snapshot unchanged. If the states after the accepted path are known, they are the next
    snapshot; otherwise the row stays at the old one, and the next pass begins with the accepted tokens. The states are known
    at the end of a path, and after each of its tokens if the layers are convolutions or have scans
    that record them (`scans.SCANS`).

    Each branch of a tree runs from the snapshot on. Modules that lose their states in a pass over
    several tokens (Mamba-1) run single tokens after the start of a text.

    Attributes:
        records_states: False to run accepted tokens again even if states can be recorded.
    """

    max_uncached = MAX_REPLAYED
    cache: RecurrentCache

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.cache_class = _cache_class_of(model)
        self.records_states = True
        replace_functions(model)

    @property
    def description(self) -> str:
        return "single tokens" if self.single_steps else "row by row"

    def run(
        self, tokens: Tensor, step: ForwardStep, num_logits: int, hidden_layers: Sequence[int]
    ) -> ForwardOutput:
        with recording(self.cache.record if self.cache.records else None):
            return super().run(tokens, step, num_logits, hidden_layers)

    def prefill(self, state: CachedRow, tokens: list[int], hidden_layers: Sequence[int]) -> HiddenStates:
        path = range(state.length, state.length + len(tokens))
        is_prompt = path.stop < state.row.num_prompt
        output, known = self._run_from(state.slot, state.length, path, tokens, 1, hidden_layers, is_prompt)
        self.cache.add(state.slot, state.length, Snapshot(path.stop, _last(known)))
        return output.hidden

    def run_branch(
        self,
        state: CachedRow,
        tokens: Sequence[int],
        known: Sequence[int],
        new: Sequence[int],
        num_logits: int,
        hidden_layers: Sequence[int],
    ) -> ForwardOutput:
        path = [*known, *new]
        positions, path_tokens = [state.length + query for query in path], [tokens[query] for query in path]
        output, after = self._run_from(
            state.slot, state.length, positions, path_tokens, num_logits, hidden_layers
        )
        pending = len(state.row.tokens) - state.length - 1
        ends = {
            query - pending - 1: compute_states
            for query, compute_states in zip(path, after, strict=True)
            if compute_states is not None and query >= pending
        }
        self.cache.add_ends(state.slot, len(state.row.tokens), ends)
        return output

    def _run_from(
        self,
        slot: int,
        start: int,
        positions: Sequence[int],
        tokens: list[int],
        num_logits: int,
        hidden_layers: Sequence[int],
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
            outputs.append(self.run_path(piece, start + first, min(num_logits, len(piece)), hidden_layers))
            known += self.cache.states_by_token()
            states = _last(known)()
        hidden = {
            layer: torch.cat([output.hidden[layer] for output in outputs], dim=1) for layer in hidden_layers
        }
        return ForwardOutput(torch.cat([output.logits for output in outputs], dim=1), hidden), known

    def probe(self, tokens: list[int], start: int, is_prompt: bool = False) -> Probe:
        path, is_prompt = range(start, start + len(tokens)), is_prompt or not start
        output, known = self._run_from(0, start, path, tokens, len(tokens), (), is_prompt)
        self.cache.add(0, start, Snapshot(path.stop, _last(known)))
        return Probe(output.logits[0, -len(tokens) :].double(), _last(known)())

    def accept(self, error: float, error_of_single: float) -> None:
        if not self.cache.snapshots[0][-1].states:
            raise unsupported(type(self.call.model).__name__, "its recurrent states are not in its cache")
        self.single_steps = not self.is_rounding(error)
        if self.single_steps:
            self.require_rounding(
                error_of_single, "single tokens after a cache give other results than one pass"
            )


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
