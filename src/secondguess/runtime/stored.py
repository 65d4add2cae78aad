"""Linear layers whose weights stay in the files of a checkpoint until they are read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from secondguess.runtime.weight_format import INT4

GROUP = INT4.group_size or 0


@dataclass(frozen=True)
class GroupedWeight:
    """Quantised weight: `scale * code + minimum`, with scales and minima per group of inputs.

    Args:
        codes: `[output, input]` in uint8.
        bits: bits of a code.
        scale, minimum: `[output, group]` in float32.
        groups: `[input]`, the group of each input; None if each group is a range of inputs.
    """

    codes: Tensor
    bits: int
    scale: Tensor
    minimum: Tensor
    groups: Tensor | None = None

    def dequantised(self) -> Tensor:
        """Return the weight `[output, input]` in float32."""
        if self.groups is not None:
            return self.codes * self.scale[:, self.groups] + self.minimum[:, self.groups]
        codes = self.codes.view(*self.scale.shape, -1)
        return (codes * self.scale[:, :, None] + self.minimum[:, :, None]).flatten(1)

    def in_bytes(self) -> Tensor | None:
        """Return the weight in the kernels' 4 bits, as `weights.pack_blocks` takes it.

        None if it has no such form: more than 4 bits, or groups that are not made of whole groups of
        the kernels. Larger groups are repeated.
        """
        num_outputs, num_inputs = self.codes.shape
        if self.groups is not None or self.bits > INT4.bits or num_inputs // self.scale.shape[1] % GROUP:
            return None
        codes = self.codes.view(num_outputs, -1, GROUP)
        repeats = codes.shape[1] // self.scale.shape[1]
        parameters = [
            each.half().repeat_interleave(repeats, 1)[:, :, None].view(torch.uint8)
            for each in (self.scale, self.minimum)
        ]
        return torch.cat((codes, *parameters), 2)


class StoredLinear(nn.Module):
    """Linear layer that reads its weight from the files whenever it is used.

    Args:
        read: returns the weight.
        in_features, out_features: of the layer.
        bias: `[output]` or None.
        dtype: dtype of `weight`.
    """

    def __init__(
        self,
        read: Callable[[], Tensor | GroupedWeight],
        in_features: int,
        out_features: int,
        bias: Tensor | None,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self._read = read
        self.in_features, self.out_features = in_features, out_features
        self.bias = bias
        self._dtype = dtype

    @property
    def weight(self) -> Tensor:
        """The weight `[output, input]`."""
        found = self._read()
        return (found.dequantised() if isinstance(found, GroupedWeight) else found).to(self._dtype)

    def in_bytes(self) -> Tensor | None:
        """Return the weight as `GroupedWeight.in_bytes` does; None if it is not quantised."""
        found = self._read()
        return found.in_bytes() if isinstance(found, GroupedWeight) else None

    def forward(self, values: Tensor) -> Tensor:
        return functional.linear(values, self.weight, self.bias)
