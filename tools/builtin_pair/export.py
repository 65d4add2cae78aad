"""Export of a trained decoder to a Transformers model directory, and import from one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from builtin_pair.model import Decoder, ModelShape
from builtin_pair.tokenizer import as_transformers, end_token_id
from secondguess.errors import CheckpointError
from secondguess.train.export import write_folder_atomically


def llama_config(shape: ModelShape, end_token: int) -> Any:
    """Return the Transformers configuration of a shape."""
    from transformers import LlamaConfig

    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
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


def export_model(
    decoder: Decoder, tokenizer: Tokenizer, directory: Path, *, dtype: torch.dtype = torch.bfloat16
) -> None:
    """Write configuration, weights and tokenizer, each file atomically."""
    end_token = end_token_id(tokenizer)
    weights = {name: weight.detach().to(dtype).contiguous() for name, weight in decoder.state_dict().items()}
    with write_folder_atomically(directory) as fresh:
        config = llama_config(decoder.shape, end_token)
        config.dtype = str(dtype).removeprefix("torch.")
        config.save_pretrained(fresh)
        save_file(weights, fresh / "model.safetensors", metadata={"format": "pt"})
        as_transformers(tokenizer, decoder.shape.max_positions).save_pretrained(fresh)
        _name_tokenizer_class(fresh / "tokenizer_config.json")


def _name_tokenizer_class(path: Path) -> None:
    """Set a tokenizer class that every version of Transformers accepts.

    Version 5 writes a name that earlier versions do not accept.
    """
    content = json.loads(path.read_text(encoding="utf-8"))
    content["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def load_exported(directory: Path) -> Decoder:
    """Return the decoder in a directory written by ``export_model``.

    Raises:
        CheckpointError: a directory that ``export_model`` did not write.
    """
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        shape = ModelShape(
            config["num_hidden_layers"],
            config["hidden_size"],
            config["num_attention_heads"],
            config["num_key_value_heads"],
            config["intermediate_size"],
            config["vocab_size"],
            config["max_position_embeddings"],
            config["rope_parameters"]["rope_theta"],
            config["rms_norm_eps"],
        )
        decoder = Decoder(shape)
        weights = load_file(directory / "model.safetensors")
        decoder.load_state_dict({name: weight.float() for name, weight in weights.items()})
    except Exception as error:
        raise CheckpointError(
            f"{directory} is not a model exported by `python -m builtin_pair run` ({type(error).__name__}: {error}); "
            "give the target folder of a finished pair"
        ) from error
    return decoder
