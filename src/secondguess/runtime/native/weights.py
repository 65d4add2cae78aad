"""Weights in the block layout of the kernels (see `product.h`), in memory with large pages."""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from secondguess.runtime.native import library
from secondguess.runtime.stored import GROUP
from secondguess.runtime.support import allocate_pages, num_threads
from secondguess.runtime.weight_format import INT8, WeightFormat

BLOCK, TILE = 32, 16
INPUT_MULTIPLE = 64
ARENA = 2**26
NUMBERS_AT_ONCE = 2**20
"""Numbers of a weight whose codes are packed at once.

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
            memory = allocate_pages(max(size, ARENA))
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
        tensors: tensors that must be kept as long as `weight`, the blocks last.
    """

    weight: library.Weight
    tensors: list[Tensor] = field(default_factory=list)

    @property
    def num_lines(self) -> int:
        """Number of outputs, padded to whole blocks."""
        return _round_up(self.weight.num_outputs, BLOCK)

    def keep(self, values: Tensor) -> int:
        """Keep a tensor allocated and return its address."""
        self.tensors.append(values.contiguous())
        return self.tensors[-1].data_ptr()


def pack_blocks(
    weight: Tensor, bias: Tensor | None, arena: Arena, weight_format: WeightFormat, gated: bool = False
) -> Blocks:
    """Return a linear layer's weight in the layout of the kernels.

    Little memory is needed in addition to a weight in bfloat16 or float32 and its blocks.

    Args:
        weight: `[output, input]`, or in groups as `GroupedWeight.in_bytes` returns it.
        bias: `[output]` or None.
        gated: whether the first half of the outputs are gates, which are interleaved with the
            values that they multiply.
    """
    halves = weight.chunk(2) if gated else (weight,)
    num_outputs = len(halves) * _round_up(halves[0].shape[0], TILE) if gated else weight.shape[0]
    num_inputs = _round_up(weight.shape[1] * (1 if weight.dim() == 2 else GROUP), INPUT_MULTIPLE)
    blocks = Blocks(library.Weight(num_outputs=num_outputs, num_inputs=num_inputs))
    if bias is not None:
        bias = interleave_rows(*bias.chunk(2)) if gated else bias
        blocks.weight.bias = blocks.keep(_padded(bias.float(), blocks.num_lines))
    data = _allocate(blocks, arena, weight_format)
    if weight.dim() == 2:
        _pack_rows(blocks, halves)
    else:
        num_rows = _blocks_at_once(num_inputs) * BLOCK // len(halves)
        pieces = zip(*(torch.split(half, num_rows) for half in halves), strict=True)
        rows = (interleave_rows(*parts) if gated else parts[0] for parts in pieces)
        _store_codes(data, rows, num_inputs // GROUP, weight_format)
    return blocks


def requantise(packed: Blocks, arena: Arena, weight_format: WeightFormat) -> Blocks:
    """Return a weight in bfloat16 in another encoding; both share the bias."""
    blocks = Blocks(library.Weight.from_buffer_copy(packed.weight), packed.tensors[:-1])
    _allocate(blocks, arena, weight_format)
    library.units()[0].kernels.secondguess_repack(blocks.weight, packed.weight, num_threads())
    return blocks


def unpack_blocks(packed: Blocks) -> Tensor:
    """Return a weight in bfloat16 in plain layout, `[output, input]` with the padding."""
    data = packed.tensors[-1].view(torch.bfloat16)
    slices = data.view(-1, packed.weight.num_inputs // 2, BLOCK, 2)
    return slices.transpose(1, 2).reshape(packed.num_lines, -1)


def _allocate(blocks: Blocks, arena: Arena, weight_format: WeightFormat) -> Tensor:
    """Allocate the blocks of a weight in an encoding; return their bytes."""
    weight, num_lines = blocks.weight, blocks.num_lines
    weight.encoding = library.ENCODINGS.index(weight_format.name)
    num_bytes = num_lines * weight.num_inputs * weight_format.bits // 8
    if weight_format.group_size is not None:
        num_groups = weight.num_inputs // weight_format.group_size
        num_bytes += num_lines * num_groups * weight_format.bytes_per_group
    if weight_format is INT8:
        weight.scale = blocks.keep(library.float32_buffer(num_lines).zero_())
        weight.sum = blocks.keep(torch.zeros(num_lines, dtype=torch.int32))
    data = arena.allocate(num_bytes)
    weight.data = blocks.keep(data)
    return data


def _pack_rows(blocks: Blocks, halves: Sequence[Tensor]) -> None:
    """Round rows to the encoding of a weight and write them to its blocks.

    Args:
        halves: its rows `[output, input]`, or its gates and the values that they multiply.
    """
    assert len({half.shape for half in halves}) == 1
    assert library.ENCODINGS[blocks.weight.encoding] in library.ROUNDED
    dtype = torch.bfloat16 if halves[0].dtype == torch.bfloat16 else torch.float32
    rows = [half.detach().to(dtype).contiguous() for half in halves]
    source = library.Source(
        first=rows[0].data_ptr(),
        second=rows[1].data_ptr() if len(rows) == 2 else None,
        num_rows=rows[0].shape[0],
        width=rows[0].shape[1],
        is_float32=dtype == torch.float32,
    )
    library.units()[0].kernels.secondguess_pack(blocks.weight, source, num_threads())


def _store_codes(
    data: Tensor, pieces: Iterable[Tensor], num_groups: int, weight_format: WeightFormat
) -> None:
    """Write codes to blocks, given in pieces of whole blocks; only the last one may be shorter.

    Args:
        pieces: as `GroupedWeight.in_bytes` returns them.
        num_groups: number of groups, padding included.
    """
    bits = weight_format.bits
    parts = data.view(-1, num_groups, BLOCK * (GROUP * bits // 8 + weight_format.bytes_per_group))
    first = 0
    for part in pieces:
        rows = _padded(part, _round_up(part.shape[0], BLOCK), num_groups, part.shape[2])
        last = first + rows.shape[0] // BLOCK
        parts[first:last] = _pack_groups(rows, bits)
        first = last


def _blocks_at_once(num_inputs: int) -> int:
    return max(1, NUMBERS_AT_ONCE // (num_inputs * BLOCK))


def _pack_groups(rows: Tensor, bits: int) -> Tensor:
    """Return the bytes `[block, group, byte]` of whole blocks in groups (see `product.h`).

    Args:
        rows: as `GroupedWeight.in_bytes` returns them.
    """
    codes, parameters = torch.split(rows, [GROUP, rows.shape[2] - GROUP], dim=2)
    fours = codes.reshape(-1, BLOCK, rows.shape[1], GROUP // 4, 4)
    if bits == 4:
        low, high = fours.view(*fours.shape[:3], GROUP // 8, 2, 4).unbind(4)
        fours = low | high << 4
    slices = fours.permute(0, 2, 3, 1, 4).flatten(2)
    by_output = parameters.reshape(-1, BLOCK, rows.shape[1], parameters.shape[2] // 2, 2)  # two bytes each
    return torch.cat((slices, by_output.permute(0, 2, 3, 1, 4).flatten(2)), 2)


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
