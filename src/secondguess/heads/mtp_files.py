"""Files of multi-token-prediction (MTP) modules.

A module is read from its target's checkpoint or from a folder of its own; it is written to a
folder of its own with DeepSeek's tensor names.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from secondguess.errors import CheckpointError, UnsupportedModelError
from secondguess.heads.fields import config_errors
from secondguess.heads.files import find_tensors, load_into, read_config, read_named_tensors
from secondguess.heads.layer import LayerConfig
from secondguess.heads.mtp import MtpHead
from secondguess.heads.unrolled import DEFAULT_STEPS
from secondguess.runtime.base import EmbeddingAndHead

WEIGHTS = "model.safetensors"


@dataclass(frozen=True)
class Naming:
    """Tensor names of the MTP modules of a model family.

    Args:
        prefix: format string of a module's name prefix, with the fields `{index}` (index of the
            module) and `{layer}` (that index plus the number of target layers).
        parts: name prefixes after the module prefix, mapped to those of `MtpHead`; all other
            tensors belong to the decoder layer.
        state_first: whether the projection's input is `[state; embedding]`, not
            `[embedding; state]`.
        norm_output: as in `MtpHead`.
    """

    prefix: str
    parts: Mapping[str, str]
    state_first: bool = False
    norm_output: bool = False

    def prefix_of(self, index: int, num_layers: int) -> str:
        """Return the name prefix of a module."""
        return self.prefix.format(index=index, layer=num_layers + index)

    @property
    def projection(self) -> str:
        """Name of the projection weight, without the module prefix; present in every module."""
        return next(theirs for theirs, ours in self.parts.items() if ours == "eh_proj.") + "weight"

    def ours(self, name: str) -> str:
        """Return the `MtpHead` name of a tensor; `name` is without the module prefix."""
        for theirs, ours in self.parts.items():
            if name.startswith(theirs):
                return ours + name.removeprefix(theirs)
        return f"layer.{name}"

    def theirs(self, name: str) -> str:
        """Return the checkpoint name of an `MtpHead` tensor; inverse of `ours`."""
        for theirs, ours in self.parts.items():
            if name.startswith(ours):
                return theirs + name.removeprefix(ours)
        return name.removeprefix("layer.")


DEEPSEEK = Naming(
    "model.layers.{layer}.",
    {
        "enorm.": "enorm.",
        "hnorm.": "hnorm.",
        "eh_proj.": "eh_proj.",
        "shared_head.norm.": "norm.",
        "shared_head.head.": "head.",
        "embed_tokens.": "embed_tokens.",
    },
)
QWEN = Naming(
    "mtp.",
    {
        "pre_fc_norm_embedding.": "enorm.",
        "pre_fc_norm_hidden.": "hnorm.",
        "fc.": "eh_proj.",
        "norm.": "norm.",
        "layers.0.": "layer.",
    },
    norm_output=True,
)
MIMO = Naming(
    "model.mtp_layers.{index}.",
    {
        "token_layernorm.": "enorm.",
        "hidden_layernorm.": "hnorm.",
        "input_proj.": "eh_proj.",
        "final_layernorm.": "norm.",
    },
    state_first=True,
    norm_output=True,
)
NAMINGS = (DEEPSEEK, QWEN, MIMO)

_FOREIGN_PARTS = {
    "self_attn.kv_a_proj_with_mqa.": "latent attention (MLA)",
    "mlp.experts.": "a mixture of experts (MoE)",
    "mlp.gate.": "a mixture of experts (MoE)",
    "linear_attn.": "linear attention",
}
"""Unsupported layer parts by a substring of their tensor names."""


def contains_mtp(folder: Path) -> bool:
    """Return whether a target's checkpoint contains an MTP module."""
    if not (folder / "config.json").is_file():
        return False
    names = find_tensors(folder)
    config = _text_config(read_config(folder))
    return _find_naming(names, config.get("num_hidden_layers", 0)) is not None


def load_mtp(folder: Path, embedding_and_head: EmbeddingAndHead, vocab_size: int, num_layers: int) -> MtpHead:
    """Read the first MTP module of a checkpoint; other tensors are not read.

    Warns if there are further modules, which are not used.

    Args:
        folder: folder of the target or of a single module.
        embedding_and_head: embeddings and LM head of the target.
        vocab_size, num_layers: sizes of the target.

    Raises:
        CheckpointError: no module, broken files, or a module for another target.
        UnsupportedModelError: a module with an unsupported kind of layer.
    """
    config, places = _text_config(read_config(folder)), find_tensors(folder)
    with config_errors(folder):
        naming = _find_naming(places, config["num_hidden_layers"])
        if naming is None:
            raise CheckpointError(
                f"expected a multi-token-prediction module in {folder}, such as model.layers.{config['num_hidden_layers']}."
                "eh_proj.weight, got none; train one with `secondguess train mtp`"
            )
        prefix = naming.prefix_of(0, config["num_hidden_layers"])
        _require_supported_layer(
            folder, [name.removeprefix(prefix) for name in places if name.startswith(prefix)], config
        )
        _check_target(folder, config, vocab_size, num_layers)
        wanted = {name: place for name, place in places.items() if name.startswith(prefix)}
        tensors = {
            naming.ours(name.removeprefix(prefix)): tensor
            for name, tensor in read_named_tensors(wanted).items()
        }
        if naming.state_first:
            tensors["eh_proj.weight"] = torch.cat(tensors["eh_proj.weight"].chunk(2, 1)[::-1], 1)
        head = MtpHead(
            _layer_shape(config),
            embedding_and_head,
            vocab_size,
            num_layers,
            has_embeddings="embed_tokens.weight" in tensors,
            has_head="head.weight" in tensors,
            norm_output=config.get("norm_output", naming.norm_output),
            num_steps=config.get("num_steps", DEFAULT_STEPS),
        )
    load_into(head, tensors, folder)
    if naming.prefix_of(1, config["num_hidden_layers"]) + naming.projection in places and naming is not QWEN:
        warnings.warn(
            f"{folder} holds several multi-token-prediction modules: the first one drafts all tokens, the others are not used",
            stacklevel=2,
        )
    return head


def save_mtp(head: MtpHead, folder: Path) -> None:
    """Write a module to a folder of its own, created if missing, with DeepSeek's tensor names."""
    folder.mkdir(parents=True, exist_ok=True)
    prefix = DEEPSEEK.prefix_of(0, head.num_layers_of_target)
    tensors: dict[str, Tensor] = {
        prefix + DEEPSEEK.theirs(name): tensor.detach().contiguous().cpu()
        for name, tensor in head.state_dict().items()
    }
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    config = {
        **head.shape.to_config(),
        "vocab_size": head.vocab_size,
        "num_hidden_layers": head.num_layers_of_target,
        "num_nextn_predict_layers": 1,
        "norm_output": head.norm_output,
        "num_steps": head.num_steps,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the configuration of the language model; that of a multimodal model is nested."""
    inner: Mapping[str, Any] = config.get("text_config", config)
    return inner


def _find_naming(names: Mapping[str, Path], num_layers: int) -> Naming | None:
    return next(
        (naming for naming in NAMINGS if naming.prefix_of(0, num_layers) + naming.projection in names), None
    )


def _require_supported_layer(folder: Path, names: list[str], config: Mapping[str, Any]) -> None:
    foreign = [reason for part, reason in _FOREIGN_PARTS.items() if any(part in name for name in names)]
    if config.get("attn_output_gate"):
        foreign.append("gated attention")
    if foreign:
        raise UnsupportedModelError(
            f"expected a multi-token-prediction module with a dense layer like those of llama or qwen in {folder}, got one "
            f"with {foreign[0]}, which is not supported yet; train one with `secondguess train mtp` or use another drafter"
        )


def _check_target(folder: Path, config: Mapping[str, Any], vocab_size: int, num_layers: int) -> None:
    found = config["vocab_size"], config["num_hidden_layers"]
    if found != (vocab_size, num_layers):
        raise CheckpointError(
            f"expected a module in {folder} for a target with {vocab_size} words and {num_layers} layers, got one for "
            f"{found[0]} and {found[1]}; it was trained for another target"
        )


def _layer_shape(config: Mapping[str, Any]) -> LayerConfig:
    """Return the layer shape; MiMo's layers are those of Qwen2."""
    return LayerConfig.from_config(
        {**config, "model_type": "qwen2"} if config.get("model_type") == "mimo" else config
    )
