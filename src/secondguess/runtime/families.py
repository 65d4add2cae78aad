"""How the dense decoder families differ, in words that the fused decoder understands.

A family is a line in `FAMILIES`. `obstacle_to_fusing` names configurations that ask for what no description has words for;
whether the description is right is then found out by the probe in `fused.fuse`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from secondguess.runtime.support import LENGTH_DEPENDENT_ROPE

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_pytorch_tanh": partial(functional.gelu, approximate="tanh"),
}


class Norm:
    """Root-mean-square norm; scaled after rounding, as Llama's modules do."""

    def __init__(self, module: Any) -> None:
        self.weight: Tensor = module.weight.detach()
        self.eps: float = module.variance_epsilon

    def __call__(self, states: Tensor) -> Tensor:
        return functional.rms_norm(states, self.weight.shape, None, self.eps) * self.weight


class OffsetNorm(Norm):
    """Gemma's: the weight is what the scale has more than one, and rounding comes last."""

    def __init__(self, module: Any) -> None:
        self.weight = 1.0 + module.weight.detach().float()
        self.eps = module.eps

    def __call__(self, states: Tensor) -> Tensor:
        return functional.rms_norm(states.float(), self.weight.shape, self.weight, self.eps).to(states.dtype)


@dataclass(frozen=True)
class Family:
    """How a family departs from Llama: pre-norm, rotary positions, gated feed-forward, biases where it has any.

    Args:
        windows: from the configuration, how many tokens each layer sees, None for all. A configuration may name windows
            that the family's module does not have.
        normalises_heads: whether queries and keys pass a norm of their own, per head (Qwen3).
        joins_projections: whether query, key and value, and gate and up, are one linear layer each (Phi-3).
        norm: which root-mean-square norm.
        normalises_outputs: whether what attention and feed-forward add is normalised first (Gemma 3).
        turns_by_layer_type: whether each type of layer has its own rotary frequencies (Gemma 3).
        scales_embeddings: whether the embedding module multiplies what it looks up (Gemma).
        activation: the configuration's name for the activation.
    """

    windows: Callable[[Any], list[int | None]]
    normalises_heads: bool = False
    joins_projections: bool = False
    norm: type[Norm] = Norm
    normalises_outputs: bool = False
    turns_by_layer_type: bool = False
    scales_embeddings: bool = False
    activation: str = "hidden_act"


def no_windows(config: Any) -> list[int | None]:
    return [None] * config.num_hidden_layers


def one_window(config: Any) -> list[int | None]:
    return [config.sliding_window] * config.num_hidden_layers


def window_by_layer(config: Any) -> list[int | None]:
    return [config.sliding_window if kind == "sliding_attention" else None for kind in config.layer_types]


FAMILIES = {
    "llama": Family(no_windows),
    "mistral": Family(one_window),
    "qwen2": Family(window_by_layer),
    "qwen3": Family(window_by_layer, normalises_heads=True),
    "phi3": Family(one_window, joins_projections=True),
    "gemma": Family(no_windows, norm=OffsetNorm, scales_embeddings=True),
    "gemma3_text": Family(
        window_by_layer,
        normalises_heads=True,
        norm=OffsetNorm,
        normalises_outputs=True,
        turns_by_layer_type=True,
        scales_embeddings=True,
        activation="hidden_activation",
    ),
}

UNCOVERED = ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention")
"""Fields of a configuration that, where they are set, ask for what no description here has words for."""


def can_fuse(config: Any, device: torch.device) -> bool:
    """Whether there is a description for models with this configuration on this device."""
    return obstacle_to_fusing(config, device) is None


def obstacle_to_fusing(config: Any, device: torch.device) -> str | None:
    """Why there is no description for models with this configuration on this device; None when there is."""
    if device.type != "cpu":
        return f"our own decoders run on a CPU, not on {device}"
    if config.model_type not in FAMILIES:
        return f"{config.model_type} is not among the families described ({', '.join(FAMILIES)})"
    family, text = FAMILIES[config.model_type], config.get_text_config()
    ropes = text.rope_parameters or {}
    if getattr(config, "quantization_config", None) is not None:
        return "the checkpoint is quantised"
    if getattr(text, family.activation) not in ACTIVATIONS:
        return f"activation {getattr(text, family.activation)} is none of {', '.join(ACTIVATIONS)}"
    if not all(map(_is_plain_rope, ropes.values() if family.turns_by_layer_type else [ropes])):
        return "its rotary positions depend on the length, or turn part of a head"
    asked = [field for field in UNCOVERED if getattr(text, field, None)]
    return f"no description has words for {asked[0]}" if asked else None


def _is_plain_rope(rope: Mapping[str, Any]) -> bool:
    """Whether frequencies are the same at every length and turn whole heads."""
    fixed = rope.get("rope_type", "default") not in LENGTH_DEPENDENT_ROPE
    return fixed and rope.get("partial_rotary_factor", 1.0) == 1.0


def attention_inputs(attention: Any, family: Family) -> list[Any]:
    """The layers that make queries, keys and values."""
    if family.joins_projections:
        return [attention.qkv_proj]
    return [attention.q_proj, attention.k_proj, attention.v_proj]


def mlp_inputs(mlp: Any, family: Family) -> list[Any]:
    """The layers that make gate and up."""
    return [mlp.gate_up_proj] if family.joins_projections else [mlp.gate_proj, mlp.up_proj]
