"""Configuration of block drafters in the `speculators` format, `dspark` and `dflash`.

`aux_hidden_state_layer_ids` uses this package's numbering: 0 is the embeddings, k the output of
layer k.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from secondguess.core import MAX_DRAFT_LENGTH
from secondguess.errors import BadInputError, UnsupportedModelError
from secondguess.heads.fields import config_errors, get_bool, whole_number
from secondguess.heads.layer import LayerConfig
from secondguess.names import check_range

KINDS = ("dspark", "dflash")


@dataclass(frozen=True)
class DsparkConfig:
    """Sizes and options of a block drafter.

    Args:
        layer: shape of its decoder layers; its width is the target's.
        num_layers: number of decoder layers.
        hidden_layers: target layers whose hidden states are fused.
        block_size: number of positions in a block.
        mask_token: token whose embedding is the input at positions to be predicted.
        vocab_size: vocabulary size of the target.
        num_words: size of the draft vocabulary.
        has_output: whether it has an output matrix of its own; if not, it uses the target's.
        samples_from_anchor: whether the position of the pending token predicts the next token; if
            not (DFlash), the first mask position does.
        markov_rank: rank of the Markov head, the logit bias by the preceding token; 0 for none.
        has_confidence: whether a confidence head predicts acceptance probabilities.
        confidence_reads_markov: whether the confidence head also reads the Markov embedding of the
            preceding token.

    Raises:
        BadInputError: a number out of range, or options that exclude each other.
    """

    layer: LayerConfig
    num_layers: int
    hidden_layers: tuple[int, ...]
    block_size: int
    mask_token: int
    vocab_size: int
    num_words: int
    has_output: bool = False
    samples_from_anchor: bool = True
    markov_rank: int = 0
    has_confidence: bool = False
    confidence_reads_markov: bool = False

    def __post_init__(self) -> None:
        check_range("layers of a block drafter", self.num_layers, 1, 64)
        check_range("draft tokens of a block drafter", self.num_guesses, 1, MAX_DRAFT_LENGTH)
        check_range("the mask token", self.mask_token, 0, self.vocab_size - 1)
        check_range("the draft vocabulary of a block drafter", self.num_words, 1, self.vocab_size)
        check_range("the rank of a Markov head", self.markov_rank, 0, 4096)
        if not self.hidden_layers or min(self.hidden_layers) < 0:
            raise BadInputError(
                f"expected layers of the target, numbered from 0 on, got {list(self.hidden_layers)}"
            )
        if self.has_vocab_map and not self.has_output:
            raise BadInputError("expected an lm_head.weight beside a vocabulary of its own, got none")
        if self.confidence_reads_markov and not (self.markov_rank and self.has_confidence):
            raise BadInputError("expected a Markov head and a confidence head where the one reads the other")

    @property
    def num_guesses(self) -> int:
        """Number of draft tokens per block."""
        return self.block_size - (not self.samples_from_anchor)

    @property
    def has_vocab_map(self) -> bool:
        """True if the draft vocabulary is smaller than the target's."""
        return self.num_words < self.vocab_size

    @classmethod
    def from_config(cls, config: Mapping[str, Any], folder: Path, has_output: bool) -> Self:
        """Build a shape from a `config.json`.

        Args:
            config: contents of the file.
            folder: folder of the file, for error messages.
            has_output: whether the weights contain an output matrix.

        Raises:
            CheckpointError: a missing or invalid field.
            UnsupportedModelError: an unsupported kind of drafter, layer or Markov head.
        """
        kind = config.get("speculators_model_type")
        if kind not in KINDS:
            raise UnsupportedModelError(
                f"expected a drafter of the speculators_model_type {' or '.join(KINDS)} in {folder}, got {kind!r}"
            )
        with config_errors(folder):
            layers = config["transformer_layer_config"]
            _require_supported_parts(config, layers, folder)
            rank = whole_number(config, "markov_rank", 0) if kind == "dspark" else 0
            confident = kind == "dspark" and get_bool(config, "enable_confidence_head", False)
            vocab_size = whole_number(layers, "vocab_size")
            return cls(
                layer=LayerConfig.from_config(layers),
                num_layers=whole_number(layers, "num_hidden_layers"),
                hidden_layers=tuple(int(layer) for layer in config["aux_hidden_state_layer_ids"]),
                block_size=whole_number(config, "block_size"),
                mask_token=whole_number(config, "mask_token_id", 0),
                vocab_size=vocab_size,
                num_words=whole_number({"draft_vocab_size": vocab_size, **config}, "draft_vocab_size"),
                has_output=has_output,
                samples_from_anchor=get_bool(config, "sample_from_anchor", kind == "dspark"),
                markov_rank=rank,
                has_confidence=confident,
                confidence_reads_markov=confident and get_bool(config, "confidence_head_with_markov", False),
            )

    def to_config(self, target: str) -> dict[str, Any]:
        """Return the `config.json` of a `dspark` drafter in the `speculators` format.

        Args:
            target: name of the target model.
        """
        proposal = {
            "proposal_type": "greedy",
            "speculative_tokens": self.num_guesses,
            "verifier_accept_k": 1,
            "accept_tolerance": 0.0,
        }
        return {
            "architectures": ["DSparkDraftModel"],
            "speculators_model_type": "dspark",
            "block_size": self.block_size,
            "aux_hidden_state_layer_ids": list(self.hidden_layers),
            "mask_token_id": self.mask_token,
            "sample_from_anchor": self.samples_from_anchor,
            "sliding_window_non_causal": False,
            "draft_vocab_size": self.num_words,
            "markov_rank": self.markov_rank,
            "markov_head_type": "vanilla",
            "enable_confidence_head": self.has_confidence,
            "confidence_head_with_markov": self.confidence_reads_markov,
            "transformer_layer_config": self.layer.to_config()
            | {
                "vocab_size": self.vocab_size,
                "num_hidden_layers": self.num_layers,
                "layer_types": ["full_attention"] * self.num_layers,
            },
            "speculators_config": {
                "algorithm": "dspark",
                "proposal_methods": [proposal],
                "default_proposal_method": "greedy",
                "verifier": {"name_or_path": target, "architectures": []},
            },
        }


def _require_supported_parts(config: Mapping[str, Any], layers: Mapping[str, Any], folder: Path) -> None:
    markov = config.get("markov_head_type", "vanilla")
    if config.get("markov_rank") and markov != "vanilla":
        raise UnsupportedModelError(
            f"expected a Markov head of the type vanilla in {folder}, got {markov!r}; train one without the other's state"
        )
    if any(kind != "full_attention" for kind in layers.get("layer_types") or []):
        raise UnsupportedModelError(
            f"expected layers that attend to the whole text in {folder}, got {layers['layer_types']}"
        )
