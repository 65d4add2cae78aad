"""GGUF files of random models, written by gguf's own writer as llama.cpp's converter writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from checkpoints import random_llama, write_tokenizer

WIDTH = 256
LLAMA_HEADS = {"attn_q": 4, "attn_k": 2}


def blocks(weight: Tensor, kind: str) -> tuple[object, Tensor]:
    """A tensor in blocks of a type, and what these blocks hold.

    gguf quantises to types of 32 numbers; for those of 256 the blocks are random, with scales near 0.001.
    """
    gguf = pytest.importorskip("gguf")
    numpy = pytest.importorskip("numpy")
    wanted = gguf.GGMLQuantizationType[kind]
    if kind.endswith("_K"):
        size = gguf.GGML_QUANT_SIZES[wanted][1]
        random = numpy.random.default_rng(4)
        data = random.integers(0, 256, (len(weight), weight.shape[1] // 256, size), dtype=numpy.uint8)
        scales = numpy.array([0.001, 0.002], dtype=numpy.float16).view(numpy.uint8)
        place = slice(size - 2, size) if kind == "Q6_K" else slice(0, 4)
        data[:, :, place] = scales[: 2 if kind == "Q6_K" else 4]
        data = data.reshape(len(weight), -1)
    else:
        data = gguf.quants.quantize(weight.numpy(), wanted)
    return data, torch.from_numpy(gguf.quants.dequantize(data, wanted).copy())


def interleaved(weight: Tensor, heads: int, *, back: bool = False) -> Tensor:
    """Rows as llama.cpp orders them: the halves of a head in turn."""
    sizes = (-1, 2) if back else (2, -1)
    return weight.unflatten(0, (heads, *sizes)).transpose(1, 2).flatten(0, 2)


def writer_for(folder: Path, architecture: str, config: Any, **fields: int | float | str) -> Any:
    """Return a writer of `model.gguf` that has a model's sizes, other fields, and a tokenizer.

    Double underscores in the names of fields stand for dots.
    """
    gguf = pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    write_tokenizer(folder)
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]
    writer = gguf.GGUFWriter(folder / "model.gguf", architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    if hasattr(config, "rms_norm_eps"):
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    else:
        writer.add_layer_norm_eps(config.layer_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    for name, value in fields.items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)]
        add(f"{architecture}.{name.replace('__', '.')}", value)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(sorted(vocabulary["vocab"], key=vocabulary["vocab"].get))
    writer.add_token_merges([" ".join(merge) for merge in vocabulary["merges"]])
    writer.add_eos_token_id(0)
    writer.add_pad_token_id(0)
    return writer


def finish(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_model(
    writer: Any,
    model: nn.Module,
    kind: str,
    *,
    mixed: str | None = None,
    factors: dict[str, Tensor] | None = None,
) -> None:
    """Write the weights of a model, its linear layers in a type, some in another, and factors of RoPE.

    The weights become those that the file holds. A tied head is written as llama.cpp does, as the embeddings, and in
    the other type.
    """
    gguf = pytest.importorskip("gguf")
    architecture = writer.arch
    tied = mixed is not None and model.config.tie_word_embeddings
    for name, value in (factors or {}).items():
        writer.add_tensor(name, value.numpy())
    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(kinds[architecture], model.config.num_hidden_layers)
    for name, value in model.state_dict().items():
        stem, _, suffix = name.rpartition(".")
        place = names.get_name(stem)
        if stem == "lm_head" and model.config.tie_word_embeddings:
            continue
        heads = LLAMA_HEADS.get(place.rpartition(".")[2]) if architecture == "llama" else None
        is_gemma_norm = architecture.startswith("gemma") and value.dim() == 1
        if value.dim() == 1 or (place in ("token_embd", "output") and not tied):
            ordered = value if heads is None else interleaved(value, heads)
            writer.add_tensor(f"{place}.{suffix}", (ordered + is_gemma_norm).numpy())
            continue
        used = mixed if mixed and place.endswith(("ffn_down", "attn_v", "token_embd")) else kind
        data, held = blocks(value if heads is None else interleaved(value, heads), used)
        value.copy_(held if heads is None else interleaved(held, heads, back=True))
        writer.add_tensor(f"{place}.{suffix}", data, raw_dtype=gguf.GGMLQuantizationType[used])
    finish(writer)


def write_llama(
    folder: Path, kind: str, mixed: str | None = None, tied: bool = False, rope_factors: Tensor | None = None
) -> tuple[Path, nn.Module]:
    """Write a random Llama; return the file and the model in float32."""
    model = random_llama(
        3,
        hidden_size=WIDTH,
        intermediate_size=WIDTH,
        vocab_size=300,
        initializer_range=0.1,
        tie_word_embeddings=tied,
    )
    factors = {} if rope_factors is None else {"rope_freqs.weight": rope_factors}
    writer = writer_for(folder, "llama", model.config, rope__freq_base=10000.0)
    write_model(writer, model, kind, mixed=mixed, factors=factors)
    return folder / "model.gguf", model
