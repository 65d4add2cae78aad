"""Multi-token prediction: a module trained with the target, or after it, that reads the target's last state (DeepSeek-V3,
arXiv 2412.19437, section 2.2).

One module guesses as many tokens as are wanted: behind its own guesses it reads its own thoughts. Of the same form are
those of Qwen and MiMo.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from secondguess.errors import BadInputError
from secondguess.heads.layer import Attend, DecoderLayer, LayerShape, Norm, Turns
from secondguess.heads.unrolled import DEFAULT_STEPS, UnrolledHead, initialise, shape_of_width
from secondguess.runtime.base import Ends, Hidden


class MtpHead(UnrolledHead):
    """One module: `layer(eh_proj([enorm(embedding); hnorm(state)]))`, then a norm and the target's head.

    Args:
        layer: of its decoder layer.
        ends: the target's.
        vocab_size, num_layers_of_target: the target's; the module's layer is numbered behind the target's.
        has_embeddings, has_head: whether it has its own, and does not borrow the target's.
        norm_output: whether later steps read what has passed the last norm, and not what comes before it.
        num_steps: how deep it guesses in training.

    Raises:
        BadInputError: states of another width than the target's.
    """

    def __init__(
        self,
        layer: LayerShape,
        ends: Ends,
        vocab_size: int,
        num_layers_of_target: int,
        *,
        has_embeddings: bool = False,
        has_head: bool = False,
        norm_output: bool = False,
        num_steps: int = DEFAULT_STEPS,
    ) -> None:
        super().__init__()
        width = layer.width
        if width != ends.width:
            raise BadInputError(
                f"expected a module for states of width {ends.width}, the target's, got one for {width}"
            )
        self.shape, self.num_layers = layer, 1
        self.hidden_layers, self.num_steps, self.vocab_size = (-1,), num_steps, vocab_size
        self.num_layers_of_target, self.norm_output = num_layers_of_target, norm_output
        self.words = None
        self.enorm = Norm(width, layer.norm_eps)
        self.hnorm = Norm(width, layer.norm_eps)
        self.eh_proj = nn.Linear(2 * width, width, bias=False)
        self.layer = DecoderLayer(layer)
        self.norm = Norm(width, layer.norm_eps)
        if has_embeddings:
            self.embed_tokens = nn.Embedding(vocab_size, width)
        if has_head:
            self.head = nn.Linear(width, vocab_size, bias=False)
        self._has_embeddings, self._has_head = has_embeddings, has_head
        self._ends = ends

    @classmethod
    def fresh(
        cls,
        ends: Ends,
        vocab_size: int,
        num_layers_of_target: int,
        seed: int,
        *,
        layer: LayerShape | None = None,
        num_steps: int = DEFAULT_STEPS,
    ) -> MtpHead:
        """An untrained module for a target of these ends; `seed` makes its weights."""
        shape = layer or shape_of_width(ends.width)
        head = cls(shape, ends, vocab_size, num_layers_of_target, num_steps=num_steps)
        initialise(head, seed)
        return head

    def features(self, hidden: Hidden) -> Tensor:
        return hidden[-1]

    def forward(self, embedded: Tensor, features: Tensor, turns: Turns, attend: Attend) -> Tensor:
        both = torch.cat((self.enorm(embedded), self.hnorm(features)), -1)
        state: Tensor = self.layer(self.eh_proj(both), turns, attend)
        return self.norm(state) if self.norm_output else state

    def own_logits(self, thought: Tensor) -> Tensor:
        normed = thought if self.norm_output else self.norm(thought)
        logits: Tensor = (
            self.head(normed) if self._has_head else self._ends.unembed(normed.to(self._ends.dtype))
        )
        return logits

    def embed(self, tokens: Tensor) -> Tensor:
        embedded: Tensor = self.embed_tokens(tokens) if self._has_embeddings else self._ends.embed(tokens)
        return embedded
