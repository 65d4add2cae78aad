"""Models of a few hundred random weights whose outputs can be enumerated, with a real cache."""

from __future__ import annotations

from typing import Any

import torch

from secondguess.runtime.system.quiet import quiet

with quiet():
    from transformers import LlamaConfig, LlamaForCausalLM


def tiny_pair(vocab_size: int = 3, seed: int = 3, disagreement: float = 0.2) -> tuple[Any, Any]:
    """Return a target and a similar drafter, both one-layer Llamas in float32.

    Args:
        vocab_size: number of tokens.
        seed: seed of the weights; the state of the global generator is preserved.
        disagreement: standard deviation of the noise that is added to the drafter's weights, which
            are of order one.
    """
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        max_position_embeddings=64,
        initializer_range=1.0,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        target, drafter = LlamaForCausalLM(config), LlamaForCausalLM(config)
        drafter.load_state_dict(target.state_dict())
        for weights in drafter.parameters():
            weights.add_(disagreement * torch.randn_like(weights))
        # logits of order one, so that no token is impossible and none is certain
        for model in (target, drafter):
            model.lm_head.weight.mul_(0.56)
    return target.eval(), drafter.eval()
