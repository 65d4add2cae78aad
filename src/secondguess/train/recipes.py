"""How each kind of drafter is made and trained: one frozen dataclass per kind, whose fields are what `--set` may change.

To add one: a class, one line in `RECIPES`, and one in the `SUMMARIES` of `cli/train_heads.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from math import exp
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from secondguess.errors import BadInputError
from secondguess.heads.learning import Learner
from secondguess.names import read_options, require_between
from secondguess.runtime.base import Ends
from secondguess.train.head_trainer import acceptance_length


@dataclass(frozen=True)
class TargetFacts:
    """What a fresh learner is made from.

    Args:
        path: of the target's folder.
        config: the target's configuration, as Transformers writes it.
        ends: of the target, in float32.
        num_layers: of the target.
        vocab_size: of its logits.
        token_counts: `[vocab]` int64, how often it wrote each token.
        device: where it is.
        seed: of the first weights.
    """

    path: Path
    config: Mapping[str, Any]
    ends: Ends
    num_layers: int
    vocab_size: int
    token_counts: Tensor
    device: torch.device
    seed: int


@dataclass(frozen=True)
class Recipe(ABC):
    """What all recipes say.

    Args:
        learning_rate, weight_decay: of AdamW.
        warmup_steps: until the rate is at its height.
        clip: largest norm of the gradient.
        batch_size: texts per step.
        places: share of their places that a step learns from (`TrainSettings`).

    Attributes:
        kind: of drafter; the command's name.
        loss: the default of `--loss`.
        guesses_alone: whether one law serves all depths, so that the last acceptance holds for all further ones.
        runs_first_layers: whether what is trained drafts with the first of the target's layers, which not every runtime can run.
        keeps_tokenizer: whether what is saved is a whole model, which needs the target's tokenizer beside it.
    """

    learning_rate: float = 1e-3
    weight_decay: float = 0.0
    warmup_steps: int = 50
    clip: float = 1.0
    batch_size: int = 8
    places: float = 0.25

    kind: ClassVar[str]
    loss: ClassVar[str] = "lk"
    guesses_alone: ClassVar[bool] = False
    runs_first_layers: ClassVar[bool] = False
    keeps_tokenizer: ClassVar[bool] = False

    @abstractmethod
    def fresh(self, target: TargetFacts) -> Learner:
        """An untrained learner, the same for the same seed."""

    @abstractmethod
    def weights(self, num_depths: int) -> list[float]:
        """Of the losses, by depth of the guess."""

    def score(self, accepted: Sequence[float]) -> float:
        """What early stopping watches on held-out text: the acceptance length."""
        return acceptance_length(accepted)

    def save(self, learner: Learner, folder: Path, target: str) -> None:
        """Write `config.json` and `model.safetensors` in the format of the kind, for a target of this name."""
        saves: Any = learner
        saves.save(folder)


def _falling(decay: float, num_depths: int) -> list[float]:
    return [decay**depth for depth in range(num_depths)]


def _head(place: str) -> Any:
    """A class or function of `secondguess.heads`, imported when it is asked for."""
    module, _, name = place.partition(":")
    return getattr(import_module(f"secondguess.heads.{module}"), name)


@dataclass(frozen=True)
class DraftRecipe(Recipe):
    """A small model of its own.

    Args:
        num_layers: of it.
        width: a multiple of 64; 0 for the target's, cut to 512.
    """

    num_layers: int = 2
    width: int = 0

    kind = "draft"
    guesses_alone = True
    keeps_tokenizer = True

    def __post_init__(self) -> None:
        require_between("the number of layers", self.num_layers, 1, 64)
        require_between("the width", self.width, 0, 8192)

    def fresh(self, target: TargetFacts) -> Learner:
        from secondguess.train.draft_model import DraftModel

        with torch.random.fork_rng():
            torch.manual_seed(target.seed)
            return DraftModel.fresh(
                target.config, target.vocab_size, target.ends, self.num_layers, self.width, target.device
            )

    def weights(self, num_depths: int) -> list[float]:
        return [1.0] * num_depths


@dataclass(frozen=True)
class EarlyExitRecipe(Recipe):
    """A head behind an early layer of the target.

    Args:
        layer: after which the target is left; 0 for a quarter of them.
        mlp_size: of the adapter's feed-forward; 0 for twice the target's width.
    """

    layer: int = 0
    mlp_size: int = 0

    kind = "early-exit"
    guesses_alone = True
    runs_first_layers = True

    def fresh(self, target: TargetFacts) -> Learner:
        layer = self.layer or max(1, target.num_layers // 4)
        require_between("the layer", layer, 1, target.num_layers - 1)
        mlp_size = self.mlp_size or 2 * target.ends.width
        learner: Learner = _head("early_exit:EarlyExitHead").fresh(
            target.ends, layer, mlp_size, seed=target.seed
        )
        return learner

    def weights(self, num_depths: int) -> list[float]:
        return [1.0] * num_depths


@dataclass(frozen=True)
class WholeModelRecipe(Recipe):
    """`early-exit --whole`: the target itself, made good at exiting early.

    Args:
        layer_dropout: chance that the last layer is skipped while it learns.
        exit_scale: weight of the early exits' losses beside the whole model's; 1 in LayerSkip's fine-tuning.
    """

    learning_rate: float = 1e-4
    layer_dropout: float = 0.1
    exit_scale: float = 1.0

    kind = "early-exit"
    loss = "kl"
    runs_first_layers = True
    keeps_tokenizer = True

    def __post_init__(self) -> None:
        require_between("the layer dropout", self.layer_dropout, 0, 0.9)
        require_between("the scale of the exits", self.exit_scale, 0, 10)

    def fresh(self, target: TargetFacts) -> Learner:
        from secondguess.train.export import saved_dtype
        from secondguess.train.whole_model import WholeModel, read_trainable

        return WholeModel(read_trainable(target.path), self.layer_dropout, saved_dtype(target.config))

    def weights(self, num_depths: int) -> list[float]:
        from secondguess.train.whole_model import exit_weights

        return exit_weights(num_depths, self.exit_scale)

    def score(self, accepted: Sequence[float]) -> float:
        """The mean over the exits, weighted as their losses are."""
        weights = self.weights(len(accepted))
        return sum(weight * each for weight, each in zip(weights, accepted, strict=True))


@dataclass(frozen=True)
class MedusaRecipe(Recipe):
    """Medusa-1 (arXiv 2401.10774).

    Args:
        num_heads: how far it guesses.
        num_layers: residual layers per head.
        decay: weight of each head's loss relative to the one before.
    """

    num_heads: int = 4
    num_layers: int = 1
    decay: float = 0.8

    kind = "medusa"

    def fresh(self, target: TargetFacts) -> Learner:
        head = _head("medusa:MedusaHead")
        learner: Learner = head.fresh(target.ends, self.num_heads, self.num_layers, seed=target.seed)
        return learner

    def weights(self, num_depths: int) -> list[float]:
        return _falling(self.decay, num_depths)

    def save(self, learner: Learner, folder: Path, target: str) -> None:
        saves: Any = learner
        saves.save(folder, target)


@dataclass(frozen=True)
class EagleRecipe(Recipe):
    """EAGLE-3 (arXiv 2503.01840).

    Args:
        num_steps: how many of its own guesses it learns to build on.
        draft_vocab_size: words it knows: those that the target writes most; 0 for all.
        decay: weight of each step's loss relative to the one before.
    """

    learning_rate: float = 5e-4
    num_steps: int = 7
    draft_vocab_size: int = 32_000
    decay: float = 0.8

    kind = "eagle"

    def fresh(self, target: TargetFacts) -> Learner:
        num_words = min(self.draft_vocab_size or target.vocab_size, target.vocab_size)
        learner: Learner = _head("eagle:EagleHead").fresh(
            target.ends,
            target.num_layers,
            num_words,
            target.token_counts,
            target.seed,
            num_steps=self.num_steps,
        )
        return learner

    def weights(self, num_depths: int) -> list[float]:
        return _falling(self.decay, num_depths)

    def save(self, learner: Learner, folder: Path, target: str) -> None:
        _head("eagle_files:save_eagle")(learner, folder, target)


@dataclass(frozen=True)
class MtpRecipe(Recipe):
    """A module that predicts several tokens (DeepSeek-V3, arXiv 2412.19437).

    Args:
        num_steps: how far it guesses.
        decay: weight of each step's loss relative to the one before.
    """

    learning_rate: float = 5e-4
    num_steps: int = 4
    decay: float = 0.8

    kind = "mtp"

    def fresh(self, target: TargetFacts) -> Learner:
        learner: Learner = _head("mtp:MtpHead").fresh(
            target.ends, target.vocab_size, target.num_layers, target.seed, num_steps=self.num_steps
        )
        return learner

    def weights(self, num_depths: int) -> list[float]:
        return _falling(self.decay, num_depths)

    def save(self, learner: Learner, folder: Path, target: str) -> None:
        _head("mtp_files:save_mtp")(learner, folder)


@dataclass(frozen=True)
class DSparkRecipe(Recipe):
    """DSpark (arXiv 2607.05147).

    Args:
        block_size: tokens guessed at once.
        num_layers: of its backbone.
        num_states: of the target, evenly spread over its depth, that are fused for it.
        markov_rank: of the head that corrects a guess by the word before it.
        gamma: how slowly the weights `exp(-k / gamma)` fall with the depth k.
    """

    learning_rate: float = 5e-4
    block_size: int = 7
    num_layers: int = 2
    num_states: int = 4
    markov_rank: int = 64
    gamma: float = 4.0

    kind = "dspark"

    def __post_init__(self) -> None:
        require_between("gamma", self.gamma, 0.1, 1000)
        require_between("the number of states to fuse", self.num_states, 1, 1000)

    def fresh(self, target: TargetFacts) -> Learner:
        learner: Learner = _head("dspark:DsparkHead").fresh(
            target.ends,
            spread_layers(target.num_layers, self.num_states),
            block_size=self.block_size,
            markov_rank=self.markov_rank,
            num_layers=self.num_layers,
            seed=target.seed,
            # Padding has an embedding that no text uses.
            mask_token=target.config.get("pad_token_id") or 0,
            device=target.device,
        )
        return learner

    def weights(self, num_depths: int) -> list[float]:
        return [exp(-depth / self.gamma) for depth in range(num_depths)]

    def save(self, learner: Learner, folder: Path, target: str) -> None:
        saves: Any = learner
        saves.save(folder, target)


def spread_layers(num_layers: int, most: int) -> tuple[int, ...]:
    """At most so many layers of a target, evenly from the second to the third from the end, where there are as many.

    >>> spread_layers(16, 5), spread_layers(2, 5)
    ((2, 5, 8, 11, 14), (1, 2))
    """
    first, last = (2, num_layers - 2) if num_layers >= most + 3 else (1, num_layers)
    count = min(most, last - first + 1)
    steps = [index / max(1, count - 1) for index in range(count)]
    return tuple(round(first + (last - first) * step) for step in steps)


RECIPES: dict[str, type[Recipe]] = {
    recipe.kind: recipe
    for recipe in (DraftRecipe, EarlyExitRecipe, MedusaRecipe, MtpRecipe, EagleRecipe, DSparkRecipe)
}
"""By kind; `WholeModelRecipe` is the other mode of early-exit."""


def make_recipe(kind: str, changes: Sequence[str] = (), whole: bool = False) -> Recipe:
    """The recipe of a kind, with `NAME=VALUE` changes.

    Raises:
        BadInputError: no such kind, option or value.
    """
    if kind not in RECIPES:
        raise BadInputError(f"expected a drafter to train among {', '.join(RECIPES)}, got {kind!r}")
    options: dict[str, str] = {}
    for change in changes:
        name, equals, value = (part.strip() for part in change.partition("="))
        if not (name and equals and value) or name in options:
            raise BadInputError(f"expected NAME=VALUE, each name once, for --set, got {change!r}")
        options[name] = value
    recipe = WholeModelRecipe if whole else RECIPES[kind]
    return read_options(recipe, options, f"training of {kind}")
