"""Reference implementations of published heads from their papers, for one short text, with plain tensors."""

from __future__ import annotations

import torch
from torch import Tensor

Tensors = dict[str, Tensor]
NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE, THETA, EPS = 4, 2, 8, 10_000.0, 1e-5


def plain_norm(states: Tensor, weight: Tensor) -> Tensor:
    return weight * states / (states.square().mean(-1, keepdim=True) + EPS).sqrt()


def plain_turn(heads: Tensor) -> Tensor:
    """Each pair (i, i + half) of `[position, head, size]` as a complex number, turned by its position."""
    half = heads.shape[-1] // 2
    speeds = THETA ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = torch.arange(len(heads), dtype=torch.float64)[:, None] * speeds
    turned = (
        torch.complex(heads[..., :half], heads[..., half:])
        * torch.polar(torch.ones_like(angles), angles)[:, None]
    )
    return torch.cat((turned.real, turned.imag), -1)


def plain_attention(weights: Tensors, prefix: str, states: Tensor) -> Tensor:
    """Causal, head by head, position by position."""

    def project(name: str, num_heads: int) -> Tensor:
        projected = states @ weights[f"{prefix}{name}_proj.weight"].T
        if f"{prefix}{name}_proj.bias" in weights:
            projected = projected + weights[f"{prefix}{name}_proj.bias"]
        return projected.view(len(states), num_heads, HEAD_SIZE)

    queries, keys = plain_turn(project("q", NUM_HEADS)), plain_turn(project("k", NUM_KV_HEADS))
    values = project("v", NUM_KV_HEADS)
    gathered = []
    for place in range(len(states)):
        of_heads = []
        for head in range(NUM_HEADS):
            of_key = head * NUM_KV_HEADS // NUM_HEADS
            scores = keys[: place + 1, of_key] @ queries[place, head] / HEAD_SIZE**0.5
            of_heads.append(scores.softmax(0) @ values[: place + 1, of_key])
        gathered.append(torch.cat(of_heads))
    return torch.stack(gathered) @ weights[f"{prefix}o_proj.weight"].T


def plain_mlp(weights: Tensors, prefix: str, states: Tensor) -> Tensor:
    gate = states @ weights[f"{prefix}gate_proj.weight"].T
    opened = gate * gate.sigmoid() * (states @ weights[f"{prefix}up_proj.weight"].T)
    return opened @ weights[f"{prefix}down_proj.weight"].T


def plain_layer(weights: Tensors, prefix: str, states: Tensor, read: Tensor) -> Tensor:
    """A decoder layer over `states`, whose attention reads `read` (normed, or whatever a head makes of it)."""
    states = states + plain_attention(weights, f"{prefix}self_attn.", read)
    normed = plain_norm(states, weights[f"{prefix}post_attention_layernorm.weight"])
    return states + plain_mlp(weights, f"{prefix}mlp.", normed)


def layer_tensors(prefix: str, width: int, read_width: int, bias: bool = False) -> Tensors:
    """Return random weights of a layer, under their usual names."""
    inner, of_keys = NUM_HEADS * HEAD_SIZE, NUM_KV_HEADS * HEAD_SIZE
    sizes = {
        "self_attn.q_proj.weight": (inner, read_width),
        "self_attn.k_proj.weight": (of_keys, read_width),
        "self_attn.v_proj.weight": (of_keys, read_width),
        "self_attn.o_proj.weight": (width, inner),
        "mlp.gate_proj.weight": (48, width),
        "mlp.up_proj.weight": (48, width),
        "mlp.down_proj.weight": (width, 48),
        "post_attention_layernorm.weight": (width,),
    }
    if bias:
        sizes |= {
            "self_attn.q_proj.bias": (inner,),
            "self_attn.k_proj.bias": (of_keys,),
            "self_attn.v_proj.bias": (of_keys,),
        }
    return random_tensors({prefix + name: size for name, size in sizes.items()})


def random_tensors(sizes: dict[str, tuple[int, ...]]) -> Tensors:
    """Norms about one, all else about zero; the same for the same names."""
    generator = torch.Generator().manual_seed(len(sizes))
    return {
        name: 0.3 * torch.randn(size, generator=generator, dtype=torch.float64) + float("norm" in name)
        for name, size in sizes.items()
    }


def layer_config(width: int, vocab_size: int) -> dict[str, object]:
    return {
        "model_type": "llama",
        "hidden_size": width,
        "vocab_size": vocab_size,
        "num_attention_heads": NUM_HEADS,
        "num_key_value_heads": NUM_KV_HEADS,
        "head_dim": HEAD_SIZE,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "rms_norm_eps": EPS,
        "rope_theta": THETA,
        "hidden_act": "silu",
    }
