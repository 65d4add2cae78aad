"""Configuration of block drafters, and what it is in the formats of their publishers."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from secondguess.core import MAX_DRAFT_LENGTH
from secondguess.errors import BadInputError, UnsupportedModelError
from secondguess.heads.base import TargetModel
from secondguess.heads.block_layers import BlockAttention, ConvolutionConfig
from secondguess.heads.files import whole_number
from secondguess.heads.formats import (
    SPECULATORS_BLOCKS,
    ZLAB_BLOCKS,
    Format,
    StoredHead,
    layer_fields,
    speculators_fields,
)
from secondguess.heads.layer import LayerConfig
from secondguess.names import check_range

MARKOV_KINDS = ("vanilla", "gated", "rnn", "selector", "refiner", "gru")
"""Kinds of heads that correct logits by the preceding tokens (`heads.markov`)."""
ARCHITECTURES = {
    "dspark": "DSparkDraftModel",
    "dflash2": "DFlash2DraftModel",
    "xpress": "XPressDraftModel",
    "specforge": "DSparkDraftModel",
    "z-lab-2": "DFlash2DraftModel",
    "domino": "DominoDraftModel",
}
"""Architecture of written heads by the name of their format."""
PROJECTORS = ("dflash", "dflash2", "dspark", "domino")
SLIDING = "sliding_attention"


@dataclass(frozen=True)
class DsparkConfig:
    """Sizes and options of a block drafter."""

    layer: LayerConfig
    num_layers: int
    hidden_layers: tuple[int, ...]  # target layers whose states are fused
    block_size: int
    mask_token: int = 0  # whose embedding is the input at positions to be predicted
    has_output: bool = False  # an output matrix of its own instead of the target's
    samples_from_anchor: bool = True  # the pending token predicts the next; in DFlash the first mask position
    markov_rank: int = 0  # of the head that corrects logits by the preceding tokens; 0 for none
    markov_kind: str = "vanilla"  # of `MARKOV_KINDS`
    selector_top_k: int = 0  # number of candidates of the kind `selector`
    refiner_mlp_size: int = 0  # of the kind `refiner`
    gru_size: int = 0  # of the kind `gru`
    num_uncorrected: int = 0  # number of draft positions before the first that the kind `gru` corrects
    has_confidence: bool = False  # a confidence head predicts acceptance probabilities
    confidence_reads_markov: bool = False  # that head also reads the preceding token's Markov embedding
    attention: tuple[BlockAttention, ...] = ()  # by layer; empty if all attend to everything
    convolutions: ConvolutionConfig | None = None  # around each part of each layer
    has_embeddings: bool = False  # embeddings of its own instead of the target's
    has_mask_embedding: bool = False  # an embedding of the mask token beside these
    target_width: int = 0  # of the target's states; 0 if it is that of the head

    def __post_init__(self) -> None:
        check_range("layers of a block drafter", self.num_layers, 1, 64)
        check_range("draft tokens of a block drafter", self.num_drafted, 1, MAX_DRAFT_LENGTH)
        check_range("the rank of a Markov head", self.markov_rank, 0, 4096)
        if not self.hidden_layers or min(self.hidden_layers) < 0:
            raise BadInputError(
                f"expected layers of the target, numbered from 0 on, got {list(self.hidden_layers)}"
            )
        if self.markov_kind not in MARKOV_KINDS:
            raise UnsupportedModelError(
                f"expected a Markov head of the type {', '.join(MARKOV_KINDS)}, got {self.markov_kind!r}"
            )
        if self.confidence_reads_markov and not (self.markov_rank and self.has_confidence):
            raise BadInputError("expected a Markov head and a confidence head where the one reads the other")
        if self.convolutions is not None:
            check_range("taps of convolutions", self.convolutions.kernel_size, 1, self.block_size)
            if self.layer.width % self.convolutions.group_size:
                raise BadInputError(
                    f"expected groups of channels that divide the width {self.layer.width}, got groups of "
                    f"{self.convolutions.group_size}"
                )

    @property
    def num_drafted(self) -> int:
        """Number of draft tokens per block."""
        return self.block_size - self.first_drafted

    @property
    def first_drafted(self) -> int:
        """Position in the block that predicts the first draft token."""
        return 0 if self.samples_from_anchor else 1

    @property
    def context_length(self) -> int | None:
        """Largest number of positions that the head was made for; None for no limit of its own."""
        return self.layer.more.get("max_position_embeddings")

    @property
    def layer_attention(self) -> tuple[BlockAttention, ...]:
        """Ranges that the positions of the layers attend to."""
        return self.attention or (BlockAttention(),) * self.num_layers

    @property
    def is_plain(self) -> bool:
        """True if the backbone has the parts of DFlash alone, in the target's width."""
        return (
            set(self.layer_attention) == {BlockAttention()}
            and self.convolutions is None
            and not self.has_mask_embedding
            and self.target_width in (0, self.layer.width)
        )

    @classmethod
    def from_stored(cls, stored: StoredHead, tensors: Container[str] = ()) -> Self:
        """Build a configuration from that in a folder with these tensors; call it inside `config_errors`."""
        _require_known_projector(stored)
        layers, rank = stored.layers, stored.number("markov_rank", least=0)
        num_layers, kind = whole_number(layers, "num_hidden_layers"), stored.get("markov_kind", "vanilla")
        if rank and kind not in MARKOV_KINDS:
            raise UnsupportedModelError(
                f"expected a Markov head of the type {', '.join(MARKOV_KINDS)} in {stored.folder}, got {kind!r}"
            )
        reads_markov = stored.flag("confidence_reads_markov")
        has_confidence = stored.flag("has_confidence") and "confidence_head.proj.weight" in tensors
        kernel_size, block_size = stored.number("conv_kernel_size", 0, least=0), stored.number("block_size")
        return cls(
            layer=_layer_config(layers, tensors),
            num_layers=num_layers,
            hidden_layers=_hidden_layers(stored, num_layers),
            block_size=block_size,
            mask_token=stored.number("mask_token", least=0),
            has_output="lm_head.weight" in tensors,
            samples_from_anchor=stored.flag("samples_from_anchor", stored.get("projector") == "dspark"),
            markov_rank=rank,
            markov_kind=kind if rank else "vanilla",
            selector_top_k=stored.number("selector_top_k", 0, least=0),
            refiner_mlp_size=rank * stored.number("refiner_mlp_ratio", 0, least=0),
            gru_size=stored.number("gru_size", 0, least=0),
            num_uncorrected=stored.number("num_uncorrected", 0, least=0),
            has_confidence=has_confidence,
            confidence_reads_markov=has_confidence and reads_markov,
            attention=_layer_attention(stored, num_layers),
            convolutions=ConvolutionConfig(kernel_size, stored.number("conv_group_size"))
            if kernel_size
            else None,
            has_embeddings="embed_tokens.weight" in tensors,
            has_mask_embedding="mask_embedding" in tensors,
            target_width=stored.number("target_width", 0, least=0),
        )

    def to_stored(self, num_outputs: int, target: TargetModel, name: str) -> tuple[Format, dict[str, Any]]:
        """Return a format that can express this configuration, and its `config.json`, for a target of this name."""
        sliding = [attention for attention in self.layer_attention if attention.window]
        layers = {
            **layer_fields(self.layer, target.vocab_size, self.num_layers),
            "layer_types": [
                SLIDING if attention.window else "full_attention" for attention in self.layer_attention
            ],
        }
        if sliding:
            layers |= {"sliding_window": sliding[0].window, "use_sliding_window": True}
        values: dict[str, Any] = {
            "block_size": self.block_size,
            "mask_token": self.mask_token,
            "markov_rank": self.markov_rank,
        }
        if self.markov_kind == "selector":
            values["selector_top_k"] = self.selector_top_k
        elif self.markov_kind == "refiner":
            values["refiner_mlp_ratio"] = self.refiner_mlp_size // self.markov_rank
        elif self.markov_kind == "gru":
            values |= {"gru_size": self.gru_size, "num_uncorrected": self.num_uncorrected}
        else:
            values |= {
                "markov_kind": self.markov_kind,
                "has_confidence": self.has_confidence,
                "confidence_reads_markov": self.confidence_reads_markov,
            }
        if self.convolutions is not None:
            values["conv_kernel_size"] = self.convolutions.kernel_size
            values["conv_group_size"] = self.convolutions.group_size
        if self.target_width:
            values["target_width"] = self.target_width
        common = {"draft_vocab_size": num_outputs}
        values["samples_from_anchor"] = self.samples_from_anchor
        is_of_speculators = all(
            attention.from_anchor or attention == BlockAttention() for attention in self.layer_attention
        )
        if is_of_speculators and self.markov_kind != "gru":
            row = SPECULATORS_BLOCKS.get(self.markov_kind, SPECULATORS_BLOCKS["vanilla"])
            values["window_is_bidirectional"] = bool(sliding) and not sliding[0].is_causal
            values["hidden_layers"] = list(self.hidden_layers)
            published = {
                **speculators_fields(row.name, self.num_drafted, name),
                "architectures": [ARCHITECTURES[row.name]],
                "transformer_layer_config": layers,
            }
        else:
            row = ZLAB_BLOCKS.get(self.markov_kind, ZLAB_BLOCKS["vanilla"])
            values["hidden_layers"] = [layer - 1 for layer in self.hidden_layers]
            published = {
                "architectures": [ARCHITECTURES[row.name]],
                "num_target_layers": target.num_layers,
                **layers,
            }
            if any(attention.is_causal != bool(attention.window) for attention in self.layer_attention):
                values["is_causal"] = self.layer_attention[0].is_causal
        return row, {**published, **common, **row.spelled(values)}


def _require_known_projector(stored: StoredHead) -> None:
    """Raise an `UnsupportedModelError` for a head of a kind that is not known."""
    projector = stored.get("projector")
    if projector not in (None, *PROJECTORS):
        raise UnsupportedModelError(
            f"expected the projector_type {', '.join(PROJECTORS)} in {stored.folder}, got {projector!r}; use another drafter"
        )


def _layer_config(layers: Mapping[str, Any], tensors: Container[str]) -> LayerConfig:
    """Return the configuration of the layers, which are Qwen3's for targets of other families too."""
    config = LayerConfig.from_config(layers)
    has_norms = "layers.0.self_attn.q_norm.weight" in tensors
    return replace(config, model_type="qwen3") if has_norms and config.is_like_llama else config


def _hidden_layers(stored: StoredHead, num_layers: int) -> tuple[int, ...]:
    """Return the target's layers, in this package's numbers: 0 is the embeddings, k the output of layer k."""
    found, first = stored.get("hidden_layers"), stored.get("first_layer", 0)
    if found is None and first and stored.get("num_target_layers") is not None:
        last = stored.number("num_target_layers") - 3  # the default of z-lab and SpecForge
        steps = [index / max(1, num_layers - 1) for index in range(num_layers)]
        found = [round(1 + (last - 1) * step) for step in steps] if num_layers > 1 else [(last + 3) // 2]
    return tuple(int(layer) + first for layer in found or ())


def _layer_attention(stored: StoredHead, num_layers: int) -> tuple[BlockAttention, ...]:
    """Return the ranges that the positions of the layers attend to."""
    layers = stored.layers
    kinds = layers.get("layer_types") or ["full_attention"] * num_layers
    if len(kinds) != num_layers or not {*kinds} <= {"full_attention", SLIDING}:
        raise UnsupportedModelError(
            f"expected {num_layers} layers of the types full_attention and {SLIDING} in {stored.folder}, got {kinds}"
        )
    is_sliding = [kind == SLIDING for kind in kinds]
    from_anchor = stored.get("window_from_anchor", False)
    if from_anchor:
        sliding_is_causal: bool | None = not stored.flag("window_is_bidirectional")
    else:
        sliding_is_causal = stored.get("is_causal")
    causal = [sliding if sliding_is_causal is None else sliding_is_causal for sliding in is_sliding]
    if from_anchor:
        causal = [each and sliding for each, sliding in zip(causal, is_sliding, strict=True)]
    elif stored.flag("slides_everywhere", False) and not any(is_sliding):
        is_sliding = [True] * num_layers
    window, is_excluded = 0, layers.get("use_sliding_window") is False
    sizes = {size for size in (stored.get("window"), layers.get("sliding_window")) if size is not None}
    if any(is_sliding):
        if is_excluded and SLIDING in kinds:
            raise ValueError("layers with a sliding window, which use_sliding_window excludes")
        if len(sizes) > 1:
            raise ValueError(f"sliding windows of {min(sizes)} and {max(sizes)}, which should be the same")
        window = whole_number({"sliding_window": sizes.pop()} if sizes else {}, "sliding_window")
        if not from_anchor and window < stored.number("block_size"):
            raise ValueError(f"a sliding window of {window}, which should be no smaller than a block")
    attention = tuple(
        BlockAttention(window * sliding, bool(is_causal), from_anchor and sliding)
        for sliding, is_causal in zip(is_sliding, causal, strict=True)
    )
    return () if set(attention) == {BlockAttention()} else attention
