"""Autoregressive drafter heads (EAGLE, MTP), trained with training-time test (arXiv 2503.01840).

The input is a token and the feature of the previous position. While drafting, that feature comes
from the target for committed tokens and from the drafter head's own output for draft nodes. In
training, every position of a text is the root of a chain: step 0 reads the target's feature there;
each further step reads the text's next token and the output of the previous step. So training uses
the same features and keys as drafting.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from secondguess.errors import BadInputError
from secondguess.heads.base import DraftVocabulary, Head, TargetModel
from secondguess.heads.layer import (
    AttentionFunction,
    CosSin,
    LayerConfig,
    RotaryPositions,
    add_mlp,
    run_attention,
    run_layer,
    sequence_attention,
)
from secondguess.heads.learning import LAST_HIDDEN, CountedTokens, DepthLosses, Objective, TrainingBatch
from secondguess.runtime.base import EmbeddingAndHead, HiddenStates

DEFAULT_STEPS = 4
"""Default number of draft steps that a drafter head is trained for."""


@dataclass
class TrainingTimeAttention:
    """Attention for training-time test, with one chain per text position; keys and values are kept by layer.

    Each call runs one step of all chains. The query of step t in the chain of position j attends
    to the text up to j (keys of step 0) and to its own chain (keys of steps 1 to t at position j).
    Each step has one position fewer, because the text ends.

    Args:
        windows: sliding window of each layer, in positions; layers without one attend to everything before.
    """

    windows: Sequence[int | None] = ()
    texts: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)  # of step 0
    chains: dict[int, list[tuple[Tensor, Tensor]]] = field(default_factory=dict)  # of later steps

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend from the first positions of the text, one step deeper than in the previous call."""
        if layer not in self.texts:
            self.texts[layer], self.chains[layer] = (key, value), []
            return sequence_attention(self._text_mask(layer, query))(layer, query, key, value)
        num_positions, group = query.shape[2], query.shape[1] // key.shape[1]
        self.chains[layer].append((key, value))
        text_key, text_value = (_for_queries(part, group, num_positions) for part in self.texts[layer])
        own = [[_for_queries(part, group, num_positions) for part in pair] for pair in self.chains[layer]]
        hidden = torch.ones(num_positions, num_positions, dtype=torch.bool, device=query.device).triu(1)
        window, step = self.windows[layer] if self.windows else None, len(own)
        if window is not None:
            hidden |= torch.ones_like(hidden).tril(step - window)
            own = own[-window:]  # of this step and those before
        on_text = (query @ text_key.transpose(2, 3)).masked_fill(hidden, -torch.inf)
        on_own = [(query * own_key).sum(-1, keepdim=True) for own_key, _ in own]
        weights = (torch.cat([on_text, *on_own], -1) * query.shape[-1] ** -0.5).softmax(-1)
        attended: Tensor = weights[..., :num_positions] @ text_value
        for index, (_, own_value) in enumerate(own):
            attended = attended + weights[..., num_positions + index, None] * own_value
        return attended

    def _text_mask(self, layer: int, query: Tensor) -> Tensor | None:
        """Return the mask of a whole text for a layer with a window; None for the causal rule."""
        window = self.windows[layer] if self.windows else None
        if window is None:
            return None
        places = torch.arange(query.shape[2], device=query.device)
        behind = places[:, None] - places
        return ((behind >= 0) & (behind < window))[None, None]


def _for_queries(heads: Tensor, group: int, num_positions: int) -> Tensor:
    """Return keys or values of the first positions, repeated for each query head of a group."""
    return heads[:, :, :num_positions].repeat_interleave(group, 1)


@dataclass(frozen=True)
class FeatureParts:
    """Modules of a feature head, for a compiled forward pass.

    Tokens and features are normalised and joined. The joined parts are projected to the input of
    the first layer; without a projection they are the input of its attention, and the residual
    connection carries the feature or, with `residual_is_normalised`, the normalised feature.
    """

    token_norm: Any  # `nn.Identity` for none
    feature_norm: Any
    projection: nn.Linear | None
    layers: Iterable[Any]
    residual_is_normalised: bool = False


class FeatureHead(Head):
    """Drafter head that reads a feature with each token, trained by unrolling its own outputs.

    Subclasses create the modules: embeddings and LM head of their own as `embed_tokens` and
    `lm_head`, if any, the last norm as `norm`, and positions as `rotary`.

    Args:
        target: target model.
        layer: configuration of the decoder layers.
        hidden_layers: target layers whose hidden states the features are computed from.
        num_layers: number of decoder layers.
        num_steps: number of draft steps in training.
        norm_output: whether later draft steps read the output after the last norm, not before it.
        vocabulary: tokens that it drafts; None for the whole vocabulary.
        windows: sliding window of each layer, in tokens; None for layers of full attention.
        target_width: width of the target's states, if it may differ from the head's. Then the head has
            embeddings and an LM head of its own.
    """

    embed_tokens: nn.Embedding | None
    lm_head: nn.Linear | None
    norm: nn.Module
    rotary: RotaryPositions

    def __init__(
        self,
        target: TargetModel,
        layer: LayerConfig,
        hidden_layers: Sequence[int] = (LAST_HIDDEN,),
        *,
        num_layers: int = 1,
        num_steps: int = DEFAULT_STEPS,
        norm_output: bool = False,
        vocabulary: DraftVocabulary | None = None,
        windows: Sequence[int | None] | None = None,
        target_width: int | None = None,
    ) -> None:
        super().__init__()
        if (target_width or layer.width) != target.width:
            raise BadInputError(
                f"expected a head for states of width {target.width}, the target's, got one for "
                f"{target_width or layer.width}"
            )
        if num_layers < 1 or num_steps < 1 or not hidden_layers:
            raise BadInputError(
                f"expected at least one layer, step and state of the target, got {num_layers}, {num_steps} "
                f"and {list(hidden_layers)}"
            )
        self.target, self.layer_config, self.hidden_layers = target, layer, tuple(hidden_layers)
        self.num_layers, self.num_steps, self.norm_output = num_layers, num_steps, norm_output
        self.windows = (None,) * num_layers if windows is None else tuple(windows)
        self.vocabulary = vocabulary or DraftVocabulary(target.vocab_size)

    @property
    def context_length(self) -> int | None:
        """Largest number of positions that it was made for; None for no limit of its own."""
        return self.layer_config.context_length

    @property
    def mask_token(self) -> int | None:
        """Token that a head which drafts in parallel reads at draft positions; None for one that drafts step by step."""
        return None

    def mask_states(self) -> HiddenStates:
        """Return the states `[1, width]` by layer that stand for the target's at mask tokens."""
        raise NotImplementedError("a head that drafts step by step reads no mask tokens")

    @property
    @abstractmethod
    def parts(self) -> FeatureParts:
        """Modules between the inputs and the last norm."""

    @property
    def fusion(self) -> nn.Linear | None:
        """Projection of the joined target states to the feature; None if there is none."""
        return None

    @abstractmethod
    def join_states(self, hidden: HiddenStates) -> Tensor:
        """Return the target's states `[..., width]` by layer as one tensor, the input of `fusion`."""

    def features(self, hidden: HiddenStates) -> Tensor:
        """Return features `[..., feature]` of the target's states `[..., width]` by layer."""
        joined = self.join_states(hidden)
        return joined if self.fusion is None else self.fusion(joined)

    def forward(
        self, embedded: Tensor, features: Tensor, cos_sin: CosSin, attend: AttentionFunction
    ) -> Tensor:
        """Return the outputs `[row, position, feature]`, the features of the next tokens.

        They are computed from token embeddings `[row, position, width]`, and the features of the tokens before each.
        """
        parts = self.parts
        first, *deeper = parts.layers
        normed = parts.feature_norm(features)
        joined = torch.cat((parts.token_norm(embedded), normed), -1)
        if parts.projection is not None:
            states = run_layer(first, parts.projection(joined), cos_sin, attend)
        else:
            kept = normed if parts.residual_is_normalised else features
            states = add_mlp(first, kept + run_attention(first, joined, cos_sin, attend))
        for layer in deeper:
            states = run_layer(layer, states, cos_sin, attend)
        return self.norm(states) if self.norm_output else states

    def draft_logits(self, output: Tensor) -> Tensor:
        """Return logits `[..., draft_vocab]` over the draft vocabulary for outputs of `forward`."""
        normed: Tensor = output if self.norm_output else self.norm(output)
        return self.unembed(normed, self.lm_head)

    def logits(self, output: Tensor) -> Tensor:
        """Return logits `[..., vocab]`; tokens outside the draft vocabulary get -inf."""
        return self.vocabulary.to_target(self.draft_logits(output))

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the embeddings of target token ids."""
        if self.embed_tokens is None:
            return self.target.embed(tokens)
        embedded: Tensor = self.embed_tokens(tokens)
        return embedded

    def unroll(self, training_batch: TrainingBatch) -> list[Tensor]:
        """Return the outputs `[row, position, feature]` of each depth, teacher-forced on the text.

        The output at depth t and position j has read the tokens up to j + 1 + t, those after j + 1
        with the drafter head's own outputs as features, and predicts token j + 2 + t. Each depth
        has one position fewer; depths without positions are left out.
        """
        if self.mask_token is not None:
            raise BadInputError(
                "expected a head that drafts step by step to train, got one that drafts in parallel"
            )
        dtype = next(self.parameters()).dtype
        features = self.features(
            {layer: training_batch.hidden[layer].to(dtype) for layer in self.hidden_layers}
        )
        attention = TrainingTimeAttention(self.windows)
        outputs: list[Tensor] = []
        num_steps = min(self.num_steps, training_batch.num_depths, training_batch.tokens.shape[1] - 2)
        for step in range(num_steps):
            num_positions = training_batch.tokens.shape[1] - 2 - step
            behind = (outputs[-1] if outputs else features)[:, :num_positions]
            positions = torch.arange(num_positions, device=training_batch.tokens.device)[None] + step
            cos_sin = self.rotary(positions, dtype)
            embedded = self.embed(training_batch.tokens[:, 1 + step : 1 + step + num_positions]).to(dtype)
            outputs.append(self(embedded, behind, cos_sin, attention.attend))
        return outputs

    def learn(
        self, training_batch: TrainingBatch, target: EmbeddingAndHead, objective: Objective
    ) -> DepthLosses:
        """Return the losses and acceptance rates of `num_steps` draft steps from every position.

        The reference of each step is the target's distribution over the draft vocabulary.
        """
        counted = CountedTokens(training_batch, target, self.vocabulary.select)
        losses, accepted = [], []
        for step, output in enumerate(self.unroll(training_batch)):
            loss, share = counted.loss_and_acceptance(2 + step, output, self.draft_logits, objective)
            losses.append(loss)
            accepted.append(share)
        # Depths that the texts are too short for count as 0.
        num_depths = min(self.num_steps, training_batch.num_depths)
        missing = [training_batch.hidden[LAST_HIDDEN].new_zeros(())] * (num_depths - len(losses))
        return DepthLosses(losses + missing, accepted + missing)


def default_layer_config(width: int) -> LayerConfig:
    """Return the default layer configuration for a hidden size.

    Attention heads have size 64, as far as the hidden size is divisible; otherwise smaller powers of
    two are used. Every 4 query heads share a key-value head if at least 4 of them remain: the token
    that a position of EAGLE-3 adds reaches its output through the values alone.
    """
    head_size = next(size for size in (64, 32, 16, 8, 4, 2, 1) if width % size == 0)
    num_heads = width // head_size
    num_kv_heads = num_heads // 4 if num_heads % 4 == 0 and num_heads >= 16 else num_heads
    return LayerConfig(width, num_heads, num_kv_heads, head_size, mlp_size=3 * width)


def initialise(head: nn.Module, seed: int) -> None:
    """Initialise all matrices from a normal distribution with standard deviation 1/sqrt(fan-in).

    This preserves the scale of activations. The outputs of attention and feed-forward start at a
    tenth of it, so that a layer starts near the identity. The weights depend on `seed` alone;
    vectors (norms, biases) keep their values.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            if parameter.dim() > 1:
                is_output = name.endswith(("o_proj.weight", "down_proj.weight"))
                scale = (0.1 if is_output else 1.0) / math.sqrt(parameter.shape[1])
                parameter.normal_(std=scale, generator=generator)
