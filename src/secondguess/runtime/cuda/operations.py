"""Operations of a decoder's forward pass over few tokens: Triton kernels on a GPU, torch elsewhere.

All shapes are fixed by the arguments, and nothing is read back from the device, so that a pass can be captured as a
CUDA graph. The torch versions define the results; the kernels equal them up to rounding.
"""

from __future__ import annotations

import math
import sys
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from secondguess.runtime.cuda.quantised import BLOCK, GROUP, QuantisedProduct
from secondguess.runtime.decoder.families import ACTIVATIONS, LayerNorm, Norm
from secondguess.runtime.decoder.fused_decoder import AttentionHeads
from secondguess.runtime.decoder.products import PackableLinear
from secondguess.runtime.decoder.rotary import Rotary, rotate
from secondguess.runtime.decoder.scores import explicit_attention

MAX_QUERIES = 63
"""Largest number of queries of a row, whose ancestors are bits of a signed 64-bit integer."""
MAX_KERNEL_TOKENS = 64
"""Largest number of tokens for which the linear kernel is used; products of more are not bound by reading weights."""
CHUNK = 128
"""Keys that one program of the attention kernel reads."""
MAX_TILES = 1024
"""More than the blocks of outputs of a product whose inputs several programs share, on any device, and than rows."""
MERGED_CHUNKS, MERGED_SIZE = 64, 32
"""Chunks, and places of their outputs, that one program of the merge kernel reads at a time."""
LOGITS_BLOCK = 2048
"""Logits that one program reads to find the most likely token."""
GATES = {"silu": 1, "gelu_pytorch_tanh": 2}
"""Number in the kernels of each activation that they compute."""


class PassInputs(NamedTuple):
    """Inputs of a forward pass, int64 on the device.

    Args:
        slots: `[row]`, cache slot.
        starts: `[row]`, cached tokens; negative for padding, which writes nothing and whose outputs are undefined.
        tokens: `[row, query]`, token ids.
        positions: `[row, query]`, text positions.
        ancestors: `[row, query]`, bit i is set at the query's ancestors among the queries, and at itself; None if each
            query follows the one before it, as in prefills.
        num_finished: `[MAX_TILES]` in int32, programs of a kernel that have finished, by block of a product's outputs or by
            row of logits; zeros between kernels.
    """

    slots: Tensor
    starts: Tensor
    tokens: Tensor
    positions: Tensor
    ancestors: Tensor | None
    num_finished: Tensor


class LayerCache(NamedTuple):
    """Keys and values of one layer, `[slot, kv_head, position, size]` each, contiguous."""

    keys: Tensor
    values: Tensor


def linear(
    states: Tensor,
    product: PackableLinear,
    num_finished: Tensor,
    norm: Norm | None = None,
    activation: str | None = None,
    residual: Tensor | None = None,
    scale: float = 1.0,
) -> Tensor:
    """Return `residual + scale * activation(norm(states) @ weight.T + bias)`, `[token, output]`.

    Args:
        states: `[token, input]`.
        num_finished: as in `PassInputs`.
        activation: name of the activation of the first half of the outputs, by which the second half is multiplied;
            None to return all outputs.
        residual: `[token, output]`; None for zeros.
        scale: factor on what is added to the residual.
    """
    if not len(states):
        return states.new_empty(0, product.num_outputs)
    if norm is not None:
        has_kernel = uses_kernels(states) and not isinstance(norm, LayerNorm)
        states = _norm_kernel(states, norm) if has_kernel else norm(states)
    fits = len(states) <= MAX_KERNEL_TOKENS and (activation is None or activation in GATES)
    if fits and uses_kernels(states):
        return _linear_kernel(states, product, num_finished, activation, residual, scale)
    output = product(states)
    if activation is not None:
        gate, value = output.chunk(2, -1)
        output = ACTIVATIONS[activation](gate) * value
    output = output if scale == 1.0 else output * scale
    return output if residual is None else residual + output


def most_likely(logits: Tensor, num_finished: Tensor) -> tuple[Tensor, Tensor]:
    """Return the most likely tokens, the lowest among equals, and their softmax in float64, `[row]` each.

    Args:
        logits: `[row, vocab]` in float32, contiguous. The softmax is NaN where one is NaN or infinite, or all are minus
            infinity.
        num_finished: as in `PassInputs`.
    """
    if not uses_kernels(logits):
        return logits.argmax(-1), logits.softmax(-1).amax(-1).double()
    num_rows, num_logits = logits.shape
    parts = -(-num_logits // LOGITS_BLOCK)
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    confidences = torch.empty(num_rows, dtype=torch.float64, device=logits.device)
    _triton().most_likely_kernel[num_rows, parts](
        logits,
        torch.empty(num_rows, parts, 3, dtype=torch.float32, device=logits.device),
        num_finished,
        tokens,
        confidences,
        num_logits,
        BLOCK=LOGITS_BLOCK,
        PARTS=parts,
    )
    return tokens, confidences


def rotate_and_store(
    qkv: Tensor,
    heads: AttentionHeads,
    norms: tuple[Norm, Norm] | None,
    rotary: Rotary,
    cache: LayerCache,
    inputs: PassInputs,
) -> Tensor:
    """Return rotated queries `[token, head, size]`, and write keys and values to the cache.

    Args:
        qkv: `[token, width]`, queries, keys and values of all heads.
        norms: norms of each head of queries and of keys, before the rotation; None for none.
        rotary: table of the layer, with rows for every position of the cache.
        cache: the layer's cache.
    """
    if uses_kernels(qkv):
        return _rotate_kernel(qkv, heads, norms, rotary, cache, inputs)
    num_rows, width = inputs.tokens.shape
    parts = qkv.view(num_rows, width, -1, heads.size)
    queries, keys, values = torch.split(parts, [heads.num_queries, heads.num_keys, heads.num_keys], 2)
    if norms is not None:
        queries, keys = norms[0](queries), norms[1](keys)
    cos, sin = rotary.table(0)[inputs.positions].unsqueeze(-2).chunk(2, -1)
    queries, keys = (rotate(each, cos, sin, rotary.is_interleaved) for each in (queries, keys))
    for row, start in enumerate(inputs.starts.tolist()):
        if start >= 0:
            slot, cells = inputs.slots[row], slice(start, start + width)
            cache.keys[slot, :, cells] = keys[row].transpose(0, 1)
            cache.values[slot, :, cells] = values[row].transpose(0, 1)
    return queries.flatten(0, 1)


def attention(
    queries: Tensor, heads: AttentionHeads, window: int | None, cache: LayerCache, inputs: PassInputs
) -> Tensor:
    """Return the attention output `[token, head * size]`.

    Args:
        queries: `[token, head, size]`.
        heads: number, size and scaling of the heads.
        window: sliding window in positions; None for full attention.
        cache: the layer's cache.
    """
    if uses_kernels(queries):
        return _attention_kernel(queries, heads, window, cache, inputs)
    num_rows, width = inputs.tokens.shape
    outputs = []
    for row, start in enumerate(inputs.starts.tolist()):
        row_queries = queries.view(num_rows, width, heads.num_queries, heads.size)[row : row + 1]
        row_queries = row_queries.transpose(1, 2)
        if start < 0:
            outputs.append(torch.zeros_like(row_queries.transpose(1, 2)))
            continue
        slot, total = int(inputs.slots[row]), start + width
        nodes = torch.arange(width, device=queries.device)
        seen = nodes <= nodes[:, None]
        if inputs.ancestors is not None:
            seen = (inputs.ancestors[row][:, None] >> nodes) & 1 == 1
        mask = torch.cat((seen.new_ones(width, start), seen), 1)
        if window is not None:
            key_positions = torch.cat((torch.arange(start, device=nodes.device), inputs.positions[row]))
            mask &= inputs.positions[row][:, None] - key_positions < window
        keys, values = (each[slot : slot + 1, :, :total] for each in cache)
        outputs.append(
            explicit_attention(row_queries, keys, values, mask[None, None], heads.scaling, heads.cap)
        )
    return torch.cat(outputs).reshape(num_rows * width, -1)


@lru_cache
def shared_memory(device: torch.device) -> int:
    """Return the bytes of shared memory that a program may use, which hold the blocks of all pipeline stages."""
    if device.type != "cuda":
        return sys.maxsize
    from triton.runtime import driver

    return int(driver.active.utils.get_device_properties(device.index or 0)["max_shared_mem"])


@lru_cache
def num_processors(device: torch.device) -> int:
    """Return the number of multiprocessors of a CUDA device."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def uses_kernels(values: Tensor) -> bool:
    """Return whether the Triton kernels compute with these values."""
    return values.is_cuda


def _norm_kernel(states: Tensor, norm: Norm) -> Tensor:
    output, size = torch.empty_like(states), states.shape[1]
    _triton().norm_kernel[(len(states),)](
        states,
        norm.weight,
        output,
        norm.eps,
        SIZE=size,
        BLOCK=_power_of_two(size),
        num_warps=8,
    )
    return output


class Tile(NamedTuple):
    """Division of a product among programs.

    Args:
        outputs, inputs: sizes of the blocks of a weight that a program reads.
        stages: number of pipeline stages.
        warps: of a program.
        programs: largest number of programs per multiprocessor if several share the inputs of a block of outputs.
    """

    outputs: int
    inputs: int
    stages: int
    warps: int = 4
    programs: int = 2


def _linear_kernel(
    states: Tensor,
    product: PackableLinear,
    num_finished: Tensor,
    activation: str | None,
    residual: Tensor | None,
    scale: float,
) -> Tensor:
    num_tokens, num_inputs = states.shape
    num_halves = 1 if activation is None else 2
    num_outputs = product.num_outputs // num_halves
    output = states.new_empty(num_tokens, num_outputs)
    is_quantised = isinstance(product, QuantisedProduct)
    tile = _tile_in_4_bits(activation) if is_quantised else _tile(num_outputs, activation, states.dtype)
    block_tokens = max(8 if is_quantised else 16, _power_of_two(num_tokens))
    weight_bytes = 0.5 if is_quantised else states.dtype.itemsize
    row_bytes = block_tokens * states.dtype.itemsize + tile.outputs * num_halves * weight_bytes
    num_tiles = -(-num_outputs // tile.outputs)
    parts = 1 if activation is not None else _parts(tile, num_tiles, num_inputs, states.device)
    shape = (parts, num_tokens, num_outputs)
    partial_sums = torch.empty(shape, dtype=torch.float32, device=states.device) if parts > 1 else None
    tensors = (product.bias, residual, output, partial_sums, num_finished, num_tokens, num_outputs, scale)
    options = {
        "NUM_INPUTS": num_inputs,
        "HAS_BIAS": product.bias is not None,
        "HAS_RESIDUAL": residual is not None,
        "ACTIVATION": 0 if activation is None else GATES[activation],
        "BLOCK_TOKENS": block_tokens,
        "BLOCK_OUTPUTS": tile.outputs,
        "STAGES": max(1, min(tile.stages, int(shared_memory(states.device) // (tile.inputs * row_bytes)))),
        "PARTS": parts,
        "num_warps": tile.warps,
    }
    if isinstance(product, QuantisedProduct):
        _triton().quantised_linear_kernel[num_tiles, parts](
            states, product.codes, product.scales, *tensors, GROUP=GROUP, **options
        )
    else:
        _triton().linear_kernel[num_tiles, parts](
            states, product.weight, *tensors, BLOCK_INPUTS=tile.inputs, **options
        )
    return output


def _tile(num_outputs: int, activation: str | None, dtype: torch.dtype) -> Tile:
    """Return how a product is divided, chosen by the times of the products of an 8B Llama on an H200."""
    if dtype == torch.float32:
        return Tile(32, 64, 2)
    if num_outputs > 32768:  # a head
        return Tile(64, 64, 8)
    return Tile(64, 128, 4) if activation is None else Tile(64, 64, 6)


def _tile_in_4_bits(activation: str | None) -> Tile:
    return Tile(64, BLOCK, 3, programs=3) if activation is None else Tile(32, BLOCK, 4, warps=2)


def _parts(tile: Tile, num_tiles: int, num_inputs: int, device: torch.device) -> int:
    """Return how many programs share the inputs of a block of outputs, a power of two.

    Each reads at least four blocks.
    """
    limit = min(tile.programs * num_processors(device) // num_tiles, num_inputs // tile.inputs // 4)
    return 1 << max(0, limit.bit_length() - 1)


def _rotate_kernel(
    qkv: Tensor,
    heads: AttentionHeads,
    norms: tuple[Norm, Norm] | None,
    rotary: Rotary,
    cache: LayerCache,
    inputs: PassInputs,
) -> Tensor:
    table = rotary.table(0)
    queries = qkv.new_empty(len(qkv), heads.num_queries, heads.size)
    _triton().rotate_kernel[(len(qkv), heads.num_queries + 2 * heads.num_keys)](
        qkv,
        queries,
        *cache,
        *((None, None) if norms is None else (norms[0].weight, norms[1].weight)),
        table,
        inputs.slots,
        inputs.starts,
        inputs.positions,
        inputs.tokens.shape[1],
        *cache.keys.stride()[:2],
        0.0 if norms is None else norms[0].eps,
        NUM_QUERIES=heads.num_queries,
        NUM_KEYS=heads.num_keys,
        SIZE=heads.size,
        ROTATED=table.shape[1] // 2,
        BLOCK=_power_of_two(heads.size),
        HAS_NORM=norms is not None,
        IS_INTERLEAVED=rotary.is_interleaved,
        num_warps=1,
    )
    return queries


def _attention_kernel(
    queries: Tensor,
    heads: AttentionHeads,
    window: int | None,
    cache: LayerCache,
    inputs: PassInputs,
) -> Tensor:
    num_rows, width = inputs.tokens.shape
    num_tokens, capacity = num_rows * width, cache.keys.shape[2]
    is_causal = inputs.ancestors is None
    # With many queries there is work for all processors without chunks, whose sums need memory.
    chunk = capacity if is_causal else CHUNK
    num_chunks = -(-capacity // chunk)
    shape = (num_tokens, heads.num_queries, num_chunks)
    sums = torch.empty(*shape, heads.size, dtype=torch.float32, device=queries.device)
    statistics = torch.empty(*shape, 2, dtype=torch.float32, device=queries.device)
    block_size = max(16, _power_of_two(heads.size))
    # The same for every width of a draft, as the sums of a query depend on it.
    block = 64 if is_causal and heads.size <= 128 else 32
    _triton().attention_kernel[(num_rows * heads.num_keys, num_chunks, -(-width * heads.group // block))](
        queries,
        *cache,
        inputs.slots,
        inputs.starts,
        inputs.positions,
        inputs.ancestors,
        sums,
        statistics,
        width,
        *cache.keys.stride()[:2],
        num_chunks,
        chunk,
        heads.scaling,
        heads.cap or 0.0,
        window or 0,
        IS_CAUSAL=is_causal,
        HAS_CAP=heads.cap is not None,
        HAS_WINDOW=window is not None,
        NUM_KEYS=heads.num_keys,
        GROUP=heads.group,
        BLOCK_QUERIES=block,
        BLOCK_KEYS=32 if queries.dtype == torch.float32 else 64,
        num_warps=4,
        num_stages=2 if heads.size <= 128 else 1,
        SIZE=heads.size,
        BLOCK_SIZE=block_size,
    )
    output = queries.new_empty(num_tokens, heads.num_queries * heads.size)
    merged_size, merged_chunks = (MERGED_SIZE, MERGED_CHUNKS) if num_chunks > 1 else (block_size, 1)
    _triton().merge_kernel[(num_tokens, heads.num_queries, -(-heads.size // merged_size))](
        sums,
        statistics,
        inputs.starts,
        output,
        width,
        num_chunks,
        chunk,
        NUM_HEADS=heads.num_queries,
        SIZE=heads.size,
        BLOCK_SIZE=merged_size,
        BLOCK_CHUNKS=merged_chunks,
        num_warps=2,
    )
    return output


def _triton() -> Any:
    from secondguess.runtime.cuda import triton_kernels

    return triton_kernels


def _power_of_two(number: int) -> int:
    return 1 << math.ceil(math.log2(number))
