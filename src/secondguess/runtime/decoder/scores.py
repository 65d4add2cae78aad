"""Attention of queries to keys and values with explicit masks."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

MIN_QUERIES = 4
"""Bits were seen to depend on the number of queries below 2 with AMX, and below 4 with AVX-512 bfloat16."""


def masked_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None = None
) -> Tensor:
    """Compute masked attention `[row, kv_head, query, size]`.

    The bits of a query do not depend on how many there are. On a CPU, products of fewer than
    `MIN_QUERIES` rows use other instructions than products of more rows, so the last query is
    repeated up to this number.
    """
    num_queries = query.shape[2]
    if num_queries < MIN_QUERIES and query.device.type == "cpu":
        query = repeat_last(query)
        mask = mask if mask is None or mask.shape[2] == 1 else repeat_last(mask)
    return scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)[:, :, :num_queries]


def repeat_last(numbers: Tensor) -> Tensor:
    """Return `[row, head, query, size]` with the last query repeated up to `MIN_QUERIES`."""
    last = numbers[:, :, -1:]
    return torch.cat([numbers, last.expand(-1, -1, MIN_QUERIES - numbers.shape[2], -1)], dim=2)


def explicit_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    softcap: float | None,
    sinks: Tensor | None = None,
    position_bias: Tensor | None = None,
) -> Tensor:
    """Compute attention from explicit scores, for features that SDPA lacks.

    Arguments and result are those of `grouped_query_attention`. The softmax is computed in float32,
    or in float64 for float64 scores.
    """
    num_rows, num_heads, num_queries, size = query.shape
    num_kv_heads, num_keys = key.shape[1:3]
    folded = query.reshape(num_rows, num_kv_heads, -1, size)
    scores = (folded @ key.transpose(2, 3)).reshape(num_rows, num_heads, num_queries, num_keys)
    scores = scores * (size**-0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if position_bias is not None:
        scores = scores + position_bias
    if mask is None and num_queries > 1:
        mask = torch.ones(num_queries, num_keys, dtype=torch.bool, device=query.device).tril()
    if mask is not None and mask.is_floating_point():
        scores = scores + mask
    elif mask is not None:
        # not -inf, with which a fully masked query (padding of a direct call) would become NaN
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    if sinks is not None:
        sink = sinks.reshape(1, -1, 1, 1).expand(num_rows, -1, num_queries, 1)
        scores = torch.cat([scores, sink.to(scores.dtype)], dim=-1)
    exact = torch.float64 if scores.dtype == torch.float64 else torch.float32
    weights = scores.softmax(-1, dtype=exact)[..., :num_keys].to(value.dtype)
    out = weights.reshape(num_rows, num_kv_heads, -1, num_keys) @ value
    return out.reshape(num_rows, num_heads, num_queries, -1).transpose(1, 2).contiguous()
