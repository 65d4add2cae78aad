"""How block drafters are described on disk: the `config.json` of the speculators library, for `dspark` and for `dflash`.

The numbers in `aux_hidden_state_layer_ids` are this package's own: 0 is the embeddings, k the output of layer k.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from secondguess.core import MAX_DRAFT_LENGTH
from secondguess.errors import BadInputError, UnsupportedModelError
from secondguess.heads.fields import fields_of, whole_number, yes_or_no
from secondguess.heads.layer import LayerShape
from secondguess.names import require_between

KINDS = ("dspark", "dflash")


@dataclass(frozen=True)
class DsparkShape:
    """The sizes of a block drafter.

    Args:
        layer: of its decoder layers; as wide as the target.
        num_layers: of them.
        hidden_layers: of the target, whose states are fused.
        block_size: positions in a block.
        mask_token: which token's embedding stands where a token is to be guessed.
        vocab_size: the target's.
        num_words: tokens that it guesses among.
        has_output: whether it has an output matrix of its own, and not the target's.
        samples_from_anchor: whether pending's own position guesses the token behind it; else (DFlash) the first mask does.
        markov_rank: of the bias by the token before; 0 for none.
        has_confidence: whether it foretells how likely each guess is accepted.
        confidence_reads_markov: whether that looks at the token before.
    """

    layer: LayerShape
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
        require_between("layers of a block drafter", self.num_layers, 1, 64)
        require_between("guesses of a block drafter", self.num_guesses, 1, MAX_DRAFT_LENGTH)
        require_between("the mask token", self.mask_token, 0, self.vocab_size - 1)
        require_between("the words of a block drafter", self.num_words, 1, self.vocab_size)
        require_between("the rank of a Markov head", self.markov_rank, 0, 4096)
        if not self.hidden_layers or min(self.hidden_layers) < 0:
            raise BadInputError(
                f"expected layers of the target, numbered from 0 on, got {list(self.hidden_layers)}"
            )
        if self.maps_words and not self.has_output:
            raise BadInputError("expected an lm_head.weight beside a vocabulary of its own, got none")
        if self.confidence_reads_markov and not (self.markov_rank and self.has_confidence):
            raise BadInputError("expected a Markov head and a confidence head where the one reads the other")

    @property
    def num_guesses(self) -> int:
        """How many tokens a block guesses."""
        return self.block_size - (not self.samples_from_anchor)

    @property
    def maps_words(self) -> bool:
        """Whether it guesses among some of the target's tokens only."""
        return self.num_words < self.vocab_size

    @classmethod
    def of_config(cls, config: Mapping[str, Any], folder: Path, has_output: bool) -> Self:
        """From a `config.json`.

        Args:
            folder: where it is, for messages.
            has_output: whether an output matrix lies beside it.

        Raises:
            CheckpointError: a field that is missing or wrong.
            UnsupportedModelError: a kind of drafter, of layer or of Markov head that is not known here.
        """
        kind = config.get("speculators_model_type")
        if kind not in KINDS:
            raise UnsupportedModelError(
                f"expected a drafter of the speculators_model_type {' or '.join(KINDS)} in {folder}, got {kind!r}"
            )
        with fields_of(folder):
            layers = config["transformer_layer_config"]
            _refuse_unknown_parts(config, layers, folder)
            rank = whole_number(config, "markov_rank", 0) if kind == "dspark" else 0
            confident = kind == "dspark" and yes_or_no(config, "enable_confidence_head", False)
            vocab_size = whole_number(layers, "vocab_size")
            return cls(
                layer=LayerShape.of_config(layers),
                num_layers=whole_number(layers, "num_hidden_layers"),
                hidden_layers=tuple(int(layer) for layer in config["aux_hidden_state_layer_ids"]),
                block_size=whole_number(config, "block_size"),
                mask_token=whole_number(config, "mask_token_id", 0),
                vocab_size=vocab_size,
                num_words=whole_number({"draft_vocab_size": vocab_size, **config}, "draft_vocab_size"),
                has_output=has_output,
                samples_from_anchor=yes_or_no(config, "sample_from_anchor", kind == "dspark"),
                markov_rank=rank,
                has_confidence=confident,
                confidence_reads_markov=confident and yes_or_no(config, "confidence_head_with_markov", False),
            )

    def to_config(self, target: str) -> dict[str, Any]:
        """As the speculators library writes it.

        Args:
            target: the name of the model that it drafts for.
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


def _refuse_unknown_parts(config: Mapping[str, Any], layers: Mapping[str, Any], folder: Path) -> None:
    markov = config.get("markov_head_type", "vanilla")
    if config.get("markov_rank") and markov != "vanilla":
        raise UnsupportedModelError(
            f"expected a Markov head of the type vanilla in {folder}, got {markov!r}; train one without the other's state"
        )
    if any(kind != "full_attention" for kind in layers.get("layer_types") or []):
        raise UnsupportedModelError(
            f"expected layers that attend to the whole text in {folder}, got {layers['layer_types']}"
        )
