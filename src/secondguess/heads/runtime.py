"""Runtime for drafter heads with a KV cache of their own: EAGLE layers and MTP modules.

The input at each position is a token and a *feature*: the target's hidden state at the previous
token, or, after a draft node, the drafter head's own output at that node. The drafter head's rows
are the target's rows without their first token, so that a token and its feature share one index.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from secondguess.core import Row
from secondguess.heads.layer import AttentionFunction, CosSin, LayerConfig, cos_sin_at
from secondguess.runtime.attention import ForwardStep
from secondguess.runtime.base import HiddenStates
from secondguess.runtime.cached import CachedRuntime, Output
from secondguess.runtime.slots import CachedRow

FEATURE_KEY = 0
"""Key of the drafter head's output in `ForwardOutput.hidden`: the feature of the next node."""


class FeatureHead(nn.Module):
    """Drafter head that reads a feature beside each token; run by `FeatureHeadRuntime`.

    Attributes:
        hidden_layers: target layers whose hidden states the features are computed from.
        shape: shape of its decoder layers.
        num_layers: number of its decoder layers.
    """

    hidden_layers: tuple[int, ...]
    shape: LayerConfig
    num_layers: int

    @abstractmethod
    def features(self, hidden: HiddenStates) -> Tensor:
        """Return features `[..., feature]` of the target's states `[..., width]` by layer."""

    @abstractmethod
    def forward(
        self, embedded: Tensor, features: Tensor, cos_sin: CosSin, attend: AttentionFunction
    ) -> Tensor:
        """Return the outputs `[row, position, feature]`, the features of the next tokens.

        Args:
            embedded: `[row, position, width]`, token embeddings.
            features: `[row, position, feature]`, the feature of the token before each token.
            cos_sin: rotary cos and sin of the positions.
            attend: attention function.
        """

    @abstractmethod
    def logits(self, output: Tensor) -> Tensor:
        """Return logits `[..., vocab]` over the target's vocabulary for outputs of `forward`.

        Tokens outside the draft vocabulary get -inf.
        """

    @abstractmethod
    def embed(self, tokens: Tensor) -> Tensor:
        """Return the embeddings of target token ids."""


class FeatureHeadRuntime(CachedRuntime):
    """Cached runtime (rows, slots, rollback, trees) of a feature-reading drafter head.

    Args:
        head: drafter head in evaluation mode, on the target's device and in its dtype.
        vocab_size: vocabulary size of the target.
        context_length: maximum number of positions, the target's.
        device: device of the target and the drafter head.
        prefill_chunk: maximum number of tokens per prefill forward pass.
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
            hidden_layers=(FEATURE_KEY,),
            prefill_chunk=prefill_chunk,
        )
        self.head = head.requires_grad_(False)
        self._features: dict[Row, Tensor] = {}
        self._forward_features = torch.empty(0)

    def set_features(self, row: Row, start: int, features: Tensor) -> None:
        """Set the features `[position, width]` of a row's tokens from index `start` on.

        Nodes are indexed after the row's tokens.
        """
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
        # Padding may extend beyond the features that were set; `set_features` grows the table.
        for state, start in zip(states, starts, strict=True):
            missing = start + width - len(self._features[state.row])
            if missing > 0:
                self.set_features(state.row, start + width, self._features[state.row][:0])
        self._forward_features = torch.stack(
            [
                self._features[state.row][start : start + width]
                for state, start in zip(states, starts, strict=True)
            ]
        )

    def run(self, tokens: Tensor, step: ForwardStep, num_logits: int, with_hidden: bool) -> Output:
        mask = step.mask

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            keys, values = self.cache.update(key, value, layer)
            causal = mask is None and query.shape[2] > 1
            grouped = query.shape[1] != key.shape[1]
            return functional.scaled_dot_product_attention(
                query, keys, values, attn_mask=mask, is_causal=causal, enable_gqa=grouped
            )

        embedded = self.head.embed(tokens)
        cos_sin = cos_sin_at(self.head.shape, step.query_positions, embedded.dtype)
        output = self.head(embedded, self._forward_features, cos_sin, attend)
        logits = self.head.logits(output[:, -num_logits:])
        return Output(logits, {FEATURE_KEY: output} if with_hidden else {})
