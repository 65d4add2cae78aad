"""Linear layers of a Transformers module, computed by the kernels."""

from __future__ import annotations

from copy import copy

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from secondguess.errors import OutOfMemoryError, UnsupportedModelError
from secondguess.runtime.cpu import library
from secondguess.runtime.cpu.weights import Arena, pack_blocks, requantise, unpack_blocks
from secondguess.runtime.system.machine import num_threads
from secondguess.runtime.weight_format import BFLOAT16, WeightFormat


class KernelLinear(nn.Module):
    """Linear layer whose weight is in the layout of the kernels, and whose inputs are rounded to bfloat16.

    A row's bits do not depend on other rows. If a gradient is needed, torch computes the layer; a quantised one has none.

    Args:
        linear: the layer; an `nn.Linear`, or a `Conv1D` of Transformers (GPT-2), whose weight is transposed.
        arena: allocator of the weight.
        weight_format: encoding of the weight. With a quantised one inputs are quantised to 8 bits.

    Attributes:
        weight: tensor of the weight's shape `[output, input]` and dtype without memory.
        is_transposed: whether the layer is a `Conv1D`.
    """

    def __init__(
        self, linear: nn.Linear | Conv1D, arena: Arena, weight_format: WeightFormat = BFLOAT16
    ) -> None:
        super().__init__()
        self.is_transposed = isinstance(linear, Conv1D)
        weight = linear.weight.detach()
        weight = weight.T if self.is_transposed else weight
        self.weight = torch.empty(weight.shape, dtype=weight.dtype, device="meta")
        self.bias = linear.bias
        self._unit = library.units()[0]
        self.weight_format = weight_format
        bias = None if self.bias is None else self.bias.detach()
        self._blocks = pack_blocks(weight, bias, arena, weight_format)

    def forward(self, values: Tensor) -> Tensor:
        if values.requires_grad and torch.is_grad_enabled():
            return functional.linear(values, self.plain_weight(), self.bias)
        num_outputs, width = self.weight.shape
        if values.shape[-1] != width:  # torch's error for nn.Linear
            raise RuntimeError(f"expected inputs of {width} numbers, got {tuple(values.shape)}")
        rows = values.to(torch.bfloat16).contiguous()
        dtype = torch.bfloat16 if values.dtype == torch.bfloat16 else torch.float32
        product = torch.empty(*values.shape[:-1], num_outputs, dtype=dtype)
        arguments = (rows.data_ptr(), rows.numel() // width, width, product.data_ptr())
        to_run = (*arguments, int(dtype == torch.float32), int(self._unit.has_tiles), num_threads())
        if self._unit.kernels.secondguess_linear(self._blocks.weight, *to_run):
            raise OutOfMemoryError(f"expected memory for {rows.numel()} numbers of a linear layer, got none")
        return product.to(values.dtype)

    def requantised(self, arena: Arena, weight_format: WeightFormat) -> KernelLinear:
        """Return this layer, whose weight is in bfloat16, with the weight in another encoding."""
        other = copy(self)
        other.weight_format, other._blocks = weight_format, requantise(self._blocks, arena, weight_format)
        return other

    @property
    def num_bytes(self) -> int:
        """Bytes of the weight, with its scales."""
        return sum(each.nbytes for each in self._blocks.tensors)

    def plain_weight(self) -> Tensor:
        """Return the weight `[output, input]` in plain layout; refuse to if it is quantised."""
        if self.weight_format.is_quantised:
            raise UnsupportedModelError(
                f"expected a layer with its weight in bfloat16, to save it or for a gradient, got one in "
                f"{self.weight_format.bits} bits; load the model without quantize"
            )
        num_outputs, num_inputs = self.weight.shape
        return unpack_blocks(self._blocks)[:num_outputs, :num_inputs].to(self.weight.dtype)

    def _save_to_state_dict(self, destination: dict[str, Tensor], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        weight = self.plain_weight()
        destination[f"{prefix}weight"] = weight.T if self.is_transposed else weight
