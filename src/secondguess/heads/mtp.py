"""Multi-token prediction (MTP) module (DeepSeek-V3, arXiv 2412.19437, section 2.2).

A drafter head, trained with the target or after it, that reads the target's last hidden state.
One module drafts any number of tokens: after its own draft tokens it reads its own outputs. The
modules of Qwen and MiMo have the same form.

A module is read from its target's checkpoint or from a folder of its own; it is written to a
folder of its own with DeepSeek's tensor names.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from secondguess.checkpoint.quantised import StoredWeights
from secondguess.checkpoint.source import FolderSource
from secondguess.checkpoint.weight_files import TensorFiles
from secondguess.errors import CheckpointError, UnsupportedModelError
from secondguess.heads.base import TargetModel
from secondguess.heads.feature import (
    DEFAULT_STEPS,
    FeatureHead,
    FeatureParts,
    default_layer_config,
    initialise,
)
from secondguess.heads.files import (
    CONFIG,
    config_errors,
    find_tensors,
    load_into,
    read_config,
    read_named_tensors,
    write_head,
)
from secondguess.heads.formats import TensorNames
from secondguess.heads.layer import (
    GATED_TYPES,
    LATENT_TYPES,
    MTP_TYPES,
    LayerConfig,
    make_layers,
)
from secondguess.heads.learning import LAST_HIDDEN
from secondguess.runtime.base import HiddenStates

CPU = torch.device("cpu")


class MtpHead(FeatureHead):
    """MTP module: `layer(eh_proj([enorm(embedding); hnorm(state)]))`, a norm and an LM head.

    Without embeddings or an LM head of its own it uses the target's. With `has_bias`, the projection
    has a bias; other arguments are as in `FeatureHead`.
    """

    has_norms = True
    """True if there are norms other than the one inside the decoder layer."""

    def __init__(
        self,
        layer: LayerConfig,
        target: TargetModel,
        *,
        has_bias: bool = False,
        has_embeddings: bool = False,
        has_head: bool = False,
        norm_output: bool = False,
        num_steps: int = DEFAULT_STEPS,
    ) -> None:
        super().__init__(target, layer, norm_output=norm_output, num_steps=num_steps)
        width, vocab_size = layer.width, target.vocab_size
        make_norm: Callable[[], nn.Module] = (
            partial(nn.RMSNorm, width, layer.norm_eps) if self.has_norms else nn.Identity
        )
        self.enorm = make_norm()
        self.hnorm = make_norm()
        self.eh_proj = nn.Linear(2 * width, width, bias=has_bias)
        (self.layer,), self.rotary = make_layers(layer)
        if not self.has_norms:
            self.layer.input_layernorm = nn.Identity()
        self.norm = make_norm()
        self.embed_tokens = nn.Embedding(vocab_size, width) if has_embeddings else None
        self.lm_head = nn.Linear(width, vocab_size, bias=False) if has_head else None

    @classmethod
    def fresh(cls, target: TargetModel, seed: int = 0, *, num_steps: int = DEFAULT_STEPS) -> Self:
        """Build an untrained module with a default layer for the target's hidden size."""
        head = cls(default_layer_config(target.width), target, num_steps=num_steps)
        initialise(head, seed)
        return head

    @classmethod
    def load(cls, folder: Path, target: TargetModel) -> MtpHead:
        """Read the first MTP module of a checkpoint; other tensors are not read.

        The folder is that of the target or of a single module. Warns if there are further modules,
        which are not used.
        """
        stored = find_module(folder)
        config, names, layer = stored.config, stored.names, stored.layer
        num_layers = config["num_hidden_layers"]
        with config_errors(folder):
            if (config["vocab_size"], num_layers) != (target.vocab_size, target.num_layers):
                raise CheckpointError(
                    f"expected a module in {folder} for a target with {target.vocab_size} tokens and {target.num_layers} "
                    f"layers, got one for {config['vocab_size']} and {num_layers}; it was trained for another target"
                )
            tensors = {
                names.in_module(name): tensor for name, tensor in _read_weights(folder, stored).items()
            }
            tensors = join_experts(tensors, "layer.mlp.experts.")
            if names.centred_norms and layer.model_type in GATED_TYPES:
                tensors |= {name: tensor + 1 for name, tensor in tensors.items() if "norm" in name}
            if names.state_first:
                tensors["eh_proj.weight"] = torch.cat(tensors["eh_proj.weight"].chunk(2, 1)[::-1], 1)
            head = cls(
                layer,
                target,
                has_embeddings="embed_tokens.weight" in tensors,
                has_head="lm_head.weight" in tensors,
                norm_output=config.get("norm_output", names.norm_output),
                num_steps=config.get("num_steps", DEFAULT_STEPS),
            )
        load_into(head, tensors, folder, names.in_file)
        if stored.has_others:
            warnings.warn(
                f"{folder} holds several multi-token-prediction modules: the first one drafts all tokens, the others are unused",
                stacklevel=2,
            )
        return head

    def save(self, folder: Path, target: str = "") -> None:
        names = family_names(self.target.num_layers)[0]
        config = {
            **self.layer_config.to_config(),
            "vocab_size": self.target.vocab_size,
            "num_hidden_layers": self.target.num_layers,
            "num_nextn_predict_layers": 1,
            "norm_output": self.norm_output,
            "num_steps": self.num_steps,
        }
        write_head(
            folder, config, {names.in_file(name): tensor for name, tensor in self.state_dict().items()}
        )

    @property
    def parts(self) -> FeatureParts:
        return FeatureParts(self.enorm, self.hnorm, self.eh_proj, [self.layer])

    def join_states(self, hidden: HiddenStates) -> Tensor:
        return hidden[LAST_HIDDEN]


@dataclass(frozen=True)
class ModuleNames(TensorNames):
    """Tensor names of the MTP modules of a model family."""

    next_prefix: str = ""  # of the names of a second module
    state_first: bool = False  # the projection's input is `[state; embedding]`, not `[embedding; state]`
    norm_output: bool = False  # as in `FeatureHead`
    centred_norms: bool = False  # norm weights of layers with gates are stored as differences from 1

    @property
    def projection(self) -> str:
        """Name of the projection weight, without the prefix; present in every module."""
        return self.in_file("eh_proj.weight").removeprefix(self.prefix)


_DEEPSEEK = ModuleNames(
    {
        "enorm.": "enorm.",
        "hnorm.": "hnorm.",
        "eh_proj.": "eh_proj.",
        "shared_head.norm.": "norm.",
        "shared_head.head.": "lm_head.",
        "embed_tokens.": "embed_tokens.",
        "": "layer.",
    }
)
_QWEN = ModuleNames(
    {
        "pre_fc_norm_embedding.": "enorm.",
        "pre_fc_norm_hidden.": "hnorm.",
        "fc.": "eh_proj.",
        "norm.": "norm.",
        "layers.0.": "layer.",
    },
    prefix="mtp.",
    norm_output=True,
    centred_norms=True,
)
_MIMO = ModuleNames(
    {
        "token_layernorm.": "enorm.",
        "hidden_layernorm.": "hnorm.",
        "input_proj.": "eh_proj.",
        "final_layernorm.": "norm.",
        "": "layer.",
    },
    prefix="model.mtp_layers.0.",
    next_prefix="model.mtp_layers.1.",
    state_first=True,
    norm_output=True,
)


def family_names(num_layers: int) -> tuple[ModuleNames, ...]:
    """Return the tensor names of all families, for a target of `num_layers` layers."""
    prefixes = [f"model.layers.{num_layers + index}." for index in range(2)]
    return replace(_DEEPSEEK, prefix=prefixes[0], next_prefix=prefixes[1]), _QWEN, _MIMO


class StoredModule(NamedTuple):
    """The first MTP module of a checkpoint, as far as its configuration and tensor names describe it."""

    config: Mapping[str, Any]  # of the target
    names: ModuleNames
    files: Mapping[str, Path]  # by tensor
    layer: LayerConfig
    has_others: bool  # True if there are further modules


def find_module(folder: Path) -> StoredModule:
    """Return the first MTP module of a checkpoint, without reading weights.

    Raises:
        CheckpointError: there is none, or its configuration cannot be read.
        UnsupportedModelError: its decoder layer is of a kind that is not supported.
    """
    config, files = _text_config(read_config(folder)), find_tensors(folder)
    with config_errors(folder):
        num_layers = config["num_hidden_layers"]
        names = _find_names(files, num_layers)
        if names is None:
            raise CheckpointError(
                f"expected a multi-token-prediction module in {folder}, such as model.layers.{num_layers}.eh_proj.weight, "
                "got none; train one with `secondguess train mtp`"
            )
        own = {name: file for name, file in files.items() if name.startswith(names.prefix)}
        _require_readable_weights(folder, own)
        _require_supported_layer(folder, own, config)
        layer = _layer_config(config, has_experts=any("mlp.experts." in name for name in own))
    has_others = bool(names.next_prefix) and f"{names.next_prefix}{names.projection}" in files
    return StoredModule(config, names, own, layer, has_others)


def _read_weights(folder: Path, stored: StoredModule) -> dict[str, Tensor]:
    """Read the tensors of a module; those that are quantised as in `config.json` are decoded."""
    encoding = FolderSource(folder).encoding(CPU)
    if encoding is None:
        return read_named_tensors(stored.files)
    weights = StoredWeights(TensorFiles(dict.fromkeys(stored.files.values())), encoding)
    return {name: weights.read(name) for name in weights.names if name.startswith(stored.names.prefix)}


def join_experts(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return tensors with the matrices of all experts in one, where a checkpoint has those of each expert.

    The names of the experts' tensors start with `prefix`, such as `layer.mlp.experts.`.
    """
    joined, parts = dict(tensors), ("gate_proj", "up_proj", "down_proj")
    num_experts = 0
    while all(f"{prefix}{num_experts}.{part}.weight" in tensors for part in parts):
        num_experts += 1
    if num_experts:
        gate, up, down = (
            torch.stack([joined.pop(f"{prefix}{expert}.{part}.weight") for expert in range(num_experts)])
            for part in parts
        )
        joined |= {f"{prefix}gate_up_proj": torch.cat((gate, up), 1), f"{prefix}down_proj": down}
    return joined


def contains_mtp(folder: Path) -> bool:
    """Return whether a target's checkpoint contains an MTP module."""
    if not (folder / CONFIG).is_file():
        return False
    num_layers = _text_config(read_config(folder)).get("num_hidden_layers", 0)
    return _find_names(find_tensors(folder), num_layers) is not None


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the configuration of the language model; that of a multimodal model is nested."""
    inner: Mapping[str, Any] = config.get("text_config", config)
    return inner


def _find_names(files: Mapping[str, Path], num_layers: int) -> ModuleNames | None:
    families = family_names(num_layers)
    return next((names for names in families if names.prefix + names.projection in files), None)


def _require_readable_weights(folder: Path, names: Iterable[str]) -> None:
    """Refuse quantised weights in an encoding that is not decoded here."""
    marks = ("weight_scale_inv", "weight_scale", "qweight", "weight_packed")
    coded = next((name for name in names if name.endswith(marks)), None)
    if coded is not None and FolderSource(folder).encoding(CPU) is None:
        raise UnsupportedModelError(
            f"expected a multi-token-prediction module with weights that can be read in {folder}, got {coded}, of an "
            "encoding that is not decoded; train one with `secondguess train mtp` or use another drafter"
        )


def _require_supported_layer(folder: Path, names: Iterable[str], config: Mapping[str, Any]) -> None:
    kind, found = config.get("model_type"), []
    if any("linear_attn." in name for name in names):
        found.append("linear attention")
    if any("kv_a_proj_with_mqa." in name for name in names) and kind not in LATENT_TYPES:
        found.append("latent attention (MLA)")
    if config.get("attn_output_gate") and kind not in GATED_TYPES:
        found.append("gated attention")
    if found:
        raise UnsupportedModelError(
            f"expected a multi-token-prediction module with the layer of a {kind} in {folder}, got one with "
            f"{found[0]}, which is not supported; train one with `secondguess train mtp` or use another drafter"
        )


def _layer_config(config: Mapping[str, Any], has_experts: bool) -> LayerConfig:
    """Return the layer configuration; MiMo's layers are those of Qwen2."""
    is_mimo = config.get("model_type") == "mimo"
    described = {**config, "model_type": "qwen2"} if is_mimo else config
    return LayerConfig.from_config(described, MTP_TYPES, has_experts=has_experts)
