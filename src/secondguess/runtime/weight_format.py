"""Encodings of weights. Imports neither torch nor Transformers."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class WeightFormat:
    """Encoding of the weights of linear layers in the kernels.

    A quantised weight is an integer times the scale of its group of inputs, plus the minimum of its group if
    groups have minima; with levels it is one of 16 levels, which are not evenly spaced, times the scale.

    Args:
        name: as given to `quantize`.
        bits: number of bits per weight.
        group_size: number of inputs that share a scale; None without groups.
        has_minima: whether groups have minima.
        has_levels: whether weights are levels.
        keeps_others: whether weights that the checkpoint does not store in this encoding stay in
            bfloat16.
    """

    name: str
    bits: int
    group_size: int | None = None
    has_minima: bool = False
    has_levels: bool = False
    keeps_others: bool = False

    @property
    def is_quantised(self) -> bool:
        return self.bits < 16

    @property
    def head_format(self) -> WeightFormat:
        """Encoding of the language-modelling head, which loses more than other weights in 4 bits."""
        return INT8 if self.bits < INT8.bits and not self.keeps_others else self

    @property
    def bytes_per_group(self) -> int:
        """Bytes of the parameters of a group: its scale, and its minimum if it has one."""
        return 4 if self.has_minima else 2

    @property
    def bytes_per_weight(self) -> float:
        """Bytes of a weight with its share of the scales, for estimates."""
        parameters = 0.0 if self.group_size is None else self.bytes_per_group / self.group_size
        return self.bits / 8 + parameters


BFLOAT16 = WeightFormat("bfloat16", 16)
INT8 = WeightFormat("int8", 8, group_size=32)
INT8_GROUPS = WeightFormat("int8-groups", 8, group_size=32, has_minima=True)
INT4_GROUPS = WeightFormat("int4-groups", 4, group_size=32, has_minima=True)
INT4 = WeightFormat("int4", 4, group_size=32, has_levels=True)
MXFP4 = WeightFormat("mxfp4", 4, group_size=32, has_levels=True)
"""OCP Microscaling Formats 1.0."""
STORED_INT8 = replace(INT8_GROUPS, keeps_others=True)
STORED_INT4 = replace(INT4_GROUPS, keeps_others=True)
"""Up to 8 bits, or up to 4 bits and some with more, as a quantised checkpoint stores them."""
PROBE_TOLERANCE = {BFLOAT16: 0.03, INT8: 0.12, INT4: 0.6, STORED_INT4: 0.12, STORED_INT8: 0.12}
"""Largest relative root-mean-square error of the logits attributed to rounding, by encoding.

Trained and tiny random models have errors of 0.01 in bfloat16, 0.03 to 0.05 in 8 bits and 0.1 to 0.5
in 4 bits, 0.02 to 0.05 if the checkpoint's own codes are kept; a wrong computation has an error of about 1.
"""
QUANTIZATIONS = {each.name: each for each in (INT8, INT4)}
"""Formats that `quantize` accepts, by name."""
