"""Weights in the block layout of the kernels (see `product.h`), in memory with large pages."""

from __future__ import annotations

import mmap
from contextlib import suppress
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from secondguess.runtime.native import library
from secondguess.runtime.weight_format import WeightFormat

BLOCK, TILE = 32, 16
INPUT_MULTIPLE = 64
ARENA = 2**26
NUMBERS_AT_ONCE = 2**20
"""Numbers of a weight that are padded and quantised at once.

A whole language-modelling head would take as much memory as a small model.
"""


class Arena:
    """Allocator of weight memory in few large pieces.

    A processor reads memory with pages of 2 MiB a fifth faster than with pages of 4 KiB.
    """

    def __init__(self) -> None:
        self._piece = torch.empty(0, dtype=torch.uint8)

    def allocate(self, num_bytes: int) -> Tensor:
        """Return zeros `[num_bytes]` in uint8, which stay allocated while referenced."""
        size = -(-num_bytes // 64) * 64
        if size > self._piece.numel():
            # Private: large pages for shared memory follow another setting, which is usually off.
            memory = mmap.mmap(-1, max(size, ARENA), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            with suppress(OSError):  # systems without large pages: small ones are only slower
                memory.madvise(mmap.MADV_HUGEPAGE)
            self._piece = torch.frombuffer(memory, dtype=torch.uint8)
        place, self._piece = self._piece[:num_bytes], self._piece[size:]
        return place


@dataclass
class Blocks:
    """Weight in blocks, with its scales, sums and bias.

    Args:
        weight: structure that the kernels read; it points into `tensors`.
        tensors: tensors that must be kept as long as `weight`.
    """

    weight: library.Weight
    tensors: list[Tensor] = field(default_factory=list)

    def keep(self, values: Tensor) -> int:
        """Keep a tensor allocated and return its address."""
        self.tensors.append(values.contiguous())
        return self.tensors[-1].data_ptr()


def pack_blocks(
    weight: Tensor, bias: Tensor | None, arena: Arena, weight_format: WeightFormat, gated: bool = False
) -> Blocks:
    """Return a linear layer's weight in the layout of the kernels.

    The weight is packed in slices: beside it and its blocks little memory is needed.

    Args:
        weight: `[output, input]`.
        bias: `[output]` or None.
        arena: allocator of the blocks.
        weight_format: encoding of the weight.
        gated: whether the first half of the outputs are gates, which are interleaved with the
            values that they multiply.
    """
    halves = weight.chunk(2) if gated else (weight,)
    num_outputs = len(halves) * _round_up(halves[0].shape[0], TILE) if gated else weight.shape[0]
    num_lines, num_inputs = _round_up(num_outputs, BLOCK), _round_up(weight.shape[1], INPUT_MULTIPLE)
    blocks = Blocks(library.Weight(num_outputs=num_outputs, num_inputs=num_inputs))
    if bias is not None:
        bias = interleave_rows(*bias.chunk(2)) if gated else bias
        blocks.weight.bias = blocks.keep(_padded(bias.float(), num_lines))
    dtype = torch.int8 if weight_format.is_quantised else weight.dtype
    per_line = 4 // dtype.itemsize
    data = arena.allocate(num_lines * num_inputs * dtype.itemsize)
    tiles = data.view(dtype).view(-1, num_inputs // (TILE * per_line), BLOCK // TILE, TILE, TILE, per_line)
    num_groups = num_inputs // (weight_format.group_size or num_inputs)
    scale, sums = torch.zeros(num_lines, num_groups), torch.zeros(num_lines, num_groups, dtype=torch.int32)
    num_blocks = max(1, NUMBERS_AT_ONCE // (num_inputs * BLOCK))
    slices = (torch.split(half, num_blocks * BLOCK // len(halves)) for half in halves)
    for number, parts in enumerate(zip(*slices, strict=True)):
        rows = interleave_rows(*parts) if gated else parts[0]
        rows = _padded(rows, _round_up(rows.shape[0], BLOCK), num_inputs)
        first = number * num_blocks
        if weight_format.is_quantised:
            lines = slice(first * BLOCK, first * BLOCK + rows.shape[0])
            groups, scale[lines] = quantise(rows, weight_format)
            sums[lines] = groups.sum(2, dtype=torch.int32)
            rows = groups.flatten(1)
        in_tiles = rows.view(-1, BLOCK // TILE, TILE, tiles.shape[1], TILE, per_line)
        tiles[first : first + in_tiles.shape[0]] = in_tiles.permute(0, 3, 1, 4, 2, 5)
    if weight_format.is_quantised:
        blocks.weight.scale, blocks.weight.sum = blocks.keep(scale), blocks.keep(sums)
    blocks.weight.data = blocks.keep(data)
    return blocks


def quantise(rows: Tensor, weight_format: WeightFormat) -> tuple[Tensor, Tensor]:
    """Return rows `[row, input]` as integers `[row, group, input]`, and scales `[row, group]`."""
    groups = rows.float().reshape(len(rows), -1, weight_format.group_size or rows.shape[1])
    largest = 2 ** (weight_format.bits - 1) - 1
    scale = groups.abs().amax(2).clamp_min(torch.finfo(torch.float32).tiny) / largest
    return (groups / scale[:, :, None]).round().to(torch.int8), scale


def _padded(values: Tensor, *sizes: int) -> Tensor:
    """Return values with zeros appended in each dimension up to these sizes."""
    missing = [size - present for size, present in zip(sizes, values.shape, strict=True)]
    to_add = [count for each in reversed(missing) for count in (0, each)]
    return functional.pad(values, to_add) if any(to_add) else values


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def interleave_rows(gate: Tensor, up: Tensor) -> Tensor:
    """Interleave the rows of two weights (or biases), 16 of each in turn.

    A block of 32 outputs then holds 16 gates and the 16 values that they multiply.

    Args:
        gate, up: `[output, ...]`; padded with zeros to whole tiles.
    """
    parts = []
    for part in (gate, up):
        missing = part.new_zeros(-part.shape[0] % TILE, *part.shape[1:])
        parts.append(torch.cat((part, missing)).view(-1, TILE, *part.shape[1:]))
    return torch.stack(parts, 1).flatten(0, 2)
