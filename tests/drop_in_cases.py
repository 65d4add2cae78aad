"""A tiny model, and one `generate` call with Transformers' loop and with the drop-in."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaForCausalLM

import secondguess
from checkpoints import random_llama

PROMPT = torch.tensor([[5, 6, 7, 8, 5, 6, 7, 8, 5, 6]])
BATCH = torch.tensor([[2, 2, 2, 2, 5, 6, 7, 8, 5, 6], [9, 8, 7, 6, 5, 9, 8, 7, 6, 5]])
BATCH_MASK = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1, 1, 1], [1] * 10])
LENGTH = {"max_new_tokens": 12}
END = 9
"""A token that the tiny model's greedy text has early."""

SAME_DISTRIBUTION = {
    "do_sample": {"top_k": 0},
    "temperature": {"temperature": 0.5, "top_k": 0},
    "top_k": {"top_k": 2},
    "top_p": {"top_p": 0.5, "top_k": 0},
    "min_p": {"min_p": 0.4, "top_k": 0},
    "num_return_sequences": {"top_k": 0},
}
"""Fields of the generation config that change what is drawn, each with settings that show it."""


def tiny_model(vocab_size: int = 40, seed: int = 26, **changes: Any) -> LlamaForCausalLM:
    """A random Llama in float32: two layers of width 32, 128 positions, end token 1, padding 2."""
    special = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    return random_llama(seed, vocab_size=vocab_size, **(special | changes))


def theirs(model: Any, *args: Any, **settings: Any) -> Any:
    """Return the output of Transformers."""
    return model.generate(*args, **settings)


def ours(model: Any, *args: Any, drafter: str | None = "ngram", **settings: Any) -> Any:
    """Return the output of `custom_generate` for the same call."""
    return model.generate(*args, custom_generate=secondguess.custom_generate, drafter=drafter, **settings)
