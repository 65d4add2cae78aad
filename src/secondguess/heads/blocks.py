"""Forward passes of a block drafter (DSpark, DFlash) over its cache of the target's features."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from secondguess.core import Row
from secondguess.heads.context import FeatureCache
from secondguess.heads.dspark import DsparkHead
from secondguess.runtime.base import HiddenStates


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
        self.head, self.shape, self.hidden_layers = head, head.shape, head.hidden_layers
        self.device = device
        self.context = FeatureCache(device)

    def forget(self) -> None:
        """Remove every row and free the cache."""
        self.context = FeatureCache(self.device)

    def append(self, rows: Sequence[Row], received: Sequence[HiddenStates]) -> None:
        """Cache the target's states `[position, width]` by layer at each row's next tokens."""
        layers = self.hidden_layers
        counts = [len(states[layers[0]]) for states in received]
        together = {layer: pad_sequence([states[layer] for states in received], True) for layer in layers}
        starts = torch.tensor([self.context.length(row) for row in rows], device=self.device)
        positions = starts[:, None] + torch.arange(max(counts), device=self.device)
        keys_values = self.head.context(self.head.features(together), positions)
        self.context.append(rows, counts, keys_values)

    def run(self, rows: Sequence[Row], longest: int) -> Block:
        """Run the backbone for one block per row, whose other tokens are cached.

        Args:
            longest: number of draft positions to return.
        """
        attend = self.context.attend(rows, self.shape.block_size)
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
