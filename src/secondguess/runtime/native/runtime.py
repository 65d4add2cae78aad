"""The runtime whose forward is one call of compiled code."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

from secondguess.errors import BadInputError, OutOfMemoryError
from secondguess.runtime.attention import Step
from secondguess.runtime.cache import KeyValueCache
from secondguess.runtime.cached import CachedRuntime, Output, Queries
from secondguess.runtime.families import Norm, OffsetNorm, obstacle_to_fusing
from secondguess.runtime.fused import FusedDecoder, FusedRuntime, Layer
from secondguess.runtime.native import library
from secondguess.runtime.native.weights import Arena, Blocks, in_blocks, side_by_side
from secondguess.runtime.packing import Product
from secondguess.runtime.support import context_length_of

ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_pytorch_tanh": 2}
LARGEST_HEAD = 512
NO_MEMORY, UNKNOWN_TOKEN = 1, 2
MOST_ROWS = 1024
"""Rows whose slots, when in order, are listed once."""
NOWHERE = torch.empty(0, dtype=torch.long)


PROBE_WIDTH = 16
PROBE_TOLERANCE = {False: 0.03, True: 0.12}
"""What rounding to bfloat16 or 8 bits may explain of the logits, as root mean squares: trained models and tiny random ones show
0.01 and 0.03 to 0.05; what computes something else is off by about 1."""


def can_run_native(config: Any, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the kernels are there and know models like this, in bfloat16 or rounded from it."""
    return obstacle_to_kernels(config, dtype, device) is None


def obstacle_to_kernels(config: Any, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why the kernels do not run models like this; None when they do."""
    if obstacle := obstacle_to_fusing(config, device):
        return obstacle
    if dtype != torch.bfloat16:
        return f"the kernels compute in bfloat16, not {str(dtype).removeprefix('torch.')}"
    if library.library() is None:
        return "the kernels were not built (no C++ compiler?), or this processor has no AVX-512 with bfloat16 products"
    text = config.get_text_config()
    head_size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    if head_size % 2 or head_size > LARGEST_HEAD:
        return f"heads of {head_size} numbers; the kernels take even sizes up to {LARGEST_HEAD}"
    return None


def to_native(decoder: FusedDecoder, eight_bits: bool = False) -> NativeDecoder | None:
    """A fused decoder for the kernels, or None when they would not say the same; it is used up either way.

    Args:
        decoder: unpacked, in bfloat16.
        eight_bits: as in `NativeDecoder`.
    """
    tokens = torch.arange(2 * PROBE_WIDTH).remainder(decoder.embedding.shape[0]).reshape(2, PROBE_WIDTH)
    expected = FusedRuntime(decoder).read(tokens).logits.float()
    native = NativeDecoder(decoder, eight_bits)
    found = NativeRuntime(native).read(tokens).logits
    error = float((found - expected).square().mean().sqrt() / expected.square().mean().sqrt())
    return native if error <= PROBE_TOLERANCE[eight_bits] else None


class NativeDecoder:
    """The weights of a fused decoder in the form that the kernels read.

    Args:
        decoder: unpacked, in bfloat16; its layers are emptied on the way.
        eight_bits: whether linear layers are rounded to 8 bits a number, and what they read to 8 bits a number and row.
        use_amx: whether matrix tiles do the products; None where the processor has them.
    """

    def __init__(self, decoder: FusedDecoder, eight_bits: bool = False, use_amx: bool | None = None) -> None:
        self.config = decoder.config
        self.eight_bits = eight_bits
        self.rotaries = list(decoder.rotaries.values())
        self.num_layers = len(decoder.layers)
        self.embedding = decoder.embedding
        heads = decoder.layers[0].heads
        self.num_key_heads, self.head_size = heads.num_keys, heads.size
        self._arena = Arena()
        self._kept: list[Any] = []
        kinds = list(decoder.rotaries)
        inner_width = decoder.layers[0].down.weight.shape[1]
        layers = (library.Layer * self.num_layers)()
        for index in range(self.num_layers):
            layers[index] = self._layer(decoder.layers[index], kinds)
            decoder.layers[index].release()
        activation = decoder.layers[0].activation_name
        scale = decoder.embedding_scale
        self.head = self._weight(decoder.head)
        self.described = library.Decoder(
            layers=layers,
            num_layers=self.num_layers,
            width=self.embedding.shape[1],
            inner_width=inner_width,
            num_queries=heads.num_queries,
            num_keys=heads.num_keys,
            head_size=heads.size,
            activation=ACTIVATIONS[activation],
            num_embedded=self.embedding.shape[0],
            amx=library.has_amx() if use_amx is None else use_amx,
            scaling=heads.scaling,
            embedding_scale=1.0 if scale is None else float(scale),
            embedding=self.embedding.data_ptr(),
            norm=self._norm(decoder.norm),
            head=self.head.weight,
        )

    def read_weights(self, num_threads: int) -> int:
        """Read all that a forward over one token reads of the weights, and nothing else; returns how many bytes.

        The time that this takes is the least that a forward can.
        """
        kernels = library.library()
        assert kernels is not None
        held = [blocks.tensors[-1] for blocks in self._kept if isinstance(blocks, Blocks)]
        sizes = [tensor.numel() for tensor in held]
        addresses = (c_void_p * len(held))(*(tensor.data_ptr() for tensor in held))
        kernels.secondguess_read(addresses, (c_int64 * len(held))(*sizes), len(held), num_threads)
        return sum(sizes)

    def _layer(self, layer: Layer, rotary_kinds: list[str | None]) -> library.Layer:
        gate_up = layer.gate_up
        return library.Layer(
            attention_norm=self._norm(layer.attention_norm),
            query_norm=self._norm(layer.query_norm),
            key_norm=self._norm(layer.key_norm),
            attention_output_norm=self._norm(layer.attention_output_norm),
            mlp_norm=self._norm(layer.mlp_norm),
            mlp_output_norm=self._norm(layer.mlp_output_norm),
            joint=self._weight(layer.joint).weight,
            output=self._weight(layer.output).weight,
            gate_up=self._blocks(
                side_by_side(*gate_up.weight.chunk(2)),
                None if gate_up.bias is None else side_by_side(*gate_up.bias.chunk(2)),
            ).weight,
            down=self._weight(layer.down).weight,
            window=layer.window or 0,
            rotary=rotary_kinds.index(layer.turned_like),
        )

    def _weight(self, product: Product) -> Blocks:
        return self._blocks(product.weight, product.bias)

    def _blocks(self, weight: Tensor, bias: Tensor | None) -> Blocks:
        blocks = in_blocks(weight, bias, self._arena, self.eight_bits)
        self._kept.append(blocks)
        return blocks

    def _norm(self, norm: Norm | None) -> library.Norm:
        if norm is None:
            return library.Norm()
        weight = norm.weight.float().contiguous()
        self._kept.append(weight)
        return library.Norm(weight.data_ptr(), norm.eps, not isinstance(norm, OffsetNorm))


class NativeRuntime(CachedRuntime):
    """Speculation over the kernels.

    A row's bits depend on that row alone: on no neighbour, no padding, no length of a chunk and no shape of a draft.

    Args:
        decoder: from a fused decoder.
        hidden_layers, prefill_chunk: as in `CachedRuntime`.
    """

    least_logits = 0

    def __init__(
        self, decoder: NativeDecoder, hidden_layers: Sequence[int] = (), prefill_chunk: int = 512
    ) -> None:
        super().__init__(
            vocab_size=decoder.described.head.num_outputs,
            context_length=context_length_of(decoder.config),
            num_layers=decoder.num_layers,
            device=decoder.embedding.device,
            hidden_layers=hidden_layers,
            prefill_chunk=prefill_chunk,
        )
        kernels = library.library()
        assert kernels is not None, "a native decoder was made where there are no kernels"
        self.decoder = decoder
        self._key_block = 1
        self._prefills_together = True
        self._kernels = kernels
        self._workspace = c_void_p(kernels.secondguess_workspace())
        levels = decoder.num_layers + 1
        self._levels = {layer: layer % levels for layer in self.hidden_layers}  # -1 is the last of them
        self._keys, self._values = (c_void_p * decoder.num_layers)(), (c_void_p * decoder.num_layers)()
        self._turns = (c_void_p * len(decoder.rotaries))()
        self._no_levels = (c_void_p * levels)()
        self._in_order = torch.arange(MOST_ROWS)
        self._forward = library.Forward(
            context_length=self.context_length,
            turns=ctypes.addressof(self._turns),
            keys=ctypes.addressof(self._keys),
            values=ctypes.addressof(self._values),
        )
        self._reached: tuple[KeyValueCache | None, int, int] = (None, 0, 0)

    def __del__(self) -> None:
        self._kernels.secondguess_free(self._workspace)

    def _step(self, starts: Sequence[int], queries: Queries, num_keys: int, *, causal: bool = False) -> Step:
        return Step(None, NOWHERE, num_keys, starts=starts, closure=queries.closure)

    def _reach_cache(self) -> None:
        """Know where keys and values are; they move when the cache grows."""
        cache, decoder = self.cache, self.decoder
        cache.allocate(decoder.num_layers, decoder.num_key_heads, decoder.head_size, torch.bfloat16)
        reached = (cache, cache.num_slots, cache.capacity)
        if reached != self._reached:
            for index in range(decoder.num_layers):
                self._keys[index] = cache.keys[index].data_ptr()
                self._values[index] = cache.values[index].data_ptr()
            self._reached = reached

    def run(self, tokens: Tensor, step: Step, num_logits: int, with_hidden: bool) -> Output:
        rows, width = tokens.shape
        tokens = tokens.contiguous()
        self._reach_cache()
        for index, rotary in enumerate(self.decoder.rotaries):
            self._turns[index] = rotary.table(step.num_keys).data_ptr()
        levels, states = self._levels_for(rows, width) if with_hidden else (self._no_levels, {})
        logits = torch.empty(rows, num_logits, self.vocab_size)
        slots = self.cache.placement.slots
        if slots is None:
            slots = self._in_order if rows <= MOST_ROWS else torch.arange(rows)
        starts = (c_int64 * rows)(*step.starts)
        closure = None if step.closure is None else step.closure.contiguous()
        forward = self._forward
        forward.num_rows, forward.num_tokens, forward.num_logits = rows, width, num_logits
        forward.capacity, forward.num_threads = self.cache.capacity, torch.get_num_threads()
        forward.tokens, forward.slots, forward.logits = tokens.data_ptr(), slots.data_ptr(), logits.data_ptr()
        forward.starts, forward.hidden = ctypes.addressof(starts), ctypes.addressof(levels)
        forward.closure = None if closure is None else closure.data_ptr()
        failure = self._kernels.secondguess_run(self.decoder.described, forward, self._workspace)
        if failure == NO_MEMORY:
            raise OutOfMemoryError(
                f"expected memory for a forward over {rows * width} tokens, got none; decode fewer at once"
            )
        if failure == UNKNOWN_TOKEN:
            raise BadInputError(
                f"expected token ids from 0 to {self.decoder.described.num_embedded - 1}, got {int(tokens.max())} "
                f"or {int(tokens.min())}; is it the tokenizer of another model?"
            )
        return Output(
            logits, {layer: states[level] for layer, level in self._levels.items()} if states else {}
        )

    def _levels_for(self, rows: int, width: int) -> tuple[ctypes.Array[c_void_p], dict[int, Tensor]]:
        """Where the kernels put the states that `hidden_layers` asks for, as addresses by level and as tensors."""
        levels = (c_void_p * (self.decoder.num_layers + 1))()
        states = {}
        for level in set(self._levels.values()):
            states[level] = torch.empty(rows, width, self.decoder.embedding.shape[1], dtype=torch.bfloat16)
            levels[level] = states[level].data_ptr()
        return levels, states
