"""A head that reads the text with a cache of its own, as a runtime: EAGLE's layers, multi-token-prediction modules.

Beside each token such a head reads a *feature*: what the target thought before that token; behind its own nodes, what the head
itself thought. Its rows are the target's without their first token, so that token and feature stand in one place.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from secondguess.core import Row
from secondguess.heads.layer import Attend, LayerShape, Turns, turns_at
from secondguess.runtime.attention import Step
from secondguess.runtime.base import Hidden
from secondguess.runtime.cached import CachedRow, CachedRuntime, Output

OWN = 0
"""Under this number `Scores.hidden` has what a head thinks: the feature of the node behind."""


class FeatureHead(nn.Module):
    """What `HeadRuntime` runs.

    Attributes:
        hidden_layers: of the target, which its features are made of.
        shape: of its decoder layers.
        num_layers: how many of them.
    """

    hidden_layers: tuple[int, ...]
    shape: LayerShape
    num_layers: int

    @abstractmethod
    def features(self, hidden: Hidden) -> Tensor:
        """`[..., feature]` from the target's states `[..., width]` of `hidden_layers`."""

    @abstractmethod
    def forward(self, embedded: Tensor, features: Tensor, turns: Turns, attend: Attend) -> Tensor:
        """What the head thinks, `[row, position, feature]`: the features of what follows.

        Args:
            embedded: `[row, position, width]`, embeddings of the tokens.
            features: `[row, position, feature]`, what was thought before each token.
            turns: of the positions.
            attend: its attention, by layer.
        """

    @abstractmethod
    def logits(self, thought: Tensor) -> Tensor:
        """`[..., vocab]` over the target's vocabulary, from what `forward` gave; -inf where it has no word."""

    @abstractmethod
    def embed(self, tokens: Tensor) -> Tensor:
        """Embeddings of the target's tokens."""


class HeadRuntime(CachedRuntime):
    """Rows, slots, rollback and trees for a feature head.

    Args:
        head: in evaluation mode, on the target's device and in its dtype.
        vocab_size: the target's.
        context_length: positions it may use: the target's.
        device: of both.
        prefill_chunk: most tokens in one forward.
    """

    def __init__(
        self,
        head: FeatureHead,
        vocab_size: int,
        context_length: int,
        device: torch.device,
        prefill_chunk: int = 512,
    ) -> None:
        super().__init__(
            vocab_size=vocab_size,
            context_length=context_length,
            num_layers=head.num_layers,
            device=device,
            hidden_layers=(OWN,),
            prefill_chunk=prefill_chunk,
        )
        self.head = head.requires_grad_(False)
        self._features: dict[Row, Tensor] = {}
        self._fed = torch.empty(0)

    def feed(self, row: Row, start: int, features: Tensor) -> None:
        """Set what a row's tokens from place `start` on (nodes stand behind the tokens) are read beside, `[place, width]`."""
        table = self._features.get(row)
        needed = start + len(features)
        if table is None or needed > len(table):
            larger = features.new_zeros(2 * needed, features.shape[-1])
            if table is not None:
                larger[: len(table)] = table
            table = self._features[row] = larger
        table[start:needed] = features

    def end(self, row: Row) -> None:
        super().end(row)
        self._features.pop(row, None)

    def _place(self, states: Sequence[CachedRow], starts: Sequence[int], width: int, num_keys: int) -> None:
        super()._place(states, starts, width, num_keys)
        # Places that only pad a row may lie beyond what it was fed.
        for state, start in zip(states, starts, strict=True):
            missing = start + width - len(self._features[state.row])
            if missing > 0:
                self.feed(state.row, start + width, self._features[state.row][:0])
        self._fed = torch.stack(
            [
                self._features[state.row][start : start + width]
                for state, start in zip(states, starts, strict=True)
            ]
        )

    def run(self, tokens: Tensor, step: Step, num_logits: int, with_hidden: bool) -> Output:
        mask = step.mask

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            keys, values = self.cache.update(key, value, layer)
            causal = mask is None and query.shape[2] > 1
            grouped = query.shape[1] != key.shape[1]
            return functional.scaled_dot_product_attention(
                query, keys, values, attn_mask=mask, is_causal=causal, enable_gqa=grouped
            )

        embedded = self.head.embed(tokens)
        turns = turns_at(self.head.shape, step.query_positions, embedded.dtype)
        thought = self.head(embedded, self._fed, turns, attend)
        logits = self.head.logits(thought[:, -num_logits:])
        return Output(logits, {OWN: thought} if with_hidden else {})
