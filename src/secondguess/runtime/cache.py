"""Preallocated KV cache of all rows: `[slot, kv_head, position, head_size]` for each layer.

Each active row owns a slot. Slots stay contiguous, so that a round over all rows reads views.
Rollback of a chain is free (a smaller length); the accepted path of a tree is moved to consecutive
positions. The cache does not depend on the model: shapes are those of the tensors passed in, which
is also correct if heads are spread over devices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from secondguess.runtime.system.machine import allocate_pages

MIN_CAPACITY = 256


@dataclass(frozen=True)
class Placement:
    """Cache positions that one forward pass writes and reads.

    Args:
        num_rows: number of rows in the forward pass.
        num_keys: number of cache positions that are read, from the first.
        start: first position written, if it is the same for every row; else None.
        positions: `[row, query]` int64, positions written, if rows differ; else None.
        slots: `[row]` int64, slots of the rows; None if row `i` is in slot `first_slot + i`.
        first_slot: slot of the first row, if `slots` is None.
        keys: `[key]` int64, positions that are read; None for the first `num_keys`.
        num_cached: number of tokens cached before, of the row with the fewest.
    """

    num_rows: int
    num_keys: int
    start: int | None = None
    positions: Tensor | None = None
    slots: Tensor | None = None
    first_slot: int = 0
    keys: Tensor | None = None
    num_cached: int = 0


@dataclass(eq=False)
class KeyValueCache:
    """KV cache of one model.

    The runtime calls `place` before each forward pass; attention layers call `update`.

    Args:
        device: device of the slot and position indices.
        keys, values: by layer.
        indexes: by layer, for attention that chooses keys with an index of its own.
    """

    device: torch.device
    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
    indexes: list[Tensor] = field(default_factory=list)
    num_slots: int = 0
    capacity: int = 0
    placement: Placement = Placement(0, 0)

    # Modules of Transformers read these from any cache, for positions and masks of their own. With `step_mask`
    # and explicit positions the values have no effect.
    is_compileable = False
    is_sliding = ()  # layers that drop keys behind a window: none does

    @property
    def layers(self) -> Any:
        return ()  # cached states of an encoder, of which a text alone has none

    @property
    def is_initialized(self) -> bool:
        return self.placement.num_cached > 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.placement.num_cached

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self.placement.num_cached

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.placement.num_keys, 0

    def allocate(
        self,
        num_layers: int,
        num_heads: int,
        head_size: int,
        dtype_of_keys: torch.dtype,
        dtype_of_values: torch.dtype,
    ) -> None:
        """Allocate all layers that are not yet, for runtimes that write to the tensors without `update`."""
        shape = (self.num_slots, num_heads, self.capacity, head_size)
        missing = num_layers - len(self.keys)
        if missing > 0:
            self.keys, self.values = (
                [*blocks, *(_zeros(shape, dtype, self.device) for _ in range(missing))]
                for blocks, dtype in ((self.keys, dtype_of_keys), (self.values, dtype_of_values))
            )

    def place(
        self, starts: Sequence[int], num_queries: int, slots: Sequence[int], num_keys: int
    ) -> Placement:
        """Set the placement of the next forward pass, and grow the cache if needed.

        Row `i` writes `num_queries` tokens from position `starts[i]` of slot `slots[i]` and reads
        the first `num_keys` positions.
        """
        self.reserve(max(slots) + 1, num_keys)
        in_order = list(slots) == list(range(len(slots)))
        uniform = starts.count(starts[0]) == len(starts)
        slot_index = None if in_order else torch.tensor(slots, device=self.device)
        positions = None
        if not (in_order and uniform):
            offsets = torch.arange(num_queries, device=self.device)
            positions = torch.tensor(starts, device=self.device)[:, None] + offsets
        start = starts[0] if positions is None else None
        self.placement = Placement(len(slots), num_keys, start, positions, slot_index, num_cached=min(starts))
        return self.placement

    def place_path(self, slot: int, start: int, path: Sequence[int], num_queries: int) -> None:
        """Set the placement of a forward pass over one path of one row.

        It reads the first `start` positions of the slot and those of `path`, which follow them in
        ascending order, and writes the last `num_queries` of these.
        """
        num_keys = start + len(path)
        self.reserve(slot + 1, path[-1] + 1)
        placement = Placement(1, num_keys, first_slot=slot, num_cached=num_keys - num_queries)
        if path[-1] + 1 == num_keys:  # no gap
            self.placement = replace(placement, start=placement.num_cached)
            return
        index = torch.tensor(path, device=self.device)
        keys = torch.cat((torch.arange(start, device=self.device), index))
        self.placement = replace(placement, positions=index[None, -num_queries:], keys=keys)

    def update(
        self, key: Tensor, value: Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        """Write a layer's new keys and values `[row, kv_head, query, head_size]`; return all that are read."""
        return self._write(self.keys, key, layer_idx), self._write(self.values, value, layer_idx)

    def update_indexer(self, states: Tensor, layer_idx: int) -> Tensor:
        """Write a layer's index `[row, query, size]` of the new tokens; return that of all tokens that are read."""
        return self._write(self.indexes, states[:, None], layer_idx)[:, 0]

    def _write(self, blocks: list[Tensor], new: Tensor, layer_idx: int) -> Tensor:
        # Modules may leave layers out, or call them in another order than that of their indices.
        missing = layer_idx + 1 - len(blocks)
        blocks += [new.new_zeros(self.num_slots, 0, self.capacity, 0)] * missing
        if not blocks[layer_idx].shape[1]:
            blocks[layer_idx] = _empty(new, self.num_slots, self.capacity)
        block, placement = blocks[layer_idx], self.placement
        if placement.slots is not None:
            block[placement.slots[:, None], :, placement.positions] = new.transpose(1, 2)
            return block.narrow(2, 0, placement.num_keys).index_select(0, placement.slots)
        whole = placement.num_rows == block.shape[0]
        rows = block if whole else block.narrow(0, placement.first_slot, placement.num_rows)
        if placement.start is not None:
            rows.narrow(2, placement.start, new.shape[2]).copy_(new)
        else:
            row_index = torch.arange(placement.num_rows, device=new.device)
            rows[row_index[:, None], :, placement.positions] = new.transpose(1, 2)
        if placement.keys is not None:
            return rows.index_select(2, placement.keys)
        return rows.narrow(2, 0, placement.num_keys)

    def compact(self, slots: Sequence[int], starts: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        """Move the accepted paths of trees to consecutive positions.

        In slot `slots[i]` the tokens at `starts[i] + paths[i]` are moved to `starts[i]` and
        following.
        """
        depth = max(len(path) for path in paths)
        # shorter paths are padded with positions that are copied to themselves
        filled = [[*path, *range(len(path), depth)] for path in paths]
        slot_index = torch.tensor(slots, device=self.device)[:, None]
        start_index = torch.tensor(starts, device=self.device)[:, None]
        target = start_index + torch.arange(depth, device=self.device)
        source = start_index + torch.tensor(filled, device=self.device)
        for block in (*self.keys, *self.values, *self.indexes):
            block[slot_index, :, target] = block[slot_index, :, source]

    def is_finite(self, slot: int, length: int) -> bool:
        """Return whether the first `length` positions of a slot hold finite entries, as the last layer shows."""
        for blocks in (self.keys, self.values):
            last = next((block for block in reversed(blocks) if block.shape[1]), None)
            if last is None or slot >= len(last):  # some layers cache nothing
                continue
            # The sum of numbers in float16 may overflow.
            dtype = torch.promote_types(last.dtype, torch.float32)
            if not math.isfinite(last[slot, :, :length].sum(dtype=dtype)):
                return False
        return True

    def erase(self, slot: int, start: int, end: int | None = None) -> None:
        """Set the entries of a slot from position `start` on, up to `end`, to zero."""
        for block in (*self.keys, *self.values, *self.indexes):
            if slot < len(block):
                block[slot, :, start:end] = 0

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of one slot to another."""
        if not length:
            return
        for block in (*self.keys, *self.values, *self.indexes):
            block[target, :, :length] = block[source, :, :length]

    def move(self, source: int, target: int, length: int) -> None:
        """Move the first `length` positions of one slot to another; those that it had are undefined afterwards."""
        self.copy(source, target, length)

    def swap(self, first: int, second: int, length: int) -> None:
        """Exchange the first `length` positions of two slots."""
        if not length:
            return
        for block in (*self.keys, *self.values, *self.indexes):
            kept = block[first, :, :length].clone()
            block[first, :, :length] = block[second, :, :length]
            block[second, :, :length] = kept

    def reusable(self, slot: int, length: int) -> int:
        """Return how many of the first `length` positions of a slot a row can start with."""
        return length

    def restore(self, slot: int, length: int) -> int:
        """Drop what a slot has after `length` tokens; return how many of these the next pass can continue from."""
        return length

    def first_node(self, slot: int, length: int) -> int:
        """Return the position of the first node of the draft scored last, in a slot of `length` tokens."""
        return length

    def commit(self, slot: int, start: int, path: Sequence[int] | None = None) -> int:
        """Return how many tokens the next pass can continue from after a pass that has run `start` tokens and a draft.

        `path` are the nodes of the draft that are kept, after which it is over; None while that is not decided.
        """
        return start + len(path or ())

    def clear(self) -> None:
        """Free all memory; the next `place` or `reserve` allocates what it needs."""
        self.keys, self.values, self.indexes, self.num_slots, self.capacity = [], [], [], 0, 0

    def num_tokens_to_allocate(self, num_slots: int, num_positions: int) -> int:
        """Return the number of tokens to allocate for this many slots and positions; 0 if they fit already."""
        if num_slots <= self.num_slots and num_positions <= self.capacity:
            return 0
        slots, capacity = self._grown_size(num_slots, num_positions)
        return slots * capacity

    def _grown_size(self, num_slots: int, num_positions: int) -> tuple[int, int]:
        slots = _doubled(self.num_slots or 1, num_slots)
        return slots, _doubled(self.capacity or MIN_CAPACITY, num_positions)

    def reserve(self, num_slots: int, num_positions: int, num_used: int | None = None) -> None:
        """Grow the cache to `num_slots` slots of `num_positions` positions, unless they fit already.

        `num_used` is the number of positions that hold entries; None for all.
        """
        if num_slots <= self.num_slots and num_positions <= self.capacity:
            return
        slots, capacity = self._grown_size(num_slots, num_positions)
        # Allocate everything before assigning, so that running out of memory leaves the cache
        # unchanged.
        keys, values, indexes = (
            [_grown(block, slots, capacity, num_used) for block in blocks]
            for blocks in (self.keys, self.values, self.indexes)
        )
        self.keys, self.values, self.indexes = keys, values, indexes
        self.num_slots, self.capacity = slots, capacity


@dataclass(eq=False)
class IndexedCache(KeyValueCache):
    """KV cache for kernels that take the slot of each row: slots are exchanged without moving their entries.

    Its placements have the slots alone: the kernels get the positions otherwise.

    Args:
        blocks: for each slot, the index in `keys` and `values` of its entries.
    """

    blocks: list[int] = field(default_factory=list)

    def place(
        self, starts: Sequence[int], num_queries: int, slots: Sequence[int], num_keys: int
    ) -> Placement:
        self.reserve(max(slots) + 1, num_keys)
        blocks = _index(tuple([self.blocks[slot] for slot in slots]))
        self.placement = Placement(len(slots), num_keys, slots=blocks, num_cached=min(starts))
        return self.placement

    def compact(self, slots: Sequence[int], starts: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        super().compact([self.blocks[slot] for slot in slots], starts, paths)

    def is_finite(self, slot: int, length: int) -> bool:
        return True  # for the kernels, which read no entries of other rows

    def erase(self, slot: int, start: int, end: int | None = None) -> None:
        """Do nothing: see `is_finite`."""

    def copy(self, source: int, target: int, length: int) -> None:
        if length:
            super().copy(self.blocks[source], self.blocks[target], length)

    def move(self, source: int, target: int, length: int) -> None:
        self.swap(source, target, length)

    def swap(self, first: int, second: int, length: int) -> None:
        if length:  # else a slot may not be allocated
            blocks = list(self.blocks)
            blocks[first], blocks[second] = blocks[second], blocks[first]
            self.blocks = blocks  # in one step, so that an interrupt leaves no block in two slots

    def clear(self) -> None:
        self.blocks = []
        super().clear()

    def reserve(self, num_slots: int, num_positions: int, num_used: int | None = None) -> None:
        super().reserve(num_slots, num_positions, num_used)
        self.blocks += range(len(self.blocks), self.num_slots)


@lru_cache(maxsize=256)
def _index(blocks: tuple[int, ...]) -> Tensor:
    """Return indices as a tensor, cached because those of a batch recur."""
    return torch.tensor(blocks)


def _grown(block: Tensor, num_slots: int, capacity: int, num_used: int | None) -> Tensor:
    grown = _empty(block, num_slots, capacity)
    used = block[:, :, :num_used]
    grown[: used.shape[0], :, : used.shape[2]] = used
    return grown


def _empty(like: Tensor, num_slots: int, capacity: int) -> Tensor:
    # zeros, not empty: attention multiplies masked values by zero, and 0 * nan is nan
    return _zeros((num_slots, like.shape[1], capacity, like.shape[3]), like.dtype, like.device)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor of zeros, on a CPU in pages that the system clears when they are first used.

    Torch writes all zeros at once, which delays the rows that decode while the cache grows.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    if not num_bytes:
        return torch.zeros(shape, dtype=dtype)
    return torch.frombuffer(allocate_pages(num_bytes), dtype=dtype).view(shape)


def _doubled(size: int, needed: int) -> int:
    while size < needed:
        size *= 2
    return size
