"""Weights in the block layout of the kernels (see `product.h`), in memory with large pages."""

from __future__ import annotations

import mmap
from contextlib import suppress
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from secondguess.runtime.native import library

BLOCK, TILE = 32, 16
INPUT_MULTIPLE = 64
ARENA = 2**26
ROWS_AT_ONCE = 4096
"""Rows of a weight that are quantised at once.

A whole language-modelling head in float32 would take as much memory as a small model.
"""


class Arena:
    """Allocator of weight memory in few large pieces.

    A processor reads memory with pages of 2 MiB a fifth faster than with pages of 4 KiB.
    """

    def __init__(self) -> None:
        self._piece = torch.empty(0, dtype=torch.uint8)

    def hold(self, values: Tensor) -> Tensor:
        """Return a flat copy of the bytes of `values`, which stays allocated while referenced."""
        flat = values.contiguous().view(torch.uint8).reshape(-1)
        size = -(-flat.numel() // 64) * 64
        if size > self._piece.numel():
            # Private: large pages for shared memory follow another setting, which is usually off.
            memory = mmap.mmap(-1, max(size, ARENA), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            with suppress(OSError):  # systems without large pages: small ones are only slower
                memory.madvise(mmap.MADV_HUGEPAGE)
            self._piece = torch.frombuffer(memory, dtype=torch.uint8)
        place, self._piece = self._piece[: flat.numel()], self._piece[size:]
        return place.copy_(flat)


@dataclass
class Blocks:
    """Weight in blocks, with its scales, sums and bias.

    Args:
        weight: structure that the kernels read; it points into `tensors`.
        tensors: tensors that must be kept as long as `weight`.
    """

    weight: library.Weight
    tensors: list[Tensor] = field(default_factory=list)


def pack_blocks(weight: Tensor, bias: Tensor | None, arena: Arena, eight_bits: bool) -> Blocks:
    """Return a linear layer's weight in the layout of the kernels.

    Args:
        weight: `[output, input]`.
        bias: `[output]` or None.
        arena: allocator of the blocks.
        eight_bits: whether to quantise to 8 bits, with one scale per output.
    """
    num_outputs, num_inputs = weight.shape
    to_add = (0, -num_inputs % INPUT_MULTIPLE, 0, -num_outputs % BLOCK)
    padded = functional.pad(weight, to_add)
    found = library.Weight(num_outputs=num_outputs, num_inputs=padded.shape[1])
    kept = []
    if bias is not None:
        kept.append(functional.pad(bias.float(), (0, to_add[3])).contiguous())
        found.bias = kept[-1].data_ptr()
    if eight_bits:
        scale = padded.abs().amax(1).float().clamp_min(torch.finfo(torch.float32).tiny) / 127
        padded = torch.cat(
            [
                (rows.float() / part[:, None]).round().to(torch.int8)
                for rows, part in zip(
                    torch.split(padded, ROWS_AT_ONCE), torch.split(scale, ROWS_AT_ONCE), strict=True
                )
            ]
        )
        sums = padded.sum(1, dtype=torch.int32)
        kept += [scale, sums]
        found.scale, found.sum = scale.data_ptr(), sums.data_ptr()
    per_line = 4 // padded.dtype.itemsize
    tiles = padded.view(-1, BLOCK // TILE, TILE, padded.shape[1] // (TILE * per_line), TILE, per_line)
    kept.append(arena.hold(tiles.permute(0, 3, 1, 4, 2, 5)))
    found.data = kept[-1].data_ptr()
    return Blocks(found, kept)


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
