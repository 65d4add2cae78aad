"""KV cache of a block drafter over the target's features of all committed tokens.

Only committed tokens are appended, so there is no rollback. A draft block writes its own keys and
values after them; the next append or the next block overwrites these.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from secondguess.core import Row
from secondguess.heads.layer import AttentionFunction, attention
from secondguess.runtime.cache import KeyValueCache


class FeatureCache:
    """KV caches of all rows, one tensor of keys and one of values per layer."""

    def __init__(self, device: torch.device) -> None:
        self._cache = KeyValueCache(device)
        self._slots: dict[Row, int] = {}
        self._by_slot: list[Row] = []
        self._lengths: dict[Row, int] = {}

    def length(self, row: Row) -> int:
        """Return the number of cached tokens of a row; 0 for an unknown row."""
        return self._lengths.get(row, 0)

    def append(
        self, rows: Sequence[Row], counts: Sequence[int], keys_values: Sequence[tuple[Tensor, Tensor]]
    ) -> None:
        """Append `counts[i]` keys and values to row i; new rows are admitted.

        Args:
            keys_values: keys and values per layer, `[row, kv_head, position, size]` each; entries
                beyond a row's count are padding.
        """
        for row in rows:
            if row not in self._slots:
                self._slots[row] = len(self._by_slot)
                self._by_slot.append(row)
                self._lengths[row] = 0
        self._place(rows, keys_values[0][0].shape[2])
        for layer, (keys, values) in enumerate(keys_values):
            self._cache.update(keys, values, layer)
        for row, count in zip(rows, counts, strict=True):
            self._lengths[row] += count

    def attend(self, rows: Sequence[Row], width: int) -> AttentionFunction:
        """Return the attention function of a draft block of `width` positions per row.

        Each position attends to the row's cached tokens and to all positions of the block.
        """
        num_keys = self._place(rows, width)
        ends = [self.length(row) + width for row in rows]
        mask: Tensor | None = None
        if min(ends) < num_keys:
            places = torch.arange(num_keys, device=self._cache.device)
            mask = (places < torch.tensor(ends, device=self._cache.device)[:, None])[:, None, None]

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            keys, values = self._cache.update(key, value, layer)
            return attention(query, keys, values, mask)

        return attend

    def end(self, row: Row) -> None:
        """Release a row; does nothing for an unknown row."""
        slot = self._slots.pop(row, None)
        if slot is None:
            return
        del self._lengths[row]
        last = self._by_slot.pop()
        if last is not row:  # slots stay contiguous: the last row moves into the freed slot
            with torch.inference_mode():
                self._cache.move(self._slots[last], slot, self._lengths[last])
            self._slots[last] = slot
            self._by_slot[slot] = last

    def _place(self, rows: Sequence[Row], width: int) -> int:
        """Place the next cache update after each row's cached tokens.

        Returns:
            The number of cache positions that attention reads.
        """
        starts = [self._lengths[row] for row in rows]
        num_keys = max(starts) + width
        self._cache.place(starts, width, [self._slots[row] for row in rows], num_keys)
        return num_keys
