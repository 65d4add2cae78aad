"""Descriptions of the dense decoder families that the fused decoder supports.

Each family is one entry of `FAMILIES`. `why_not_fused` rejects configurations with features
that a description cannot express. The probe in `fused.fuse` then checks that the description is
correct.
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
    """Root-mean-square norm that rounds before it applies the weight, as Llama's modules do."""

    def __init__(self, module: Any) -> None:
        self.weight: Tensor = module.weight.detach()
        self.eps: float = module.variance_epsilon

    def __call__(self, states: Tensor) -> Tensor:
        return functional.rms_norm(states, self.weight.shape, None, self.eps) * self.weight


class GemmaRMSNorm(Norm):
    """Gemma's root-mean-square norm: the scale is 1 + weight, and the result is rounded last."""

    def __init__(self, module: Any) -> None:
        self.weight = 1.0 + module.weight.detach().float()
        self.eps = module.eps

    def __call__(self, states: Tensor) -> Tensor:
        return functional.rms_norm(states.float(), self.weight.shape, self.weight, self.eps).to(states.dtype)


@dataclass(frozen=True)
class Family:
    """Differences of a model family from Llama.

    All families have Llama's structure: pre-norm, rotary positions, a gated feed-forward network,
    and biases where the checkpoint has them.

    Args:
        windows: function from the configuration to each layer's sliding window in tokens, None for
            full attention. A configuration may name windows that the family's module does not use.
        has_qk_norm: whether queries and keys are normalised per head (Qwen3).
        has_joined_projections: whether query, key and value are one linear layer, and gate and up
            another (Phi-3).
        norm: class of the root-mean-square norms.
        has_post_norms: whether the outputs of attention and feed-forward are normalised before
            they are added to the residual (Gemma 3).
        turns_by_layer_type: whether each layer type has its own rotary frequencies (Gemma 3).
        scales_embeddings: whether the embedding module scales its output (Gemma).
        activation: name of the configuration field that holds the activation.
    """

    windows: Callable[[Any], list[int | None]]
    has_qk_norm: bool = False
    has_joined_projections: bool = False
    norm: type[Norm] = Norm
    has_post_norms: bool = False
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
    "qwen3": Family(window_by_layer, has_qk_norm=True),
    "phi3": Family(one_window, has_joined_projections=True),
    "gemma": Family(no_windows, norm=GemmaRMSNorm, scales_embeddings=True),
    "gemma3_text": Family(
        window_by_layer,
        has_qk_norm=True,
        norm=GemmaRMSNorm,
        has_post_norms=True,
        turns_by_layer_type=True,
        scales_embeddings=True,
        activation="hidden_activation",
    ),
}

UNSUPPORTED_FIELDS = ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention")
"""Configuration fields that, when set, enable features the fused decoder does not implement."""


def why_not_fused(config: Any, device: torch.device) -> str | None:
    """Return why the fused decoder does not cover this configuration on this device, else None."""
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
    asked = [field for field in UNSUPPORTED_FIELDS if getattr(text, field, None)]
    return f"no description has words for {asked[0]}" if asked else None


def _is_plain_rope(rope: Mapping[str, Any]) -> bool:
    """Return whether rotary frequencies are the same at every length and rotate whole heads."""
    fixed = rope.get("rope_type", "default") not in LENGTH_DEPENDENT_ROPE
    return fixed and rope.get("partial_rotary_factor", 1.0) == 1.0


def attention_inputs(attention: Any, family: Family) -> list[Any]:
    """Return the linear layers that compute queries, keys and values."""
    if family.has_joined_projections:
        return [attention.qkv_proj]
    return [attention.q_proj, attention.k_proj, attention.v_proj]


def mlp_inputs(mlp: Any, family: Family) -> list[Any]:
    """Return the linear layers that compute gate and up."""
    return [mlp.gate_up_proj] if family.has_joined_projections else [mlp.gate_proj, mlp.up_proj]
