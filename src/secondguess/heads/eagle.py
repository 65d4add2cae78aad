"""EAGLE drafter heads: a decoder layer that reads each token with a hidden state of the target.

EAGLE-3 (arXiv 2503.01840) fuses the target's hidden states of three depths and has its own LM head
over a reduced vocabulary. EAGLE-1 and 2 (arXiv 2401.15077, 2406.16858; same weights) extrapolate
the target's last hidden state and use its LM head.

EAGLE-3 is written in the `speculators` format, EAGLE-1 in its authors' format.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from secondguess.errors import BadInputError
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
    load_into,
    read_config,
    require_layers,
    require_same,
    whole_number,
    write_head,
)
from secondguess.heads.formats import (
    EAGLE1,
    StoredHead,
    checkpoint_tensors,
    layer_fields,
    pop_vocabulary,
    speculators_fields,
)
from secondguess.heads.layer import LayerConfig, make_layers, widen_attention
from secondguess.heads.mtp import MtpHead
from secondguess.runtime.base import HiddenStates

FORMAT_VERSION = "0.9.0"
"""Version of the `speculators` format that is written."""

_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
_COPIES = "secondguess_target_weights"
"""Field of a written head: names of the tensors that are copies of the target's, for other readers."""


def load_eagle(folder: Path, target: TargetModel) -> EagleHead | Eagle1Head:
    """Read an EAGLE head of any of the formats; see `Head.load`."""
    stored = StoredHead(folder, "eagle")
    head_class = Eagle1Head if stored.format.name == "eagle1" else EagleHead
    return head_class.from_stored(stored, target)


def holds_eagle3(folder: Path) -> bool:
    """Return whether the EAGLE head in a folder is one of EAGLE-3."""
    return StoredHead(folder, "eagle").format.name == "eagle3"


@dataclass(frozen=True)
class EagleConfig:
    """Sizes and options of an EAGLE-3 drafter head; those that it has in common with others are as in `FeatureHead`."""

    layer: LayerConfig
    hidden_layers: tuple[int, ...]  # states that are fused, numbered as in `output_hidden_states`
    num_layers: int = 1
    norm_before_residual: bool = False  # the first residual connection carries the normalised feature
    norm_before_fc: bool = False  # one norm over the joined states precedes the fusion
    fc_norm: bool = False  # each state has its own norm before the fusion instead
    norm_output: bool = False
    num_steps: int = DEFAULT_STEPS

    def __post_init__(self) -> None:
        if self.norm_before_fc and self.fc_norm:
            raise BadInputError("expected one of norm_before_fc and fc_norm, got both")


class EagleHead(FeatureHead):
    """EAGLE-3 drafter head; without embeddings or an LM head of its own it uses the target's."""

    def __init__(
        self,
        config: EagleConfig,
        target: TargetModel,
        vocabulary: DraftVocabulary | None = None,
        has_embeddings: bool = False,
        has_head: bool = True,
    ) -> None:
        layer, num_states = config.layer, len(config.hidden_layers)
        super().__init__(
            target,
            layer,
            config.hidden_layers,
            num_layers=config.num_layers,
            num_steps=config.num_steps,
            norm_output=config.norm_output,
            vocabulary=vocabulary,
        )
        self.config = config
        if config.norm_before_fc:
            self.input_norm = nn.RMSNorm(num_states * layer.width, layer.norm_eps)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(
                nn.RMSNorm(layer.width, layer.norm_eps) for _ in config.hidden_layers
            )
        self.fc = nn.Linear(num_states * layer.width, layer.width, bias=False)
        self.layers, self.rotary = make_layers(layer, config.num_layers)
        widen_attention(self.layers[0], 2 * layer.width)
        self.layers[0].hidden_norm = nn.RMSNorm(layer.width, layer.norm_eps)
        self.norm = nn.RMSNorm(layer.width, layer.norm_eps)
        self.lm_head = nn.Linear(layer.width, len(self.vocabulary), bias=False) if has_head else None
        self.embed_tokens = nn.Embedding(target.vocab_size, layer.width) if has_embeddings else None

    @classmethod
    def fresh(
        cls,
        target: TargetModel,
        seed: int = 0,
        *,
        vocabulary: DraftVocabulary | None = None,
        num_steps: int = DEFAULT_STEPS,
    ) -> EagleHead:
        """Build an untrained drafter head.

        For the whole vocabulary it uses the target's LM head, for a reduced one its own, which
        starts with the target's weights. A reduced vocabulary should be that of the most frequent
        tokens (`DraftVocabulary.most_frequent`).
        """
        config = EagleConfig(
            layer=default_layer_config(target.width),
            hidden_layers=default_layers(target.num_layers),
            # The target's raw states vary widely in magnitude; the first layer trains faster on
            # normalised ones.
            norm_before_residual=True,
            num_steps=num_steps,
        )
        is_whole = vocabulary is None or len(vocabulary) == target.vocab_size
        head = cls(config, target, vocabulary, has_head=not is_whole)
        initialise(head, seed)
        if head.lm_head is None:
            return head
        with torch.no_grad():
            columns = dict(_target_weights(target))["lm_head.weight"].T
            head.lm_head.weight.copy_(head.vocabulary.to(target.device).select(columns).T)
        return head

    @classmethod
    def load(cls, folder: Path, target: TargetModel) -> EagleHead:
        return cls.from_stored(StoredHead(folder, "eagle"), target)

    @classmethod
    def from_stored(cls, stored: StoredHead, target: TargetModel) -> EagleHead:
        """Read the head in a folder."""
        folder, tensors = stored.folder, stored.read_tensors()
        with config_errors(folder):
            vocabulary = pop_vocabulary(tensors, stored, target)
            require_same("width", stored.get("target_width", target.width), target.width, folder)
            _drop_target_weights(tensors, stored, target)
            hidden_layers = tuple(stored.get("hidden_layers", default_layers(target.num_layers)))
            require_layers(hidden_layers, target.num_layers, folder)
            head = cls(
                EagleConfig(
                    layer=LayerConfig.from_config(stored.layers),
                    hidden_layers=hidden_layers,
                    num_layers=stored.layers.get("num_hidden_layers", 1),
                    num_steps=int(stored.get("num_steps", DEFAULT_STEPS)),
                    **{flag: bool(stored.get(flag)) for flag in _FLAGS},
                ),
                target,
                vocabulary,
                has_embeddings="embed_tokens.weight" in tensors,
                has_head="lm_head.weight" in tensors,
            )
        load_into(head, tensors | vocabulary.state_dict(prefix="vocabulary."), folder)
        return head

    def save(self, folder: Path, target: str = "") -> None:
        path = Path(target) / CONFIG
        target_config = read_config(path.parent) if path.is_file() else {}
        own = checkpoint_tensors(self, self.vocabulary)
        # Embeddings and LM head are written even if they are the target's: `speculators` leaves
        # missing ones uninitialised.
        dtype = self.fc.weight.dtype
        copies = {name: weight.to(dtype) for name, weight in _target_weights(self.target) if name not in own}
        config = {
            **speculators_fields("eagle3", self.num_steps, target, target_config.get("architectures", [])),
            "architectures": ["Eagle3Speculator"],
            "speculators_version": FORMAT_VERSION,
            "dtype": str(self.fc.weight.dtype).removeprefix("torch."),
            "draft_vocab_size": len(self.vocabulary),
            "target_hidden_size": None,
            "eagle_aux_hidden_state_layer_ids": list(self.hidden_layers),
            # All flags are written, because readers disagree on the defaults of missing ones.
            **{flag: getattr(self.config, flag) for flag in _FLAGS},
            "embed_requires_grad": False,
            _COPIES: sorted(copies),
            "transformer_layer_config": {
                **layer_fields(self.layer_config, self.target.vocab_size, self.num_layers),
                **{key: value for key, value in target_config.items() if key == "max_position_embeddings"},
                "attention_bias": self.layer_config.attention_bias,
                "tie_word_embeddings": False,
            },
        }
        write_head(folder, config, copies | own)

    @property
    def parts(self) -> FeatureParts:
        first = self.layers[0]
        return FeatureParts(
            first.input_layernorm, first.hidden_norm, None, self.layers, self.config.norm_before_residual
        )

    @property
    def fusion(self) -> nn.Linear:
        return self.fc

    def join_states(self, hidden: HiddenStates) -> Tensor:
        states = [hidden[layer] for layer in self.hidden_layers]
        if self.config.fc_norm:
            states = [norm(state) for norm, state in zip(self.fc_norm, states, strict=True)]
        joined = torch.cat(states, -1)
        return self.input_norm(joined) if self.config.norm_before_fc else joined


class Eagle1Head(MtpHead):
    """EAGLE-1 and 2 drafter head: an MTP module without norms, in its authors' format."""

    has_norms = False

    @classmethod
    def load(cls, folder: Path, target: TargetModel) -> Eagle1Head:
        return cls.from_stored(StoredHead(folder, "eagle"), target)

    @classmethod
    def from_stored(cls, stored: StoredHead, target: TargetModel) -> Eagle1Head:
        """Read the head in a folder; its copy of the target's embeddings is not used."""
        folder, tensors = stored.folder, stored.read_tensors()
        with config_errors(folder):
            require_same("vocabulary", whole_number(stored.layers, "vocab_size"), target.vocab_size, folder)
            layer = LayerConfig.from_config(stored.layers)
            head = cls(layer, target, has_bias="eh_proj.bias" in tensors)
        load_into(head, tensors, folder, EAGLE1.tensors.in_file)
        return head

    def save(self, folder: Path, target: str = "") -> None:
        config = {
            **layer_fields(self.layer_config, self.target.vocab_size, 1),
            "architectures": ["LlamaForCausalLM"],
            "bias": self.eh_proj.bias is not None,
        }
        tensors = {EAGLE1.tensors.in_file(name): tensor for name, tensor in self.state_dict().items()}
        write_head(folder, config, tensors)


def default_layers(num_layers: int) -> tuple[int, ...]:
    """Return the target layers to fuse: an early, a middle and a late one.

    These are the published choices, 2, L // 2 and L - 3; in shallow targets they are spread as
    widely as possible. Index k is the hidden state that enters layer k, counted from 0, as in
    `output_hidden_states`.

    >>> default_layers(32), default_layers(5), default_layers(2)
    ((2, 16, 29), (1, 2, 4), (0, 1, 2))
    """
    published = (2, num_layers // 2, num_layers - 3)
    if published[0] < published[1] < published[2]:
        return published
    last = num_layers - 1 if num_layers > 2 else num_layers
    first = min(1, max(last - 2, 0))
    return (first, (first + last) // 2, last)


@torch.no_grad()
def _target_weights(target: TargetModel) -> Iterator[tuple[str, Tensor]]:
    """Yield the target's embeddings and LM head, without its bias, by `speculators` name."""
    yield "embed_tokens.weight", _embeddings(target)
    bias = target.unembed(torch.zeros(1, target.width, dtype=target.dtype, device=target.device))
    yield "lm_head.weight", (_biased_columns(target) - bias).T


def _embeddings(target: TargetModel) -> Tensor:
    """Return the target's embeddings `[vocab, width]`."""
    return target.embed(torch.arange(target.vocab_size, device=target.device))


def _biased_columns(target: TargetModel) -> Tensor:
    """Return the columns `[width, vocab]` of the target's LM head, each plus its bias, if it has one.

    Applying the LM head to the identity gives them even if they are packed, quantised or tied.
    """
    return target.unembed(torch.eye(target.width, dtype=target.dtype, device=target.device))


@torch.no_grad()
def _drop_target_weights(tensors: dict[str, Tensor], stored: StoredHead, target: TargetModel) -> None:
    """Drop embeddings and LM head that are copies of the target's, which are used instead.

    They are the largest part of a drafter head. Files that do not list the copies are compared with
    the target: files of earlier versions have the bias of its LM head added to every column.
    """
    copies = stored.get(_COPIES)
    if copies is not None:
        for name in copies:
            tensors.pop(name, None)
        return
    compared = {"embed_tokens.weight": _embeddings(target), "lm_head.weight": _biased_columns(target).T}
    for name, weight in compared.items():
        own = tensors.get(name)
        if own is not None and own.shape == weight.shape and torch.equal(weight.cpu().to(own.dtype), own):
            del tensors[name]
