"""Linear layers whose weights were laid out for the processor once, at load, instead of at every call.

On a CPU a bfloat16 product over a few rows spends more time on reading a plainly stored weight than on arithmetic. oneDNN
can store it in the blocks its kernel reads. The numbers are the same to the last bit, which a probe checks before the
originals are released; where it finds a difference the model stays as it was.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

ROWS_HINT = 8
"""How many rows oneDNN is told to expect: blocks chosen for 8 serve 1 to 8 rows alike, those for 1 do not."""


ALIKE_ROWS = 32
"""oneDNN sums a row of a packed product in the same order for up to so many rows, and in another one for more."""

LONGEST_DRAFT = 96
"""More tokens than any draft has nodes, with what a row may have to catch up."""


class Product:
    """`values @ weight.T + bias` over a weight that may be packed.

    Args:
        weight: `[output, input]`.
        bias: `[output]` or None.
        packed: whether `can_pack` holds for it.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, packed: bool) -> None:
        self.num_outputs = weight.shape[0]
        self.weight: Tensor = pack(weight) if packed else weight
        self.bias = bias
        self.packed = packed

    @classmethod
    def joined(cls, linears: Sequence[Any], packed: bool) -> Product:
        """One product for several linear layers that read the same values; their outputs follow one another."""
        weights = [linear.weight.detach() for linear in linears]
        biases = [linear.bias for linear in linears]
        weight = torch.cat(weights) if len(weights) > 1 else weights[0]
        bias = torch.cat([each.detach() for each in biases]) if biases[0] is not None else None
        return cls(weight, bias, packed)

    def __call__(self, values: Tensor) -> Tensor:
        if self.packed:
            return multiply(values, self.weight, self.bias)
        return functional.linear(values, self.weight, self.bias)


def pack(weight: Tensor) -> Tensor:
    """The same weight in oneDNN's blocks; opaque to everything but `multiply`."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), ROWS_HINT)
    return packed


def multiply(values: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """`[..., output]` from `values` `[..., input]` and a packed weight.

    A row's bits depend on that row alone, except in a lone prompt of more than `LONGEST_DRAFT` tokens, which is always read as
    one and in which whole products are the faster ones.
    """
    num_rows = values.shape[:-1].numel()
    if num_rows <= ALIKE_ROWS or (values.shape[0] == 1 and num_rows > LONGEST_DRAFT):
        return _multiply_at_once(values, packed, bias)
    parts = torch.split(values.reshape(num_rows, -1), ALIKE_ROWS)
    product = torch.cat([_multiply_at_once(part, packed, bias) for part in parts])
    return product.view(*values.shape[:-1], -1)


def _multiply_at_once(values: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    # An unusual stride would send oneDNN to a reference kernel a hundred times slower.
    product: Tensor = torch.ops.mkldnn._linear_pointwise(values.contiguous(), packed, bias, "none", [], "")
    return product


class PackedLinear(nn.Module):
    """A linear layer over a packed weight; `weight` keeps its shape, not its layout."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight: Tensor
        self.register_buffer("weight", pack(linear.weight), persistent=False)
        self.bias = linear.bias

    def forward(self, values: Tensor) -> Tensor:
        return multiply(values, self.weight, self.bias)

    def unpacked(self) -> nn.Linear:
        """The layer that this was made from."""
        num_outputs, num_inputs = self.weight.shape
        linear = nn.Linear(num_inputs, num_outputs, bias=False, device="meta")
        linear.weight = nn.Parameter(self.weight.to_dense(), requires_grad=False)
        linear.bias = self.bias
        return linear


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether packing helps: bfloat16 on a CPU whose oneDNN computes in it."""
    return (
        device.type == "cpu"
        and dtype == torch.bfloat16
        and torch._C._has_mkldnn
        and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


def pack_linears(model: Any) -> bool:
    """Replace a model's linear layers by packed ones, if it then says the same.

    One layer at a time, so that no more than one weight is held twice.

    Returns:
        Whether it was done. A model that reads a layer's weight in its own code, or whose logits would
        change, is left as it was.
    """
    with torch.inference_mode():
        expected = _probe(model)
    for name in list(_linear_names(model)):
        model.set_submodule(name, PackedLinear(model.get_submodule(name)))
    try:
        with torch.inference_mode():
            same = torch.equal(_probe(model), expected)
    except (RuntimeError, AttributeError):
        same = False
    if not same:
        for name, module in list(model.named_modules()):
            if isinstance(module, PackedLinear):
                model.set_submodule(name, module.unpacked())
        model.tie_weights()
    return same


def _linear_names(model: Any) -> Iterator[str]:
    """Layers of exactly this class; a subclass may compute something else."""
    return (name for name, module in model.named_modules() if type(module) is nn.Linear)


def _probe(model: Any) -> Tensor:
    """Logits of a few tokens, uncached, over more than one row."""
    vocab_size = model.get_input_embeddings().weight.shape[0]
    tokens = torch.arange(6).remainder(vocab_size).reshape(2, 3)
    logits: Tensor = model(input_ids=tokens, use_cache=False).logits
    return logits
