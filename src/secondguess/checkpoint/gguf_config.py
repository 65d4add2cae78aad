"""Configuration fields of GGUF files that Transformers does not read: sizes, and scaling of RoPE.

Where a file has no field for a value, the value is the one that llama.cpp uses.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from secondguess.checkpoint.weights import gguf_reader
from secondguess.errors import UnsupportedModelError
from secondguess.runtime.quiet import quiet

with quiet():
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

ARCHITECTURES = ("llama", "qwen2", "qwen3", "qwen3moe", "phi3", "gemma2", "gemma3", "stablelm")
"""Architectures of GGUF files among the families of the kernels that Transformers reads."""
SIZES = {
    "expert_feed_forward_length": "moe_intermediate_size",
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
LAYERS_OF_GEMMA_27B = {"gemma2": 46, "gemma3": 62}
"""These models divide scores by the root of width / heads, not of the size of a head."""
ROPE_FACTORS, LONG_FACTORS, SHORT_FACTORS = (
    f"rope_{name}.weight" for name in ("freqs", "factors_long", "factors_short")
)
LLAMA_3_SCALING = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
SCALINGS = {
    "none": {},
    "linear": {"factor": "factor"},
    "yarn": {
        "factor": "factor",
        "original_context_length": "original_max_position_embeddings",
        "yarn_attn_factor": "attention_factor",
        "yarn_beta_fast": "beta_fast",
        "yarn_beta_slow": "beta_slow",
    },
    "longrope": {
        "original_context_length": "original_max_position_embeddings",
        "attn_factor": "attention_factor",
    },
}
"""By type, the names in `rope_parameters` of the fields of a scaling."""
WITHOUT_EFFECT = {"type", "finetuned", "original_context_length"}


def check_readable(file: Path) -> None:
    """Check that Transformers reads the configuration of a GGUF file.

    Raises:
        CheckpointError: if the file is broken, or a part of a model.
        UnsupportedModelError: if Transformers does not read it.
    """
    if _architecture(file) == "gpt-oss":
        raise UnsupportedModelError(
            "expected a GGUF file that Transformers reads, got one of gpt-oss, whose configuration it does not; "
            "use the safetensors checkpoint, which has the same weights in MXFP4"
        )


def _architecture(file: Path) -> str | None:
    field = gguf_reader(file).fields.get("general.architecture")
    return None if field is None else str(field.contents())


def complete_config(config: Any, file: Path) -> None:
    """Set in a configuration what Transformers does not read from a GGUF file.

    Raises:
        UnsupportedModelError: for a scaling of RoPE that is not known.
    """
    reader = gguf_reader(file)
    architecture = _architecture(file)
    prefix = f"{architecture}."
    values = {
        name.removeprefix(prefix): field.contents()
        for name, field in reader.fields.items()
        if name.startswith(prefix)
    }
    factors = {
        tensor.name: torch.from_numpy(np.array(tensor.data))
        for tensor in reader.tensors
        if tensor.name in (ROPE_FACTORS, LONG_FACTORS, SHORT_FACTORS)
    }
    if architecture is not None and architecture in ARCHITECTURES:
        _set_sizes(config, architecture, values)
        _set_rope(config, values, factors)
    elif values.get("rope.scaling.type", "none") != "none":
        raise _unknown_scaling(f"architecture {architecture} with a scaling of RoPE")


def _set_sizes(config: Any, architecture: str, values: dict[str, Any]) -> None:
    for key, name in SIZES.items():
        if key in values and hasattr(config, name):
            setattr(config, name, values[key] or None)
    if architecture in LAYERS_OF_GEMMA_27B:
        is_27b = config.num_hidden_layers == LAYERS_OF_GEMMA_27B[architecture]
        config.query_pre_attn_scalar = (
            config.hidden_size // config.num_attention_heads if is_27b else config.head_dim
        )


def _set_rope(config: Any, values: dict[str, Any], factors: dict[str, Tensor]) -> None:
    rope = config.rope_parameters
    if "sliding_attention" in rope:
        if "rope.freq_base_swa" in values:
            rope["sliding_attention"]["rope_theta"] = values["rope.freq_base_swa"]
        rope = rope["full_attention"]
    if "rope.freq_base" in values:
        rope["rope_theta"] = values["rope.freq_base"]
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    num_rotated = values.get("rope.dimension_count", head_size)
    if "partial_rotary_factor" in rope and "rope.dimension_count" in values:
        rope["partial_rotary_factor"] = num_rotated / head_size
    elif num_rotated != head_size:
        raise _unknown_scaling(f"RoPE on {num_rotated} of {head_size} numbers of a head")
    rope |= _read_scaling(values, factors)
    if "original_max_position_embeddings" in rope and hasattr(config, "original_max_position_embeddings"):
        config.original_max_position_embeddings = rope["original_max_position_embeddings"]
    if ROPE_FACTORS in factors:
        _set_llama_3_scaling(config, factors[ROPE_FACTORS])


def _read_scaling(values: dict[str, Any], factors: dict[str, Tensor]) -> dict[str, Any]:
    """Return the fields of `rope_parameters` that describe the scaling, none without one."""
    prefix = "rope.scaling."
    found = {
        key.removeprefix(prefix): value for key, value in values.items() if key.startswith(prefix) and value
    }
    kind = "longrope" if LONG_FACTORS in factors else found.get("type", "linear")
    if kind not in SCALINGS:
        raise _unknown_scaling(f"rope.scaling.type {kind}")
    names = SCALINGS[kind]
    if unknown := found.keys() - names.keys() - WITHOUT_EFFECT:
        raise _unknown_scaling(f"rope.scaling.{min(unknown)} of a scaling of type {kind}")
    if not any(key in found for key in names) and LONG_FACTORS not in factors:
        return {}
    scaling: dict[str, Any] = {"rope_type": kind} | {
        name: found[key] for key, name in names.items() if key in found
    }
    if kind == "longrope":
        scaling |= {
            "long_factor": factors[LONG_FACTORS].tolist(),
            "short_factor": factors[SHORT_FACTORS].tolist(),
        }
    return scaling


def _set_llama_3_scaling(config: Any, factors: Tensor) -> None:
    """Set Llama 3's scaling of RoPE, of which the file has only the factors of the wavelengths."""
    unscaled = config.rope_parameters["rope_theta"] ** (torch.arange(len(factors)) / len(factors))
    config.rope_parameters |= LLAMA_3_SCALING | {"factor": factors.max().item()}
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config)
    if scaled.shape != factors.shape or not torch.allclose(1 / (unscaled * scaled), factors, rtol=1e-3):
        raise _unknown_scaling(
            f"{ROPE_FACTORS} with factors ({factors.min().item():.3g} to {factors.max().item():.3g}) that are "
            "not Llama 3's"
        )


def _unknown_scaling(found: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"expected a GGUF file whose rotary positions are known, got {found}; "
        "use the safetensors checkpoint of the model"
    )
