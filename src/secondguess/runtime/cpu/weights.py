"""Weights in the block layout of the kernels (see `product.h`), in memory with large pages."""

from __future__ import annotations

import mmap
from contextlib import suppress
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from secondguess.runtime.cpu import library
from secondguess.runtime.decoder.stored import TILE, WeightRows
from secondguess.runtime.system.machine import allocate_pages, num_threads
from secondguess.runtime.weight_format import WeightFormat

BLOCK = 32
INPUT_MULTIPLE = 64
ARENA = 2**26


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
    """Weight in blocks, with its bias.

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
    weight: Tensor | WeightRows,
    bias: Tensor | None,
    arena: Arena,
    weight_format: WeightFormat,
    gated: bool = False,
) -> Blocks:
    """Return a linear layer's weight `[output, input]` in the layout of the kernels.

    Codes of stored rows are kept where the encoding has what they need, and are rounded to it otherwise. With `gated`, the
    first half of the outputs are gates, which are interleaved with the values that they multiply.
    """
    rows = weight if isinstance(weight, WeightRows) else WeightRows.of_tensor(weight)
    rows = rows.interleaved() if gated else rows
    blocks = Blocks(library.Weight(num_outputs=len(rows), num_inputs=_round_up(rows.width, INPUT_MULTIPLE)))
    if bias is not None:
        bias = interleaved(bias) if gated else bias
        blocks.weight.bias = blocks.keep(functional.pad(bias.float(), (0, blocks.num_lines - len(bias))))
    _allocate(blocks, arena, weight_format)
    source, kept = _source_of(rows.padded(BLOCK))
    library.units()[0].kernels.secondguess_pack(blocks.weight, source, num_threads())
    del kept
    return blocks


def _source_of(rows: WeightRows) -> tuple[library.Source, object]:
    """Return the structure that the kernels read, and an object to be kept as long as it."""
    addresses, types = rows.addresses.contiguous(), rows.types.contiguous()
    return library.Source(addresses.data_ptr(), types.data_ptr(), rows.width), (addresses, types, rows)


def decode_rows(rows: WeightRows, dtype: torch.dtype) -> Tensor:
    """Return stored rows as a tensor `[output, input]` in float32 or bfloat16."""
    found = torch.empty(len(rows.addresses), rows.width, dtype=dtype)
    source, kept = _source_of(rows)
    is_float32 = int(dtype == torch.float32)
    library.units()[0].kernels.secondguess_decode(
        source, len(found), found.data_ptr(), is_float32, num_threads()
    )
    del kept
    return found


def requantise(packed: Blocks, arena: Arena, weight_format: WeightFormat) -> Blocks:
    """Return a weight in bfloat16 in another encoding; both share the bias."""
    blocks = Blocks(library.Weight.from_buffer_copy(packed.weight), packed.tensors[:-1])
    _allocate(blocks, arena, weight_format)
    library.units()[0].kernels.secondguess_repack(blocks.weight, packed.weight, num_threads())
    return blocks


def unpack_blocks(packed: Blocks, found: Tensor | None = None, order: Tensor | None = None) -> Tensor:
    """Return the numbers of a weight in plain layout, `[output, input]` in float32.

    Args:
        packed: the weight.
        found: where they are written, perhaps without the last inputs; by default a new tensor with the padding.
        order: row of each output of the blocks, or -1 for one that is not read; by default the outputs in order, as
            many as there are rows.
    """
    if found is None:
        found = library.float32_buffer(packed.num_lines, packed.weight.num_inputs)
    if order is None:
        order = torch.arange(packed.num_lines)
    rows = found.data_ptr() + order * found.stride(0) * found.itemsize
    rows = torch.where((order < 0) | (order >= len(found)), 0, rows)
    unpack = library.units()[0].kernels.secondguess_unpack
    unpack(packed.weight, rows.data_ptr(), found.shape[1], num_threads())
    return found


def _allocate(blocks: Blocks, arena: Arena, weight_format: WeightFormat) -> None:
    """Allocate the blocks of a weight in an encoding."""
    weight, num_lines = blocks.weight, blocks.num_lines
    weight.encoding = library.ENCODINGS.index(weight_format.name)
    num_bytes = num_lines * weight.num_inputs * weight_format.bits // 8
    if weight_format.group_size is not None:
        num_groups = weight.num_inputs // weight_format.group_size
        num_bytes += num_lines * num_groups * weight_format.bytes_per_group
    weight.data = blocks.keep(arena.allocate(num_bytes))


def interleaved(values: Tensor) -> Tensor:
    """Interleave a bias as `WeightRows.interleaved` does rows."""
    gates, others = (functional.pad(half, (0, -len(half) % TILE)).view(-1, TILE) for half in values.chunk(2))
    return torch.stack((gates, others), 1).flatten()


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
