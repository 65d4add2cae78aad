"""Encodings of weights. Imports neither torch nor Transformers."""

from __future__ import annotations

from dataclasses import dataclass

BYTES_PER_SCALE = 8
"""Bytes of a group's scale and of the sum of its weights, which corrects unsigned products."""
SHORT_ROW = 400
"""Number of inputs of an output in small models, whose scales take the largest share."""


@dataclass(frozen=True)
class WeightFormat:
    """Encoding of the weights of linear layers in the kernels.

    A quantised weight is an integer times a scale, which a group of inputs of an output share.

    Args:
        name: as given to `quantize`.
        bits: number of bits per weight.
        group_size: number of inputs that share a scale; None for all inputs of an output.
    """

    name: str
    bits: int
    group_size: int | None = None

    @property
    def is_quantised(self) -> bool:
        return self.bits < 16

    @property
    def bytes_per_weight(self) -> float:
        """Bytes of a weight with its share of the scales, for estimates."""
        return self.bits / 8 + (BYTES_PER_SCALE / (self.group_size or SHORT_ROW) if self.is_quantised else 0)


BFLOAT16 = WeightFormat("bfloat16", 16)
INT8 = WeightFormat("int8", 8)
QUANTIZATIONS = {each.name: each for each in (INT8,)}
"""Formats that `quantize` accepts, by name."""
