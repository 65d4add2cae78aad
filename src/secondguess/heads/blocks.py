"""Forward passes of a block drafter (DSpark, DFlash) over its KV cache of the target's features of committed tokens.

Only committed tokens are appended, so rounds need no rollback. A draft block writes its own keys and
values after them; the next append or the next block overwrites these.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from secondguess.core import Row
from secondguess.heads.dspark import DsparkHead
from secondguess.heads.layer import AttentionFunction, attention
from secondguess.runtime.base import HiddenStates
from secondguess.runtime.cache import KeyValueCache
from secondguess.runtime.slots import SlotTable


class Block(NamedTuple):
    """Output of the backbone for one block per row.

    Args:
        hidden: `[row, position, width]`, hidden states at the draft positions.
        base: `[row, position, draft_vocab]`, logits before the Markov head.
    """

    hidden: Tensor
    base: Tensor


class BlockRuntime:
    """Runtime of a block drafter head, which computes in torch.

    Args:
        head: drafter head in evaluation mode, on the target's device and in its dtype.
        device: device of the target.
    """

    def __init__(self, head: DsparkHead, device: torch.device) -> None:
        self.head, self.config, self.hidden_layers = head, head.config, head.hidden_layers
        self.device = device
        self.forget()

    def forget(self) -> None:
        """Remove every row and free the cache."""
        self.cache = KeyValueCache(self.device)
        self.slots = SlotTable(self.cache)

    def append(self, rows: Sequence[Row], received: Sequence[HiddenStates]) -> None:
        """Cache the target's states `[position, width]` by layer at each row's next tokens."""
        layers = self.hidden_layers
        counts = [len(states[layers[0]]) for states in received]
        together = {layer: pad_sequence([states[layer] for states in received], True) for layer in layers}
        starts = torch.tensor([self.length(row) for row in rows], device=self.device)
        positions = starts[:, None] + torch.arange(max(counts), device=self.device)
        keys_values = self.head.context(self.head.features(together), positions)
        self.place_new(rows, max(counts))
        for layer, (keys, values) in enumerate(keys_values):
            self.cache.update(keys, values, layer)
        self.advance(rows, counts)

    def run(self, rows: Sequence[Row], longest: int) -> Block:
        """Run the backbone for one block per row, whose other tokens are cached.

        Args:
            longest: number of draft positions to return.
        """
        attend = self._attend(rows, self.config.block_size)
        anchors = torch.tensor([row.pending for row in rows], device=self.device)
        positions = torch.tensor([len(row.tokens) - 1 for row in rows], device=self.device)
        outputs = self.head.run_backbone(anchors[:, None], positions[:, None], attend)
        hidden = outputs[:, 0, :longest]
        return Block(hidden, self.head.base_logits(hidden))

    def add_markov_bias(self, base: Tensor, previous: Tensor) -> Tensor:
        """Return base logits plus the bias for the tokens before them (`DsparkHead`)."""
        return self.head.add_markov_bias(base, previous)

    def confidence(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """Return the logits `[...]` of acceptance probabilities (`DsparkHead.confidence`)."""
        return self.head.confidence(hidden, previous)

    def __contains__(self, row: Row) -> bool:
        return row in self.slots

    def length(self, row: Row) -> int:
        """Return the number of cached tokens of a row; 0 for an unknown row."""
        return self.slots[row].length if row in self.slots else 0

    def admit(self, rows: Sequence[Row], reuse_limits: Sequence[int | None] | None = None) -> list[int]:
        """Add rows; return the numbers of tokens that are cached already (`SlotTable.admit`)."""
        return [state.length for state in self.slots.admit(rows, reuse_limits)]

    def crop(self, row: Row, length: int) -> None:
        """Keep at most the first `length` cached tokens of a row."""
        self.slots[row].length = min(self.slots[row].length, length)

    def place_new(self, rows: Sequence[Row], width: int) -> tuple[list[int], int]:
        """Place the next cache update as `place` does; new rows are admitted."""
        new = [row for row in rows if row not in self.slots]
        self.admit(new, [0] * len(new))
        return self.place(rows, width)

    def advance(self, rows: Sequence[Row], counts: Sequence[int]) -> None:
        """Count `counts[i]` tokens that have been written for row i."""
        for row, count in zip(rows, counts, strict=True):
            self.slots[row].length += count

    def _attend(self, rows: Sequence[Row], width: int) -> AttentionFunction:
        """Return the attention function of a draft block of `width` positions per row.

        Each position attends to the row's cached tokens and to all positions of the block.
        """
        starts, num_keys = self.place(rows, width)
        ends = [start + width for start in starts]
        mask: Tensor | None = None
        if min(ends) < num_keys:
            positions = torch.arange(num_keys, device=self.cache.device)
            mask = (positions < torch.tensor(ends, device=self.cache.device)[:, None])[:, None, None]

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            keys, values = self.cache.update(key, value, layer)
            return attention(query, keys, values, mask)

        return attend

    def release(self, row: Row) -> None:
        """Release a row; does nothing for an unknown row."""
        self.slots.release(row)

    def reset_prefix_cache(self) -> None:
        """Forget the entries of released rows."""
        self.slots.forget()

    def place(self, rows: Sequence[Row], width: int) -> tuple[list[int], int]:
        """Place the next cache update after each row's cached tokens.

        Returns:
            The number of cached tokens per row, and that of cache positions that attention reads.
        """
        states = [self.slots[row] for row in rows]
        starts = [state.length for state in states]
        num_keys = max(starts) + width
        self.cache.place(starts, width, [state.slot for state in states], num_keys)
        return starts, num_keys
