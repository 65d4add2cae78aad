"""Linear layers whose weights stay in the files of a checkpoint until they are read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from secondguess.errors import CheckpointError
from secondguess.runtime.weight_format import INT4_GROUPS, INT8_GROUPS, MXFP4, WeightFormat

GROUP = INT4_GROUPS.group_size or 0
SMALLEST_HALF = 2.0**-24
"""Smallest positive number of float16."""


@dataclass(frozen=True)
class GroupedWeight:
    """Quantised weight: `scale * level + minimum`, with scales and minima per group of inputs.

    Args:
        codes: `[output, input]` in uint8.
        bits: bits of a code.
        scale, minimum: `[output, group]` in float32.
        groups: `[input]`, the group of each input; None if each group is a range of inputs.
        levels: `[code]` in uint8, level of each code; None if they are the codes.
    """

    codes: Tensor
    bits: int
    scale: Tensor
    minimum: Tensor
    groups: Tensor | None = None
    levels: Tensor | None = None

    @classmethod
    def rounded(cls, weight: Tensor) -> GroupedWeight:
        """Round a weight `[output, input]` to 8 bits, evenly spaced between the limits of each group."""
        last_code = 255
        groups = weight.float().view(len(weight), -1, GROUP)
        minimum = groups.amin(2).half().float()
        above = groups - minimum[:, :, None]
        scale = (above.amax(2) / last_code).clamp_min(SMALLEST_HALF).half().float()
        codes = (above / scale[:, :, None]).round().clamp(0, last_code).to(torch.uint8)
        return cls(codes.flatten(1), INT8_GROUPS.bits, scale, minimum)

    @classmethod
    def joined(cls, parts: Sequence[GroupedWeight]) -> GroupedWeight:
        """Join the outputs of parts, which have the same bits and levels, and no `groups`."""
        codes, scale, minimum = (
            torch.cat([getattr(part, name) for part in parts]) for name in ("codes", "scale", "minimum")
        )
        return cls(codes, parts[0].bits, scale, minimum, levels=parts[0].levels)

    def dequantised(self) -> Tensor:
        """Return the weight `[output, input]` in float32."""
        codes = self.codes
        if self.levels is not None:  # in an eighth of the time of an index
            codes = self.levels.float().expand(len(codes), -1).gather(1, codes.long())
        if self.groups is not None:
            return codes * self.scale[:, self.groups] + self.minimum[:, self.groups]
        # in place, which takes a third of the time of one expression
        values = codes.view(*self.scale.shape, -1).float()
        return values.mul_(self.scale[:, :, None]).add_(self.minimum[:, :, None]).flatten(1)

    @property
    def weight_format(self) -> WeightFormat | None:
        """Encoding in which the kernels take the codes as they are.

        None if there is none, because groups are not made of whole groups of the kernels.
        """
        if self.groups is not None or self.codes.shape[1] // self.scale.shape[1] % GROUP:
            return None
        if self.levels is not None:
            return MXFP4
        return INT4_GROUPS if self.bits <= INT4_GROUPS.bits else INT8_GROUPS

    def in_bytes(self, weight_format: WeightFormat) -> Tensor:
        """Return the weight `[output, group, byte]` in uint8, as `weights.pack_blocks` takes it.

        Each group has its codes, one per byte, then its scale and its minimum in float16; with levels, its scale in
        bfloat16. Larger groups are repeated. In `INT8_GROUPS` codes are signed.
        """
        assert (self.levels is not None) == weight_format.has_levels
        codes, minimum = self.codes, self.minimum
        if weight_format == INT8_GROUPS and self.bits == INT8_GROUPS.bits:
            codes, minimum = codes ^ 128, minimum + 128 * self.scale  # 128 less
        codes = codes.view(len(codes), -1, GROUP)
        repeats = codes.shape[1] // self.scale.shape[1]
        parameters = (
            [self.scale.bfloat16()] if weight_format.has_levels else [self.scale.half(), minimum.half()]
        )
        repeated = [each.repeat_interleave(repeats, 1)[:, :, None].view(torch.uint8) for each in parameters]
        return torch.cat((codes, *repeated), 2)


class WeightSource(Protocol):
    """Weights of a checkpoint, read one by one.

    Attributes:
        names: names of the weights.
    """

    names: list[str]

    def quantises(self, name: str) -> bool:
        """Return whether a weight is quantised."""

    def read(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """Return a weight in a dtype, by default in that of the file, or in float32 if it is decoded."""

    def read_codes(self, name: str) -> Tensor | GroupedWeight:
        """Return the weight of a linear layer for the kernels, with codes if it is quantised."""


class StoredLinear(nn.Module):
    """Linear layer that reads its weight from the files whenever it is used.

    Args:
        source, name: where the weight is.
        in_features, out_features: of the layer.
        bias: `[output]` or None.
        dtype: dtype of `weight`.
    """

    def __init__(
        self,
        source: WeightSource,
        name: str,
        in_features: int,
        out_features: int,
        bias: Tensor | None,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self._source, self._name = source, name
        self.in_features, self.out_features = in_features, out_features
        self.bias = bias
        self._dtype = dtype

    @property
    def weight(self) -> Tensor:
        """The weight `[output, input]`.

        Raises:
            CheckpointError: a weight of another shape.
        """
        found = self._source.read(self._name, self._dtype)
        self._check(found.shape)
        return found

    def read_codes(self) -> GroupedWeight | None:
        """Return the weight if it is quantised.

        Raises:
            CheckpointError: a weight of another shape.
        """
        found = self._source.read_codes(self._name)
        if not isinstance(found, GroupedWeight):
            return None
        self._check(found.codes.shape)
        return found

    def _check(self, shape: torch.Size) -> None:
        if shape != (self.out_features, self.in_features):
            raise CheckpointError(
                f"expected a weight of shape {(self.out_features, self.in_features)} in the checkpoint, got "
                f"{tuple(shape)}; copy or download the checkpoint again"
            )

    def forward(self, values: Tensor) -> Tensor:
        return functional.linear(values, self.weight, self.bias)
