"""Forward passes of a fused decoder, by torch's operations."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from secondguess.runtime.base import ForwardOutput
from secondguess.runtime.cache import KeyValueCache
from secondguess.runtime.decoder.fused_decoder import FusedDecoder, LayerMask
from secondguess.runtime.layered import LayeredForward
from secondguess.runtime.step import ForwardStep, in_window
from secondguess.runtime.tree import ChainMasks


class DecoderForward(LayeredForward):
    """Forward passes of a fused decoder over a cache.

    Args:
        decoder: the weights.
        cache: of the runtime.
    """

    def __init__(self, decoder: FusedDecoder, cache: KeyValueCache) -> None:
        self.decoder, self.cache = decoder, cache
        device, group = decoder.embedding.device, decoder.num_heads_per_key
        self._shown, self._hidden = torch.tensor(
            [0.0, -torch.inf], dtype=decoder.embedding.dtype, device=device
        )
        self._additive_chain_masks = ChainMasks(device, self._shown, self._hidden, repeats=group)

    def run(
        self, tokens: Tensor, step: ForwardStep, num_logits: int, hidden_layers: Sequence[int]
    ) -> ForwardOutput:
        """Run tokens `[row, query]` that are placed in the cache; return their last logits and hidden states."""
        levels = self._run_layers(self.decoder.embed(tokens), step, range(len(self.decoder.layers)))
        return self._output(levels, num_logits, hidden_layers)

    def run_first(self, tokens: Tensor, step: ForwardStep, num_known: int, num_layers: int) -> Tensor:
        return self._run_layers(self.decoder.embed(tokens), step.drop_first(num_known), range(num_layers))[-1]

    def run_remaining(
        self,
        tokens: Tensor,
        states: Tensor,
        step: ForwardStep,
        num_layers: int,
        hidden_layers: Sequence[int],
    ) -> ForwardOutput:
        levels = self._run_layers(states, step, range(num_layers, len(self.decoder.layers)))
        # Of the levels that were not kept, only the embeddings can be requested.
        levels = [self.decoder.embed(tokens)] + [states] * (num_layers - 1) + levels
        return self._output(levels, tokens.shape[1], hidden_layers)

    def _run_layers(self, states: Tensor, step: ForwardStep, layers: range) -> list[Tensor]:
        """Run these layers; return their input and each layer's output, `[row, query, width]`."""
        decoder = self.decoder
        cos_sin = {kind: rotary.at(step) for kind, rotary in decoder.rotaries.items()}
        views = {window: self._layer_mask(step, window) for window in decoder.windows}
        levels = [states]
        for index in layers:
            layer = decoder.layers[index]
            states = layer.forward(states, index, cos_sin[layer.rotary_kind], views[layer.window], self.cache)
            levels.append(states)
        return levels

    def _output(self, levels: list[Tensor], num_logits: int, hidden_layers: Sequence[int]) -> ForwardOutput:
        """Return the output for the hidden states of all levels, embeddings first."""
        last = levels[-1] = self.decoder.norm(levels[-1])
        logits = self.decoder.unembed(last[:, -num_logits:])
        return ForwardOutput(logits, {layer: levels[layer] for layer in hidden_layers})

    def _layer_mask(self, step: ForwardStep, window: int | None) -> LayerMask:
        """Return the mask of the layers of one kind, with heads folded, in the model's dtype."""
        width = step.query_positions.shape[1]
        sees_all = window is None or step.num_keys <= window
        # The kernels of a GPU need masks that are aligned, as views of the table are not.
        if sees_all and step.mask is not None and step.start is not None and step.mask.device.type == "cpu":
            return LayerMask(self._additive_chain_masks.mask(step.start, width, step.num_keys), causal=False)
        allowed = step.visible(None if window is None else partial(in_window, window), window)
        if allowed is None:
            return LayerMask(None, causal=width > 1)
        mask = torch.where(allowed, self._shown, self._hidden)
        return LayerMask(mask.repeat_interleave(self.decoder.num_heads_per_key, 2), causal=False)
