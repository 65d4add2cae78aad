"""KV cache of models whose layers also have recurrent states (Mamba, linear attention, convolutions).

A recurrent state is a sum over all tokens before it, so rejected ones cannot be removed from it. The cache
keeps snapshots of the states at some lengths of a row, and a row continues from one of these. No
tensor of a snapshot is changed in place: copies of a row share them, and a pass that fails leaves
them as they were.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from secondguess.errors import SecondGuessError
from secondguess.runtime.cache import KeyValueCache, Placement

StateKey = tuple[str, int, int]
"""Key of a state: its kind (`conv` or `recurrent`), its layer, and its index in the layer."""
States = dict[StateKey, Tensor]
"""Recurrent states of one row after some token."""
ComputeStates = Callable[[], States]
"""Function that returns states, which are computed only then if they were not needed in the pass."""
MAX_REWIND = 31
"""Number of tokens for which a row can be rewound without starting over, if it was never pruned."""


@dataclass(eq=False)
class Snapshot:
    """Recurrent states of a row after its first `length` tokens, computed when they are first used.

    The snapshot after `pending` is replaced before its states are used if drafts are accepted.
    """

    length: int
    compute_states: ComputeStates

    @cached_property
    def states(self) -> States:
        """The states."""
        states = self.compute_states()
        self.compute_states = lambda: states  # frees what they were computed from
        return states


class ScoredDraft(NamedTuple):
    """Recurrent states after the nodes of a draft.

    Args:
        start: number of tokens before its first node.
        ends: states after the nodes, -1 for pending, as far as they are known.
    """

    start: int
    ends: dict[int, ComputeStates]


@dataclass(frozen=True)
class ByIndex:
    """Values that a function returns for indices; empty for loops, as `KeyValueCache.layers`."""

    get: Callable[[int], Any]

    def __getitem__(self, index: int) -> Any:
        return self.get(index)

    def __len__(self) -> int:
        return 0

    def __iter__(self) -> Iterator[Any]:
        return iter(())


@dataclass(eq=False)
class RecurrentCache(KeyValueCache):
    """KV cache that also holds snapshots of recurrent states, by slot.

    The runtime calls `begin` before a forward pass over one row; linear layers read and write the
    states of the pass with the methods of Transformers' caches; afterwards `states_by_token` has
    the states that the pass has left. Only `add` makes them a snapshot.

    Args:
        snapshots: by slot, in ascending order of their lengths.
        drafts: by slot, the draft scored last.
        records: True if the current pass keeps the states after each token.
    """

    snapshots: dict[int, list[Snapshot]] = field(default_factory=dict)
    drafts: dict[int, ScoredDraft] = field(default_factory=dict)
    records: bool = False
    _num_tokens: int = 0
    _before: States = field(default_factory=dict)
    _after: States = field(default_factory=dict)
    _by_token: dict[StateKey, Sequence[Tensor]] = field(default_factory=dict)
    _recorded: Sequence[Tensor] | None = None

    def begin(self, states: States, num_tokens: int, records: bool = False) -> None:
        """Start a forward pass; with `records`, the states after each token are kept as far as they are known."""
        self._num_tokens, self.records = num_tokens, records
        self._before, self._after = states, dict(states)
        self._by_token, self._recorded = {}, None

    def place(
        self, starts: Sequence[int], num_queries: int, slots: Sequence[int], num_keys: int
    ) -> Placement:
        """Place a forward pass over whole sequences, from the first token on."""
        self.begin({}, num_queries)
        return super().place(starts, num_queries, slots, num_keys)

    def record(self, states: Sequence[Tensor]) -> None:
        """Take the recurrent states after each token but the last, before the layer writes the last."""
        self._recorded = states

    def states_by_token(self) -> list[ComputeStates | None]:
        """Return the states after each token of the last pass, None where a layer has not kept them."""
        after, by_token = self._after, self._by_token
        known = by_token.keys() >= after.keys()

        def between(step: int) -> States:
            return {key: by_token[key][step] for key in after}

        steps = range(self._num_tokens - 1)
        return [*(partial(between, step) if known else None for step in steps), lambda: after]

    def states_at(self, slot: int, length: int) -> States:
        """Return the states of a slot after `length` tokens, of which there must be a snapshot."""
        if not length:
            return {}
        found = [each.states for each in self.snapshots.get(slot, ()) if each.length == length]
        if not found:
            raise SecondGuessError(f"expected a snapshot of slot {slot} after {length} tokens, got none")
        return found[0]

    def add(self, slot: int, start: int, snapshot: Snapshot) -> None:
        """Add a snapshot to a slot whose row had `start` tokens; drop some that are close together."""
        self._truncate(slot, start)
        farthest: dict[int, Snapshot] = {}
        for each in (*self.snapshots.get(slot, ()), snapshot):
            farthest.setdefault((snapshot.length - each.length).bit_length(), each)
        self.snapshots[slot] = [
            each for each in farthest.values() if snapshot.length - each.length <= MAX_REWIND
        ]

    def add_ends(self, slot: int, start: int, ends: dict[int, ComputeStates]) -> None:
        """Add the states after nodes of a draft, whose first node follows `start` tokens."""
        known = self.drafts[slot].ends if slot in self.drafts else {}
        self.drafts[slot] = ScoredDraft(start, known | ends)

    def restore(self, slot: int, length: int) -> int:
        self.drafts.pop(slot, None)
        return self._truncate(slot, length)

    def first_node(self, slot: int, length: int) -> int:
        return self.drafts[slot].start if slot in self.drafts else length

    def commit(self, slot: int, start: int, path: Sequence[int] | None = None) -> int:
        """Move a slot on to the states after the last node of the path, or pending, if they are known."""
        before, length = self._truncate(slot, start), start + len(path or ())
        ends = self.drafts[slot].ends if slot in self.drafts else {}
        if (compute_states := ends.get(path[-1] if path else -1)) is not None:
            self.add(slot, before, Snapshot(length, compute_states))
        left = self._truncate(slot, length)
        if path is not None:
            self.drafts.pop(slot, None)
            del self.snapshots[slot][:-1]
        return left

    def _truncate(self, slot: int, length: int) -> int:
        """Drop the snapshots beyond `length` tokens; return the length of the last one left, or 0."""
        left = [each for each in self.snapshots.get(slot, ()) if each.length <= length]
        self.snapshots[slot] = left
        return left[-1].length if left else 0

    def reusable(self, slot: int, length: int) -> int:
        return max((each.length for each in self.snapshots.get(slot, ()) if each.length <= length), default=0)

    def copy(self, source: int, target: int, length: int) -> None:
        super().copy(source, target, length)
        self.snapshots[target] = [each for each in self.snapshots.get(source, ()) if each.length <= length]

    def move(self, source: int, target: int, length: int) -> None:
        super().move(source, target, length)
        self.drafts = {
            target if slot == source else slot: draft for slot, draft in self.drafts.items() if slot != target
        }

    def swap(self, first: int, second: int, length: int) -> None:
        super().swap(first, second, length)
        held = self.snapshots.get(first, []), self.snapshots.get(second, [])
        self.snapshots[second], self.snapshots[first] = held
        other = {first: second, second: first}
        self.drafts = {other.get(slot, slot): draft for slot, draft in self.drafts.items()}

    def clear(self) -> None:
        super().clear()
        self.snapshots.clear()
        self.drafts.clear()
        self.begin({}, 0)

    # Methods of Transformers' caches that linear layers call.

    @property
    def layers(self) -> Any:
        """States of each layer, which modules read here before Transformers 5.21."""
        return ByIndex(
            lambda layer_idx: SimpleNamespace(
                conv_states=ByIndex(partial(self.get_conv_state, layer_idx)),
                recurrent_states=ByIndex(partial(self.get_recurrent_state, layer_idx)),
                record_past=False,
            )
        )

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int = 0) -> bool:
        return bool(self._before) if layer_idx is None else ("conv", layer_idx, state_idx) in self._before

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self._initial_state(("conv", layer_idx, state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self._initial_state(("recurrent", layer_idx, state_idx))

    def update_conv_state(
        self,
        conv_states: Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **_: object,
    ) -> Tensor:
        """Write a layer's new inputs, whose last dimension is the query; return all inputs that its convolution reads.

        `conv_kernel_size` is the number of inputs to keep; as many as given, by default.
        """
        key = ("conv", layer_idx, state_idx)
        size = conv_kernel_size or conv_states.shape[-1]
        before = self._before.get(key)
        whole = conv_states if before is None else torch.cat([before, conv_states], dim=-1)
        whole = _padded(whole, size)
        self._after[key] = whole[..., -size:].clone()
        if conv_kernel_size is not None and self.records:
            # Without a size, a layer passes its state instead of its inputs.
            inputs = _padded(whole, size + self._num_tokens)
            ends = range(inputs.shape[-1] - self._num_tokens + 1, inputs.shape[-1])
            self._by_token[key] = [inputs[..., end - size : end] for end in ends]
        return whole

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: object
    ) -> Tensor:
        """Write a layer's state after the last token, which keeps the dtype that it had at first."""
        key = ("recurrent", layer_idx, state_idx)
        first = self._before.get(key, recurrent_states)
        if self._recorded is None:
            # A copy, as the tensor may be a view of the states after every chunk.
            self._after[key] = recurrent_states.to(
                first.dtype, copy=True, memory_format=torch.contiguous_format
            )
        else:
            self._after[key] = recurrent_states.to(first.dtype)
            self._by_token[key], self._recorded = self._recorded, None
        return self._after[key]

    def get_linear_cache(self, layer_idx: int) -> Tensor | None:
        return self.get_recurrent_state(layer_idx)

    def set_linear_cache(self, layer_idx: int, linear_cache: Tensor) -> None:
        self.update_recurrent_state(linear_cache, layer_idx)

    def _initial_state(self, key: StateKey) -> Tensor | None:
        """Return a state at the start of the pass; a pass over one token changes it in place."""
        state = self._before.get(key)
        if state is None or self._num_tokens > 1:
            return state
        self._after[key] = state.clone()
        return self._after[key]


def _padded(values: Tensor, num_tokens: int) -> Tensor:
    """Return values with zeros before the first token, if there are fewer than `num_tokens` tokens."""
    missing = num_tokens - values.shape[-1]
    return pad(values, (missing, 0)) if missing > 0 else values
