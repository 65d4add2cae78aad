"""Tiny random checkpoints of every class in Transformers' causal-LM mapping."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
)

VOCAB_SIZE = 300
GAINS = (1.0, 2.0, 4.0, 0.5)
"""Factors on the matrices of the layers, by seed: at which of them texts vary depends on the class."""
WINDOW = 8
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "unpadded_vocab_size": VOCAB_SIZE - 4,
    "hidden_size": 32,
    "d_model": 32,
    "n_embd": 32,
    "embedding_size": 32,
    "intermediate_size": 48,
    "decoder_ffn_dim": 48,
    "encoder_ffn_dim": 48,
    "ffn_dim": 48,
    "n_inner": 48,
    "num_hidden_layers": 4,
    "n_layer": 4,
    "n_layers": 4,
    "num_layers": 4,
    "decoder_layers": 4,
    "encoder_layers": 1,
    "num_attention_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "num_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "n_positions": 128,
    "sliding_window": WINDOW,
    "attention_chunk_size": WINDOW,
    "index_topk": WINDOW,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "is_decoder": True,
    "bos_token_id": 1,
    "eos_token_id": 0,
    "pad_token_id": 2,
}
"""Values for every configuration that has the field."""

WINDOWED = ["sliding_attention", "full_attention"] * 2
DOTS3_WINDOWED = {
    "head_dim": 16, "kv_lora_rank": 24, "num_attention_heads": 2, "num_key_value_heads": 2, "q_lora_rank": 24,
    "qk_nope_head_dim": 12, "qk_rope_head_dim": 4, "v_head_dim": 8,
}  # fmt: skip
SPECIAL: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"layer_group_size": 2},
    "bamba": {"mamba_n_heads": 4, "attn_layer_indices": [1, 3]},
    "cohere_compass_text": {
        "layer_types": WINDOWED,
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 1e4}
            for kind in ("sliding_attention", "full_attention")
        },
    },
    "codegen": {"rotary_dim": 4},
    "ctrl": {"dff": 48},
    "dbrx": {
        "attn_config": {"rope_theta": 1e4, "kv_n_heads": 2, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "dory": {"n_input_layers": 1, "n_recurrent_layers": 2, "n_output_layers": 1},
    "dots1": {"n_shared_experts": 1},
    "dots3_note": {
        "vision_config": {"mlp_layer_types": ["dense"] * 4, "adapter_in_dim": 32, "adapter_out_dim": 32},
        "audio_config": {
            "adapter_input_size": 32,
            "adapter_out_dim": 32,
            "feature_size": 8,
            "downsample_hidden_size": 16,
            "conv_output_size": 16,
        },
        "text_config": {
            "shared_experts_intermediate_size": 16,
            "per_layer_config": {"2": DOTS3_WINDOWED, "3": DOTS3_WINDOWED},
        },
    },
    "emu3": {"vocabulary_map": {"<image>": 5, "<|extra_200|>": 6, "<|visual token 000000|>": 7}},
    "gemma3n_text": {
        "layer_types": WINDOWED,
        "num_kv_shared_layers": 2,
        "vocab_size_per_layer_input": VOCAB_SIZE,
        "hidden_size_per_layer_input": 8,
        "laurel_rank": 8,
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": WINDOW},
    "gptj": {"rotary_dim": 4},
    "granitemoehybrid": {"mamba_n_heads": 4, "layer_types": ["mamba", "attention"] * 2},
    "inkling2_loop_text": {
        "n_layers_per_attn_res_block": 1,
        "loop_layer_index_start": 1,
        "loop_layer_index_end": 3,
        "layer_types": ["hybrid_sliding", "hybrid"] * 2,
    },
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "marian": {"tie_word_embeddings": False},
    "mamba2": {"num_heads": 8},
    # Transformers limits the time step from below only in passes over several tokens.
    "nemotron_h": {"time_step_min": 1e-9},
    "roc_bert": {"tie_word_embeddings": False},
    "roformer": {"tie_word_embeddings": False},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid"] * 2},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"] * 2, "time_step_min": 1e-9},
    "zaya": {"num_experts_per_tok": 1},
    # Transformers applies the window in single steps only; in published models it is as long as the context.
    "moshi": {"sliding_window": 128},
    "reformer": {
        "attention_head_size": 8,
        "axial_pos_embds_dim": (16, 16),
        "axial_pos_shape": (8, 16),
        "attn_layers": ["local", "lsh"],
        "feed_forward_size": 48,
    },
}
"""Values by model type, where those of `SMALL` do not fit together or leave the model huge."""
GEMMA4 = {
    "layer_types": WINDOWED,
    "num_kv_shared_layers": 2,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "hidden_size_per_layer_input": 8,
    "global_head_dim": 16,
}
SPECIAL |= {
    "gemma4": {"text_config": GEMMA4},
    "gemma4_assistant": {
        "text_config": {
            "model_type": "gemma4_text",
            "layer_types": WINDOWED,
            "num_kv_shared_layers": 4,
            "vocab_size_per_layer_input": 0,
            "hidden_size_per_layer_input": 0,
            "use_double_wide_mlp": False,
        }
    },
    "gemma4_text": GEMMA4,
    "gemma4_unified": {"text_config": GEMMA4},
    "gemma4_unified_text": GEMMA4,
}
SPECIAL["gemma4_unified_assistant"] = SPECIAL["gemma4_assistant"]


def tiny_config(model_type: str) -> Any:
    """Return a configuration of a few thousand weights, with sliding windows where the class has them."""
    return _shrunk(CONFIG_MAPPING[model_type], SPECIAL.get(model_type, {}))


def _shrunk(config_class: Any, special: dict[str, Any]) -> Any:
    defaults = {field.name: field.default for field in dataclasses.fields(config_class)}
    small = SMALL | special
    if defaults.get("num_key_value_heads") in (None, defaults.get("num_attention_heads")):
        small["num_key_value_heads"] = small["num_attention_heads"]
    parts = {
        name: _shrunk(part_class, special.get(name, {})).to_dict()
        for name in config_class.sub_configs
        if (part_class := _class_of_part(config_class, name, special.get(name, {}))) is not None
    }
    fields = defaults.keys() | config_class.attribute_map.keys() | special.keys()
    return config_class(**{name: value for name, value in small.items() if name in fields} | parts)


def _class_of_part(config_class: Any, name: str, special: dict[str, Any]) -> Any:
    """Return the class of a configuration inside another one, None if it has none by default."""
    if "model_type" in special:
        return CONFIG_MAPPING[special["model_type"]]
    part = getattr(config_class(), name, None)
    return None if part is None else type(part)


def write_tiny(model_type: str, directory: Path, seed: int) -> None:
    """Write a random checkpoint with a tokenizer, as `save_pretrained` leaves them.

    Args:
        model_type: key of the mapping.
        directory: written to.
        seed: seed of the weights, and index of their gain.
    """
    config = tiny_config(model_type)
    config.save_pretrained(directory)  # for the refusals that need no weights, if the next lines fail
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if model_class.config_class is not type(config):  # the text part of a model for images and text
        model_class = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING.get(type(config), model_class)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = model_class(config).float()
        spread_weights(model, GAINS[seed])
    model.save_pretrained(directory)
    words = {"<end>": 0, **{f"w{index}": index for index in range(1, VOCAB_SIZE)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<end>"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(directory)


def spread_weights(model: Any, gain: float) -> None:
    """Give each matrix a scale at which the text depends on the whole context.

    With the usual initialisation a tiny model repeats one token, and a comparison of texts shows nothing.

    Args:
        model: the model.
        gain: factor on all matrices but the embeddings, with which the layers compete.
    """
    embedding = model.get_input_embeddings().weight
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2 and parameter.numel():
                scale = parameter.shape[-1] ** -0.5 * (1.0 if parameter is embedding else gain)
                parameter.mul_(scale / parameter.std().clamp(min=1e-6))
            elif name.endswith("sinks"):  # zero at first, which would hide that they are ignored
                torch.nn.init.normal_(parameter)
