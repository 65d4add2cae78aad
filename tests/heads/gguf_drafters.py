"""Drafters in GGUF files, tiny and random, written by gguf's own writer as llama.cpp's converter writes them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from plain_layers import Tensors
from torch import Tensor

from gguf_files import blocks, finish, interleaved

OUTER = {
    "fc": "fc",
    "input_norm": "enc.output_norm",
    "hidden_norm": "enc.output_norm",
    "markov_head.markov_w1": "markov_w1",
    "markov_head.markov_w2": "markov_w2",
    "confidence_head.proj": "conf_proj",
    "candidate_selector.hidden_projection": "selector_hidden",
    "norm": "output_norm",
    "lm_head": "output",
    "embed_tokens": "token_embd",
}
SHARED = ("shared_expert", "shared_experts")
PARTS = {
    "input_layernorm": "attn_norm",
    "hidden_norm": "attn_norm_2",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    **{f"mlp.{name}.{part}_proj": f"ffn_{part}_shexp" for name in SHARED for part in ("gate", "up", "down")},
    "attention_conv.kernel_projection": "attn_conv_proj",
    "mlp_conv.kernel_projection": "ffn_conv_proj",
    "enorm": "nextn.enorm",
    "hnorm": "nextn.hnorm",
    "eh_proj": "nextn.eh_proj",
    "shared_head.norm": "nextn.shared_head_norm",
}


def in_gguf(name: str) -> str:
    """Return llama.cpp's name of a tensor of a published folder."""
    stem, _, suffix = name.rpartition(".")
    if suffix.endswith("_codebook"):
        return f"selector_{suffix.removesuffix('_codebook')}.weight"
    if suffix == "base_kernel":
        _, index, part = stem.split(".")
        return f"blk.{index}.{part.replace('attention', 'attn').replace('mlp', 'ffn')}_base"
    if stem in OUTER:
        return f"{OUTER[stem]}.{suffix}"
    first, _, rest = stem.removeprefix("model.").partition(".")
    if first == "midlayer":
        return f"blk.0.{PARTS[rest]}.{suffix}"
    if first != "layers":
        return name
    index, _, part = rest.partition(".")
    return f"blk.{index}.{PARTS[part]}.{suffix}"


def converted(tensors: Mapping[str, Tensor], heads: Mapping[str, int]) -> Tensors:
    """Return tensors as in a file; `heads` are those of the parts whose rows are reordered."""
    found: Tensors = {}
    for name, tensor in tensors.items():
        place = in_gguf(name)
        count = heads.get(place.split(".")[-2]) if "." in place else None
        found[place] = tensor if count is None else interleaved(tensor, count)
    return found


def sizes_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that llama.cpp's converter writes for the layers of all architectures."""
    return {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config["head_dim"],
        "attention.value_length": config["head_dim"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": float(config.get("rope_theta", 10_000.0)),
        "rope.dimension_count": config["head_dim"],
        "vocab_size": config["vocab_size"],
    }


def write_gguf(
    path: Path,
    architecture: str,
    fields: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    *,
    kind: str = "",
    further: Mapping[str, Any] | None = None,
) -> Path:
    """Write a file; None leaves a field out. With a kind, matrices of whole blocks become those that it holds."""
    gguf = pytest.importorskip("gguf")
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(path, architecture)
    prefixed = {f"{architecture}.{key}": value for key, value in fields.items()}
    for key, value in (prefixed | dict(further or {})).items():
        add = {
            bool: writer.add_bool,
            int: writer.add_uint32,
            float: writer.add_float32,
            str: writer.add_string,
            list: writer.add_array,
        }
        if value is not None:
            add[type(value)](key, value)
    for name, tensor in tensors.items():
        if kind and tensor.dim() > 1 and tensor.shape[-1] % 32 == 0:
            data, _ = blocks(tensor.float(), kind)
            writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType[kind])
        elif tensor.dtype == torch.int64:
            raw = gguf.GGMLQuantizationType.I64
            writer.add_tensor(name, tensor.numpy().astype(numpy.int64), raw_dtype=raw)
        else:
            writer.add_tensor(name, tensor.float().contiguous().numpy())
    finish(writer)
    return path
