"""A small Llama that learns its target's law, for any target: a draft model where the family has none.

It shares the target's tokenizer and starts from the target's embeddings, brought to its own width.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from secondguess.errors import BadInputError
from secondguess.heads.learning import Learner, Lesson, Marks, Objective, mean_where, overlap
from secondguess.runtime.base import Ends
from secondguess.runtime.quiet import quiet
from secondguess.train.export import save_model, saved_dtype

with quiet():
    from transformers import LlamaConfig, LlamaForCausalLM

HEAD_SIZE = 64
WIDEST = 512
"""A draft model is no wider than its target, nor than this, unless asked to be."""


class DraftModel(Learner):
    """Learns as a head does, but reads tokens alone.

    Args:
        model: a `LlamaForCausalLM` over the target's vocabulary.
        dtype: to be saved in.
    """

    hidden_layers = ()

    def __init__(self, model: Any, dtype: torch.dtype) -> None:
        super().__init__()
        self.model = model
        self.dtype = dtype

    @classmethod
    def fresh(
        cls,
        target: Mapping[str, Any],
        vocab_size: int,
        ends: Ends,
        num_layers: int,
        width: int,
        device: torch.device | None = None,
    ) -> DraftModel:
        """A model of random layers between the target's embeddings, drawn from torch's generator.

        Args:
            target: the target's configuration, for the ids of its special tokens, its context and its dtype.
            vocab_size: of the target's logits.
            ends: of the target.
            num_layers: of the draft model.
            width: of it, a multiple of 64; 0 for the target's, cut to 512.
            device: of the target.

        Raises:
            BadInputError: a width that heads of size 64 do not divide.
        """
        width = width or max(HEAD_SIZE, min(ends.width, WIDEST) // HEAD_SIZE * HEAD_SIZE)
        if width % HEAD_SIZE:
            raise BadInputError(f"expected a width that is a multiple of {HEAD_SIZE}, got {width}")
        num_heads = width // HEAD_SIZE
        config = LlamaConfig(
            vocab_size=vocab_size,
            hidden_size=width,
            intermediate_size=3 * width,
            num_hidden_layers=num_layers,
            num_attention_heads=num_heads,
            num_key_value_heads=num_heads // 2 if num_heads % 2 == 0 else num_heads,
            head_dim=HEAD_SIZE,
            max_position_embeddings=target.get("max_position_embeddings") or 2048,
            tie_word_embeddings=True,
            **{name: target.get(name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")},
        )
        model = LlamaForCausalLM(config)
        with torch.no_grad():
            model.get_input_embeddings().weight.copy_(
                embeddings_of_width(ends.embed(torch.arange(vocab_size, device=device)).cpu(), width)
            )
        return cls(model, saved_dtype(target))

    def learn(self, lesson: Lesson, ends: Ends, objective: Objective) -> Marks:
        states = self.model.model(input_ids=lesson.tokens, use_cache=False).last_hidden_state
        # The state at a place guesses the token behind it.
        counts = lesson.counts[:, 1:]
        draft_logits = self.model.lm_head(states[:, :-1][counts])
        with torch.no_grad():
            target_logits = ends.unembed(lesson.hidden[-1][:, :-1][counts])
        there = torch.ones(len(draft_logits), dtype=torch.bool, device=draft_logits.device)
        loss = mean_where(objective(target_logits, draft_logits), there)
        return Marks([loss], [mean_where(overlap(target_logits, draft_logits), there)])

    def save(self, folder: Path) -> None:
        """Write it in Transformers format, without a tokenizer."""
        save_model(self.model, folder, self.dtype)


def embeddings_of_width(embeddings: Tensor, width: int) -> Tensor:
    """`[vocab, width]`, with inner products as near as can be to those of `embeddings` `[vocab, any]`, of norm 1 on average.

    Their leading singular directions; a wider table is filled up with zeros.
    """
    table = embeddings.double()
    _, directions = torch.linalg.eigh(table.T @ table)
    leading = table @ directions.flip(1)[:, :width]
    filled = torch.zeros(len(table), width, dtype=torch.float64)
    filled[:, : leading.shape[1]] = leading
    # A fresh model's logits then have the spread of a fresh model.
    scaled: Tensor = filled / filled.norm(dim=1).mean().clamp_min(1e-9)
    return scaled.float()
