"""Weights of a decoder in the layout of the kernels, and checks for covered models."""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Callable, Iterable, Sequence
from ctypes import POINTER
from typing import Any, NamedTuple

import torch
from torch import Tensor

from secondguess.runtime.cpu import library
from secondguess.runtime.cpu.weights import Arena, Blocks, pack_blocks, requantise
from secondguess.runtime.decoder.families import Norm
from secondguess.runtime.decoder.feed_forward import Experts, FeedForward
from secondguess.runtime.decoder.fused_decoder import FusedDecoder, Layer, embed
from secondguess.runtime.decoder.products import PackableLinear
from secondguess.runtime.decoder.rotary import Rotary
from secondguess.runtime.decoder.stored import WeightRows
from secondguess.runtime.layered import remaining_layers
from secondguess.runtime.weight_format import BFLOAT16, WeightFormat

ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_pytorch_tanh": 2, "gelu_new": 2}


class LayerBlocks(NamedTuple):
    """Packed weights of a layer.

    Args:
        qkv, output: of the attention.
        inner, down: of the feed-forward network; None for a mixture of experts.
        router: of a mixture, and None otherwise.
        experts: inner and outer weights of each expert.
    """

    qkv: Blocks
    output: Blocks
    inner: Blocks | None
    down: Blocks | None
    router: Blocks | None
    experts: Sequence[tuple[Blocks, Blocks]]


class PackedDecoder:
    """Weights in the layout of the kernels, and their description.

    Args:
        unit: unit that computes the products; by default the fastest of `library.units()`.

    Attributes:
        described: description that the kernels read.
        num_layers: number of decoder layers.
        embedding: `[token, width]` in bfloat16.
        rotaries: rotary tables, in the order of the layers' indices into them.
        num_key_heads, head_size: of the attention.
    """

    described: library.Decoder
    num_layers: int
    embedding: Tensor
    rotaries: Sequence[Rotary]
    num_key_heads: int
    head_size: int

    def __init__(self, unit: library.Unit | None = None) -> None:
        self.unit = unit or library.units()[0]
        self._arena = Arena()
        self._kept: list[Any] = []

    def _pack(
        self,
        weight: Tensor | WeightRows,
        bias: Tensor | None = None,
        weight_format: WeightFormat = BFLOAT16,
        gated: bool = False,
    ) -> Blocks:
        """Return a packed weight, which stays allocated as long as this object."""
        blocks = pack_blocks(weight, bias, self._arena, weight_format, gated)
        self._kept.append(blocks)
        return blocks

    def _keep_norm(self, weight: Tensor, eps: float, bias: Tensor | None = None) -> library.Norm:
        kept = [each.detach().float().contiguous() for each in (weight, bias) if each is not None]
        self._kept.append(kept)
        addresses = [each.data_ptr() for each in kept]
        return library.Norm(addresses[0], addresses[1] if bias is not None else None, eps)


class NativeDecoder(PackedDecoder):
    """Weights of a fused decoder in the layout of the kernels.

    Args:
        decoder: unpacked, in bfloat16; its weights are released as they are packed, except a tied head.
        weight_format: encoding of the weights of linear layers; that of the LM head is its
            `head_format`. With a quantised one their inputs are quantised to 8 bits, with a scale per 32 inputs.
        unit: as in `PackedDecoder`.
        report: called after each layer with the number of packed layers.
    """

    def __init__(
        self,
        decoder: FusedDecoder,
        weight_format: WeightFormat = BFLOAT16,
        unit: library.Unit | None = None,
        report: Callable[[int], None] = lambda num_packed: None,
    ) -> None:
        super().__init__(unit)
        self.config = decoder.config
        self.weight_format = weight_format
        self.rotaries = [rotary.to(torch.float32) for rotary in decoder.rotaries.values()]
        self.num_layers = len(decoder.layers)
        self.embedding = decoder.embedding
        self.embedding_scale = decoder.embedding_scale
        self.logit_scaling = decoder.logit_scaling
        self.norm = decoder.norm
        self.is_tied, self.head_bias = decoder.is_tied, decoder.head.bias
        first = decoder.layers[0]
        heads = first.heads
        self.num_key_heads, self.head_size = heads.num_keys, heads.size
        kinds = list(decoder.rotaries)
        sizes = _feed_forward_sizes([layer.feed_forward for layer in decoder.layers])
        layers = (library.Layer * self.num_layers)()
        self.blocks: list[LayerBlocks] = []
        for index, layer in enumerate(decoder.layers):
            self.blocks.append(self._pack_layer(layer))
            layers[index] = self._layer(layer, kinds, self.blocks[-1])
            report(index + 1)
        rotary = self.rotaries[0]
        self.head = self._weight(decoder.head, weight_format.head_format)
        packed = [each.weight.encoding for each in self._kept if isinstance(each, Blocks)]
        if weight_format.keeps_others and not any(packed):  # none had a form that the kernels keep
            self.weight_format = BFLOAT16
        self.described = library.Decoder(
            layers=layers,
            num_layers=self.num_layers,
            width=self.embedding.shape[1],
            num_queries=heads.num_queries,
            num_keys=heads.num_keys,
            head_size=heads.size,
            num_embedded=self.embedding.shape[0],
            amx=self.unit.has_tiles,
            scaling=heads.scaling,
            embedding_scale=1.0 if self.embedding_scale is None else self.embedding_scale,
            embedding=self.embedding.data_ptr(),
            norm=self._norm(decoder.norm),
            head=self.head.weight,
            rotary_size=2 * len(rotary.frequencies),
            is_interleaved=rotary.is_interleaved,
            joins_heads_in_norms=first.query_norm is not None and len(first.query_norm.weight) != heads.size,
            is_parallel=first.is_parallel,
            residual_scale=first.residual_scale or 0,
            score_cap=heads.cap or 0,
            logit_divisor=decoder.logit_scaling.divisor or 0,
            logit_cap=decoder.logit_scaling.cap or 0,
            **sizes,
        )

    def without(self, skipped: Sequence[int]) -> NativeDecoder:
        """Return a decoder that shares the weights but skips some layers, by `remaining_layers`."""
        kept = remaining_layers(skipped, self.num_layers)
        fewer = copy.copy(self)
        fewer.num_layers = len(kept)
        fewer.described = library.Decoder.from_buffer_copy(self.described)
        fewer.described.layers = (library.Layer * len(kept))(
            *(self.described.layers[index] for index in kept)
        )
        fewer.described.num_layers = len(kept)
        return fewer

    def requantised(self, weight_format: WeightFormat) -> NativeDecoder:
        """Return a decoder of the same layers in bfloat16 with weights in another encoding, and all else shared."""
        rounded = copy.copy(self)
        rounded.weight_format = weight_format
        rounded._arena, rounded._kept = Arena(), [self]
        packed = {each.weight.data: each for each in self._kept if isinstance(each, Blocks)}

        def round_weight(weight: library.Weight, encoding: WeightFormat) -> Blocks:
            rounded._kept.append(requantise(packed[weight.data], rounded._arena, encoding))
            blocks: Blocks = rounded._kept[-1]
            return blocks

        def round_weights(part: library.Layer | library.Expert, names: Sequence[str]) -> None:
            for name in names:
                setattr(part, name, round_weight(getattr(part, name), weight_format).weight)

        layers = (library.Layer * self.num_layers)(*self.described.layers[: self.num_layers])
        for layer in layers:
            round_weights(layer, ("qkv", "output"))
            if not layer.router.num_outputs:
                round_weights(layer, ("gate_up", "down"))
                continue
            layer.experts = rounded._keep_experts(
                library.Expert.from_buffer_copy(layer.experts[index])
                for index in range(layer.router.num_outputs)
            )
            for index in range(layer.router.num_outputs):
                round_weights(layer.experts[index], ("gate_up", "down"))
        rounded.head = round_weight(self.head.weight, weight_format.head_format)
        rounded.described = library.Decoder.from_buffer_copy(self.described)
        rounded.described.layers, rounded.described.head = layers, rounded.head.weight
        return rounded

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the inputs of the first layer, `[..., width]`."""
        return embed(tokens, self.embedding, self.embedding_scale)

    def _pack_layer(self, layer: Layer) -> LayerBlocks:
        qkv, output = (self._weight(product, self.weight_format) for product in (layer.qkv, layer.output))
        part = layer.feed_forward
        if isinstance(part, FeedForward):
            return LayerBlocks(qkv, output, *self._network(part), router=None, experts=())
        router = self._weight(part.router, BFLOAT16)
        return LayerBlocks(
            qkv, output, None, None, router, [self._network(expert) for expert in part.experts]
        )

    def _layer(self, layer: Layer, rotary_kinds: list[str | None], blocks: LayerBlocks) -> library.Layer:
        described = library.Layer(
            attention_norm=self._norm(layer.attention_norm),
            query_norm=self._norm(layer.query_norm),
            key_norm=self._norm(layer.key_norm),
            attention_output_norm=self._norm(layer.attention_output_norm),
            mlp_norm=self._norm(layer.mlp_norm),
            mlp_output_norm=self._norm(layer.mlp_output_norm),
            qkv=blocks.qkv.weight,
            output=blocks.output.weight,
            window=layer.window or 0,
            rotary=rotary_kinds.index(layer.rotary_kind),
        )
        if layer.heads.sinks is not None:
            self._kept.append(layer.heads.sinks.float().contiguous())
            described.sinks = self._kept[-1].data_ptr()
        if blocks.router is not None:
            # the kernels add the outputs of experts as they are
            assert layer.mlp_output_norm is None
            assert layer.residual_scale is None
            assert not layer.is_parallel
            described.router = blocks.router.weight
            described.experts = self._keep_experts(
                library.Expert(inner.weight, down.weight) for inner, down in blocks.experts
            )
        elif blocks.inner is not None and blocks.down is not None:
            described.gate_up, described.down = blocks.inner.weight, blocks.down.weight
        return described

    def _network(self, network: FeedForward) -> tuple[Blocks, Blocks]:
        """Return the packed weights of a feed-forward network."""
        return (
            self._weight(network.inner, self.weight_format, gated=network.is_gated),
            self._weight(network.output, self.weight_format),
        )

    def _keep_experts(self, experts: Iterable[library.Expert]) -> Any:
        """Return the address of an array of experts, which stays allocated as long as this object."""
        described = list(experts)
        self._kept.append((library.Expert * len(described))(*described))
        return ctypes.cast(self._kept[-1], POINTER(library.Expert))

    def _weight(self, product: PackableLinear, weight_format: WeightFormat, gated: bool = False) -> Blocks:
        rows = product.rows()
        stored = rows.weight_format if weight_format.is_quantised else None
        if stored is not None and (weight_format.keeps_others or stored.bits <= weight_format.bits):
            weight_format = stored
        elif weight_format.keeps_others:
            weight_format = BFLOAT16
        blocks = self._pack(rows, product.bias, weight_format, gated)
        product.release()
        return blocks

    def _norm(self, norm: Norm | None) -> library.Norm:
        if norm is None:
            return library.Norm()
        return self._keep_norm(norm.weight, norm.eps, norm.bias)


def _feed_forward_sizes(parts: Sequence[FeedForward | Experts]) -> dict[str, float]:
    """Return the fields of `library.Decoder` that describe the feed-forward parts, which are still unpacked."""
    dense = next((part for part in parts if isinstance(part, FeedForward)), None)
    mixture = next((part for part in parts if isinstance(part, Experts)), None)
    first = parts[0] if isinstance(parts[0], FeedForward) else parts[0].experts[0]
    found: dict[str, float] = {"activation": ACTIVATIONS[first.activation]}
    if first.clamp is not None:
        found |= {"gate_alpha": first.clamp.alpha, "gate_limit": first.clamp.limit}
    if dense is not None:
        found |= {"inner_width": dense.output.num_inputs, "has_no_gates": int(not dense.is_gated)}
    if mixture is not None:
        found |= {
            "num_experts": len(mixture.experts),
            "num_selected": mixture.num_selected,
            "expert_width": mixture.experts[0].output.num_inputs,
            "normalises_routing_weights": int(mixture.normalises_routing_weights),
        }
    return found
