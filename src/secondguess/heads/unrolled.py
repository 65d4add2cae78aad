"""Heads that feed on their own thoughts, trained as they draft (training-time test, EAGLE-3, arXiv 2503.01840).

A head reads a token beside the feature of what came before it. While drafting, that feature is the target's for what was
committed and the head's own for its nodes. In training every place of a text is the root of a chain: step 0 reads the
target's features there; each further step reads the text's next token beside the thought of the step before. So the head
meets in training the features and the keys that it will meet while drafting.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from secondguess.heads.layer import LayerShape, attend_to_all, turns_at
from secondguess.heads.learning import Learner, Lesson, Marks, Objective, grade
from secondguess.heads.runtime import FeatureHead
from secondguess.runtime.base import Ends

DEFAULT_STEPS = 4
"""How deep a head is trained to guess, unless somebody says otherwise."""


@dataclass
class ChainsOfPlaces:
    """Attention of the chains that hang from every place of a text, one step of all chains at a time.

    A query of step t, in the chain of place j, sees what the text holds up to j (the keys of step 0) and its own
    chain: the keys of steps 1 to t at place j. Later steps have fewer places: the text ends.
    """

    texts: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    chains: dict[int, list[tuple[Tensor, Tensor]]] = field(default_factory=dict)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """As `layer.Attend`: places `[0, num)` of the text, one step deeper than at the call before."""
        if layer not in self.texts:
            self.texts[layer], self.chains[layer] = (key, value), []
            return attend_to_all(None)(layer, query, key, value)
        num_places, group = query.shape[2], query.shape[1] // key.shape[1]
        self.chains[layer].append((key, value))
        text_key, text_value = (_for_queries(each, group, num_places) for each in self.texts[layer])
        own = [[_for_queries(each, group, num_places) for each in pair] for pair in self.chains[layer]]
        hidden = torch.ones(num_places, num_places, dtype=torch.bool, device=query.device).triu(1)
        on_text = (query @ text_key.transpose(2, 3)).masked_fill(hidden, -torch.inf)
        on_own = [(query * own_key).sum(-1, keepdim=True) for own_key, _ in own]
        weights = (torch.cat([on_text, *on_own], -1) * query.shape[-1] ** -0.5).softmax(-1)
        gathered: Tensor = weights[..., :num_places] @ text_value
        for step, (_, own_value) in enumerate(own):
            gathered = gathered + weights[..., num_places + step, None] * own_value
        return gathered


def _for_queries(heads: Tensor, group: int, num_places: int) -> Tensor:
    """Keys or values of the first places, once for each query head."""
    return heads[:, :, :num_places].repeat_interleave(group, 1)


class UnrolledHead(FeatureHead, Learner):
    """A feature head that learns by unrolling its own outputs.

    Attributes:
        num_steps: how deep it guesses in training.
        vocab_size: the target's.
        words: `[draft_vocab]`, ids of the target's tokens that it can say; None for all of them.
    """

    hidden_layers: tuple[int, ...]
    num_steps: int
    vocab_size: int
    words: Tensor | None

    @abstractmethod
    def own_logits(self, thought: Tensor) -> Tensor:
        """`[..., draft_vocab]`, over `words`."""

    def logits(self, thought: Tensor) -> Tensor:
        own = self.own_logits(thought)
        if self.words is None:
            return own
        everywhere = own.new_full((*own.shape[:-1], self.vocab_size), -torch.inf)
        everywhere[..., self.words] = own
        return everywhere

    def unroll(self, lesson: Lesson) -> list[Tensor]:
        """What the head thinks, by depth: `[row, place, feature]`, one place fewer at each depth, while there are any.

        The thought at depth t and place j has read the tokens up to j + 1 + t, those behind j + 1 beside its own thoughts, and
        guesses the one at j + 2 + t.
        """
        dtype = next(self.parameters()).dtype
        features = self.features({layer: lesson.hidden[layer].to(dtype) for layer in self.hidden_layers})
        attention = ChainsOfPlaces()
        thoughts: list[Tensor] = []
        for step in range(min(self.num_steps, lesson.tokens.shape[1] - 2)):
            num_places = lesson.tokens.shape[1] - 2 - step
            places = slice(1 + step, 1 + step + num_places)
            behind = (thoughts[-1] if thoughts else features)[:, :num_places]
            positions = torch.arange(num_places, device=lesson.tokens.device)[None] + step
            turns = turns_at(self.shape, positions, dtype)
            embedded = self.embed(lesson.tokens[:, places]).to(dtype)
            thoughts.append(self(embedded, behind, turns, attention.attend))
        return thoughts

    def learn(self, lesson: Lesson, ends: Ends, objective: Objective) -> Marks:
        """Guess `num_steps` tokens behind every place, each step by the target's law over the words that the head has."""
        losses, accepted = [], []
        for step, thought in enumerate(self.unroll(lesson)):
            places = slice(1 + step, 1 + step + thought.shape[1])
            counts = lesson.counts[:, 2 + step : 2 + step + thought.shape[1]]
            states = lesson.hidden[-1][:, places]
            loss, share = grade(states, ends, thought, self.own_logits, counts, objective, self.words)
            losses.append(loss)
            accepted.append(share)
        # A text that ends before a depth says nothing of it.
        missing = [lesson.hidden[-1].new_zeros(())] * (self.num_steps - len(losses))
        return Marks(losses + missing, accepted + missing)


def shape_of_width(width: int) -> LayerShape:
    """A layer for states of this width, where nobody says more: heads of 64, four to a key head where that goes."""
    head_size = next(size for size in (64, 32, 16, 8, 4, 2, 1) if width % size == 0)
    num_heads = width // head_size
    num_kv_heads = next(
        num for num in (num_heads // 4, num_heads // 2, num_heads) if num and num_heads % num == 0
    )
    return LayerShape(width, num_heads, num_kv_heads, head_size, mlp_size=3 * width)


def initialise(head: nn.Module, seed: int) -> None:
    """Normal weights that keep the size of what goes through, the same for the same seed; norms stay ones."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in head.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=1 / math.sqrt(parameter.shape[1]), generator=generator)
