"""Runtime for drafter heads with a KV cache of their own: EAGLE layers and MTP modules.

The input at each position is a token and a *feature*: the target's hidden state at the previous
token, or, after a draft node, the drafter head's own output at that node. The drafter head's rows
are the target's rows without their first token, so that a token and its feature share one index.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from secondguess.core import Draft, Row
from secondguess.heads.feature import FeatureHead
from secondguess.heads.layer import attention
from secondguess.runtime.base import ForwardOutput, HiddenStates
from secondguess.runtime.cached import CachedRuntime
from secondguess.runtime.slots import CachedRow
from secondguess.runtime.step import ForwardStep

FEATURE_KEY = 0
"""Key of the drafter head's output in `ForwardOutput.hidden`: the feature of the next node."""


class FeatureRuntime(CachedRuntime):
    """Cached runtime (rows, slots, rollback, trees) of a feature-reading drafter head, which computes in torch.

    The features of committed tokens come from `set_features`; those of draft nodes and of tokens
    appended after a pass are the head's outputs at the tokens before them. A forward pass reads them
    from `_forward_features`.

    Args:
        head: drafter head in evaluation mode, on the target's device and in its dtype.
        context_length: maximum number of positions, the target's.
        device: device of the target and the drafter head.
    """

    def __init__(self, head: FeatureHead, context_length: int, device: torch.device) -> None:
        super().__init__(
            vocab_size=head.target.vocab_size,
            context_length=context_length,
            num_layers=head.num_layers,
            device=device,
        )
        self.head = head
        self.request_hidden_states((FEATURE_KEY,))
        self._features: dict[Row, Tensor] = {}
        self._outputs: dict[Row, Tensor] = {}
        self._forward_features = torch.empty(0)

    def features(self, hidden: HiddenStates) -> Tensor:
        """Return features `[..., feature]` of the target's states `[..., width]` by layer."""
        # Some targets keep their states in float32 whatever their dtype, such as Mamba 2.
        dtype = next(self.head.parameters()).dtype
        return self.head.features({layer: hidden[layer].to(dtype) for layer in self.head.hidden_layers})

    def run(self, tokens: Tensor, step: ForwardStep, num_logits: int, with_hidden: bool) -> ForwardOutput:
        mask = step.mask

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            keys, values = self.cache.update(key, value, layer)
            return attention(query, keys, values, mask, is_causal=mask is None and query.shape[2] > 1)

        embedded = self.head.embed(tokens)
        cos_sin = self.head.rotary(step.query_positions, embedded.dtype)
        output = self.head(embedded, self._forward_features, cos_sin, attend)
        logits = self.head.logits(output[:, -num_logits:])
        return ForwardOutput(logits, {FEATURE_KEY: output} if with_hidden else {})

    def probe_with_features(self, tokens: Tensor, features: Tensor) -> ForwardOutput:
        """Run one forward pass over whole sequences without keeping them, for probes.

        Args:
            tokens: `[row, query]` token ids.
            features: `[row, query, feature]`, the feature of the token before each.
        """
        self._forward_features = features
        return self.probe(tokens)

    def set_features(self, row: Row, start: int, features: Tensor) -> None:
        """Set the features `[position, width]` of a row's tokens from index `start` on."""
        table = self._features.get(row)
        needed = start + len(features)
        if table is None or needed > len(table):
            larger = features.new_zeros(2 * needed, features.shape[-1])
            if table is not None:
                larger[: len(table)] = table
            table = self._features[row] = larger
        table[start:needed] = features

    def score(self, rows: Sequence[Row], draft: Draft) -> ForwardOutput:
        if draft.num_nodes:
            for row, parents in zip(rows, draft.shapes, strict=True):
                # Parents were outputs of the previous pass: query 0 is pending, query i + 1 node i.
                outputs = self._outputs[row][[parent + 1 for parent in parents]]
                self.set_features(row, len(row.tokens), outputs)
        output = super().score(rows, draft)
        for row, outputs in zip(rows, output.hidden[FEATURE_KEY], strict=True):
            self._outputs[row] = outputs
            if not draft.num_nodes:
                self.set_features(row, len(row.tokens), outputs)
        return output

    def release(self, row: Row) -> None:
        super().release(row)
        self._features.pop(row, None)
        self._outputs.pop(row, None)

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
