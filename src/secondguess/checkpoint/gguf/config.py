"""Configuration of GGUF files.

For architectures that the kernels run it is made from the fields of the header. That of others is Transformers', with fields
that it does not read. Fields that llama.cpp ignores are ignored, and where it has another default than Transformers,
that is used.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from secondguess.checkpoint.gguf.file import GgufFile
from secondguess.errors import CheckpointError, UnsupportedModelError
from secondguess.runtime.system.quiet import quiet

with quiet():
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

GPT_OSS = "gpt-oss"
ARCHITECTURES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3moe": "qwen3_moe",
    "phi3": "phi3",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
    "stablelm": "stablelm",
    GPT_OSS: "gpt_oss",
}
"""Architectures of GGUF files among the families of the kernels, and their model types."""
DRAFTERS = {"eagle3": "eagle", "dflash": "dspark", "gemma4-assistant": "gemma4-assistant"}
"""Architectures of GGUF files with drafters that are no models of their own, and the kinds of these drafters."""
FIELDS = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.sliding_window": "sliding_window",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
}
FIELDS_OF_GPT_OSS = {"expert_feed_forward_length": "intermediate_size", "expert_count": "num_local_experts"}
OPTIONAL = {
    "feed_forward_length",
    "attention.head_count_kv",
    "attention.sliding_window",
    "expert_count",
    "expert_used_count",
}
NUM_MODULES = "nextn_predict_layers"
"""Field with the number of multi-token-prediction modules."""
NAMED_TOKENS = {"bos": "bos_token_id", "eos": "eos_token_id", "padding": "pad_token_id"}
ENDS = frozenset([
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|calls|>", "<|flush|>", "<end_of_turn>", "<|endoftext|>",
    "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>",
    "<|tool_response>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "[e~[",
    # after the end of a completion between two texts, and between files
    "<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]", "<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>",
    "<reponame>", "<|file_sep|>",
])  # fmt: skip
"""Tokens that end a text if the vocabulary has them, as in llama.cpp."""
END_FIELDS = ("tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
ENDS_OF_MESSAGES = {"<|return|>", "<|call|>", "<|calls|>", "<|flush|>"}
"""Where two of these end a text, as in gpt-oss, `<|end|>` does not."""
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


def read_gguf_config(file: GgufFile) -> Any:
    """Return the configuration of a GGUF file; missing fields raise a ValueError, unknown ones an UnsupportedModelError."""
    config = _own_config(file) if file.architecture in ARCHITECTURES else _config_by_transformers(file)
    _complete_config(config, file)
    return config


def _own_config(file: GgufFile) -> Any:
    """Return the configuration of an architecture that the kernels run."""
    architecture, values, tensors = file.architecture, file.values, file.tensors
    epsilon = "layer_norm_epsilon" if architecture == "stablelm" else "layer_norm_rms_epsilon"
    names = FIELDS | {
        f"attention.{epsilon}": "layer_norm_eps" if architecture == "stablelm" else "rms_norm_eps"
    }
    names |= FIELDS_OF_GPT_OSS if architecture == GPT_OSS else {}
    if missing := [key for key in names if key not in values and key not in OPTIONAL]:
        raise ValueError(f"a file of {architecture} without {missing[0]}")
    found = {name: values[key] for key, name in names.items() if key in values}
    found["num_hidden_layers"] = count_layers(file)
    if architecture == "stablelm":
        found["use_parallel_residual"] = "blk.0.ffn_norm.weight" not in tensors
        found["use_qkv_bias"] = "blk.0.attn_q.bias" in tensors
    if architecture == "qwen3moe":
        found["norm_topk_prob"] = True  # of all files: llama.cpp knows no other
    if architecture != "gemma3":  # which has other positions by type of layer
        found["rope_parameters"] = {
            "rope_type": "default",
            "rope_theta": values.get("rope.freq_base", 10000.0),
        }
    embedding = tensors.get("token_embd.weight")
    num_tokens = len(file.fields.get("tokenizer.ggml.tokens") or [])
    for kind, name in NAMED_TOKENS.items():
        token = file.fields.get(f"tokenizer.ggml.{kind}_token_id")
        found[name] = token if isinstance(token, int) and token < num_tokens else None
    config = AutoConfig.for_model(
        ARCHITECTURES[architecture],
        **found,
        vocab_size=values.get("vocab_size", num_tokens) if embedding is None else embedding.shape[0],
        tie_word_embeddings="output.weight" not in tensors,
    )
    config.eos_token_id = _end_tokens(file)
    return config


def count_layers(file: GgufFile) -> int:
    """Return the number of decoder layers; in the file, multi-token-prediction modules count as layers after them."""
    num_blocks, num_modules = file.values.get("block_count"), file.values.get(NUM_MODULES, 0)
    if not isinstance(num_blocks, int) or not isinstance(num_modules, int):
        raise CheckpointError(
            f"expected whole numbers of blocks and modules in {file.path}, got {num_blocks!r} and {num_modules!r}; copy or "
            "download it again"
        )
    return num_blocks - num_modules


def _config_by_transformers(file: GgufFile) -> Any:
    """Return the configuration of another architecture, as Transformers reads it."""
    if kind := DRAFTERS.get(file.architecture):
        raise UnsupportedModelError(
            f"expected a model, got {file.path}, which holds a drafter of the kind {kind}; use it with its target, as the "
            f"drafter {kind}:{file.path}"
        )
    try:
        config = AutoConfig.from_pretrained(
            str(file.path.parent), gguf_file=file.path.name, local_files_only=True, trust_remote_code=False
        )
    except ValueError as error:
        if "is not supported yet" not in str(error):
            raise
        raise UnsupportedModelError(
            f"expected a GGUF file of an architecture that Transformers reads, got {file.architecture} in {file.path}; "
            "use the safetensors checkpoint of the model"
        ) from error
    config.eos_token_id = _end_tokens(file) or config.eos_token_id
    return config


def _end_tokens(file: GgufFile) -> list[int] | None:
    """Return the end-of-sequence tokens: those that the file names, and those known by their texts; None if there are none."""
    tokens = file.fields.get("tokenizer.ggml.tokens") or []
    by_text = {token: index for index, token in enumerate(tokens) if token in ENDS}
    if len(ENDS_OF_MESSAGES & by_text.keys()) > 1:
        by_text.pop("<|end|>", None)
    if "<|tool_response>" in by_text:
        by_text.pop("</s>", None)
    named = [file.fields.get(name) for name in ("tokenizer.ggml.eos_token_id", *END_FIELDS)]
    found = {index for index in named if isinstance(index, int) and 0 <= index < len(tokens)}
    return sorted(found.union(by_text.values())) or None


def _complete_config(config: Any, file: GgufFile) -> None:
    """Set sizes, windows and rotary positions, of which configurations have defaults or Transformers reads none."""
    architecture, values, tensors = file.architecture, file.values, file.tensors
    factors = _read_rope_factors(file)
    for key, name in SIZES.items():
        if key in values and hasattr(config, name):
            setattr(config, name, values[key] or None)  # a soft cap of 0 is none
    if architecture in ARCHITECTURES:
        for key, name in BY_TENSOR.items():
            if hasattr(config, name):
                setattr(config, name, f"blk.0.{key}" in tensors)
        _set_attention(config, architecture, values)
        _set_rope(config, values, factors)
    else:
        _complete_others(config, architecture, values, factors)


def read_rope_parameters(file: GgufFile, head_size: int, context_length: int) -> dict[str, Any]:
    """Return the `rope_parameters` of layers like those of Llama or Qwen.

    Raises:
        UnsupportedModelError: rotary positions that are not known.
    """
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}
    config = AutoConfig.for_model(
        "llama",
        hidden_size=head_size,
        num_attention_heads=1,
        max_position_embeddings=context_length,
        rope_parameters=rope,
    )
    _set_rope(config, file.values, _read_rope_factors(file))
    found: dict[str, Any] = config.rope_parameters
    return found


def _read_rope_factors(file: GgufFile) -> dict[str, Tensor]:
    tensors = file.tensors
    return {
        name: file.bytes_of(tensors[name]).view(torch.float32).clone()
        for name in ROPE_TENSORS
        if name in tensors
    }


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
        config.layer_types = [
            "sliding_attention" if is_windowed else "full_attention" for is_windowed in has_window
        ]
    is_27b = config.num_hidden_layers == LAYERS_OF_GEMMA_27B[architecture]
    config.query_pre_attn_scalar = (
        config.hidden_size // config.num_attention_heads if is_27b else config.head_dim
    )


def _windows_of(pattern: int | list[bool], num_layers: int) -> list[bool]:
    """Return whether each layer has a window; a number is that of layers of which the last has none, 0 if all have one."""
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
