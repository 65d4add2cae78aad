"""KV cache of a block drafter over the target's features of all committed tokens.

Only committed tokens are appended, so rounds need no rollback. A draft block writes its own keys and
values after them; the next append or the next block overwrites these.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from secondguess.core import Row
from secondguess.heads.layer import attention
from secondguess.heads.parts import AttentionFunction
from secondguess.runtime.cache import KeyValueCache
from secondguess.runtime.slots import SlotTable


class FeatureCache:
    """KV caches of all rows, one tensor of keys and one of values per layer."""

    def __init__(self, device: torch.device) -> None:
        self.cache = KeyValueCache(device)
        self._slots = SlotTable(self.cache)

    def __contains__(self, row: Row) -> bool:
        return row in self._slots

    def length(self, row: Row) -> int:
        """Return the number of cached tokens of a row; 0 for an unknown row."""
        return self._slots[row].length if row in self._slots else 0

    def admit(self, rows: Sequence[Row], reuse_limits: Sequence[int | None] | None = None) -> list[int]:
        """Add rows; return the numbers of tokens that are cached already (`SlotTable.admit`)."""
        return [state.length for state in self._slots.admit(rows, reuse_limits)]

    def crop(self, row: Row, length: int) -> None:
        """Keep at most the first `length` cached tokens of a row."""
        self._slots[row].length = min(self._slots[row].length, length)

    def append(
        self, rows: Sequence[Row], counts: Sequence[int], keys_values: Sequence[tuple[Tensor, Tensor]]
    ) -> None:
        """Append `counts[i]` keys and values to row i; new rows are admitted.

        Args:
            keys_values: keys and values per layer, `[row, kv_head, position, size]` each; entries
                beyond a row's count are padding.
        """
        self.place_new(rows, keys_values[0][0].shape[2])
        for layer, (keys, values) in enumerate(keys_values):
            self.cache.update(keys, values, layer)
        self.advance(rows, counts)

    def place_new(self, rows: Sequence[Row], width: int) -> tuple[list[int], int]:
        """Place the next cache update as `place` does; new rows are admitted."""
        new = [row for row in rows if row not in self._slots]
        self.admit(new, [0] * len(new))
        return self.place(rows, width)

    def advance(self, rows: Sequence[Row], counts: Sequence[int]) -> None:
        """Count `counts[i]` tokens that have been written for row i."""
        for row, count in zip(rows, counts, strict=True):
            self._slots[row].length += count

    def attend(self, rows: Sequence[Row], width: int) -> AttentionFunction:
        """Return the attention function of a draft block of `width` positions per row.

        Each position attends to the row's cached tokens and to all positions of the block.
        """
        starts, num_keys = self.place(rows, width)
        ends = [start + width for start in starts]
        mask: Tensor | None = None
        if min(ends) < num_keys:
            places = torch.arange(num_keys, device=self.cache.device)
            mask = (places < torch.tensor(ends, device=self.cache.device)[:, None])[:, None, None]

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            keys, values = self.cache.update(key, value, layer)
            return attention(query, keys, values, mask)

        return attend

    def release(self, row: Row) -> None:
        """Release a row; does nothing for an unknown row."""
        self._slots.release(row)

    def reset_prefix_cache(self) -> None:
        """Forget the entries of released rows."""
        self._slots.forget()

    def place(self, rows: Sequence[Row], width: int) -> tuple[list[int], int]:
        """Place the next cache update after each row's cached tokens.

        Returns:
            The number of cached tokens per row, and that of cache positions that attention reads.
        """
        states = [self._slots[row] for row in rows]
        starts = [state.length for state in states]
        num_keys = max(starts) + width
        self.cache.place(starts, width, [state.slot for state in states], num_keys)
        return starts, num_keys
