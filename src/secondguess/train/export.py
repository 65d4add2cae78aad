"""A trained decoder as a directory that Transformers loads."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from secondguess.train.model import Decoder, ModelShape
from secondguess.train.tokenizer import END_TOKEN, as_transformers


def llama_config(shape: ModelShape, end_token: int) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.mlp_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_size,
        max_position_embeddings=shape.max_positions,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        rms_norm_eps=shape.norm_eps,
        tie_word_embeddings=True,
        bos_token_id=end_token,
        eos_token_id=end_token,
        pad_token_id=end_token,
    )


def as_llama(decoder: Decoder, end_token: int, dtype: torch.dtype) -> Any:
    """The same weights in Transformers' own module."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM(llama_config(decoder.shape, end_token))
    missing, unexpected = model.load_state_dict(decoder.state_dict(), strict=False)
    if unexpected or set(missing) - {"lm_head.weight"}:
        raise AssertionError(f"parameter names differ from Llama's: missing {missing}, unexpected {unexpected}")
    model.tie_weights()
    return model.to(dtype).eval()


def export_model(
    decoder: Decoder, tokenizer: Tokenizer, directory: Path, *, dtype: torch.dtype = torch.bfloat16
) -> None:
    """Write weights, configuration and tokenizer; each file appears whole or not at all."""
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent) as temporary:
        fresh = Path(temporary)
        as_llama(decoder, tokenizer.token_to_id(END_TOKEN), dtype).save_pretrained(fresh)
        as_transformers(tokenizer, decoder.shape.max_positions).save_pretrained(fresh)
        for path in sorted(fresh.iterdir()):
            shutil.move(path, directory / path.name)


def read_json(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content
