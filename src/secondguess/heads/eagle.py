"""EAGLE drafter heads: a decoder layer that reads each token with a hidden state of the target.

EAGLE-3 (arXiv 2503.01840) fuses the target's hidden states of three depths and has its own LM head
over a reduced vocabulary. EAGLE-1 and 2 (arXiv 2401.15077, 2406.16858; same weights) extrapolate
the target's last hidden state and use its LM head. Weight names are those of the `speculators`
format.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from secondguess.errors import BadInputError
from secondguess.heads.layer import Attention, AttentionFunction, CosSin, DecoderLayer, LayerConfig, Mlp, Norm
from secondguess.heads.unrolled import DEFAULT_STEPS, UnrolledHead, default_layer_config, initialise
from secondguess.runtime.base import EmbeddingAndHead, HiddenStates


@dataclass(frozen=True)
class EagleConfig:
    """Sizes and options of an EAGLE-3 drafter head.

    Args:
        layer: shape of its decoder layers.
        vocab_size: vocabulary size of the target.
        draft_vocab_size: size of the draft vocabulary, a subset of the target's.
        hidden_layers: target layers whose hidden states are fused, numbered as in
            `output_hidden_states`.
        num_layers: number of decoder layers; the first one reads the embeddings.
        norm_before_residual: whether the residual connection of the first attention carries the
            normalised feature, not the feature itself.
        norm_before_fc: whether one norm over the concatenated target states precedes the fusion.
        fc_norm: whether each target state has its own norm before the fusion instead.
        norm_output: whether later draft steps read the output after the last norm, not before it.
        num_steps: number of draft steps in training.

    Raises:
        BadInputError: a number out of range, or both `norm_before_fc` and `fc_norm`.
    """

    layer: LayerConfig
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
    """First decoder layer of EAGLE-3, whose attention input is the embedding and the feature."""

    def __init__(self, shape: LayerConfig, norm_before_residual: bool) -> None:
        super().__init__()
        self.norm_before_residual = norm_before_residual
        self.input_layernorm = Norm(shape.width, shape.norm_eps)
        self.hidden_norm = Norm(shape.width, shape.norm_eps)
        self.self_attn = Attention(shape, 2 * shape.width)
        self.post_attention_layernorm = Norm(shape.width, shape.norm_eps)
        self.mlp = Mlp(shape)

    def forward(
        self, embedded: Tensor, features: Tensor, cos_sin: CosSin, attend: AttentionFunction
    ) -> Tensor:
        normed = self.hidden_norm(features)
        both = torch.cat((self.input_layernorm(embedded), normed), -1)
        kept = normed if self.norm_before_residual else features
        states = kept + self.self_attn(both, cos_sin, attend, 0)
        output: Tensor = states + self.mlp(self.post_attention_layernorm(states))
        return output


class EagleHead(UnrolledHead):
    """EAGLE-3 drafter head.

    Args:
        shape: sizes and options.
        embedding_and_head: the target's embeddings, used unless the drafter head has its own.
        words: target token ids of the draft vocabulary, ascending; required if the draft
            vocabulary is smaller than the target's.
        has_embeddings: whether it has embeddings of its own.

    Raises:
        BadInputError: another hidden size than the target's, or `words` does not fit the draft
            vocabulary.
    """

    d2t: Tensor | None

    def __init__(
        self,
        shape: EagleConfig,
        embedding_and_head: EmbeddingAndHead,
        words: Tensor | None = None,
        has_embeddings: bool = False,
    ) -> None:
        super().__init__()
        layer = shape.layer
        if layer.width != embedding_and_head.width:
            raise BadInputError(
                f"expected an EAGLE head for states of width {embedding_and_head.width}, the target's, got one for {layer.width}"
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
        self._embedding_and_head = embedding_and_head
        self._take_words(words)

    @classmethod
    def fresh(
        cls,
        embedding_and_head: EmbeddingAndHead,
        num_layers_of_target: int,
        draft_vocab_size: int,
        counts: Tensor,
        seed: int,
        *,
        layer: LayerConfig | None = None,
        num_steps: int = DEFAULT_STEPS,
    ) -> EagleHead:
        """Build an untrained drafter head; its LM head starts with the target's weights.

        Args:
            embedding_and_head: embeddings and LM head of the target.
            num_layers_of_target: number of target layers.
            draft_vocab_size: size of the draft vocabulary.
            counts: `[vocab]` on the target's device, frequency of each token (`most_frequent_tokens`).
            seed: seed of the other weights.
            layer: shape of its decoder layer; None for the default of the target's hidden size.
            num_steps: number of draft steps in training.

        Raises:
            BadInputError: a draft vocabulary larger than the target's.
        """
        shape = EagleConfig(
            layer=layer or default_layer_config(embedding_and_head.width),
            vocab_size=len(counts),
            draft_vocab_size=draft_vocab_size,
            hidden_layers=default_layers(num_layers_of_target),
            # The target's raw states vary widely in magnitude; the first layer trains faster on
            # normalised ones.
            norm_before_residual=True,
            num_steps=num_steps,
        )
        words = most_frequent_tokens(counts, draft_vocab_size)
        head = cls(shape, embedding_and_head, words)
        initialise(head, seed)
        device = counts.device
        with torch.no_grad():
            # Applying the LM head to the identity gives its weights even if they are packed,
            # quantised or tied.
            columns = embedding_and_head.unembed(
                torch.eye(embedding_and_head.width, dtype=embedding_and_head.dtype, device=device)
            )
            head.lm_head.weight.copy_(columns[:, words].T)
        return head

    def features(self, hidden: HiddenStates) -> Tensor:
        states = [hidden[layer] for layer in self.hidden_layers]
        if self.eagle.fc_norm:
            states = [norm(each) for norm, each in zip(self.fc_norm, states, strict=True)]
        joined = torch.cat(states, -1)
        fused: Tensor = self.fc(self.input_norm(joined) if self.eagle.norm_before_fc else joined)
        return fused

    def forward(
        self, embedded: Tensor, features: Tensor, cos_sin: CosSin, attend: AttentionFunction
    ) -> Tensor:
        first, *deeper = self.layers
        states: Tensor = first(embedded, features, cos_sin, attend)
        for index, layer in enumerate(deeper, start=1):
            states = layer(states, cos_sin, attend, index)
        return self.norm(states) if self.eagle.norm_output else states

    def draft_logits(self, thought: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(thought if self.eagle.norm_output else self.norm(thought))
        return logits

    def embed(self, tokens: Tensor) -> Tensor:
        embedded: Tensor = (
            self.embed_tokens(tokens) if self._has_embeddings else self._embedding_and_head.embed(tokens)
        )
        return embedded

    def _take_words(self, words: Tensor | None) -> None:
        """Register the vocabulary mapping in the `speculators` format.

        `d2t` holds, per draft token, the target id minus the draft id; `t2d` marks the target
        tokens in the draft vocabulary.
        """
        num_words, vocab_size = self.eagle.draft_vocab_size, self.eagle.vocab_size
        if num_words == vocab_size:
            words = None
        elif words is None or len(words) != num_words:
            raise BadInputError(
                f"expected the {num_words} tokens of the draft vocabulary, got {'none' if words is None else len(words)}"
            )
        elif (words.diff() <= 0).any() or words[0] < 0 or words[-1] >= vocab_size:
            raise BadInputError(
                f"expected ascending tokens between 0 and {vocab_size - 1}, got {words.tolist()[:8]}..."
            )
        self.register_buffer("words", words, persistent=False)
        self.register_buffer(
            "d2t", None if words is None else words - torch.arange(num_words, device=words.device)
        )
        self.register_buffer(
            "t2d", None if words is None else torch.zeros(vocab_size).index_fill(0, words.cpu(), 1).bool()
        )


class Eagle1Head(UnrolledHead):
    """EAGLE-1 and 2 drafter head: predicts the target's next hidden state.

    It reads the last hidden state and the next token, and uses the target's embeddings and LM
    head.

    Args:
        layer: shape of its decoder layer.
        embedding_and_head: embeddings and LM head of the target.
        vocab_size: vocabulary size of the target.
        has_bias: whether the projection of token embedding and hidden state has a bias.
        num_steps: number of draft steps in training.

    Raises:
        BadInputError: another hidden size than the target's.
    """

    def __init__(
        self,
        layer: LayerConfig,
        embedding_and_head: EmbeddingAndHead,
        vocab_size: int,
        has_bias: bool = False,
        num_steps: int = DEFAULT_STEPS,
    ) -> None:
        super().__init__()
        if layer.width != embedding_and_head.width:
            raise BadInputError(
                f"expected an EAGLE head for states of width {embedding_and_head.width}, the target's, got one for {layer.width}"
            )
        self.shape, self.num_layers = layer, 1
        self.hidden_layers, self.num_steps, self.vocab_size = (-1,), num_steps, vocab_size
        self.fc = nn.Linear(2 * layer.width, layer.width, bias=has_bias)
        self.layers = nn.ModuleList([DecoderLayer(layer, has_input_norm=False)])
        self.words = None
        self._embedding_and_head = embedding_and_head

    def features(self, hidden: HiddenStates) -> Tensor:
        return hidden[-1]

    def forward(
        self, embedded: Tensor, features: Tensor, cos_sin: CosSin, attend: AttentionFunction
    ) -> Tensor:
        state: Tensor = self.layers[0](self.fc(torch.cat((embedded, features), -1)), cos_sin, attend)
        return state

    def draft_logits(self, thought: Tensor) -> Tensor:
        return self._embedding_and_head.unembed(thought.to(self._embedding_and_head.dtype))

    def embed(self, tokens: Tensor) -> Tensor:
        return self._embedding_and_head.embed(tokens)


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


def most_frequent_tokens(counts: Tensor, num_words: int) -> Tensor:
    """Return the most frequent tokens, `[num_words]` ids in ascending order.

    Ties are broken in favour of smaller ids.

    Args:
        counts: `[vocab]`, frequency of each token.
        num_words: number of tokens.

    Raises:
        BadInputError: `num_words` is not between 1 and the vocabulary size.
    """
    if not 1 <= num_words <= len(counts):
        raise BadInputError(f"expected a draft vocabulary of 1 to {len(counts)} words, got {num_words}")
    return counts.argsort(descending=True, stable=True)[:num_words].sort().values


def token_ids_from_d2t(offsets: Tensor) -> Tensor:
    """Return the target token ids of `d2t`, which holds the target id minus the draft id."""
    return offsets.long() + torch.arange(len(offsets), device=offsets.device)


def layers_within(layers: Sequence[int], num_layers: int) -> bool:
    """Return whether a target of `num_layers` layers has all of these hidden states."""
    return all(0 <= layer <= num_layers for layer in layers)
