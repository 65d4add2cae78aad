"""Training of a whole model for early exits (LayerSkip, Elhoushi et al., arXiv 2404.16710).

In training, layers are skipped at random, later ones more often, and the model's LM head is
applied to the hidden states after every layer. The result is a new checkpoint of the same
architecture: another model, whose first layers are a better drafter for it. It is trained towards
the distribution of the original model, so that it stays close to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from secondguess.errors import UnsupportedModelError
from secondguess.heads.learning import (
    DepthLosses,
    Objective,
    TrainableHead,
    TrainingBatch,
    overlap,
)
from secondguess.runtime.base import EmbeddingAndHead
from secondguess.runtime.quiet import quiet
from secondguess.runtime.transformers import last_norm
from secondguess.train.export import no_progress_bars, save_model

with quiet():
    from transformers import AutoModelForCausalLM


class WholeModel(TrainableHead):
    """Model that is trained to exit after every layer.

    Args:
        model: a Transformers causal language model with a list of decoder layers, in float32.
        layer_dropout: probability of skipping the last layer for a text; the first is never
            skipped.
        dtype: dtype of the saved weights.
    """

    hidden_layers = ()

    def __init__(self, model: Any, layer_dropout: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.model = model
        self.dtype = dtype
        self._norm = (last_norm(model),)  # in a tuple, so that it is not registered twice
        self._exits: list[Tensor] = []
        layers = decoder_layers(model)
        for layer, rate in zip(layers, skip_rates(len(layers), layer_dropout), strict=True):
            layer.register_forward_hook(self._watch(rate))

    def learn(
        self, training_batch: TrainingBatch, target: EmbeddingAndHead, objective: Objective
    ) -> DepthLosses:
        """Return losses and acceptance by exit, the earliest first; the last is the whole model.

        `target` belong to the original model, whose distribution is the training target.
        """
        self._exits.clear()
        self.model.base_model(input_ids=training_batch.tokens, use_cache=False)
        counts = training_batch.counts[:, 1:]
        with torch.no_grad():
            before = target.unembed(training_batch.hidden[-1][:, :-1][counts])
            now = self._logits(self._exits[-1], counts)
        losses, accepted, num_counted = [], [], max(1, len(before))
        for index, states in enumerate(self._exits):
            logits = self._logits(states, counts)
            losses.append(objective(before, logits).sum() / num_counted)
            # Exits draft for the new model; the new model is compared with the original one.
            reference = before if index == len(self._exits) - 1 else now
            accepted.append(overlap(reference, logits.detach()).sum() / num_counted)
        self._exits.clear()
        return DepthLosses(losses, accepted)

    def save(self, folder: Path, target: str = "") -> None:
        """Write the new checkpoint in Transformers format, without a tokenizer."""
        save_model(self.model, folder, self.dtype)

    def _logits(self, states: Tensor, counts: Tensor) -> Tensor:
        logits: Tensor = self.model.get_output_embeddings()(self._norm[0](states[:, :-1][counts]))
        return logits

    def _watch(self, rate: float) -> Any:
        def watch(layer: nn.Module, inputs: tuple[Tensor, ...], output: Any) -> Any:
            states = output[0] if isinstance(output, tuple) else output
            if self.training and rate > 0:
                stays = torch.rand(len(states), 1, 1, device=states.device) >= rate
                states = torch.where(stays, states, inputs[0])
            self._exits.append(states)
            return (states, *output[1:]) if isinstance(output, tuple) else states

        return watch


def skip_rates(num_layers: int, highest: float) -> list[float]:
    """Return the probability of skipping each layer (LayerSkip, equation 2).

    It rises exponentially from 0 to `highest`.

    >>> [round(rate, 3) for rate in skip_rates(3, 0.2)]
    [0.0, 0.083, 0.2]
    """
    last = max(1, num_layers - 1)
    return [highest * (2 ** (index / last) - 1) for index in range(num_layers)]


def exit_weights(num_exits: int, scale: float) -> list[float]:
    """Return the weights of the exits' losses, which sum to 1 (LayerSkip, section 4.1.2).

    They rise quadratically with the layer; that of the whole model is the largest.

    >>> exit_weights(3, 1.0)  # 0, 1 and 2 + 1
    [0.0, 0.25, 0.75]
    """
    if num_exits == 1:
        return [1.0]
    weights = [scale * index * (index + 1) / 2 for index in range(num_exits - 1)]
    weights.append(num_exits - 1 + weights[-1])
    total = sum(weights)
    return [weight / total for weight in weights]


def decoder_layers(model: Any) -> Sequence[nn.Module]:
    """Return the decoder layers of a Llama-like model.

    Raises:
        UnsupportedModelError: no list of as many layers as the configuration specifies.
    """
    wanted = model.config.get_text_config().num_hidden_layers
    for child in model.base_model.children():
        if isinstance(child, nn.ModuleList) and len(child) == wanted:
            return list(child)
    raise UnsupportedModelError(
        f"expected a model with a list of {wanted} decoder layers in its body, got a {type(model).__name__}"
    )


def read_trainable(folder: Path) -> Any:
    """Load a model in float32 for training, separate from the target in use."""
    with no_progress_bars():
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
