"""Multi-token prediction (MTP) module (DeepSeek-V3, arXiv 2412.19437, section 2.2).

A drafter head, trained with the target or after it, that reads the target's last hidden state.
One module drafts any number of tokens: after its own draft tokens it reads its own outputs. The
modules of Qwen and MiMo have the same form.

A module is read from its target's checkpoint or from a folder of its own; it is written to a
folder of its own with DeepSeek's tensor names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from secondguess.checkpoint.resolve import is_gguf
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
from secondguess.heads.formats import (
    DEEPSEEK_MTP,
    MTP_FORMATS,
    SEPARATE_MTP_FORMATS,
    SPECULATORS,
    StoredHead,
    layer_fields,
    text_config,
)
from secondguess.heads.gguf import holds_module
from secondguess.heads.layer import GATED_TYPES, LATENT_TYPES, MTP_TYPES, LayerConfig, make_layers
from secondguess.heads.learning import LAST_HIDDEN
from secondguess.runtime.base import HiddenStates

CPU = torch.device("cpu")
EXPERTS = ("mlp.experts.", "mlp.switch_mlp.", "mlp.experts_gate_proj")
"""Parts of the names of experts' tensors."""
DEFAULT_THETAS = {"ernie4_5": 500_000.0, "hy_v3": 11_158_840.0}
"""Value of `rope_theta` that a configuration without one means, where it is not 10000."""


class MtpHead(FeatureHead):
    """MTP module: `layer(eh_proj([enorm(embedding); hnorm(state)]))`, a norm and an LM head.

    Without embeddings or an LM head of its own it uses the target's. With `has_bias`, the projection
    has a bias; without `has_norm`, there is no norm before the LM head; other arguments are as in `FeatureHead`.
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
        masks_first: bool = False,
        has_norm: bool = True,
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
        self.masks_first = masks_first
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
        self.has_norm = has_norm
        self.norm = make_norm() if has_norm else nn.Identity()
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

        The folder is that of the target or of a single module.
        """
        return cls.read(find_module(folder), target)

    @classmethod
    def read(cls, stored: StoredHead, target: TargetModel) -> MtpHead:
        """Read a module that `find_module` has found, or one of the further modules of its folder."""
        folder = stored.folder
        layer, fields = module_layer(stored), stored.layers
        with config_errors(folder):
            # AngelSpec does not write the number of the target's layers.
            num_layers = (
                fields["num_hidden_layers"] if stored.format.name != "angelspec" else target.num_layers
            )
            found = fields["vocab_size"], num_layers
            if found != (target.vocab_size, target.num_layers):
                raise CheckpointError(
                    f"expected a module in {folder} for a target with {target.vocab_size} tokens and {target.num_layers} "
                    f"layers, got one for {found[0]} and {found[1]}; it was trained for another target"
                )
            tensors = stored.read_tensors()
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
                masks_first=stored.flag("masks_first"),
                has_norm=stored.flag("has_norm", default=True),
                num_steps=stored.number("num_steps", DEFAULT_STEPS),
            )
        if stored.format in SEPARATE_MTP_FORMATS:
            stored.fill(head, tensors, stored.names.in_file)
        else:  # the configuration is that of the target, which loads it
            load_into(head, tensors, folder, stored.names.in_file)
        return head

    def save(self, folder: Path, target: str = "") -> None:
        names = DEEPSEEK_MTP.tensors.at(self.target.num_layers)
        config = {
            **layer_fields(self.layer_config, self.target.vocab_size, self.target.num_layers),
            "num_nextn_predict_layers": 1,
            "norm_output": self.norm_output,
            "masks_first": self.masks_first,
            "has_norm": self.has_norm,
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
        config = read_config(folder)
        is_separate = any(row.marks.items() <= config.items() for row in SEPARATE_MTP_FORMATS)
        if not is_separate and SPECULATORS not in config:
            whole_number(text_config(config), "num_hidden_layers")
    stored = StoredHead(folder, "mtp")
    module_layer(stored)
    return stored


def module_layer(stored: StoredHead) -> LayerConfig:
    """Return the configuration of a module's decoder layer.

    Raises:
        UnsupportedModelError: a kind of layer or an encoding of weights that is not supported.
    """
    with config_errors(stored.folder):
        stored.require_readable_weights()
        _require_supported_layer(stored)
        has_experts = any(mark in name for name in stored.files for mark in EXPERTS)
        return LayerConfig.from_config(_described_layer(stored), MTP_TYPES, has_experts=has_experts)


def _described_layer(stored: StoredHead) -> dict[str, Any]:
    """Return the configuration of a model whose layers are those of a module."""
    fields = dict(stored.layers)
    kind: str = fields.get("model_type", "llama")
    if stored.format.name == "angelspec":
        fields.setdefault("rope_theta", DEFAULT_THETAS["hy_v3"])
        kind = "qwen3" if stored.flag("qk_norm", default=True) else "llama"
        if stored.get("mlp_type", "moe") != "dense":
            _require_experts_of_hy3(stored)
            kind = "hy_v3"
    # The layers of MiMo are those of Qwen2; Ernie's modules have no experts.
    kind = {"mimo": "qwen2", "qwen3_mtp": "qwen3", "ernie4_5_moe": "ernie4_5"}.get(kind, kind)
    if kind in DEFAULT_THETAS:
        fields.setdefault("rope_theta", DEFAULT_THETAS[kind])
    return {**fields, "model_type": kind}


def _require_experts_of_hy3(stored: StoredHead) -> None:
    """Refuse a module of AngelSpec whose experts are not chosen as those of Hy3."""
    fields = ("qk_norm", "route_norm", "moe_router_use_sigmoid", "moe_router_enable_expert_bias")
    other = next((name for name in fields if not stored.flag(name, default=True)), None)
    if other is not None:
        raise UnsupportedModelError(
            f"expected a module with experts like those of Hy3 in {stored.folder}, got {other} of false; use another drafter"
        )


def join_experts(tensors: dict[str, Tensor], prefix: str) -> None:
    """Replace the matrices of each expert by one of all experts, as Transformers' layers have them.

    The names of the experts' tensors start with `prefix`, such as `layer.mlp.experts.`.
    """
    parts, stacked = ("gate_proj", "up_proj", "down_proj"), prefix.replace("experts.", "switch_mlp.")
    num_experts = 0
    while all(f"{prefix}{num_experts}.{part}.weight" in tensors for part in parts):
        num_experts += 1
    fused = prefix.replace("experts.", "experts_")
    if f"{fused}gate_proj" in tensors:  # as AngelSpec stores them, `[expert, input, output]`
        gate, up, down = (tensors.pop(f"{fused}{part}").transpose(1, 2) for part in parts)
        tensors |= {f"{prefix}gate_up_proj": torch.cat((gate, up), 1), f"{prefix}down_proj": down}
    if f"{stacked}gate_proj.weight" in tensors:  # as MLX stores them
        gate, up, down = (tensors.pop(f"{stacked}{part}.weight") for part in parts)
        tensors |= {f"{prefix}gate_up_proj": torch.cat((gate, up), 1), f"{prefix}down_proj": down}
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
    config, has_tensor = read_config(folder), find_tensors(folder).__contains__
    return any(row.matches(config, has_tensor) for row in MTP_FORMATS)


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
