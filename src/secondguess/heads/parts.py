"""Parts of the decoder layers of drafter heads: feed-forward network, rotary positions."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional

from secondguess.runtime import rotary

AttentionFunction = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""Attention function: `(layer, query, key, value)` to the attention output, per query in the value's size.

Query, key and value are `[row, attention head, position, size]`.
"""
CosSin = tuple[Tensor, Tensor]
"""Rotary cos and sin of the positions, `[row or 1, position, 1, size]` each; sines of the first half are negated."""


class Mlp(nn.Module):
    """Gated feed-forward network (SwiGLU)."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, size, bias=False)
        self.up_proj = nn.Linear(width, size, bias=False)
        self.down_proj = nn.Linear(size, width, bias=False)

    def forward(self, states: Tensor) -> Tensor:
        down: Tensor = self.down_proj(functional.silu(self.gate_proj(states)) * self.up_proj(states))
        return down


def rotate(heads: Tensor, cos_sin: CosSin) -> Tensor:
    """Apply the rotary embedding (half-split layout) to `heads` `[row, position, head, size]`."""
    return rotary.rotate(heads, *cos_sin)
