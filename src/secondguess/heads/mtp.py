"""Multi-token prediction (MTP) module (DeepSeek-V3, arXiv 2412.19437, section 2.2).

A drafter head, trained with the target or after it, that reads the target's last hidden state.
One module drafts any number of tokens: after its own draft tokens it reads its own outputs. The
modules of Qwen and MiMo have the same form.

A module is read from its target's checkpoint or from a folder of its own; it is written to a
folder of its own with DeepSeek's tensor names.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Self

import torch
from torch import Tensor, nn

from secondguess.checkpoint.quantised import StoredWeights
from secondguess.checkpoint.resolve import is_gguf
from secondguess.checkpoint.source import FolderSource
from secondguess.checkpoint.weight_files import TensorFiles
from secondguess.errors import CheckpointError, UnsupportedModelError
from secondguess.heads.base import DraftVocabulary, TargetModel
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
    whole_number,
    write_head,
)
from secondguess.heads.formats import DEEPSEEK_MTP, StoredHead, find_format, layer_fields, text_config
from secondguess.heads.gguf import holds_module
from secondguess.heads.layer import GATED_TYPES, LATENT_TYPES, MTP_TYPES, LayerConfig, make_layers
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
        vocabulary: DraftVocabulary | None = None,
        windows: Sequence[int | None] | None = None,
    ) -> None:
        super().__init__(
            target,
            layer,
            norm_output=norm_output,
            num_steps=num_steps,
            vocabulary=vocabulary,
            windows=windows,
        )
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
        self.lm_head = nn.Linear(width, len(self.vocabulary), bias=False) if has_head else None

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
        layer, fields = module_layer(stored), stored.layers
        with config_errors(folder):
            found = fields["vocab_size"], fields["num_hidden_layers"]
            if found != (target.vocab_size, target.num_layers):
                raise CheckpointError(
                    f"expected a module in {folder} for a target with {target.vocab_size} tokens and {target.num_layers} "
                    f"layers, got one for {found[0]} and {found[1]}; it was trained for another target"
                )
            tensors = _read_weights(stored)
            join_experts(tensors, "layer.mlp.experts.")
            if stored.get("centred_norms") and layer.model_type in GATED_TYPES:
                tensors |= {name: tensor + 1 for name, tensor in tensors.items() if "norm" in name}
            if stored.get("state_first"):
                tensors["eh_proj.weight"] = torch.cat(tensors["eh_proj.weight"].chunk(2, 1)[::-1], 1)
            head = cls(
                layer,
                target,
                has_embeddings="embed_tokens.weight" in tensors,
                has_head="lm_head.weight" in tensors,
                norm_output=stored.flag("norm_output"),
                num_steps=stored.number("num_steps", DEFAULT_STEPS),
            )
        load_into(head, tensors, folder, stored.names.in_file)
        if stored.format.second.format(next=target.num_layers + 1) in stored.tensor_names:
            warnings.warn(
                f"{folder} holds several multi-token-prediction modules: the first one drafts all tokens, the others are unused",
                stacklevel=2,
            )
        return head

    def save(self, folder: Path, target: str = "") -> None:
        names = DEEPSEEK_MTP.tensors.at(self.target.num_layers)
        config = {
            **layer_fields(self.layer_config, self.target.vocab_size, self.target.num_layers),
            "num_nextn_predict_layers": 1,
            "norm_output": self.norm_output,
            "num_steps": self.num_steps,
        }
        tensors = {names.in_file(name): tensor for name, tensor in self.state_dict().items()}
        write_head(folder, config, tensors)

    @property
    def parts(self) -> FeatureParts:
        return FeatureParts(self.enorm, self.hnorm, self.eh_proj, [self.layer])

    def join_states(self, hidden: HiddenStates) -> Tensor:
        return hidden[LAST_HIDDEN]


def find_module(folder: Path) -> StoredHead:
    """Return the first MTP module of a checkpoint, whose layer and weights can be read; weights are not read yet."""
    with config_errors(folder):
        whole_number(text_config(read_config(folder)), "num_hidden_layers")
    stored = StoredHead(folder, "mtp")
    module_layer(stored)
    return stored


def module_layer(stored: StoredHead) -> LayerConfig:
    """Return the configuration of a module's decoder layer.

    Raises:
        UnsupportedModelError: a kind of layer or an encoding of weights that is not supported.
    """
    config = stored.layers
    with config_errors(stored.folder):
        _require_readable_weights(stored)
        _require_supported_layer(stored)
        is_mimo = config.get("model_type") == "mimo"  # the layers are those of Qwen2
        has_experts = any("mlp.experts." in name for name in stored.files)
        described = {**config, "model_type": "qwen2"} if is_mimo else config
        return LayerConfig.from_config(described, MTP_TYPES, has_experts=has_experts)


def _read_weights(stored: StoredHead) -> dict[str, Tensor]:
    """Read the tensors of a module; those that are quantised as in `config.json` are decoded."""
    encoding = None if is_gguf(stored.folder) else FolderSource(stored.folder).encoding(CPU)
    if encoding is None:
        return stored.read_tensors()
    weights = StoredWeights(TensorFiles(dict.fromkeys(stored.files.values())), encoding)
    names = (name for name in weights.names if name.startswith(stored.names.prefix))
    return stored.in_module({name: weights.read(name) for name in names})


def join_experts(tensors: dict[str, Tensor], prefix: str) -> None:
    """Replace the matrices of each expert by one of all experts, as Transformers' layers have them.

    The names of the experts' tensors start with `prefix`, such as `layer.mlp.experts.`.
    """
    parts = ("gate_proj", "up_proj", "down_proj")
    num_experts = 0
    while all(f"{prefix}{num_experts}.{part}.weight" in tensors for part in parts):
        num_experts += 1
    if num_experts:
        gate, up, down = (
            torch.stack([tensors.pop(f"{prefix}{expert}.{part}.weight") for expert in range(num_experts)])
            for part in parts
        )
        tensors |= {f"{prefix}gate_up_proj": torch.cat((gate, up), 1), f"{prefix}down_proj": down}


def contains_mtp(folder: Path) -> bool:
    """Return whether a target's checkpoint, a folder or a GGUF file, contains an MTP module."""
    if is_gguf(folder):
        return folder.is_file() and holds_module(folder)
    if not (folder / CONFIG).is_file():
        return False
    return find_format(read_config(folder), find_tensors(folder).__contains__, "mtp") is not None


def _require_readable_weights(stored: StoredHead) -> None:
    """Refuse quantised weights in an encoding that is not decoded here."""
    marks = ("weight_scale_inv", "weight_scale", "qweight", "weight_packed")
    coded = next((name for name in stored.files if name.endswith(marks)), None)
    if coded is not None and FolderSource(stored.folder).encoding(CPU) is None:
        raise UnsupportedModelError(
            f"expected a multi-token-prediction module with weights that can be read in {stored.folder}, got {coded}, of an "
            "encoding that is not decoded; train one with `secondguess train mtp` or use another drafter"
        )


def _require_supported_layer(stored: StoredHead) -> None:
    """Refuse a layer with parts that those of its model type do not have."""
    config, names = stored.layers, "\n".join(stored.files)
    kind, found = config.get("model_type"), []
    if "linear_attn." in names:
        found.append("linear attention")
    if "kv_a_proj_with_mqa." in names and kind not in LATENT_TYPES:
        found.append("latent attention (MLA)")
    if config.get("attn_output_gate") and kind not in GATED_TYPES:
        found.append("gated attention")
    if found:
        raise UnsupportedModelError(
            f"expected a multi-token-prediction module with the layer of a {kind} in {stored.folder}, got one with "
            f"{found[0]}, which is not supported; train one with `secondguess train mtp` or use another drafter"
        )
