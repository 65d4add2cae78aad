"""Small Llama draft model, for targets whose model family has no small member.

It uses the target's tokenizer and is initialised from the target's embeddings, projected to its
own width.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from secondguess.errors import BadInputError
from secondguess.heads.base import TargetModel
from secondguess.heads.learning import (
    CountedTokens,
    DepthLosses,
    Objective,
    TrainableHead,
    TrainingBatch,
)
from secondguess.runtime.base import EmbeddingAndHead
from secondguess.runtime.system.quiet import no_progress_bars, quiet

with quiet():
    from transformers import LlamaConfig, LlamaForCausalLM

HEAD_SIZE = 64
MAX_DEFAULT_WIDTH = 512
"""Maximum default width of a draft model; by default it is also no wider than its target."""


class DraftModel(TrainableHead):
    """Draft model, a `LlamaForCausalLM`, that is trained like a head but reads tokens only, no hidden states."""

    hidden_layers = ()

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    @classmethod
    def fresh(
        cls,
        config: Mapping[str, Any],
        target: TargetModel,
        num_layers: int,
        width: int,
        seed: int = 0,
    ) -> DraftModel:
        """Return a draft model with random layers and the target's embeddings at its own width.

        Special tokens and context length are those of `config`, the target's. The width is a multiple of 64;
        0 is the target's, reduced to at most 512.
        """
        width = width or max(HEAD_SIZE, min(target.width, MAX_DEFAULT_WIDTH) // HEAD_SIZE * HEAD_SIZE)
        if width % HEAD_SIZE:
            raise BadInputError(f"expected a width that is a multiple of {HEAD_SIZE}, got {width}")
        num_heads = width // HEAD_SIZE
        own_config = LlamaConfig(
            vocab_size=target.vocab_size,
            hidden_size=width,
            intermediate_size=3 * width,
            num_hidden_layers=num_layers,
            num_attention_heads=num_heads,
            num_key_value_heads=num_heads // 2 if num_heads % 2 == 0 else num_heads,
            head_dim=HEAD_SIZE,
            max_position_embeddings=config.get("max_position_embeddings") or 2048,
            tie_word_embeddings=True,
            **{name: config.get(name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")},
        )
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = LlamaForCausalLM(own_config)
        with torch.no_grad():
            embeddings = target.embed(torch.arange(target.vocab_size, device=target.device)).cpu()
            model.get_input_embeddings().weight.copy_(project_embeddings(embeddings, width))
        return cls(model)

    def learn(
        self, training_batch: TrainingBatch, target: EmbeddingAndHead, objective: Objective
    ) -> DepthLosses:
        outputs = self.model.model(input_ids=training_batch.tokens, use_cache=False).last_hidden_state
        # The hidden state at a position predicts the next token.
        loss, accepted = CountedTokens(training_batch, target).loss_and_acceptance(
            1, outputs, self.model.lm_head, objective
        )
        return DepthLosses([loss], [accepted])

    def save(self, folder: Path, target: str = "") -> None:
        """Write the model in Transformers format, without a tokenizer."""
        with no_progress_bars():
            self.model.save_pretrained(folder)
        # safetensors writes a private file
        shutil.copymode(folder / "config.json", folder / "model.safetensors")


def project_embeddings(embeddings: Tensor, width: int) -> Tensor:
    """Return embeddings `[vocab, width]` that best preserve the inner products of `embeddings`.

    They are projected on the leading singular directions, padded with zeros, and scaled to norm 1 on average.
    """
    table = embeddings.double()
    _, directions = torch.linalg.eigh(table.T @ table)
    leading = table @ directions.flip(1)[:, :width]
    filled = torch.zeros(len(table), width, dtype=torch.float64)
    filled[:, : leading.shape[1]] = leading
    # With norm 1 on average, logits have the spread of a freshly initialised model.
    scaled: Tensor = filled / filled.norm(dim=1).mean().clamp_min(1e-9)
    return scaled.float()
