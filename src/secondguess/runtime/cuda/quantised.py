"""Weights in 4 bits of a copy that drafts on a GPU."""

from __future__ import annotations

import copy

import torch
from torch import Tensor
from torch.nn import functional

from secondguess.runtime.decoder.feed_forward import FeedForward
from secondguess.runtime.decoder.fused_decoder import FusedDecoder, Layer
from secondguess.runtime.decoder.products import PackableLinear

GROUP = 32
"""Inputs that share a scale."""
BLOCK = 8 * GROUP
"""Inputs of a block, whose weights lie in `GROUP` words of 32 bits."""
LARGEST = torch.linspace(6.5, 9.0, 6).tolist()
"""Numbers that the largest weight of a group is tried to become; the one with the smallest error is taken."""
WEIGHTS_AT_ONCE = 2**24


class QuantisedProduct(PackableLinear):
    """Product whose weights are integers from -8 to 7 times a scale per output and `GROUP` inputs, in 4.5 bits.

    Args:
        product: whose weights are rounded.

    Attributes:
        codes: `[output, block, GROUP]` in int32. Bits 4 i to 4 i + 3 of word j of a block are the weight of its input
            i * GROUP + j, plus 8.
        scales: `[block, 4, output]` in int32, each word the bfloat16 scales of two groups, the first in the lower bits.
    """

    def __init__(self, product: PackableLinear) -> None:  # without the weight of the base class
        self.num_outputs, self.num_inputs = product.weight.shape
        self.bias, self.packed = product.bias, False
        self._dtype = product.weight.dtype
        rows = torch.split(product.weight, max(1, WEIGHTS_AT_ONCE // self.num_inputs))
        codes, scales = zip(*map(_quantised, rows), strict=True)
        self.codes = torch.cat(codes)
        self.scales = torch.cat(scales, -1).contiguous()

    @property
    def weight(self) -> Tensor:
        """The weight `[output, input]`, computed from the codes."""
        shifts = torch.arange(0, 32, 4, device=self.codes.device)
        codes = (self.codes[:, :, None] >> shifts[:, None] & 15) - 8  # [output, block, 8, GROUP]
        scales = self.scales.view(torch.bfloat16).view(-1, 4, self.num_outputs, 2).permute(2, 0, 1, 3)
        weight = codes * scales.reshape(self.num_outputs, -1, 8, 1).to(self._dtype)
        return weight.view(self.num_outputs, -1)[:, : self.num_inputs]

    def __call__(self, values: Tensor) -> Tensor:
        return functional.linear(values, self.weight, self.bias)


def _quantised(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes `[output, block, GROUP]` and scales `[block, 4, output]`, as in `QuantisedProduct`."""
    num_outputs, num_inputs = weight.shape
    groups = functional.pad(weight.float(), (0, -num_inputs % BLOCK)).view(num_outputs, -1, 8, GROUP)
    # The largest weight is given the sign that reaches -8.
    largest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
    least = torch.full_like(largest, torch.inf)
    best, scale = torch.zeros_like(groups), torch.zeros_like(largest)
    for number in LARGEST:
        found = _rounded(groups, -largest / number)
        # The scale with the least squared error, for these numbers.
        own = (groups * found).sum(-1, keepdim=True) / found.square().sum(-1, keepdim=True).clamp(min=1)
        own = own.bfloat16().float()
        error = (groups - own * found).square().sum(-1, keepdim=True)
        is_better = error < least
        best, scale = torch.where(is_better, found, best), torch.where(is_better, own, scale)
        least = torch.minimum(error, least)
    shifts = torch.arange(0, 32, 4, device=weight.device)
    words = ((best.long() + 8) << shifts[:, None]).sum(2)
    pairs = scale.view(num_outputs, -1, 4, 2).permute(1, 2, 0, 3).bfloat16().contiguous()
    return (words - (words >> 31 << 32)).int(), pairs.view(torch.int32).squeeze(-1)


def _rounded(groups: Tensor, scales: Tensor) -> Tensor:
    """Return the numbers from -8 to 7 nearest to weights over scales; zeros for a scale of zero."""
    return torch.where(scales == 0, 0.0, groups / scales).round().clamp(-8, 7)


def quantised_copy(decoder: FusedDecoder) -> FusedDecoder:
    """Return a decoder that shares all but the weights of its layers' linear parts, which are in 4 bits.

    The head loses more than other weights in 4 bits, and is shared.
    """
    other = copy.copy(decoder)
    other.layers = [_quantised_layer(layer) for layer in decoder.layers]
    return other


def _quantised_layer(layer: Layer) -> Layer:
    other, part = copy.copy(layer), copy.copy(layer.feed_forward)
    assert isinstance(part, FeedForward)
    other.qkv, other.output, other.feed_forward = (
        QuantisedProduct(layer.qkv),
        QuantisedProduct(layer.output),
        part,
    )
    part.inner, part.output = QuantisedProduct(part.inner), QuantisedProduct(part.output)
    return other
