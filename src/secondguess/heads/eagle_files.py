"""File formats of EAGLE drafter heads.

The EAGLE authors' two formats and that of the `speculators` library are read. EAGLE-3 is written
in the `speculators` format, EAGLE-1 in its authors' format.

| format | recognised by | decoder layer |
|---|---|---|
| EAGLE-1, 2 | none of the marks below | `layers.0.*` without `input_layernorm` |
| EAGLE-3 | `draft_vocab_size` or `midlayer.*` | `midlayer.*` |
| `speculators` | `speculators_model_type` | `layers.N.*` |
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from secondguess.errors import CheckpointError, UnsupportedModelError
from secondguess.heads.eagle import (
    Eagle1Head,
    EagleConfig,
    EagleHead,
    default_layers,
    layers_within,
    token_ids_from_d2t,
)
from secondguess.heads.fields import config_errors
from secondguess.heads.files import load_into, read_config, read_tensors
from secondguess.heads.layer import LayerConfig
from secondguess.heads.unrolled import DEFAULT_STEPS
from secondguess.runtime.base import EmbeddingAndHead

WEIGHTS = "model.safetensors"
FORMAT_VERSION = "0.9.0"
"""Version of the `speculators` format that is written."""

_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


CPU = torch.device("cpu")


def load_eagle(
    folder: Path,
    embedding_and_head: EmbeddingAndHead,
    vocab_size: int,
    num_layers: int,
    device: torch.device = CPU,
) -> EagleHead | Eagle1Head:
    """Read an EAGLE drafter head of any of the formats.

    Args:
        folder: folder with `config.json` and weights.
        embedding_and_head: embeddings and LM head of the target.
        vocab_size, num_layers, device: sizes and device of the target.

    Returns:
        The drafter head on the CPU, in the default dtype of its modules.

    Raises:
        CheckpointError: broken files, weights that do not match `config.json`, or a drafter head
            for another target.
        UnsupportedModelError: an unsupported kind of drafter or layer.
    """
    config, tensors = read_config(folder), _tidied(read_tensors(folder))
    with config_errors(folder):
        kind = config.get("speculators_model_type")
        if kind not in (None, "eagle3"):
            raise UnsupportedModelError(f"expected a drafter of the kind eagle3 in {folder}, got {kind}")
        layer_config = config["transformer_layer_config"] if kind else config
        _check_vocabulary(folder, layer_config, vocab_size)
        if kind or "draft_vocab_size" in config or "layers.0.hidden_norm.weight" in tensors:
            _leave_out_the_targets(tensors, embedding_and_head, vocab_size, device)
            head: EagleHead | Eagle1Head = _third(
                folder, config, layer_config, tensors, embedding_and_head, num_layers
            )
        else:
            # A copy of the target's embeddings, which EAGLE-1 checkpoints contain.
            tensors.pop("embed_tokens.weight", None)
            head = Eagle1Head(
                LayerConfig.from_config(layer_config),
                embedding_and_head,
                vocab_size,
                has_bias="fc.bias" in tensors,
            )
    load_into(head, tensors, folder)
    return head


def _third(
    folder: Path,
    config: Mapping[str, Any],
    layer_config: Mapping[str, Any],
    tensors: dict[str, Tensor],
    embedding_and_head: EmbeddingAndHead,
    num_layers: int,
) -> EagleHead:
    """Build an EAGLE-3 drafter head without weights; its draft vocabulary is read from `tensors`.

    Vocabulary maps are removed from `tensors` if the draft vocabulary is the whole one.
    """
    vocab_size = layer_config["vocab_size"]
    ids = (
        config.get(_LAYER_IDS) or config.get("eagle_config", {}).get(_LAYER_IDS) or default_layers(num_layers)
    )
    if not layers_within(ids, num_layers):
        raise CheckpointError(
            f"expected a head in {folder} that reads states 0 to {num_layers} of the target, got {list(ids)}; it was "
            "trained for another target"
        )
    of_target = config.get("target_hidden_size") or embedding_and_head.width
    if of_target != embedding_and_head.width:
        raise CheckpointError(
            f"expected a head in {folder} for a target of width {embedding_and_head.width}, got one for width {of_target}"
        )
    shape = EagleConfig(
        layer=LayerConfig.from_config(layer_config),
        vocab_size=vocab_size,
        draft_vocab_size=config.get("draft_vocab_size", vocab_size),
        hidden_layers=tuple(ids),
        num_layers=layer_config.get("num_hidden_layers", 1),
        num_steps=_num_steps(config),
        **{flag: bool(config.get(flag, False)) for flag in _FLAGS},
    )
    words = None
    if shape.draft_vocab_size == vocab_size:
        # Some checkpoints contain the map although the vocabularies are equal.
        tensors.pop("d2t", None)
        tensors.pop("t2d", None)
    else:
        words = _read_words(folder, tensors, shape)
    return EagleHead(shape, embedding_and_head, words, has_embeddings="embed_tokens.weight" in tensors)


def _leave_out_the_targets(
    tensors: dict[str, Tensor], embedding_and_head: EmbeddingAndHead, vocab_size: int, device: torch.device
) -> None:
    """Drop embeddings that equal the target's, which are used instead.

    They are the largest part of a drafter head.
    """
    own = tensors.get("embed_tokens.weight")
    if own is not None and tuple(own.shape) == (vocab_size, embedding_and_head.width):
        with torch.no_grad():
            of_target = embedding_and_head.embed(torch.arange(vocab_size, device=device)).cpu()
        if torch.equal(of_target.to(own.dtype), own):
            del tensors["embed_tokens.weight"]


def _read_words(folder: Path, tensors: Mapping[str, Tensor], shape: EagleConfig) -> Tensor:
    missing = [name for name in ("d2t", "t2d") if name not in tensors]
    if missing:
        raise CheckpointError(
            f"expected d2t and t2d in {folder}, whose draft vocabulary is smaller than the target's, got no {missing[0]}"
        )
    words = token_ids_from_d2t(tensors["d2t"])
    marked = tensors["t2d"].bool().nonzero()[:, 0]
    if len(tensors["t2d"]) != shape.vocab_size or not torch.equal(words, marked):
        raise CheckpointError(
            f"expected d2t of {folder} to hold, per draft token, how much larger the target's id is, and t2d to mark "
            f"the same {shape.draft_vocab_size} words of {shape.vocab_size}, got an inconsistent map"
        )
    return words


def _check_vocabulary(folder: Path, layer_config: Mapping[str, Any], vocab_size: int) -> None:
    if layer_config["vocab_size"] != vocab_size:
        raise CheckpointError(
            f"expected a head in {folder} for a target with {vocab_size} words, got one for {layer_config['vocab_size']}; "
            "it was trained for another target"
        )


def _num_steps(config: Mapping[str, Any]) -> int:
    methods = config.get("speculators_config", {}).get("proposal_methods") or [{}]
    return int(methods[0].get("speculative_tokens", DEFAULT_STEPS))


def _tidied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors by `speculators` name.

    Tensors that can be computed, and copies of the target's last norm and LM head, are left out.
    """
    left_out = ("rotary_emb.inv_freq", "verifier_lm_head.weight", "verifier_norm.weight")
    return {
        name.replace("midlayer.", "layers.0."): tensor
        for name, tensor in tensors.items()
        if not name.endswith(left_out)
    }


def save_eagle(head: EagleHead | Eagle1Head, folder: Path, target: str) -> None:
    """Write a drafter head: EAGLE-3 in the `speculators` format, EAGLE-1 in its authors' format.

    Args:
        head: drafter head, on its target's device.
        folder: output folder; created if missing.
        target: name or folder of the target model.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().contiguous().cpu() for name, tensor in head.state_dict().items()}
    if isinstance(head, EagleHead):
        # Embeddings are written even if they are the target's: `speculators` leaves missing ones
        # uninitialised.
        every_token = torch.arange(head.vocab_size, device=head.fc.weight.device)
        with torch.no_grad():
            embeddings = head.embed(every_token).to(head.fc.weight.dtype)
        tensors["embed_tokens.weight"] = embeddings.contiguous().cpu()
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    config = _describe(head, target) if isinstance(head, EagleHead) else _describe_first(head)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _describe_first(head: Eagle1Head) -> dict[str, Any]:
    return {
        **head.shape.to_config(),
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 1,
        "vocab_size": head.vocab_size,
        "bias": head.fc.bias is not None,
    }


def _describe(head: EagleHead, target: str) -> dict[str, Any]:
    path = Path(target) / "config.json"
    of_target = read_config(path.parent) if path.is_file() else {}
    same = {key: of_target[key] for key in ("max_position_embeddings",) if key in of_target}
    shape = head.eagle
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": FORMAT_VERSION,
        "dtype": str(head.fc.weight.dtype).removeprefix("torch."),
        "draft_vocab_size": shape.draft_vocab_size,
        "target_hidden_size": None,
        _LAYER_IDS: list(shape.hidden_layers),
        # All flags are written, because readers disagree on the defaults of missing ones.
        **{flag: getattr(shape, flag) for flag in _FLAGS},
        "embed_requires_grad": False,
        "transformer_layer_config": {
            **shape.layer.to_config(),
            **same,
            "vocab_size": shape.vocab_size,
            "num_hidden_layers": shape.num_layers,
            "attention_bias": shape.layer.attention_bias,
            "tie_word_embeddings": False,
        },
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": shape.num_steps,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {"name_or_path": target, "architectures": of_target.get("architectures", [])},
        },
    }
