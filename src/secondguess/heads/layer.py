"""Decoder layer used by drafter heads, compatible with Llama and Qwen.

The attention function is a parameter: training attends over whole sequences, drafting over a KV
cache. Weight names are those of the published checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from secondguess.errors import BadInputError, UnsupportedModelError

GATED_TYPES = ("qwen3_next", "qwen3_5", "qwen3_5_text")
"""Model types whose attention has gates on its output, and rotates a part of each head."""
AttentionFunction = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""Attention function: `(layer, query, key, value)` to the attention output in the query's shape.

Query, key and value are `[row, attention head, position, size]`.
"""
CosSin = tuple[Tensor, Tensor]
"""Rotary cos and sin of the positions, `[row or 1, position, 1, size]` each."""


@dataclass(frozen=True)
class LayerConfig:
    """Sizes and options of a decoder layer.

    Args:
        width: hidden size.
        num_heads, num_kv_heads: number of query heads and of key-value heads of the attention.
        head_size: size of one attention head; even.
        mlp_size: intermediate size of the feed-forward network.
        norm_eps, rope_theta: as in Llama configurations.
        has_qk_norm: whether each query and key head is RMS-normalised (QK-norm, Qwen3).
        attention_bias: whether the query, key and value projections have biases (Qwen2).
        rotary_size: number of leading values of each head that are rotated; even, 0 for all.
        has_gate: whether the query projection also computes gates on the attention output.

    Raises:
        BadInputError: a size below 1, an odd head or rotary size, or query heads that cannot be divided
            evenly among the key-value heads.
    """

    width: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    mlp_size: int
    norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    has_qk_norm: bool = False
    attention_bias: bool = False
    rotary_size: int = 0
    has_gate: bool = False

    def __post_init__(self) -> None:
        for name in ("width", "num_heads", "num_kv_heads", "head_size", "mlp_size"):
            if getattr(self, name) < 1:
                raise BadInputError(f"expected {name} of at least 1, got {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads or self.head_size % 2 or self.rotary_size % 2:
            raise BadInputError(
                f"expected heads that share key heads evenly and an even head size, got {self.num_heads} heads, "
                f"{self.num_kv_heads} key heads of size {self.head_size}, of which {self.rotary_size} are rotated"
            )

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> LayerConfig:
        """Build a shape from a Llama-like configuration.

        Raises:
            UnsupportedModelError: unsupported model type, activation or rotary embedding.
        """
        kind = config.get("model_type", "llama")
        has_gate = kind in GATED_TYPES
        if kind not in ("llama", "mistral", "qwen2", "qwen3") and not has_gate:
            raise UnsupportedModelError(
                f"expected a drafter with layers like those of llama, mistral, qwen2, qwen3 or qwen3_next, got {kind}"
            )
        if config.get("hidden_act", "silu") != "silu":
            raise UnsupportedModelError(f"expected the activation silu, got {config['hidden_act']}")
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        if rope.get("rope_type", rope.get("type", "default")) != "default":
            raise UnsupportedModelError(f"expected plain rotary positions, got {rope}")
        num_heads = config["num_attention_heads"]
        head_size = config.get("head_dim") or config["hidden_size"] // num_heads
        rotated = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 0.25))
        return cls(
            width=config["hidden_size"],
            num_heads=num_heads,
            num_kv_heads=config.get("num_key_value_heads") or num_heads,
            head_size=head_size,
            mlp_size=config["intermediate_size"],
            norm_eps=config.get("rms_norm_eps", 1e-6),
            rope_theta=rope.get("rope_theta", config.get("rope_theta", 10_000.0)),
            has_qk_norm=kind == "qwen3" or has_gate,
            attention_bias=bool(config.get("attention_bias", kind == "qwen2")),
            rotary_size=int(head_size * rotated) if has_gate else 0,
            has_gate=has_gate,
        )

    def to_config(self) -> dict[str, Any]:
        """Return the equivalent fields of a Llama-like configuration."""
        kind = "qwen3" if self.has_qk_norm else "qwen2" if self.attention_bias else "llama"
        rope: dict[str, Any] = {"rope_type": "default", "rope_theta": self.rope_theta}
        if self.has_gate:
            kind = "qwen3_next"
            rope["partial_rotary_factor"] = self.rotary_size / self.head_size
        return {
            "model_type": kind,
            "hidden_size": self.width,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_size,
            "intermediate_size": self.mlp_size,
            "rms_norm_eps": self.norm_eps,
            "rope_parameters": rope,
            "hidden_act": "silu",
        }


class Norm(nn.Module):
    """RMSNorm."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, states: Tensor) -> Tensor:
        return functional.rms_norm(states, self.weight.shape, self.weight, self.eps)


class Attention(nn.Module):
    """Grouped-query attention.

    Args:
        shape: shape of the layer.
        input_width: input width; twice the hidden size in EAGLE-3, whose first layer reads the
            token embedding concatenated with a hidden state.
    """

    def __init__(self, shape: LayerConfig, input_width: int) -> None:
        super().__init__()
        self.shape = shape
        bias = shape.attention_bias
        num_queries = shape.num_heads * (2 if shape.has_gate else 1)
        self.q_proj = nn.Linear(input_width, num_queries * shape.head_size, bias=bias)
        self.k_proj = nn.Linear(input_width, shape.num_kv_heads * shape.head_size, bias=bias)
        self.v_proj = nn.Linear(input_width, shape.num_kv_heads * shape.head_size, bias=bias)
        self.o_proj = nn.Linear(shape.num_heads * shape.head_size, shape.width, bias=False)
        if shape.has_qk_norm:
            self.q_norm = Norm(shape.head_size, shape.norm_eps)
            self.k_norm = Norm(shape.head_size, shape.norm_eps)

    def queries(self, states: Tensor, cos_sin: CosSin) -> tuple[Tensor, Tensor | None]:
        """Return the rotated queries and the gates, None without gates; `[row, head, position, size]`."""
        heads, gates = self._heads(self.q_proj(states)), None
        if self.shape.has_gate:
            heads, gates = heads[:, :, ::2], heads[:, :, 1::2].sigmoid().transpose(1, 2)
        return rotate(self.q_norm(heads) if self.shape.has_qk_norm else heads, cos_sin).transpose(1, 2), gates

    def keys_values(self, states: Tensor, cos_sin: CosSin) -> tuple[Tensor, Tensor]:
        """Return the rotated keys and the values, `[row, kv_head, position, size]` each."""
        heads = self._heads(self.k_proj(states))
        keys = rotate(self.k_norm(heads) if self.shape.has_qk_norm else heads, cos_sin)
        return keys.transpose(1, 2), self._heads(self.v_proj(states)).transpose(1, 2)

    def output(self, gathered: Tensor) -> Tensor:
        """Project the attention output `[row, head, position, size]` to hidden states."""
        mixed: Tensor = self.o_proj(gathered.transpose(1, 2).flatten(2))
        return mixed

    def forward(self, states: Tensor, cos_sin: CosSin, attend: AttentionFunction, layer: int) -> Tensor:
        keys, values = self.keys_values(states, cos_sin)
        queries, gates = self.queries(states, cos_sin)
        gathered = attend(layer, queries, keys, values)
        return self.output(gathered if gates is None else gathered * gates)

    def _heads(self, joined: Tensor) -> Tensor:
        return joined.view(*joined.shape[:2], -1, self.shape.head_size)


class Mlp(nn.Module):
    """Gated feed-forward network (SwiGLU)."""

    def __init__(self, shape: LayerConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.width, shape.mlp_size, bias=False)
        self.up_proj = nn.Linear(shape.width, shape.mlp_size, bias=False)
        self.down_proj = nn.Linear(shape.mlp_size, shape.width, bias=False)

    def forward(self, states: Tensor) -> Tensor:
        down: Tensor = self.down_proj(functional.silu(self.gate_proj(states)) * self.up_proj(states))
        return down


class DecoderLayer(nn.Module):
    """Pre-norm decoder layer with residual connections.

    Args:
        shape: shape of the layer.
        has_input_norm: whether there is a norm before the attention; False for EAGLE-1, whose only
            layer has none.
        input_width: input width of the attention; 0 for the hidden size.
    """

    def __init__(self, shape: LayerConfig, has_input_norm: bool = True, input_width: int = 0) -> None:
        super().__init__()
        self.input_layernorm = Norm(shape.width, shape.norm_eps) if has_input_norm else nn.Identity()
        self.self_attn = Attention(shape, input_width or shape.width)
        self.post_attention_layernorm = Norm(shape.width, shape.norm_eps)
        self.mlp = Mlp(shape)

    def forward(self, states: Tensor, cos_sin: CosSin, attend: AttentionFunction, layer: int = 0) -> Tensor:
        return self.add_mlp(states + self.self_attn(self.input_layernorm(states), cos_sin, attend, layer))

    def add_mlp(self, states: Tensor) -> Tensor:
        """Return the states after the feed-forward network and its residual connection."""
        output: Tensor = states + self.mlp(self.post_attention_layernorm(states))
        return output


def rotate(heads: Tensor, cos_sin: CosSin) -> Tensor:
    """Apply the rotary embedding (half-split layout) to `heads` `[row, position, head, size]`.

    Values of a head beyond the size of `cos_sin` stay as they are.
    """
    cos, sin = cos_sin
    size = cos.shape[-1]
    turned, rest = (heads, None) if size == heads.shape[-1] else (heads[..., :size], heads[..., size:])
    first, second = turned.chunk(2, -1)
    turned = turned * cos + torch.cat((-second, first), -1) * sin
    return turned if rest is None else torch.cat((turned, rest), -1)


def cos_sin_at(shape: LayerConfig, positions: Tensor, dtype: torch.dtype) -> CosSin:
    """Return rotary cos and sin `[row or 1, position, 1, size]` of `[row or 1, position]`."""
    size = shape.rotary_size or shape.head_size
    steps = torch.arange(0, size, 2, device=positions.device, dtype=torch.float32) / size
    angles = positions[..., None].float() * shape.rope_theta**-steps
    angles = torch.cat((angles, angles), -1)[:, :, None]
    return angles.cos().to(dtype), angles.sin().to(dtype)


def attention(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, is_causal: bool = False
) -> Tensor:
    """Return scaled dot-product attention, grouped if there are fewer key-value heads."""
    grouped = query.shape[1] != keys.shape[1]
    return functional.scaled_dot_product_attention(
        query, keys, values, attn_mask=mask, is_causal=is_causal, enable_gqa=grouped
    )


def sequence_attention(mask: Tensor | None) -> AttentionFunction:
    """Return an attention function over whole sequences, for training.

    Args:
        mask: `[row or 1, 1, query, key]` bool, True where a query attends to a key; None for
            causal attention.
    """
    return lambda layer, query, key, value: attention(query, key, value, mask, is_causal=mask is None)
