"""Training recipes: one frozen dataclass per kind of drafter, with fields that `--set` can change.

A new kind needs a class, one line in `RECIPES`, and one in `SUMMARIES` of `cli/train.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from math import exp
from typing import Any, ClassVar

from torch import Tensor

from secondguess.errors import BadInputError
from secondguess.heads.base import DraftVocabulary, TargetModel
from secondguess.heads.dspark import DsparkHead, evenly_spaced_layers
from secondguess.heads.eagle import EagleHead
from secondguess.heads.early_exit import EarlyExitHead
from secondguess.heads.learning import TrainableHead
from secondguess.heads.medusa import MedusaHead
from secondguess.heads.mtp import MtpHead
from secondguess.names import check_range, parse_name, read_options
from secondguess.train.draft_model import DraftModel


@dataclass(frozen=True)
class TargetInfo:
    """Properties of a target that are needed to create a head."""

    config: Mapping[str, Any]  # in Transformers format
    model: TargetModel  # with float32 outputs
    token_counts: Tensor  # [vocab] int64, occurrences of each token that counts in training texts
    seed: int


def _within(low: float, high: float, default: float) -> Any:
    """Return a dataclass field whose value `Recipe` checks."""
    return field(default=default, metadata={"range": (low, high)})


@dataclass(frozen=True)
class Recipe(ABC):
    """Base class of recipes; values out of range raise a BadInputError.

    `places` is the share of the counted positions used in a step, drawn anew for each step: neighbouring positions carry
    similar information, and computing a distribution at every position is most of the cost of a step.
    """

    learning_rate: float = _within(1e-8, 1, 1e-3)  # at the peak
    warmup_steps: int = _within(0, 1_000_000, 50)  # linear, to the peak
    clip: float = _within(1e-6, 1e6, 1.0)  # maximum norm of the gradient
    batch_size: int = _within(1, 65_536, 8)  # texts per step
    places: float = _within(0.001, 1, 0.25)

    kind: ClassVar[str]  # of drafter; also the name of the command
    has_one_distribution: ClassVar[bool] = False  # for all depths; the last measured rate holds below
    runs_first_layers: ClassVar[bool] = False  # of the target, which not every runtime supports
    keeps_tokenizer: ClassVar[bool] = False  # of the target, for a model of its own
    has_authors_layout: ClassVar[bool] = False  # beside that of speculators

    def __post_init__(self) -> None:
        for option in fields(self):
            if "range" in option.metadata:
                name = f"the {option.name.replace('_', ' ')}"
                check_range(name, getattr(self, option.name), *option.metadata["range"])

    @abstractmethod
    def fresh(self, target: TargetInfo) -> TrainableHead:
        """Return an untrained head, determined by the seed."""

    def weights(self, num_depths: int) -> list[float]:
        """Return the weights of the losses by depth, from 1 downwards."""
        return [1.0] * num_depths


@dataclass(frozen=True)
class DecayingRecipe(Recipe):
    """Base class of recipes whose depths have geometrically decaying weights."""

    decay: float = _within(0, 10, 0.8)  # weight of a depth's loss over the previous one's

    def weights(self, num_depths: int) -> list[float]:
        return [self.decay**depth for depth in range(num_depths)]


@dataclass(frozen=True)
class DraftRecipe(Recipe):
    """Separate small draft model."""

    num_layers: int = _within(1, 64, 2)
    width: int = _within(0, 8192, 0)  # a multiple of 64; 0 for the target's, reduced to at most 512

    kind = "draft"
    has_one_distribution = True
    keeps_tokenizer = True

    def fresh(self, target: TargetInfo) -> TrainableHead:
        return DraftModel.fresh(target.config, target.model, self.num_layers, self.width, target.seed)


@dataclass(frozen=True)
class EarlyExitRecipe(Recipe):
    """Adapter on the hidden states of an early layer of the target."""

    layer: int = 0  # target layers that run while drafting; 0 for a quarter of them
    mlp_size: int = _within(0, 1_000_000, 0)  # of the adapter; 0 for twice the target's hidden size

    kind = "early-exit"
    has_one_distribution = True
    runs_first_layers = True

    def fresh(self, target: TargetInfo) -> TrainableHead:
        if target.model.num_layers < 2:
            raise BadInputError(
                "cannot train an early exit: the target has one layer, and none to leave out. Train another kind of drafter."
            )
        if self.layer:
            check_range("the layer", self.layer, 1, target.model.num_layers - 1)
        return EarlyExitHead.fresh(target.model, target.seed, exit_layer=self.layer, mlp_size=self.mlp_size)


@dataclass(frozen=True)
class MedusaRecipe(DecayingRecipe):
    """Medusa-1 heads (arXiv 2401.10774)."""

    num_heads: int = 4  # one per depth
    num_layers: int = 1  # residual layers per head

    kind = "medusa"

    def fresh(self, target: TargetInfo) -> TrainableHead:
        return MedusaHead.fresh(
            target.model, target.seed, num_heads=self.num_heads, num_layers=self.num_layers
        )


@dataclass(frozen=True)
class EagleRecipe(DecayingRecipe):
    """EAGLE-3 head (arXiv 2503.01840)."""

    num_steps: int = 7  # draft steps in training
    draft_vocab_size: int = 32_000  # most frequent tokens of the training texts; 0 for all tokens
    window: int = _within(0, 100_000_000, 0)  # tokens that the head attends to, the last ones; 0 for all

    kind = "eagle"
    has_authors_layout = True

    def fresh(self, target: TargetInfo) -> TrainableHead:
        size = min(self.draft_vocab_size or target.model.vocab_size, target.model.vocab_size)
        vocabulary = DraftVocabulary.most_frequent(target.token_counts.cpu(), size)
        return EagleHead.fresh(
            target.model,
            target.seed,
            vocabulary=vocabulary,
            num_steps=self.num_steps,
            window=self.window or None,
        )


@dataclass(frozen=True)
class MtpRecipe(DecayingRecipe):
    """Multi-token prediction module (DeepSeek-V3, arXiv 2412.19437)."""

    num_steps: int = 4  # draft steps in training

    kind = "mtp"

    def fresh(self, target: TargetInfo) -> TrainableHead:
        return MtpHead.fresh(target.model, target.seed, num_steps=self.num_steps)


@dataclass(frozen=True)
class DSparkRecipe(Recipe):
    """DSpark head (arXiv 2607.05147)."""

    block_size: int = 7  # tokens drafted at once
    num_layers: int = 2  # of its backbone
    num_states: int = _within(1, 1000, 4)  # target layers, evenly spread, whose hidden states it reads
    markov_rank: int = 64  # of the head that corrects logits given the previous token
    gamma: float = _within(0.1, 1000, 4.0)  # of the loss weights exp(-k / gamma) over the depth k

    kind = "dspark"
    has_authors_layout = True

    def fresh(self, target: TargetInfo) -> TrainableHead:
        padding = target.config.get("pad_token_id") or 0  # -1 in some configurations
        return DsparkHead.fresh(
            target.model,
            target.seed,
            hidden_layers=evenly_spaced_layers(target.model.num_layers, self.num_states),
            block_size=self.block_size,
            markov_rank=self.markov_rank,
            num_layers=self.num_layers,
            # The embedding of the padding token is not used by any text.
            mask_token=padding if 0 <= padding < target.model.vocab_size else 0,
        )

    def weights(self, num_depths: int) -> list[float]:
        return [exp(-depth / self.gamma) for depth in range(num_depths)]


RECIPES: dict[str, type[Recipe]] = {
    recipe.kind: recipe
    for recipe in (DraftRecipe, EarlyExitRecipe, MedusaRecipe, MtpRecipe, EagleRecipe, DSparkRecipe)
}
"""Recipes by kind."""


def make_recipe(kind: str, changes: Sequence[str] = ()) -> Recipe:
    """Return the recipe of a kind, with `NAME=VALUE` changes."""
    options = parse_name(",".join([kind, *changes]), "training recipe", RECIPES).options
    return read_options(RECIPES[kind], options, f"training recipe {kind}")
