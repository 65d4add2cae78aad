"""What a head learns from, and what it says of how it did: the contract between heads and their trainer.

Whatever is trained, the lesson is the same: texts that the target wrote, what it thought at every place, and its law there.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from secondguess.runtime.base import Ends, Hidden

Objective = Callable[[Tensor, Tensor], Tensor]
"""Target's and head's logits `[..., vocab]` to a loss per place `[...]`."""


@dataclass(frozen=True)
class Lesson:
    """A batch of texts.

    Args:
        tokens: `[row, position]` int64, prompt and answer, padded at the end.
        counts: `[row, position]` bool, whether the token is to be guessed: it was written by the target.
        hidden: the target's states `[row, position, width]` behind each token, of the layers that the head reads and of the
            last, normalised one (-1), which says the target's law.
    """

    tokens: Tensor
    counts: Tensor
    hidden: Hidden


@dataclass(frozen=True)
class Marks:
    """How a head did, by depth of the guess.

    Args:
        losses: mean loss over the places that count, to be weighted and summed.
        accepted: share of nodes that the target would accept there, given the text before: the mean overlap
            `sum_x min(p(x), q(x))` of the two laws. Without gradient.
        extra: a further loss beside those of the guesses, such as a confidence's.
    """

    losses: list[Tensor]
    accepted: list[Tensor]
    extra: Tensor | None = None


class Learner(nn.Module, ABC):
    """A head that can be trained with its target frozen.

    Attributes:
        hidden_layers: of the target, which it reads.
    """

    hidden_layers: tuple[int, ...]

    @abstractmethod
    def learn(self, lesson: Lesson, ends: Ends, objective: Objective) -> Marks:
        """Guess at every place of a lesson, as deep as the head can, and say how that went.

        Args:
            lesson: what the target wrote and thought.
            ends: of the target: its embeddings, and its head, which makes laws of the last states.
            objective: the loss of one guess.
        """


def grade(
    states: Tensor,
    ends: Ends,
    thoughts: Tensor,
    say: Callable[[Tensor], Tensor],
    counts: Tensor,
    objective: Objective,
    words: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Loss and acceptance at the places that count; laws are made nowhere else, since they are what a step costs.

    Args:
        states: `[row, place, width]` of the target, whose law is to be guessed at each place.
        ends: of the target.
        thoughts: `[row, place, ...]` of the head.
        say: its logits `[..., word]`.
        counts: `[row, place]` bool.
        words: `[word]`, which of the target's tokens these are; None for all. The loss is about these alone.
    """
    if not counts.any():
        # Said of any one place, so that there is a gradient, of zeros: thoughts may be the target's own states.
        nothing = say(thoughts[:1, :1]).sum() * 0.0
        return nothing, nothing.detach()
    said = say(thoughts[counts])
    with torch.no_grad():
        taught = ends.unembed(states[counts])
        law = taught.float().softmax(-1)
        known, law = (taught, law) if words is None else (taught[:, words], law[:, words])
        accepted = torch.minimum(law, said.float().softmax(-1)).sum(-1).mean()
    return objective(known, said).mean(), accepted


def mean_where(values: Tensor, counts: Tensor) -> Tensor:
    """Mean of `values` over the places that count; 0 where there is none."""
    return (values * counts).sum() / counts.sum().clamp_min(1)


def overlap(target_logits: Tensor, draft_logits: Tensor) -> Tensor:
    """`sum_x min(p(x), q(x))` `[...]`: how likely a sampled guess is accepted."""
    with torch.no_grad():
        return torch.minimum(target_logits.float().softmax(-1), draft_logits.float().softmax(-1)).sum(-1)
