"""Decoder layer used by drafter heads, compatible with Llama, Qwen, GLM and DeepSeek.

The attention function is a parameter: training attends over whole sequences, drafting over a KV
cache. Weight names are those of the published checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from secondguess.errors import BadInputError, UnsupportedModelError
from secondguess.heads.experts import Experts, ExpertsConfig
from secondguess.heads.latent import LatentAttention, LatentConfig
from secondguess.heads.parts import AttentionFunction, CosSin, Mlp, rotate
from secondguess.heads.positions import RotaryConfig, rope_parameters

DENSE_TYPES = ("llama", "mistral", "qwen2", "qwen3")
GATED_TYPES = ("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text")
"""Model types whose attention has gates on its output, and rotates a part of each head."""
LATENT_TYPES = ("deepseek_v3", "glm4_moe_lite")
"""Model types with latent attention."""
MTP_TYPES = (*DENSE_TYPES, "glm4_moe", *GATED_TYPES, *LATENT_TYPES)
"""Model types whose multi-token-prediction modules are supported."""
PARTLY_ROTATED = {"glm4_moe": 0.5, **dict.fromkeys(GATED_TYPES, 0.25)}
"""Share of each head that is rotated, unless the configuration has another one."""


@dataclass(frozen=True)
class LayerConfig:
    """Sizes and options of a decoder layer.

    Args:
        width: hidden size.
        num_heads, num_kv_heads: number of query heads and of key-value heads of the attention.
        head_size: size of one attention head; even.
        mlp_size: intermediate size of the feed-forward network.
        norm_eps: as in Llama configurations.
        rope: rotary positions.
        has_qk_norm: whether each query and key head is RMS-normalised (QK-norm, Qwen3).
        attention_bias: whether the query, key and value projections have biases (Qwen2).
        rotary_size: number of leading values of each head that are rotated; even, 0 for all.
        has_gate: whether the query projection also computes gates on the attention output.
        latent: sizes of latent attention; None for grouped-query attention.
        experts: options of a mixture of experts; None for a dense feed-forward network.

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
    rope: RotaryConfig = field(default_factory=RotaryConfig)
    has_qk_norm: bool = False
    attention_bias: bool = False
    rotary_size: int = 0
    has_gate: bool = False
    latent: LatentConfig | None = None
    experts: ExpertsConfig | None = None

    def __post_init__(self) -> None:
        for name in ("width", "num_heads", "num_kv_heads", "head_size", "mlp_size"):
            if getattr(self, name) < 1:
                raise BadInputError(f"expected {name} of at least 1, got {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads or self.head_size % 2 or self.rotary_size % 2:
            raise BadInputError(
                f"expected heads that share key heads evenly and an even head size, got {self.num_heads} heads, "
                f"{self.num_kv_heads} key heads of size {self.head_size}, of which {self.rotary_size} are rotated"
            )

    @property
    def is_like_llama(self) -> bool:
        """True if the layer has the parts of Llama's, perhaps with biases and query and key norms.

        Then it has grouped-query attention without gates, with whole heads rotated, and no experts.
        """
        return not (self.has_gate or self.rotary_size or self.latent or self.experts)

    @classmethod
    def from_config(
        cls,
        config: Mapping[str, Any],
        kinds: Sequence[str] = DENSE_TYPES + GATED_TYPES,
        *,
        has_experts: bool = False,
    ) -> LayerConfig:
        """Build a configuration from a Llama-like configuration.

        Args:
            kinds: supported model types.
            has_experts: whether the layer has a mixture of experts; some layers of such models have none.

        Raises:
            UnsupportedModelError: unsupported model type, activation or scaling of rotary positions.
        """
        kind = config.get("model_type", "llama")
        has_gate = kind in GATED_TYPES
        if kind not in kinds:
            raise UnsupportedModelError(
                f"expected a drafter with layers like those of {', '.join(kinds)}, got {kind}"
            )
        if config.get("hidden_act", "silu") != "silu":
            raise UnsupportedModelError(
                f"expected the activation silu, got {config['hidden_act']}; use another drafter, or train one with "
                "`secondguess train`"
            )
        num_heads = config["num_attention_heads"]
        latent = LatentConfig.from_config(config) if kind in LATENT_TYPES else None
        head_size = config.get("head_dim") or config["hidden_size"] // num_heads
        rotary_size = 0
        if latent is not None:
            head_size, rotary_size = latent.key_size, latent.qk_rope_head_dim
        elif kind in PARTLY_ROTATED:
            usual = config.get("partial_rotary_factor", PARTLY_ROTATED[kind])
            rotary_size = int(head_size * rope_parameters(config).get("partial_rotary_factor", usual))
        return cls(
            width=config["hidden_size"],
            num_heads=num_heads,
            num_kv_heads=num_heads if latent else config.get("num_key_value_heads") or num_heads,
            head_size=head_size,
            mlp_size=config["moe_intermediate_size" if has_experts else "intermediate_size"],
            norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            rope=RotaryConfig.from_config(config),
            has_qk_norm=kind == "qwen3" or has_gate or bool(config.get("use_qk_norm")),
            attention_bias=bool(config.get("attention_bias", kind == "qwen2")),
            rotary_size=rotary_size,
            has_gate=has_gate,
            latent=latent,
            experts=ExpertsConfig.from_config(config) if has_experts else None,
        )

    def rotary_frequencies(self, device: torch.device | None = None) -> tuple[Tensor, float]:
        """Return the angles between neighbouring positions, `[rotated size / 2]`, and the factor on cos and sin."""
        return self.rope.frequencies(self.rotary_size or self.head_size, device)

    def to_config(self) -> dict[str, Any]:
        """Return the equivalent fields of a Llama-like configuration."""
        kind = "qwen3" if self.has_qk_norm else "qwen2" if self.attention_bias else "llama"
        rope = self.rope.to_config()
        more: dict[str, Any] = {}
        if self.latent is not None:
            kind, more = "deepseek_v3", self.latent.to_config()
        elif self.rotary_size:
            kind = "qwen3_next" if self.has_gate else "glm4_moe"
            more = {"use_qk_norm": self.has_qk_norm, "attention_bias": self.attention_bias}
            rope["partial_rotary_factor"] = self.rotary_size / self.head_size
        if self.experts is not None:
            more |= self.experts.to_config()
        return {
            **more,
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


class Attention(nn.Module):
    """Grouped-query attention.

    Args:
        config: configuration of the layer.
        input_width: input width; twice the hidden size in EAGLE-3, whose first layer reads the
            token embedding concatenated with a hidden state.
    """

    def __init__(self, config: LayerConfig, input_width: int) -> None:
        super().__init__()
        self.config = config
        bias = config.attention_bias
        num_queries = config.num_heads * (2 if config.has_gate else 1)
        self.q_proj = nn.Linear(input_width, num_queries * config.head_size, bias=bias)
        self.k_proj = nn.Linear(input_width, config.num_kv_heads * config.head_size, bias=bias)
        self.v_proj = nn.Linear(input_width, config.num_kv_heads * config.head_size, bias=bias)
        self.o_proj = nn.Linear(config.num_heads * config.head_size, config.width, bias=False)
        if config.has_qk_norm:
            self.q_norm = nn.RMSNorm(config.head_size, config.norm_eps)
            self.k_norm = nn.RMSNorm(config.head_size, config.norm_eps)

    def queries(self, states: Tensor, cos_sin: CosSin) -> tuple[Tensor, Tensor | None]:
        """Return the rotated queries and the gates, None without gates; `[row, head, position, size]`."""
        heads, gates = self._heads(self.q_proj(states)), None
        if self.config.has_gate:
            heads, gates = heads[:, :, ::2], heads[:, :, 1::2].sigmoid().transpose(1, 2)
        queries = rotate(self.q_norm(heads) if self.config.has_qk_norm else heads, cos_sin)
        return queries.transpose(1, 2), gates

    def keys_values(self, states: Tensor, cos_sin: CosSin) -> tuple[Tensor, Tensor]:
        """Return the rotated keys and the values, `[row, kv_head, position, size]` each."""
        heads = self._heads(self.k_proj(states))
        keys = rotate(self.k_norm(heads) if self.config.has_qk_norm else heads, cos_sin)
        return keys.transpose(1, 2), self._heads(self.v_proj(states)).transpose(1, 2)

    def output(self, attended: Tensor) -> Tensor:
        """Project the attention output `[row, head, position, size]` to hidden states."""
        states: Tensor = self.o_proj(attended.transpose(1, 2).flatten(2))
        return states

    def forward(self, states: Tensor, cos_sin: CosSin, attend: AttentionFunction, layer: int) -> Tensor:
        keys, values = self.keys_values(states, cos_sin)
        queries, gates = self.queries(states, cos_sin)
        attended = attend(layer, queries, keys, values)
        return self.output(attended if gates is None else attended * gates)

    def _heads(self, joined: Tensor) -> Tensor:
        return joined.view(*joined.shape[:2], -1, self.config.head_size)


class DecoderLayer(nn.Module):
    """Pre-norm decoder layer with residual connections.

    Args:
        config: configuration of the layer.
        has_input_norm: whether there is a norm before the attention; False for EAGLE-1, whose only
            layer has none.
        input_width: input width of the attention; 0 for the hidden size.
    """

    def __init__(self, config: LayerConfig, has_input_norm: bool = True, input_width: int = 0) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.width, config.norm_eps) if has_input_norm else nn.Identity()
        self.self_attn: Any = (
            Attention(config, input_width or config.width)
            if config.latent is None
            else LatentAttention(config.latent, config.width, config.num_heads, config.rope.score_factor)
        )
        self.post_attention_layernorm = nn.RMSNorm(config.width, config.norm_eps)
        self.mlp: Any = (
            Mlp(config.width, config.mlp_size)
            if config.experts is None
            else Experts(config.experts, config.width)
        )

    def forward(self, states: Tensor, cos_sin: CosSin, attend: AttentionFunction, layer: int = 0) -> Tensor:
        return self.add_mlp(states + self.self_attn(self.input_layernorm(states), cos_sin, attend, layer))

    def add_mlp(self, states: Tensor) -> Tensor:
        """Return the states after the feed-forward network and its residual connection."""
        output: Tensor = states + self.mlp(self.post_attention_layernorm(states))
        return output


def cos_sin_at(config: LayerConfig, positions: Tensor, dtype: torch.dtype) -> CosSin:
    """Return rotary cos and sin `[row or 1, position, 1, size]` of `[row or 1, position]`."""
    frequencies, factor = config.rotary_frequencies(positions.device)
    angles = positions[..., None].float() * frequencies
    cos, sin = angles.cos()[:, :, None] * factor, angles.sin()[:, :, None] * factor
    return torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype)


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
