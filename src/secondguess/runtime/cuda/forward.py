"""Forward pass of a fused decoder over few tokens, in a form that can be captured as a CUDA graph."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from secondguess.runtime.base import ForwardOutput
from secondguess.runtime.cache import KeyValueCache
from secondguess.runtime.cuda.operations import (
    GATES,
    LayerCache,
    PassInputs,
    attention,
    linear,
    rotate_and_store,
)
from secondguess.runtime.decoder.families import LayerNorm, Norm
from secondguess.runtime.decoder.feed_forward import FeedForward
from secondguess.runtime.decoder.fused_decoder import FusedDecoder, Layer
from secondguess.runtime.decoder.products import PackableLinear
from secondguess.runtime.decoder.rotary import Rotary


def run_decoder(
    decoder: FusedDecoder,
    cache: KeyValueCache,
    inputs: PassInputs,
    hidden_layers: Sequence[int] = (),
    with_logits: bool = True,
) -> ForwardOutput:
    """Run a forward pass that writes the keys and values of its tokens to the cache.

    Args:
        decoder: a decoder without mixtures of experts.
        cache: allocated for all layers, with room for the tokens; rotary tables have as many positions.
        hidden_layers: layers whose hidden states are returned, numbered as in `CachedRuntime`.
        with_logits: whether logits are computed.

    Returns:
        Logits `[token, vocab]`, or none `[0, vocab]`, and hidden states `[token, width]`.
    """
    with _on_device(inputs.tokens):
        return _run(decoder, cache, inputs, hidden_layers, with_logits)


def _on_device(values: Tensor) -> AbstractContextManager[object]:
    """Return a context in which kernels are launched on the device of these values."""
    return torch.cuda.device(values.device) if values.is_cuda else nullcontext()


def _run(
    decoder: FusedDecoder,
    cache: KeyValueCache,
    inputs: PassInputs,
    hidden_layers: Sequence[int],
    with_logits: bool,
) -> ForwardOutput:
    states = decoder.embed(inputs.tokens.flatten())
    levels = [states]
    for index, layer in enumerate(decoder.layers):
        layer_cache = LayerCache(cache.keys[index], cache.values[index])
        states = _run_layer(layer, states, decoder.rotaries[layer.rotary_kind], layer_cache, inputs)
        levels.append(states)
    read = states if with_logits else states[:0]
    logits = decoder.logit_scaling(linear(read, decoder.head, inputs.num_finished, decoder.norm))
    if hidden_layers:
        levels[-1] = decoder.norm(states)
    return ForwardOutput(logits, {layer: levels[layer] for layer in hidden_layers})


def _run_layer(layer: Layer, states: Tensor, rotary: Rotary, cache: LayerCache, inputs: PassInputs) -> Tensor:
    scale = 1.0 if layer.residual_scale is None else layer.residual_scale
    qkv = linear(states, layer.qkv, inputs.num_finished, layer.attention_norm)
    norms = None if layer.query_norm is None or layer.key_norm is None else (layer.query_norm, layer.key_norm)
    if norms is not None and not all(_is_per_head(norm, layer.heads.size) for norm in norms):
        qkv, norms = _normalised(qkv, norms, layer), None
    queries = rotate_and_store(qkv, layer.heads, norms, rotary, cache, inputs)
    attended = attention(queries, layer.heads, layer.window, cache, inputs)
    residual = _add(attended, layer.output, layer.attention_output_norm, states, scale, inputs)
    # A parallel layer's feed-forward part reads the input of the layer.
    part = layer.feed_forward
    assert isinstance(part, FeedForward)
    inner = _inner(part, states if layer.is_parallel else residual, layer.mlp_norm, inputs)
    return _add(inner, part.output, layer.mlp_output_norm, residual, scale, inputs)


def _is_per_head(norm: Norm, size: int) -> bool:
    return norm.weight.shape[0] == size and not isinstance(norm, LayerNorm)


def _normalised(qkv: Tensor, norms: tuple[Norm, Norm], layer: Layer) -> Tensor:
    """Normalise queries and keys, all heads together or with the norm's own rule."""
    heads = layer.heads
    sizes = [number * heads.size for number in (heads.num_queries, heads.num_keys, heads.num_keys)]
    *parts, values = torch.split(qkv, sizes, -1)
    found = [
        norm(part.reshape(len(part), -1, norm.weight.shape[0])).flatten(1)
        for norm, part in zip(norms, parts, strict=True)
    ]
    return torch.cat((*found, values), -1)


def _inner(part: FeedForward, states: Tensor, norm: Norm | None, inputs: PassInputs) -> Tensor:
    """Return the inputs of the second linear layer of a feed-forward part."""
    if part.is_gated and part.activation in GATES:
        return linear(states, part.inner, inputs.num_finished, norm, part.activation)
    return part.activate(linear(states, part.inner, inputs.num_finished, norm))


def _add(
    values: Tensor,
    product: PackableLinear,
    norm: Norm | None,
    residual: Tensor,
    scale: float,
    inputs: PassInputs,
) -> Tensor:
    """Return the residual plus the product, which is normalised if there is a norm after it."""
    if norm is None:
        return linear(values, product, inputs.num_finished, residual=residual, scale=scale)
    added = norm(linear(values, product, inputs.num_finished))
    return residual + (added if scale == 1.0 else added * scale)
