"""EAGLE drafter heads: a decoder layer that reads each token with a hidden state of the target.

EAGLE-3 (arXiv 2503.01840) fuses the target's hidden states of three depths and has its own LM head
over a reduced vocabulary. EAGLE-1 and 2 (arXiv 2401.15077, 2406.16858; same weights) extrapolate
the target's last hidden state and use its LM head.

EAGLE-3 is written in the `speculators` format, EAGLE-1 in its authors' format.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from secondguess.errors import BadInputError, UnsupportedModelError
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
    missing_lm_head,
    pop_vocabulary,
    speculators_fields,
)
from secondguess.heads.layer import (
    DENSE_TYPES,
    LATENT_TYPES,
    LayerConfig,
    make_layers,
    read_windows,
    widen_attention,
    window_fields,
)
from secondguess.heads.learning import LAST_HIDDEN
from secondguess.heads.mtp import MtpHead
from secondguess.names import check_range
from secondguess.runtime.base import HiddenStates

FORMAT_VERSION = "0.9.0"
"""Version of the `speculators` format that is written."""

PARALLEL_STEPS = 8
"""Number of draft tokens of a parallel head whose files do not say for how many it was trained."""
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
    target_width: int | None = None  # width of these states; None for the head's own
    has_fusion: bool = True  # without it the only state is the feature
    has_fusion_bias: bool = False
    windows: tuple[int | None, ...] | None = None  # by layer; None for full attention
    num_layers: int = 1
    norm_before_residual: bool = False  # the first residual connection carries the normalised feature
    norm_before_fc: bool = False  # one norm over the joined states precedes the fusion
    fc_norm: bool = False  # each state has its own norm before the fusion instead
    norm_output: bool = False
    num_steps: int = DEFAULT_STEPS
    mask_token: int | None = None  # read at draft positions by a head that drafts in parallel

    def __post_init__(self) -> None:
        if self.norm_before_fc and self.fc_norm:
            raise BadInputError("expected one of norm_before_fc and fc_norm, got both")
        if not self.has_fusion and (self.norm_before_fc or self.fc_norm or len(self.hidden_layers) != 1):
            raise BadInputError(
                f"expected one state and no norms for a head without a fusion, got {list(self.hidden_layers)}, "
                f"norm_before_fc of {self.norm_before_fc} and fc_norm of {self.fc_norm}"
            )


class EagleHead(FeatureHead):
    """EAGLE-3 drafter head; without embeddings or an LM head of its own it uses the target's.

    A head with a mask token drafts in parallel (P-EAGLE, arXiv 2602.01469): one pass over pending and
    `num_steps - 1` mask tokens predicts all draft tokens. The target's states at mask tokens are learned.
    """

    def __init__(
        self,
        config: EagleConfig,
        target: TargetModel,
        vocabulary: DraftVocabulary | None = None,
        has_embeddings: bool = False,
        has_head: bool = True,
    ) -> None:
        layer, num_states = config.layer, len(config.hidden_layers)
        target_width = config.target_width or layer.width
        if target_width != layer.width and not (has_embeddings and has_head and config.has_fusion):
            raise BadInputError(
                f"expected embeddings, an LM head and a fusion in a head of width {layer.width} for states of width "
                f"{target_width}, got a head without all of them"
            )
        super().__init__(
            target,
            layer,
            config.hidden_layers,
            num_layers=config.num_layers,
            num_steps=config.num_steps,
            norm_output=config.norm_output,
            vocabulary=vocabulary,
            windows=config.windows,
            target_width=config.target_width,
        )
        self.config = config
        if config.norm_before_fc:
            self.input_norm = nn.RMSNorm(num_states * target_width, layer.norm_eps)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(
                nn.RMSNorm(target_width, layer.norm_eps) for _ in config.hidden_layers
            )
        self.fc = (
            nn.Linear(num_states * target_width, layer.width, bias=config.has_fusion_bias)
            if config.has_fusion
            else None
        )
        if config.mask_token is not None:
            check_range("the mask token", config.mask_token, 0, target.vocab_size - 1)
            self.mask_hidden = nn.Parameter(torch.randn(1, 1, num_states * target_width))
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
        window: int | None = None,
    ) -> EagleHead:
        """Build an untrained drafter head.

        For the whole vocabulary it uses the target's LM head, for a reduced one its own, which
        starts with the target's weights. A reduced vocabulary should be that of the most frequent
        tokens (`DraftVocabulary.most_frequent`). With a `window` it attends to that many tokens, the last ones.
        """
        config = EagleConfig(
            layer=default_layer_config(target.width),
            hidden_layers=default_layers(target.num_layers),
            windows=None if window is None else (window,),
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
            if "mask_hidden" in tensors:
                tensors["mask_hidden"] = tensors["mask_hidden"].reshape(1, 1, -1)
            config = _read_config(stored, tensors, target)
            if stored.get("tied") and "embed_tokens.weight" in tensors:
                tensors.setdefault("lm_head.weight", tensors["embed_tokens.weight"])
            vocabulary = pop_vocabulary(tensors, stored, target)
            _scale_logits(tensors, stored)
            _drop_target_weights(tensors, stored, target)
            head = cls(
                config,
                target,
                vocabulary,
                has_embeddings="embed_tokens.weight" in tensors,
                has_head="lm_head.weight" in tensors,
            )
        stored.fill(head, tensors | vocabulary.state_dict(prefix="vocabulary."))
        return head

    def save(self, folder: Path, target: str = "") -> None:
        path = Path(target) / CONFIG
        target_config = read_config(path.parent) if path.is_file() else {}
        own = checkpoint_tensors(self, self.vocabulary)
        # Embeddings and LM head are written even if they are the target's: `speculators` leaves
        # missing ones uninitialised.
        dtype = next(self.parameters()).dtype
        copies = {name: weight.to(dtype) for name, weight in _target_weights(self.target) if name not in own}
        kind, masks = "eagle3", {}
        if self.mask_token is not None:
            kind, masks = "peagle", {"mask_token_id": self.mask_token}
        config = {
            **masks,
            **speculators_fields(kind, self.num_steps, target, target_config.get("architectures", [])),
            "architectures": ["Eagle3Speculator" if kind == "eagle3" else "PEagleSpeculator"],
            "speculators_version": FORMAT_VERSION,
            "dtype": str(dtype).removeprefix("torch."),
            "draft_vocab_size": len(self.vocabulary),
            "target_hidden_size": self.config.target_width,
            **self._fusion_fields,
            # All flags are written, because readers disagree on the defaults of missing ones.
            **{flag: getattr(self.config, flag) for flag in _FLAGS},
            "embed_requires_grad": False,
            _COPIES: sorted(copies),
            "transformer_layer_config": {
                **{key: value for key, value in target_config.items() if key == "max_position_embeddings"},
                **layer_fields(self.layer_config, self.target.vocab_size, self.num_layers),
                **(window_fields(self.windows) if any(self.windows) else {}),
                "attention_bias": self.layer_config.attention_bias,
                "tie_word_embeddings": False,
            },
        }
        write_head(folder, config, copies | own)

    def save_in_authors_layout(self, folder: Path) -> None:
        """Write the head with its layer as `midlayer` and without copies of the target's weights.

        Readers take the states that the authors do unless `eagle_config` has the numbers of the layers whose outputs are read.
        """
        if self.num_layers != 1 or self.fc is None or self.mask_token is not None or any(self.windows):
            raise UnsupportedModelError(
                "cannot write this EAGLE-3 head in its authors' layout: that has one layer of full attention and a fusion. "
                "Leave out --authors-layout."
            )
        config = {
            "architectures": ["LlamaForCausalLMEagle3"],
            **layer_fields(self.layer_config, self.target.vocab_size, 1),
            "draft_vocab_size": len(self.vocabulary),
            "tie_word_embeddings": False,
            **({"target_hidden_size": self.config.target_width} if self.config.target_width else {}),
            **{flag: True for flag in _FLAGS if getattr(self.config, flag)},
            **({"bias": True} if self.config.has_fusion_bias else {}),
        }
        if self.hidden_layers != default_layers(self.target.num_layers):
            config["eagle_config"] = {
                "eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in self.hidden_layers]
            }
        tensors = {
            name.replace("layers.0.", "midlayer.", 1): tensor
            for name, tensor in checkpoint_tensors(self, self.vocabulary).items()
        }
        write_head(folder, config, tensors)

    @property
    def parts(self) -> FeatureParts:
        first = self.layers[0]
        return FeatureParts(
            first.input_layernorm, first.hidden_norm, None, self.layers, self.config.norm_before_residual
        )

    @property
    def fusion(self) -> nn.Linear | None:
        return self.fc

    @property
    def mask_token(self) -> int | None:
        return self.config.mask_token

    def mask_states(self) -> HiddenStates:
        """Return what a parallel head reads in place of the target's states `[1, width]` at mask tokens, by layer."""
        parts = self.mask_hidden.detach()[0].chunk(len(self.hidden_layers), -1)
        return dict(zip(self.hidden_layers, parts, strict=True))

    @property
    def _fusion_fields(self) -> dict[str, Any]:
        """Fields of `config.json` about the target's states."""
        if self.fc is None:
            return {"eagle_config": {"use_aux_hidden_state": False}}
        has_bias = {"bias": True} if self.config.has_fusion_bias else {}
        return {"eagle_aux_hidden_state_layer_ids": list(self.hidden_layers), **has_bias}

    def join_states(self, hidden: HiddenStates) -> Tensor:
        states = [hidden[layer] for layer in self.hidden_layers]
        if self.config.fc_norm:
            states = [norm(state) for norm, state in zip(self.fc_norm, states, strict=True)]
        joined = torch.cat(states, -1)
        return self.input_norm(joined) if self.config.norm_before_fc else joined


class Eagle1Head(MtpHead):
    """EAGLE-1 and 2 drafter head: an MTP module without norms, in its authors' format.

    With `has_norms`, as in HASS (arXiv 2408.15766), embeddings and features are normalised; other
    arguments are as in `MtpHead`.
    """

    has_norms = False

    def __init__(
        self, layer: LayerConfig, target: TargetModel, *, has_norms: bool = False, **options: Any
    ) -> None:
        super().__init__(layer, target, **options)
        if has_norms:
            self.enorm = nn.RMSNorm(layer.width, layer.norm_eps)
            self.hnorm = nn.RMSNorm(layer.width, layer.norm_eps)

    @classmethod
    def load(cls, folder: Path, target: TargetModel) -> Eagle1Head:
        return cls.from_stored(StoredHead(folder, "eagle"), target)

    @classmethod
    def from_stored(cls, stored: StoredHead, target: TargetModel) -> Eagle1Head:
        """Read the head in a folder; its copy of the target's embeddings is not used."""
        folder, tensors = stored.folder, stored.read_tensors()
        with config_errors(folder):
            layer = LayerConfig.from_config(
                stored.layers, DENSE_TYPES, has_output_bias=_has_output_bias(tensors)
            )
            require_same("number of layers", stored.layers.get("num_hidden_layers", 1), 1, folder)
            vocabulary = _pop_token_map(tensors, stored, target)
            _scale_logits(tensors, stored)
            _drop_target_weights(tensors, stored, target)
            head = cls(
                layer,
                target,
                has_norms=stored.flag("has_norms"),
                has_bias=stored.flag("has_bias", "eh_proj.bias" in tensors),
                has_head="lm_head.weight" in tensors,
                vocabulary=vocabulary,
                windows=read_windows(stored.layers, 1),
            )
        stored.fill(head, tensors | vocabulary.state_dict(prefix="vocabulary."), EAGLE1.tensors.in_file)
        return head

    def save(self, folder: Path, target: str = "") -> None:
        config = {
            **layer_fields(self.layer_config, self.target.vocab_size, 1),
            **(window_fields(self.windows) if any(self.windows) else {}),
            "architectures": ["LlamaForCausalLM"],
            "bias": self.eh_proj.bias is not None,
        }
        if not isinstance(self.enorm, nn.Identity):
            config["add_para_norm"] = True
        tensors = {EAGLE1.tensors.in_file(name): tensor for name, tensor in self.state_dict().items()}
        if (token_map := tensors.pop("vocabulary.token_ids", None)) is not None:
            tensors["token_map"] = token_map
            config["truncated_vocab_size"] = len(self.vocabulary)
        write_head(folder, config, tensors)


def _read_config(stored: StoredHead, tensors: Mapping[str, Tensor], target: TargetModel) -> EagleConfig:
    """Return the configuration of an EAGLE-3 head; call it inside `config_errors`."""
    folder = stored.folder
    layer = LayerConfig.from_config(
        stored.layers, DENSE_TYPES + LATENT_TYPES, has_output_bias=_has_output_bias(tensors)
    )
    target_width = stored.get("target_width")
    require_same("width", target_width or layer.width, target.width, folder)
    require_same(
        "number of layers", stored.get("target_layers", target.num_layers), target.num_layers, folder
    )
    has_fusion = stored.flag("reads_layers", True)
    hidden_layers = _read_hidden_layers(stored, target, has_fusion)
    num_layers, is_parallel = _count_layers(stored, target), "mask_hidden" in tensors
    return EagleConfig(
        layer=layer,
        hidden_layers=hidden_layers,
        target_width=target_width,
        has_fusion=has_fusion,
        has_fusion_bias=stored.flag("has_fusion_bias", "fc.bias" in tensors),
        windows=_read_windows(stored, num_layers),
        num_layers=num_layers,
        num_steps=stored.number("num_steps", PARALLEL_STEPS if is_parallel else DEFAULT_STEPS),
        mask_token=stored.number("mask_token", least=0) if is_parallel else None,
        **{flag: stored.flag(flag) for flag in _FLAGS},
    )


def _read_hidden_layers(stored: StoredHead, target: TargetModel, has_fusion: bool) -> tuple[int, ...]:
    """Return the states that a head reads, numbered as in `output_hidden_states`.

    Some formats number the layers whose outputs are read, from 0; those are one less. Without a fusion,
    the head reads the last state, whatever layers are listed.
    """
    states, outputs = stored.get("hidden_layers"), stored.get("layer_outputs")
    if not has_fusion:
        return (LAST_HIDDEN,)
    from_outputs = [layer + 1 for layer in outputs] if outputs else None
    if states and from_outputs and states != from_outputs:
        raise ValueError(f"states {states} beside the outputs of layers {outputs}, which are other states")
    found = tuple(states or from_outputs or default_layers(target.num_layers))
    if not all(isinstance(layer, int) for layer in found):
        raise ValueError(f"layers {list(found)}, which should be whole numbers")
    require_layers(found, target.num_layers, stored.folder)
    num_states = stored.get("num_states", len(found))
    if num_states != len(found):
        raise ValueError(f"{num_states} states, but {len(found)} layers")
    return found


def _count_layers(stored: StoredHead, target: TargetModel) -> int:
    """Return the number of decoder layers; some heads of one layer have the number of the target's in that field."""
    num_layers = whole_number(
        {"num_hidden_layers": stored.layers.get("num_hidden_layers", 1)}, "num_hidden_layers"
    )
    if any("midlayer." in name for name in stored.tensor_names):
        require_same(
            "number of layers", num_layers, target.num_layers if num_layers > 1 else 1, stored.folder
        )
        return 1
    return num_layers


def _read_windows(stored: StoredHead, num_layers: int) -> tuple[int | None, ...]:
    """Return the sliding window of each layer."""
    windows = read_windows(stored.layers, num_layers)
    window = stored.get("window")
    if not stored.flag("uses_window"):
        return windows
    size, other = stored.number("window"), stored.layers.get("sliding_window")
    if other not in (None, size):
        raise ValueError(f"a sliding_window of {other} beside a swa_window_size of {window}")
    return (size,) * num_layers


def _has_output_bias(tensors: Mapping[str, Tensor]) -> bool:
    return any(name.endswith("self_attn.o_proj.bias") for name in tensors)


def _scale_logits(tensors: dict[str, Tensor], stored: StoredHead) -> None:
    """Multiply the LM head by the `logit_scale` of a head, if there is one."""
    scale = stored.get("logit_scale", 1.0)
    if scale != 1.0:
        if "lm_head.weight" not in tensors:
            raise ValueError(f"a logit_scale of {scale} without an LM head")
        tensors["lm_head.weight"] = tensors["lm_head.weight"] * scale


def _pop_token_map(tensors: dict[str, Tensor], stored: StoredHead, target: TargetModel) -> DraftVocabulary:
    """Return the vocabulary of an EAGLE-1 head, whose `token_map` holds the target ids of a smaller one."""
    token_ids = tensors.pop("token_map", None)
    vocab_size = whole_number(stored.layers, "vocab_size")
    if stored.number("draft_vocab_size", vocab_size) == vocab_size:
        return pop_vocabulary(tensors, stored, target)
    require_same("vocabulary", vocab_size, target.vocab_size, stored.folder)
    if token_ids is None or len(token_ids) != stored.number("draft_vocab_size"):
        raise ValueError(f"a token_map of {'no' if token_ids is None else len(token_ids)} tokens")
    if "lm_head.weight" not in tensors:
        raise missing_lm_head(stored.folder)
    return DraftVocabulary(vocab_size, token_ids)


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
    for name in ("embed_tokens.weight", "lm_head.weight"):
        own = tensors.get(name)
        if own is None or own.shape != (target.vocab_size, target.width):
            continue
        weight = _embeddings(target) if name.startswith("embed") else _biased_columns(target).T
        if torch.equal(weight.cpu().to(own.dtype), own):
            del tensors[name]
