"""Products of a decoder, whose weights may be packed for the processor at loading, not in every call.

On a CPU a bfloat16 product over a few rows spends more time on reading a weight in plain layout
than on arithmetic. The fused decoder in bfloat16 has weights in the blocks that oneDNN reads, with bit-identical
results, on processors for which oneDNN has them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from secondguess.runtime.decoder.stored import StoredModule, WeightRows

ROWS_HINT = 8
"""Expected number of rows given to oneDNN: blocks for 8 suit 1 to 8 rows, those for 1 do not."""


MAX_ROWS_SAME_ORDER = 32
"""Largest number of rows for which oneDNN sums each row of a packed product in the same order."""

MAX_DRAFT_QUERIES = 96
"""Upper bound on the nodes of a draft plus the tokens that a row may have to catch up."""


class PackableLinear:
    """Product `values @ weight.T + bias` with an optionally packed weight.

    Args:
        weight: `[output, input]`.
        bias: `[output]` or None.
        packed: whether to pack the weight; requires `can_pack`.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, packed: bool) -> None:
        self.num_outputs, self.num_inputs = weight.shape
        self._weight = pack(weight) if packed else weight
        self.bias = bias
        self.packed = packed

    @classmethod
    def joined(cls, linears: Sequence[Any], packed: bool, order: Tensor | None = None) -> PackableLinear:
        """Return one product for linear layers with the same input, outputs concatenated.

        With `order`, output `i` is the output `order[i]` of the layers.
        """
        biases = [linear.bias.detach() for linear in linears if linear.bias is not None]
        bias = _joined(biases, order) if biases else None
        if any(isinstance(linear, StoredModule) for linear in linears):
            return StoredProduct(linears, bias, order)
        return cls(_joined([linear.weight.detach() for linear in linears], order), bias, packed)

    @property
    def weight(self) -> Tensor:
        """The weight `[output, input]`; only `multiply` can read it if it is packed."""
        return self._weight

    def rows(self) -> WeightRows:
        """Return the rows of the weight for the kernels."""
        return WeightRows.of_tensor(self.weight)

    def release(self) -> None:
        """Drop the weight, which the caller holds in another form."""
        self._weight = torch.empty(0)

    def __call__(self, values: Tensor) -> Tensor:
        if self.packed:
            return multiply(values, self.weight, self.bias)
        return functional.linear(values, self.weight, self.bias)


class StoredProduct(PackableLinear):
    """Product of linear layers whose weights are in files; they are read in every call."""

    def __init__(self, linears: Sequence[Any], bias: Tensor | None, order: Tensor | None) -> None:
        self.num_outputs = sum(linear.out_features for linear in linears)
        self.num_inputs: int = linears[0].in_features
        self.bias = bias
        self.packed = False
        self._linears = linears
        self._order = order

    @property
    def weight(self) -> Tensor:
        return _joined([linear.weight.detach() for linear in self._linears], self._order)

    def rows(self) -> WeightRows:
        joined = WeightRows.joined([linear.rows() for linear in self._linears])
        return joined if self._order is None else joined[self._order]

    def release(self) -> None:
        self._linears = []

    def __call__(self, values: Tensor) -> Tensor:
        return functional.linear(values, self.weight, self.bias)


def _joined(parts: Sequence[Tensor], order: Tensor | None) -> Tensor:
    joined = torch.cat(list(parts)) if len(parts) > 1 else parts[0]
    return joined if order is None else joined[order]


def pack(weight: Tensor) -> Tensor:
    """Return a weight in oneDNN's block layout, which only `multiply` can read."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), ROWS_HINT)
    return packed


def multiply(values: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """Return `values @ weight.T + bias` for a weight from `pack`.

    A row's bits depend on that row alone. A single row is computed twice, because with AVX-512
    bfloat16 a product of one row adds in another order than products of more rows. The exception is
    a single prompt of more than `MAX_DRAFT_QUERIES` tokens: it is always prefilled on its own, and
    one product over all its tokens is faster.
    """
    num_rows = values.shape[:-1].numel()
    if num_rows == 1:
        return _linear(values.reshape(1, -1).expand(2, -1), packed, bias)[0].view(*values.shape[:-1], -1)
    if num_rows <= MAX_ROWS_SAME_ORDER or (values.shape[0] == 1 and num_rows > MAX_DRAFT_QUERIES):
        return _linear(values, packed, bias)
    parts = torch.split(values.reshape(num_rows, -1), MAX_ROWS_SAME_ORDER)
    product = torch.cat([_linear(part, packed, bias) for part in parts])
    return product.view(*values.shape[:-1], -1)


def _linear(values: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    # For unusual strides oneDNN falls back to a reference kernel that is a hundred times slower.
    product: Tensor = torch.ops.mkldnn._linear_pointwise(values.contiguous(), packed, bias, "none", [], "")
    return product


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether packing by oneDNN helps: bfloat16 on a CPU for which oneDNN supports it."""
    return (
        device.type == "cpu"
        and dtype == torch.bfloat16
        and torch._C._has_mkldnn
        and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )
