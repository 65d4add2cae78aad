"""Export of a trained decoder to a Transformers model directory, and import from one."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from builtin_pair.model import Decoder, ModelShape
from builtin_pair.tokenizer import as_transformers, end_token_id
from secondguess.errors import CheckpointError

FIELDS = {
    "num_hidden_layers": "num_layers",
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "intermediate_size": "mlp_size",
    "vocab_size": "vocab_size",
    "max_position_embeddings": "max_positions",
    "rms_norm_eps": "norm_eps",
}
"""Names in a configuration of Transformers, and in `ModelShape`."""


def llama_config(shape: ModelShape, end_token: int) -> Any:
    """Return the Transformers configuration of a shape."""
    from transformers import LlamaConfig

    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        head_dim=shape.head_size,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        tie_word_embeddings=True,
        bos_token_id=end_token,
        eos_token_id=end_token,
        pad_token_id=end_token,
        **{name: getattr(shape, field) for name, field in FIELDS.items()},
    )


@contextmanager
def write_folder_atomically(directory: Path) -> Iterator[Path]:
    """Yield a temporary folder whose files are then moved to `directory`, each atomically.

    No file is moved if writing fails.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory) as temporary:
        fresh = Path(temporary)
        yield fresh
        for path in sorted(fresh.iterdir()):
            # A copy has the default permissions, a file written as temporary is private.
            shutil.copyfile(path, f"{path}.whole")
            os.replace(f"{path}.whole", directory / path.name)


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
        sizes = {field: config[name] for name, field in FIELDS.items()}
        decoder = Decoder(ModelShape(**sizes, rope_theta=config["rope_parameters"]["rope_theta"]))
        weights = load_file(directory / "model.safetensors")
        decoder.load_state_dict({name: weight.float() for name, weight in weights.items()})
    except Exception as error:
        raise CheckpointError(
            f"{directory} is not a model exported by `python -m builtin_pair run` ({type(error).__name__}: {error}); "
            "give the target folder of a finished pair"
        ) from error
    return decoder
