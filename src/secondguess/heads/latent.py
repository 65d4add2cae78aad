"""Multi-head latent attention in the decoder layer of a drafter head (DeepSeek-V2, arXiv 2405.04434).

Keys and values are computed from a latent state of low rank, and one rotated key is shared by all
heads. The cache of a drafter head has a single layer, so it holds whole keys and values and not the
latent state. Weight names are those of the published checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from secondguess.heads.parts import AttentionFunction, CosSin, rotate

LATENT_EPS = 1e-6


@dataclass(frozen=True)
class LatentConfig:
    """Sizes of latent attention, with the names of DeepSeek's configurations.

    Args:
        kv_lora_rank: width of the latent state of keys and values.
        q_lora_rank: the same of queries; None if these are projected directly.
        qk_nope_head_dim, qk_rope_head_dim: sizes of the parts of a key that are not, and that are rotated.
        v_head_dim: size of a value.
        rope_interleave: whether pairs of neighbours are rotated, not values of the two halves.
        attention_bias: whether projections to latent states and of the output have biases.
    """

    kv_lora_rank: int
    q_lora_rank: int | None
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    rope_interleave: bool = True
    attention_bias: bool = False

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> LatentConfig:
        """Build the sizes from the configuration of a model."""
        required = ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        optional = {name: config[name] for name in ("rope_interleave", "attention_bias") if name in config}
        return cls(*(config[name] for name in required), **optional)

    def to_config(self) -> dict[str, Any]:
        """Return the equivalent fields of a configuration."""
        return asdict(self)

    @property
    def key_size(self) -> int:
        """Size of a key."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim


class LatentAttention(nn.Module):
    """Latent attention.

    Args:
        config: sizes.
        width: hidden size.
        num_heads: number of heads.
        score_factor: factor on the scores, in addition to `key_size ** -0.5`.
    """

    def __init__(self, config: LatentConfig, width: int, num_heads: int, score_factor: float = 1.0) -> None:
        super().__init__()
        self.score_factor = score_factor
        self.config, bias = config, config.attention_bias
        if config.q_lora_rank is None:
            self.q_proj = nn.Linear(width, num_heads * config.key_size, bias=False)
        else:
            self.q_a_proj = nn.Linear(width, config.q_lora_rank, bias=bias)
            self.q_a_layernorm = nn.RMSNorm(config.q_lora_rank, LATENT_EPS)
            self.q_b_proj = nn.Linear(config.q_lora_rank, num_heads * config.key_size, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(width, config.kv_lora_rank + config.qk_rope_head_dim, bias=bias)
        self.kv_a_layernorm = nn.RMSNorm(config.kv_lora_rank, LATENT_EPS)
        size = config.qk_nope_head_dim + config.v_head_dim
        self.kv_b_proj = nn.Linear(config.kv_lora_rank, num_heads * size, bias=False)
        self.o_proj = nn.Linear(num_heads * config.v_head_dim, width, bias=bias)

    def forward(self, states: Tensor, cos_sin: CosSin, attend: AttentionFunction, layer: int) -> Tensor:
        keys, values = self._keys_values(states, cos_sin)
        attended = attend(layer, self._queries(states, cos_sin), keys, values)
        output: Tensor = self.o_proj(attended.transpose(1, 2).flatten(2))
        return output

    def _queries(self, states: Tensor, cos_sin: CosSin) -> Tensor:
        """Return the queries, rotated in part, `[row, head, position, size]`."""
        config = self.config
        latent = None if config.q_lora_rank is None else self.q_a_layernorm(self.q_a_proj(states))
        heads = self._heads(self.q_proj(states) if latent is None else self.q_b_proj(latent), config.key_size)
        plain, rotary_part = torch.split(heads, [config.qk_nope_head_dim, config.qk_rope_head_dim], -1)
        queries = torch.cat((plain, self._rotated(rotary_part, cos_sin)), -1).transpose(1, 2)
        return queries * self.score_factor

    def _keys_values(self, states: Tensor, cos_sin: CosSin) -> tuple[Tensor, Tensor]:
        """Return the keys, rotated in part, and the values, `[row, head, position, size]` each."""
        config = self.config
        both = self.kv_a_proj_with_mqa(states)
        latent, rotary_part = torch.split(both, [config.kv_lora_rank, config.qk_rope_head_dim], -1)
        sizes = [config.qk_nope_head_dim, config.v_head_dim]
        keys, values = torch.split(
            self._heads(self.kv_b_proj(self.kv_a_layernorm(latent)), sum(sizes)), sizes, -1
        )
        rotary_part = self._rotated(rotary_part[:, :, None], cos_sin).expand(-1, -1, keys.shape[2], -1)
        return torch.cat((keys, rotary_part), -1).transpose(1, 2), values.transpose(1, 2)

    @staticmethod
    def _heads(joined: Tensor, size: int) -> Tensor:
        return joined.view(*joined.shape[:2], -1, size)

    def _rotated(self, heads: Tensor, cos_sin: CosSin) -> Tensor:
        if self.config.rope_interleave:  # pairs of neighbours, put into the order of two halves
            heads = torch.cat((heads[..., ::2], heads[..., 1::2]), -1)
        return rotate(heads, cos_sin)
