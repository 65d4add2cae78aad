"""Linear layers of a Transformers module, computed by the kernels."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from secondguess.errors import OutOfMemoryError
from secondguess.runtime.native import library
from secondguess.runtime.native.weights import Arena, pack_blocks, unpack_blocks
from secondguess.runtime.support import num_threads
from secondguess.runtime.weight_format import BFLOAT16


class KernelLinear(nn.Module):
    """Linear layer in bfloat16 whose weight is in the layout of the kernels.

    A row's bits do not depend on other rows. If a gradient is needed, torch computes the layer.

    Args:
        linear: layer in bfloat16.
        arena: allocator of the weight.

    Attributes:
        weight: tensor of the weight's shape and dtype without memory.
    """

    def __init__(self, linear: nn.Linear, arena: Arena) -> None:
        super().__init__()
        weight = linear.weight.detach()
        self.weight = torch.empty_like(weight, device="meta")
        self.bias = linear.bias
        self._unit = library.units()[0]
        self._blocks = pack_blocks(weight, None if self.bias is None else self.bias.detach(), arena, BFLOAT16)

    def forward(self, values: Tensor) -> Tensor:
        if values.requires_grad and torch.is_grad_enabled():
            return functional.linear(values, self.plain_weight(), self.bias)
        num_outputs, width = self.weight.shape
        rows = values.to(torch.bfloat16).contiguous()
        product = torch.empty(*values.shape[:-1], num_outputs, dtype=torch.bfloat16)
        places = (rows.data_ptr(), rows.numel() // width, width, product.data_ptr())
        to_run = (*places, int(self._unit.has_tiles), num_threads())
        if self._unit.kernels.secondguess_linear(self._blocks.weight, *to_run):
            raise OutOfMemoryError(f"expected memory for {rows.numel()} numbers of a linear layer, got none")
        return product

    def plain_weight(self) -> Tensor:
        """Return the weight in plain layout."""
        num_outputs, num_inputs = self.weight.shape
        return unpack_blocks(self._blocks)[:num_outputs, :num_inputs]
