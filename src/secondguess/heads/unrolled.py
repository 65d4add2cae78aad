"""Autoregressive drafter heads, trained with training-time test (EAGLE-3, arXiv 2503.01840).

The input is a token and the feature of the previous position. While drafting, that feature comes
from the target for committed tokens and from the drafter head's own output for draft nodes. In
training, every position of a text is the root of a chain: step 0 reads the target's feature there;
each further step reads the text's next token and the output of the previous step. So training uses
the same features and keys as drafting.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from secondguess.heads.layer import LayerConfig, cos_sin_at, sequence_attention
from secondguess.heads.learning import (
    DepthLosses,
    Objective,
    TrainableHead,
    TrainingBatch,
    masked_loss_and_acceptance,
)
from secondguess.heads.runtime import FeatureHead
from secondguess.runtime.base import EmbeddingAndHead

DEFAULT_STEPS = 4
"""Default number of draft steps that a drafter head is trained for."""


@dataclass
class ChainsOfPlaces:
    """Attention for training-time test, with one chain per text position.

    Each call runs one step of all chains. The query of step t in the chain of position j attends
    to the text up to j (keys of step 0) and to its own chain (keys of steps 1 to t at position j).
    Each step has one position fewer, because the text ends.

    Args:
        texts: keys and values of step 0, by layer.
        chains: keys and values of the later steps, by layer.
    """

    texts: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    chains: dict[int, list[tuple[Tensor, Tensor]]] = field(default_factory=dict)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend from the first positions of the text, one step deeper than in the previous call.

        This is a `layer.AttentionFunction` function.
        """
        if layer not in self.texts:
            self.texts[layer], self.chains[layer] = (key, value), []
            return sequence_attention(None)(layer, query, key, value)
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
    """Return keys or values of the first positions, repeated for each query head of a group."""
    return heads[:, :, :num_places].repeat_interleave(group, 1)


class UnrolledHead(FeatureHead, TrainableHead):
    """Feature-reading drafter head trained by unrolling its own outputs.

    Attributes:
        num_steps: number of draft steps in training.
        vocab_size: vocabulary size of the target.
        words: `[draft_vocab]`, target token ids of the draft vocabulary; None for the whole
            vocabulary.
    """

    hidden_layers: tuple[int, ...]
    num_steps: int
    vocab_size: int
    words: Tensor | None

    @abstractmethod
    def draft_logits(self, output: Tensor) -> Tensor:
        """Return logits `[..., draft_vocab]` over the draft vocabulary `words`."""

    def logits(self, output: Tensor) -> Tensor:
        own = self.draft_logits(output)
        if self.words is None:
            return own
        everywhere = own.new_full((*own.shape[:-1], self.vocab_size), -torch.inf)
        everywhere[..., self.words] = own
        return everywhere

    def unroll(self, training_batch: TrainingBatch) -> list[Tensor]:
        """Return the outputs `[row, position, feature]` of each depth, teacher-forced on the text.

        The output at depth t and position j has read the tokens up to j + 1 + t, those after j + 1
        with the drafter head's own outputs as features, and predicts token j + 2 + t. Each depth
        has one position fewer; depths without positions are left out.
        """
        dtype = next(self.parameters()).dtype
        features = self.features(
            {layer: training_batch.hidden[layer].to(dtype) for layer in self.hidden_layers}
        )
        attention = ChainsOfPlaces()
        outputs: list[Tensor] = []
        for step in range(min(self.num_steps, training_batch.tokens.shape[1] - 2)):
            num_places = training_batch.tokens.shape[1] - 2 - step
            places = slice(1 + step, 1 + step + num_places)
            behind = (outputs[-1] if outputs else features)[:, :num_places]
            positions = torch.arange(num_places, device=training_batch.tokens.device)[None] + step
            cos_sin = cos_sin_at(self.shape, positions, dtype)
            embedded = self.embed(training_batch.tokens[:, places]).to(dtype)
            outputs.append(self(embedded, behind, cos_sin, attention.attend))
        return outputs

    def learn(
        self, training_batch: TrainingBatch, embedding_and_head: EmbeddingAndHead, objective: Objective
    ) -> DepthLosses:
        """Return the losses and acceptance rates of `num_steps` draft steps from every position.

        The reference of each step is the target's distribution over the draft vocabulary.
        """
        losses, accepted = [], []
        for step, output in enumerate(self.unroll(training_batch)):
            places = slice(1 + step, 1 + step + output.shape[1])
            counts = training_batch.counts[:, 2 + step : 2 + step + output.shape[1]]
            states = training_batch.hidden[-1][:, places]
            loss, share = masked_loss_and_acceptance(
                states, embedding_and_head, output, self.draft_logits, counts, objective, self.words
            )
            losses.append(loss)
            accepted.append(share)
        # Depths that the texts are too short for count as 0.
        missing = [training_batch.hidden[-1].new_zeros(())] * (self.num_steps - len(losses))
        return DepthLosses(losses + missing, accepted + missing)


def default_layer_config(width: int) -> LayerConfig:
    """Return the default layer shape for a hidden size.

    Attention heads have size 64 and every four query heads share a key-value head, as far as the
    hidden size is divisible; otherwise smaller powers of two are used.
    """
    head_size = next(size for size in (64, 32, 16, 8, 4, 2, 1) if width % size == 0)
    num_heads = width // head_size
    num_kv_heads = next(
        num for num in (num_heads // 4, num_heads // 2, num_heads) if num and num_heads % num == 0
    )
    return LayerConfig(width, num_heads, num_kv_heads, head_size, mlp_size=3 * width)


def initialise(head: nn.Module, seed: int) -> None:
    """Initialise all matrices from a normal distribution with standard deviation 1/sqrt(fan-in).

    This preserves the scale of activations. The weights depend on `seed` alone; vectors (norms,
    biases) keep their values.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in head.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=1 / math.sqrt(parameter.shape[1]), generator=generator)
