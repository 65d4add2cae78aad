"""Rotary positions of drafter heads, and the scalings of them that do not depend on the length of the text."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from secondguess.errors import UnsupportedModelError
from secondguess.runtime.rotary import scaled_frequencies

SCALINGS = ("linear", "llama3", "yarn")


@dataclass(frozen=True)
class RotaryConfig:
    """Rotary positions.

    Args:
        theta: base of the frequencies.
        scaling: fields of a scaling with the names of Transformers' `rope_parameters`, sorted; empty for none.
    """

    theta: float = 10_000.0
    scaling: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> RotaryConfig:
        """Build a configuration from a Llama-like configuration.

        Raises:
            UnsupportedModelError: an unknown scaling, or one that depends on the length of the text.
            KeyError, TypeError, ValueError: fields of a scaling that are missing, or that are no suitable numbers.
        """
        rope = rope_parameters(config)
        theta = float(rope.get("rope_theta", config.get("rope_theta", 10_000.0)))
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind == "default":
            return cls(theta)
        if kind not in SCALINGS:
            raise UnsupportedModelError(
                f"expected rotary positions without scaling or with one of {', '.join(SCALINGS)}, got {rope}; use "
                "another drafter, or train one with `secondguess train`"
            )
        fields = {"rope_type": kind, **rope}
        if kind != "linear":
            fields.setdefault("original_max_position_embeddings", config.get("max_position_embeddings"))
        others = ("type", "rope_theta", "partial_rotary_factor")
        kept = {name: value for name, value in fields.items() if name not in others and value is not None}
        found = cls(theta, tuple(sorted(kept.items())))
        if not found.frequencies(2, None)[0].isfinite().all():
            raise ValueError(f"a scaling of rotary positions with finite frequencies, got {rope}")
        return found

    def frequencies(self, size: int, device: torch.device | None) -> tuple[Tensor, float]:
        """Return the angles between neighbouring positions, `[size / 2]`, and the factor on cosines and sines."""
        if self.scaling:
            return _scaled_frequencies(self, size, device)
        steps = torch.arange(0, size, 2, device=device, dtype=torch.float32) / size
        return self.theta**-steps, 1.0

    @property
    def score_factor(self) -> float:
        """Factor on the attention scores of DeepSeek's layers, in addition to the usual one."""
        scaling = dict(self.scaling)
        factor, share = max(scaling.get("factor", 1.0), 1.0), scaling.get("mscale_all_dim", 0.0)
        root: float = 0.1 * share * math.log(factor) + 1.0
        return root * root

    def to_config(self) -> dict[str, Any]:
        """Return the equivalent `rope_parameters` of a configuration."""
        return {"rope_type": "default", **dict(self.scaling), "rope_theta": self.theta}


def rope_parameters(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the fields about rotary positions in a Llama-like configuration."""
    return config.get("rope_parameters") or config.get("rope_scaling") or {}


@lru_cache
def _scaled_frequencies(rotary: RotaryConfig, size: int, device: torch.device | None) -> tuple[Tensor, float]:
    """Return the result of `RotaryConfig.frequencies`; it is needed in every forward pass."""
    with torch.inference_mode(False):
        return scaled_frequencies(rotary.to_config(), size, device)
