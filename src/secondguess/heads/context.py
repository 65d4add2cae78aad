"""What a block drafter attends to: keys and values of the target's features, of all committed tokens, per row and layer.

Only what was committed gets here, so nothing is ever rolled back. The block that drafts writes its own keys behind them, where
the next features, or the next block, will stand.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from secondguess.core import Row
from secondguess.heads.layer import Attend
from secondguess.runtime.cache import KeyValueCache


class FeatureContext:
    """The contexts of all rows, in one block per layer.

    Args:
        device: where they are.
    """

    def __init__(self, device: torch.device) -> None:
        self._cache = KeyValueCache(device)
        self._slots: dict[Row, int] = {}
        self._by_slot: list[Row] = []
        self._lengths: dict[Row, int] = {}

    def length(self, row: Row) -> int:
        """How many tokens of a row can be attended to; 0 for a row that is not known."""
        return self._lengths.get(row, 0)

    def append(
        self, rows: Sequence[Row], counts: Sequence[int], keys_values: Sequence[tuple[Tensor, Tensor]]
    ) -> None:
        """Let the contexts of rows grow; rows that are new are admitted.

        Args:
            counts: how many tokens each row gains.
            keys_values: per layer, `[row, kv_head, position, size]` each; beyond a row's count anything.
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

    def attend(self, rows: Sequence[Row], width: int) -> Attend:
        """Attention of a block of `width` positions behind each row's context, to that context and to all of the block."""
        num_keys = self._place(rows, width)
        ends = [self.length(row) + width for row in rows]
        mask: Tensor | None = None
        if min(ends) < num_keys:
            places = torch.arange(num_keys, device=self._cache.device)
            mask = (places < torch.tensor(ends, device=self._cache.device)[:, None])[:, None, None]

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            keys, values = self._cache.update(key, value, layer)
            grouped = query.shape[1] != key.shape[1]
            return functional.scaled_dot_product_attention(
                query, keys, values, attn_mask=mask, enable_gqa=grouped
            )

        return attend

    def end(self, row: Row) -> None:
        """Forget a row; nothing, for one that is not known."""
        slot = self._slots.pop(row, None)
        if slot is None:
            return
        del self._lengths[row]
        last = self._by_slot.pop()
        if last is not row:  # slots stay contiguous: the last row moves into the hole
            with torch.inference_mode():
                self._cache.move(self._slots[last], slot, self._lengths[last])
            self._slots[last] = slot
            self._by_slot[slot] = last

    def _place(self, rows: Sequence[Row], width: int) -> int:
        """Make room for `width` positions behind each row's context; how many positions are read then."""
        starts = [self._lengths[row] for row in rows]
        num_keys = max(starts) + width
        self._cache.place(starts, width, [self._slots[row] for row in rows], num_keys)
        return num_keys
