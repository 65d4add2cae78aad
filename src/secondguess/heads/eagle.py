"""EAGLE: one decoder layer that reads each token beside what the target thought before it.

EAGLE-3 (arXiv 2503.01840) fuses the target's states of three depths, and has a head of its own over the words that matter.
EAGLE-1 and 2 (2401.15077, 2406.16858; the same weights) continue the target's last state and borrow its head. Names of
weights are those of the `speculators` format.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from secondguess.errors import BadInputError
from secondguess.heads.layer import Attend, Attention, DecoderLayer, LayerShape, Mlp, Norm, Turns
from secondguess.heads.unrolled import DEFAULT_STEPS, UnrolledHead, initialise, shape_of_width
from secondguess.runtime.base import Ends, Hidden


@dataclass(frozen=True)
class EagleShape:
    """What an EAGLE-3 head is made of.

    Args:
        layer: of its decoder layers.
        vocab_size: the target's.
        draft_vocab_size: how many of the target's words it can say.
        hidden_layers: of the target, which are fused; numbered as in `output_hidden_states`.
        num_layers: decoder layers; the first one reads the embeddings.
        norm_before_residual: whether the normed feature, and not the feature itself, goes round the first attention.
        norm_before_fc: whether the target's states pass one norm together before they are fused.
        fc_norm: whether each of them passes a norm of its own instead.
        norm_output: whether later steps read what has passed the last norm, and not what comes before it.
        num_steps: how deep it guesses in training.
    """

    layer: LayerShape
    vocab_size: int
    draft_vocab_size: int
    hidden_layers: tuple[int, ...]
    num_layers: int = 1
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    num_steps: int = DEFAULT_STEPS

    def __post_init__(self) -> None:
        if not 1 <= self.draft_vocab_size <= self.vocab_size:
            raise BadInputError(
                f"expected a draft vocabulary of 1 to {self.vocab_size} words, got {self.draft_vocab_size}"
            )
        if self.num_layers < 1 or self.num_steps < 1 or not self.hidden_layers:
            raise BadInputError(
                f"expected at least one layer, step and state of the target, got {self.num_layers}, {self.num_steps} "
                f"and {list(self.hidden_layers)}"
            )
        if self.norm_before_fc and self.fc_norm:
            raise BadInputError("expected one of norm_before_fc and fc_norm, got both")


class FirstLayer(nn.Module):
    """The decoder layer whose attention reads a token's embedding and a feature side by side."""

    def __init__(self, shape: LayerShape, norm_before_residual: bool) -> None:
        super().__init__()
        self.norm_before_residual = norm_before_residual
        self.input_layernorm = Norm(shape.width, shape.norm_eps)
        self.hidden_norm = Norm(shape.width, shape.norm_eps)
        self.self_attn = Attention(shape, 2 * shape.width)
        self.post_attention_layernorm = Norm(shape.width, shape.norm_eps)
        self.mlp = Mlp(shape)

    def forward(self, embedded: Tensor, features: Tensor, turns: Turns, attend: Attend) -> Tensor:
        normed = self.hidden_norm(features)
        both = torch.cat((self.input_layernorm(embedded), normed), -1)
        kept = normed if self.norm_before_residual else features
        states = kept + self.self_attn(both, turns, attend, 0)
        output: Tensor = states + self.mlp(self.post_attention_layernorm(states))
        return output


class EagleHead(UnrolledHead):
    """EAGLE-3.

    Args:
        shape: what it is made of.
        ends: the target's; its embeddings are read.
        words: ids of the target's tokens that it can say, ascending; needed where it cannot say them all.
        has_embeddings: whether it has embeddings of its own.

    Raises:
        BadInputError: states of another width than the target's, or words that are no draft vocabulary.
    """

    d2t: Tensor | None

    def __init__(
        self, shape: EagleShape, ends: Ends, words: Tensor | None = None, has_embeddings: bool = False
    ) -> None:
        super().__init__()
        layer = shape.layer
        if layer.width != ends.width:
            raise BadInputError(
                f"expected an EAGLE head for states of width {ends.width}, the target's, got one for {layer.width}"
            )
        self.eagle = shape
        self.shape, self.num_layers = layer, shape.num_layers
        self.hidden_layers, self.num_steps, self.vocab_size = (
            shape.hidden_layers,
            shape.num_steps,
            shape.vocab_size,
        )
        num_states = len(shape.hidden_layers)
        if shape.norm_before_fc:
            self.input_norm = Norm(num_states * layer.width, layer.norm_eps)
        if shape.fc_norm:
            self.fc_norm = nn.ModuleList(Norm(layer.width, layer.norm_eps) for _ in shape.hidden_layers)
        self.fc = nn.Linear(num_states * layer.width, layer.width, bias=False)
        deeper = [DecoderLayer(layer) for _ in range(1, shape.num_layers)]
        self.layers = nn.ModuleList([FirstLayer(layer, shape.norm_before_residual), *deeper])
        self.norm = Norm(layer.width, layer.norm_eps)
        self.lm_head = nn.Linear(layer.width, shape.draft_vocab_size, bias=False)
        if has_embeddings:
            self.embed_tokens = nn.Embedding(shape.vocab_size, layer.width)
        self._has_embeddings = has_embeddings
        self._ends = ends
        self._take_words(words)

    @classmethod
    def fresh(
        cls,
        ends: Ends,
        num_layers_of_target: int,
        draft_vocab_size: int,
        counts: Tensor,
        seed: int,
        *,
        layer: LayerShape | None = None,
        num_steps: int = DEFAULT_STEPS,
    ) -> EagleHead:
        """An untrained head. It says words as the target does, but for what it does not know yet.

        Args:
            ends, num_layers_of_target: of the target.
            draft_vocab_size: how many words it can say.
            counts: `[vocab]` on the target's device, how often each of its tokens was seen (`frequent_words`).
            seed: of its weights.
            layer: of its decoder layer; by default one that fits the target's width.
            num_steps: how deep it guesses in training.

        Raises:
            BadInputError: more words than the target has.
        """
        shape = EagleShape(
            layer=layer or shape_of_width(ends.width),
            vocab_size=len(counts),
            draft_vocab_size=draft_vocab_size,
            hidden_layers=default_layers(num_layers_of_target),
            # The target's raw states are large and of all sizes; normed, the first layer learns faster.
            norm_before_residual=True,
            num_steps=num_steps,
        )
        words = frequent_words(counts, draft_vocab_size)
        head = cls(shape, ends, words)
        initialise(head, seed)
        device = counts.device
        with torch.no_grad():
            # A linear map, column by column; the target's head may be packed, quantised or tied.
            columns = ends.unembed(torch.eye(ends.width, dtype=ends.dtype, device=device))
            head.lm_head.weight.copy_(columns[:, words].T)
        return head

    def features(self, hidden: Hidden) -> Tensor:
        states = [hidden[layer] for layer in self.hidden_layers]
        if self.eagle.fc_norm:
            states = [norm(each) for norm, each in zip(self.fc_norm, states, strict=True)]
        joined = torch.cat(states, -1)
        fused: Tensor = self.fc(self.input_norm(joined) if self.eagle.norm_before_fc else joined)
        return fused

    def forward(self, embedded: Tensor, features: Tensor, turns: Turns, attend: Attend) -> Tensor:
        first, *deeper = self.layers
        states: Tensor = first(embedded, features, turns, attend)
        for index, layer in enumerate(deeper, start=1):
            states = layer(states, turns, attend, index)
        return self.norm(states) if self.eagle.norm_output else states

    def own_logits(self, thought: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(thought if self.eagle.norm_output else self.norm(thought))
        return logits

    def embed(self, tokens: Tensor) -> Tensor:
        embedded: Tensor = self.embed_tokens(tokens) if self._has_embeddings else self._ends.embed(tokens)
        return embedded

    def _take_words(self, words: Tensor | None) -> None:
        """Keep the map between the vocabularies as the format has it: `d2t` holds offsets, `t2d` marks."""
        num_words, vocab_size = self.eagle.draft_vocab_size, self.eagle.vocab_size
        if num_words == vocab_size:
            words = None
        elif words is None or len(words) != num_words:
            raise BadInputError(
                f"expected the {num_words} words of the draft vocabulary, got {'none' if words is None else len(words)}"
            )
        elif (words.diff() <= 0).any() or words[0] < 0 or words[-1] >= vocab_size:
            raise BadInputError(
                f"expected ascending words between 0 and {vocab_size - 1}, got {words.tolist()[:8]}..."
            )
        self.register_buffer("words", words, persistent=False)
        self.register_buffer(
            "d2t", None if words is None else words - torch.arange(num_words, device=words.device)
        )
        self.register_buffer(
            "t2d", None if words is None else torch.zeros(vocab_size).index_fill(0, words.cpu(), 1).bool()
        )


class Eagle1Head(UnrolledHead):
    """EAGLE-1 and 2: the next state from the last one and the token between them; the target's own embeddings and head.

    Args:
        layer: of its decoder layer.
        ends: the target's.
        vocab_size: the target's.
        has_bias: whether the map of token and state has one.
        num_steps: how deep it guesses in training.

    Raises:
        BadInputError: states of another width than the target's.
    """

    def __init__(
        self,
        layer: LayerShape,
        ends: Ends,
        vocab_size: int,
        has_bias: bool = False,
        num_steps: int = DEFAULT_STEPS,
    ) -> None:
        super().__init__()
        if layer.width != ends.width:
            raise BadInputError(
                f"expected an EAGLE head for states of width {ends.width}, the target's, got one for {layer.width}"
            )
        self.shape, self.num_layers = layer, 1
        self.hidden_layers, self.num_steps, self.vocab_size = (-1,), num_steps, vocab_size
        self.fc = nn.Linear(2 * layer.width, layer.width, bias=has_bias)
        self.layers = nn.ModuleList([DecoderLayer(layer, has_input_norm=False)])
        self.words = None
        self._ends = ends

    def features(self, hidden: Hidden) -> Tensor:
        return hidden[-1]

    def forward(self, embedded: Tensor, features: Tensor, turns: Turns, attend: Attend) -> Tensor:
        state: Tensor = self.layers[0](self.fc(torch.cat((embedded, features), -1)), turns, attend)
        return state

    def own_logits(self, thought: Tensor) -> Tensor:
        return self._ends.unembed(thought.to(self._ends.dtype))

    def embed(self, tokens: Tensor) -> Tensor:
        return self._ends.embed(tokens)


def default_layers(num_layers: int) -> tuple[int, ...]:
    """Which states of a target are fused: early, middle and late, as published; in shallow targets spread wide.

    A layer's number is that of the state which enters it.

    >>> default_layers(32), default_layers(5), default_layers(2)
    ((2, 16, 29), (1, 2, 4), (0, 1, 2))
    """
    published = (2, num_layers // 2, num_layers - 3)
    if published[0] < published[1] < published[2]:
        return published
    last = num_layers - 1 if num_layers > 2 else num_layers
    first = min(1, max(last - 2, 0))
    return (first, (first + last) // 2, last)


def frequent_words(counts: Tensor, num_words: int) -> Tensor:
    """The most frequent tokens, `[num_words]` ids in ascending order; of equals, those with the smaller ids.

    Args:
        counts: `[vocab]`, how often each token was seen.

    Raises:
        BadInputError: there are not so many.
    """
    if not 1 <= num_words <= len(counts):
        raise BadInputError(f"expected a draft vocabulary of 1 to {len(counts)} words, got {num_words}")
    return counts.argsort(descending=True, stable=True)[:num_words].sort().values


def words_of_offsets(offsets: Tensor) -> Tensor:
    """Ids of the target's tokens from `d2t`, which says for draft token i how much larger than i its id is."""
    return offsets.long() + torch.arange(len(offsets), device=offsets.device)


def layers_within(layers: Sequence[int], num_layers: int) -> bool:
    """Whether a target of so many layers has all of these states."""
    return all(0 <= layer <= num_layers for layer in layers)
