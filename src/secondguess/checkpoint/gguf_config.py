"""Configuration of GGUF files: that of Transformers, with fields that it does not read.

These are sizes, windows, and scaling of RoPE; all fields of gpt-oss, on which Transformers fails.

Fields that llama.cpp ignores are ignored, and where it has another default than Transformers, that is used.
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
    from transformers import AutoConfig, GptOssConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

GPT_OSS = "gpt-oss"
ARCHITECTURES = ("llama", "qwen2", "qwen3", "qwen3moe", "phi3", "gemma2", "gemma3", "stablelm", GPT_OSS)
"""Architectures of GGUF files among the families of the kernels."""
FIELDS_OF_GPT_OSS = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "expert_feed_forward_length": "intermediate_size",
    "expert_count": "num_local_experts",
    "expert_used_count": "num_experts_per_tok",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
}
ENDS_OF_GPT_OSS = ("<|return|>", "<|call|>", "<|endoftext|>")
ENDS_OF_TURNS = frozenset(["<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>", "<|eom_id|>"])
"""Tokens that end a text if the vocabulary has them, as in llama.cpp; in gpt-oss, `<|end|>` does not."""
END_FIELDS = ("tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
NUM_SPECIAL = 1200
"""Number of last tokens of gpt-oss's vocabulary among which its special tokens are."""
SIZES = {
    "expert_feed_forward_length": "moe_intermediate_size",
    "attention.key_length": "head_dim",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
BY_TENSOR = {
    "attn_q.bias": "attention_bias",
    "ffn_up.bias": "mlp_bias",
    "attn_q_norm.weight": "qk_layernorm",
}
"""Fields that are true if the first layer has this tensor."""
LAYERS_OF_GEMMA_27B = {"gemma2": 46, "gemma3": 62}
"""These models divide scores by the root of width / heads, not of the size of a head."""
ROPE_FACTORS, LONG_FACTORS, SHORT_FACTORS = (
    f"rope_{name}.weight" for name in ("freqs", "factors_long", "factors_short")
)
ROPE_TENSORS = (ROPE_FACTORS, LONG_FACTORS, SHORT_FACTORS)
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
        "yarn_beta_fast": "beta_fast",
        "yarn_beta_slow": "beta_slow",
    },
    "longrope": {"original_context_length": "original_max_position_embeddings"},
}
"""By type, the names in `rope_parameters` of the fields of a scaling."""
WITHOUT_EFFECT = {"type", "finetuned", "original_context_length", "yarn_attn_factor"}
"""llama.cpp computes the attention factor of YaRN, as Transformers does."""
NEUTRAL = {"attn_factor": (1.0,), "yarn_ext_factor": (-1.0, 1.0)}


def read_gguf_config(file: Path) -> Any:
    """Return the configuration of a GGUF file.

    Raises:
        CheckpointError: if the file is broken, or a part of a model.
        UnsupportedModelError: if the architecture or a field is not supported.
    """
    if is_of_gpt_oss(file):
        config = _gpt_oss_config(file)
    else:
        try:
            config = AutoConfig.from_pretrained(
                str(file.parent), gguf_file=file.name, local_files_only=True, trust_remote_code=False
            )
        except ValueError as error:
            if "is not supported yet" not in str(error):
                raise
            raise UnsupportedModelError(
                f"expected a GGUF file of an architecture that Transformers reads, got {_architecture(file)} in {file}; "
                "use the safetensors checkpoint of the model"
            ) from error
        _add_end_tokens(config, file)
    _complete_config(config, file)
    return config


def is_of_gpt_oss(file: Path) -> bool:
    """Return whether a GGUF file is one of gpt-oss, which Transformers does not read."""
    return _architecture(file) == GPT_OSS


def is_known(file: Path) -> bool:
    """Return whether the weights of a GGUF file are read by us."""
    return _architecture(file) in ARCHITECTURES


def _architecture(file: Path) -> str | None:
    field = gguf_reader(file).fields.get("general.architecture")
    return None if field is None else str(field.contents())


def _values(file: Path) -> dict[str, Any]:
    """Return the fields of the file's architecture."""
    prefix = f"{_architecture(file)}."
    return {
        name.removeprefix(prefix): field.contents()
        for name, field in gguf_reader(file).fields.items()
        if name.startswith(prefix)
    }


def _gpt_oss_config(file: Path) -> GptOssConfig:
    fields, values = gguf_reader(file).fields, _values(file)
    missing = [key for key in FIELDS_OF_GPT_OSS if key not in values]
    if missing:
        raise ValueError(f"a file of gpt-oss without {GPT_OSS}.{missing[0]}")
    tokens = fields["tokenizer.ggml.tokens"]
    first = max(0, len(tokens.data) - NUM_SPECIAL)
    special = tokens.contents(slice(first, None))
    ends = {first + special.index(token) for token in ENDS_OF_GPT_OSS if token in special}
    if "tokenizer.ggml.eos_token_id" in fields:
        ends.add(int(fields["tokenizer.ggml.eos_token_id"].contents()))
    return GptOssConfig(
        **{name: values[key] for key, name in FIELDS_OF_GPT_OSS.items()},
        vocab_size=len(tokens.data),
        eos_token_id=sorted(ends),
        rope_parameters={"rope_type": "default", "rope_theta": values["rope.freq_base"]},
        architectures=["GptOssForCausalLM"],
    )


def _add_end_tokens(config: Any, file: Path) -> None:
    """Add the ends of turns and of messages to the end-of-sequence token, which alone Transformers reads."""
    fields = gguf_reader(file).fields
    tokens = fields["tokenizer.ggml.tokens"].contents() if "tokenizer.ggml.tokens" in fields else []
    named = {int(fields[name].contents()) for name in END_FIELDS if name in fields}
    found = {index for index, token in enumerate(tokens) if token in ENDS_OF_TURNS or index in named}
    if found:
        ends = config.eos_token_id
        config.eos_token_id = sorted(
            found.union([] if ends is None else [ends] if isinstance(ends, int) else ends)
        )


def _complete_config(config: Any, file: Path) -> None:
    """Set in a configuration what Transformers does not read from a GGUF file."""
    architecture, values = _architecture(file), _values(file)
    tensors = {tensor.name: tensor for tensor in gguf_reader(file).tensors}
    factors = {
        name: torch.from_numpy(np.array(tensors[name].data)) for name in ROPE_TENSORS if name in tensors
    }
    for key, name in SIZES.items():
        if key in values and hasattr(config, name):
            setattr(config, name, values[key] or None)  # a soft cap of 0 is none
    if architecture is not None and architecture in ARCHITECTURES:
        for key, name in BY_TENSOR.items():
            if hasattr(config, name):
                setattr(config, name, f"blk.0.{key}" in tensors)
        _set_attention(config, architecture, values)
        _set_rope(config, values, factors)
    else:
        _complete_others(config, architecture, values, factors)


def _complete_others(
    config: Any, architecture: str | None, values: dict[str, Any], factors: dict[str, Tensor]
) -> None:
    """Set the frequencies of an architecture that the kernels do not read; refuse scalings and unread windows."""
    rope = getattr(config, "rope_parameters", None) or {}
    if "rope.freq_base" in values and "rope_theta" in rope:
        rope["rope_theta"] = values["rope.freq_base"]
    if _read_scaling(values, factors):
        raise _unknown_scaling(f"architecture {architecture} with a scaling of RoPE")
    window = values.get("attention.sliding_window")
    if window and getattr(config, "sliding_window", None) != window:
        raise UnsupportedModelError(
            f"expected a GGUF file whose fields Transformers reads, got architecture {architecture} with "
            "attention.sliding_window; use the safetensors checkpoint of the model"
        )


def _set_attention(config: Any, architecture: str, values: dict[str, Any]) -> None:
    """Set windows, by layer where they differ, and the scale of scores."""
    window = values.get("attention.sliding_window")
    if architecture == "phi3":
        config.sliding_window = window or None
    if architecture not in LAYERS_OF_GEMMA_27B:
        return
    pattern = values.get("attention.sliding_window_pattern")
    if window == 0 or (window is None and architecture == "gemma3"):
        config.layer_types = ["full_attention"] * config.num_hidden_layers
    elif pattern is not None:
        has_window = _windows_of(pattern, config.num_hidden_layers)
        config.layer_types = ["sliding_attention" if each else "full_attention" for each in has_window]
    is_27b = config.num_hidden_layers == LAYERS_OF_GEMMA_27B[architecture]
    config.query_pre_attn_scalar = (
        config.hidden_size // config.num_attention_heads if is_27b else config.head_dim
    )


def _windows_of(pattern: int | list[bool], num_layers: int) -> list[bool]:
    """Return whether each layer has a window.

    Args:
        pattern: the same, or the number of layers of which the last has none; 0 if all have one.
        num_layers: number of layers.
    """
    if isinstance(pattern, int):
        return [pattern == 0 or index % pattern < pattern - 1 for index in range(num_layers)]
    if len(pattern) < num_layers:
        raise UnsupportedModelError(
            f"expected an attention.sliding_window_pattern of {num_layers} layers, got one of {len(pattern)}; "
            "use the safetensors checkpoint of the model"
        )
    return list(pattern[:num_layers])


def _set_rope(config: Any, values: dict[str, Any], factors: dict[str, Tensor]) -> None:
    rope = config.rope_parameters
    if "sliding_attention" in rope:
        if "rope.freq_base_swa" in values:
            rope["sliding_attention"]["rope_theta"] = values["rope.freq_base_swa"]
        rope = rope["full_attention"]
    rope["rope_theta"] = values.get("rope.freq_base", 10000.0)
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    num_rotated = values.get("rope.dimension_count", head_size)
    if "partial_rotary_factor" in rope:
        rope["partial_rotary_factor"] = num_rotated / head_size
    elif num_rotated != head_size:
        raise _unknown_scaling(f"RoPE on {num_rotated} of {head_size} numbers of a head")
    rope |= _read_scaling(values, factors)
    if config.model_type == "gpt_oss" and rope["rope_type"] == "yarn":
        rope["truncate"] = False  # as in the model's own configuration; the file does not say so
    if "original_max_position_embeddings" in rope and hasattr(config, "original_max_position_embeddings"):
        config.original_max_position_embeddings = rope["original_max_position_embeddings"]
    if ROPE_FACTORS in factors and config.model_type != "llama":
        raise _unknown_scaling(f"{ROPE_FACTORS} of a {config.model_type}")
    if ROPE_FACTORS in factors:
        _set_llama_3_scaling(config, factors[ROPE_FACTORS])


def _read_scaling(values: dict[str, Any], factors: dict[str, Tensor]) -> dict[str, Any]:
    """Return the fields of `rope_parameters` that describe the scaling, none without one."""
    prefix = "rope.scaling."
    found = {
        key.removeprefix(prefix): value for key, value in values.items() if key.startswith(prefix) and value
    }
    if "rope.scale_linear" in values:  # of old files
        found.setdefault("factor", values["rope.scale_linear"])
    if (LONG_FACTORS in factors) != (SHORT_FACTORS in factors):
        raise _unknown_scaling(f"one of {LONG_FACTORS} and {SHORT_FACTORS} without the other")
    kind = "longrope" if LONG_FACTORS in factors else found.get("type", "linear")
    if kind not in SCALINGS:
        raise _unknown_scaling(f"rope.scaling.type {kind}")
    names = SCALINGS[kind]
    is_scaled = kind == "longrope" or (kind != "none" and found.get("factor", 1.0) != 1.0)
    unknown = [
        key
        for key, value in found.items()
        if key not in names.keys() | WITHOUT_EFFECT | {"factor"}
        and (kind, key) != ("longrope", "attn_factor")
        and value not in NEUTRAL.get(key, ())
        and (kind == "yarn" or not key.startswith("yarn_"))
    ]
    if unknown:
        raise _unknown_scaling(f"rope.scaling.{min(unknown)} of a scaling of type {kind}")
    if not is_scaled:
        return {}
    scaling: dict[str, Any] = {"rope_type": kind}
    scaling |= {name: found[key] for key, name in names.items() if key in found}
    if kind == "longrope":
        scaling |= {
            "attention_factor": found.get("attn_factor", 1.0),
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
