"""The decoder layer that trained drafters are made of, in the words of Llama and Qwen.

Attention is handed in: in training it looks at whole texts, while drafting at a cache. Names of weights are those of the
published checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from secondguess.errors import BadInputError, UnsupportedModelError

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""`(layer, query, key, value)`, each `[row, head, position, size]`, to what each query gathers, like the queries."""
Turns = tuple[Tensor, Tensor]
"""Cosines and sines of the positions, `[row or 1, position, 1, size]`."""


@dataclass(frozen=True)
class LayerShape:
    """The sizes of a decoder layer.

    Args:
        width: of the states.
        num_heads, num_kv_heads, head_size: of its attention.
        mlp_size: between the feed-forward's two products.
        norm_eps, rope_theta: as in the configurations of Llama.
        normalises_heads: whether queries and keys pass norms of their own (Qwen3).
        attention_bias: whether queries, keys and values have biases (Qwen2).
    """

    width: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    mlp_size: int
    norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    normalises_heads: bool = False
    attention_bias: bool = False

    def __post_init__(self) -> None:
        for name in ("width", "num_heads", "num_kv_heads", "head_size", "mlp_size"):
            if getattr(self, name) < 1:
                raise BadInputError(f"expected {name} of at least 1, got {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads or self.head_size % 2:
            raise BadInputError(
                f"expected heads that share key heads evenly and an even head size, got {self.num_heads} heads, "
                f"{self.num_kv_heads} key heads of size {self.head_size}"
            )

    @classmethod
    def of_config(cls, config: Mapping[str, Any]) -> LayerShape:
        """From the fields of a Llama-like configuration.

        Raises:
            UnsupportedModelError: a family whose layers are others.
        """
        kind = config.get("model_type", "llama")
        if kind not in ("llama", "mistral", "qwen2", "qwen3"):
            raise UnsupportedModelError(
                f"expected a drafter with layers like those of llama, mistral, qwen2 or qwen3, got {kind}"
            )
        if config.get("hidden_act", "silu") != "silu":
            raise UnsupportedModelError(f"expected the activation silu, got {config['hidden_act']}")
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        if rope.get("rope_type", rope.get("type", "default")) != "default":
            raise UnsupportedModelError(f"expected plain rotary positions, got {rope}")
        num_heads = config["num_attention_heads"]
        return cls(
            width=config["hidden_size"],
            num_heads=num_heads,
            num_kv_heads=config.get("num_key_value_heads") or num_heads,
            head_size=config.get("head_dim") or config["hidden_size"] // num_heads,
            mlp_size=config["intermediate_size"],
            norm_eps=config.get("rms_norm_eps", 1e-6),
            rope_theta=rope.get("rope_theta", config.get("rope_theta", 10_000.0)),
            normalises_heads=kind == "qwen3",
            attention_bias=bool(config.get("attention_bias", kind == "qwen2")),
        )

    def to_config(self) -> dict[str, Any]:
        """The fields of a Llama-like configuration that say the same."""
        kind = "qwen3" if self.normalises_heads else "qwen2" if self.attention_bias else "llama"
        return {
            "model_type": kind,
            "hidden_size": self.width,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_size,
            "intermediate_size": self.mlp_size,
            "rms_norm_eps": self.norm_eps,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "hidden_act": "silu",
        }


class Norm(nn.Module):
    """Root-mean-square norm."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, states: Tensor) -> Tensor:
        return functional.rms_norm(states, self.weight.shape, self.weight, self.eps)


class Attention(nn.Module):
    """Grouped-query attention.

    Args:
        shape: of the layer.
        input_width: of what it reads, where that is wider than the states (EAGLE-3 reads a token beside a state).
    """

    def __init__(self, shape: LayerShape, input_width: int) -> None:
        super().__init__()
        self.shape = shape
        bias = shape.attention_bias
        self.q_proj = nn.Linear(input_width, shape.num_heads * shape.head_size, bias=bias)
        self.k_proj = nn.Linear(input_width, shape.num_kv_heads * shape.head_size, bias=bias)
        self.v_proj = nn.Linear(input_width, shape.num_kv_heads * shape.head_size, bias=bias)
        self.o_proj = nn.Linear(shape.num_heads * shape.head_size, shape.width, bias=False)
        if shape.normalises_heads:
            self.q_norm = Norm(shape.head_size, shape.norm_eps)
            self.k_norm = Norm(shape.head_size, shape.norm_eps)

    def queries(self, states: Tensor, turns: Turns) -> Tensor:
        """`[row, head, position, size]`."""
        heads = self._heads(self.q_proj(states))
        return rotate(self.q_norm(heads) if self.shape.normalises_heads else heads, turns).transpose(1, 2)

    def keys_values(self, states: Tensor, turns: Turns) -> tuple[Tensor, Tensor]:
        """`[row, kv_head, position, size]` each."""
        heads = self._heads(self.k_proj(states))
        keys = rotate(self.k_norm(heads) if self.shape.normalises_heads else heads, turns)
        return keys.transpose(1, 2), self._heads(self.v_proj(states)).transpose(1, 2)

    def output(self, gathered: Tensor) -> Tensor:
        """States from what the queries gathered, `[row, head, position, size]`."""
        mixed: Tensor = self.o_proj(gathered.transpose(1, 2).flatten(2))
        return mixed

    def forward(self, states: Tensor, turns: Turns, attend: Attend, layer: int) -> Tensor:
        keys, values = self.keys_values(states, turns)
        return self.output(attend(layer, self.queries(states, turns), keys, values))

    def _heads(self, joined: Tensor) -> Tensor:
        return joined.view(*joined.shape[:2], -1, self.shape.head_size)


class Mlp(nn.Module):
    """The gated feed-forward."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.width, shape.mlp_size, bias=False)
        self.up_proj = nn.Linear(shape.width, shape.mlp_size, bias=False)
        self.down_proj = nn.Linear(shape.mlp_size, shape.width, bias=False)

    def forward(self, states: Tensor) -> Tensor:
        down: Tensor = self.down_proj(functional.silu(self.gate_proj(states)) * self.up_proj(states))
        return down


class DecoderLayer(nn.Module):
    """Pre-norm attention and feed-forward, each added to what came in.

    Args:
        shape: of the layer.
        has_input_norm: EAGLE-1's only layer has none before its attention.
    """

    def __init__(self, shape: LayerShape, has_input_norm: bool = True) -> None:
        super().__init__()
        self.input_layernorm = Norm(shape.width, shape.norm_eps) if has_input_norm else nn.Identity()
        self.self_attn = Attention(shape, shape.width)
        self.post_attention_layernorm = Norm(shape.width, shape.norm_eps)
        self.mlp = Mlp(shape)

    def forward(self, states: Tensor, turns: Turns, attend: Attend, layer: int = 0) -> Tensor:
        states = states + self.self_attn(self.input_layernorm(states), turns, attend, layer)
        output: Tensor = states + self.mlp(self.post_attention_layernorm(states))
        return output


def rotate(heads: Tensor, turns: Turns) -> Tensor:
    """Rotary embedding in the half-split layout of `heads` `[row, position, head, size]`."""
    cos, sin = turns
    first, second = heads.chunk(2, -1)
    turned = torch.cat((-second, first), -1)
    return heads * cos + turned * sin


def turns_at(shape: LayerShape, positions: Tensor, dtype: torch.dtype) -> Turns:
    """Cosines and sines for `positions` `[row or 1, position]`, as `rotate` wants them, `[row or 1, position, 1, size]`."""
    steps = (
        torch.arange(0, shape.head_size, 2, device=positions.device, dtype=torch.float32) / shape.head_size
    )
    angles = positions[..., None].float() * shape.rope_theta**-steps
    angles = torch.cat((angles, angles), -1)[:, :, None]
    return angles.cos().to(dtype), angles.sin().to(dtype)


def attend_to_all(mask: Tensor | None) -> Attend:
    """Attention over a whole text at once, for training: causal, or by a `[row or 1, 1, query, key]` bool mask."""

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=mask is None,
            enable_gqa=query.shape[1] != key.shape[1],
        )

    return attend
