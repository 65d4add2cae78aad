"""Our attention for Transformers modules: grouped queries without repeated keys, and masks that know trees.

Both are registered under one name; a function without its mask function would silently see the future
(Transformers then passes no mask at all). Outside of a forward of ours they behave like the stock SDPA
implementation, so a model that carries our name still works when its owner calls it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from secondguess.errors import UnsupportedModelError
from secondguess.runtime.quiet import quiet

with quiet():
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import causal_mask_function, sdpa_mask

IMPLEMENTATION = "secondguess"
MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Step:
    """What the queries of one forward may see.

    Args:
        mask: `[row or 1, 1, query, key]` bool; None when the causal rule of text positions says it all.
        query_positions: `[row or 1, query]` int64.
        num_keys: cache positions that are read.
        key_positions: `[row, key]` int64, text position of the token in each cache position; None when the
            two are the same, as they are unless a tree was drafted.
        start: where all rows' queries begin, one behind the other, both in the cache and in the text; None
            when rows differ or branch.
        starts: cached positions before each row's first query; for runtimes that make no masks.
        closure: `[row, query, query]` bool, which queries are a query's ancestors or itself; for the same. None for chains.
    """

    mask: Tensor | None
    query_positions: Tensor
    num_keys: int
    key_positions: Tensor | None = None
    start: int | None = None
    starts: Sequence[int] = ()
    closure: Tensor | None = None

    def behind(self, count: int) -> Step:
        """The step of the same forward without its first queries."""
        if count == 0:
            return self
        return replace(
            self,
            mask=None if self.mask is None else self.mask[:, :, count:],
            query_positions=self.query_positions[:, count:],
            start=None if self.start is None else self.start + count,
        )

    def visible(self, mask_function: MaskFunction, window: int | None) -> Tensor | None:
        """The mask for a layer type whose own rule, causal or windowed, is `mask_function`.

        Windows are counted in text positions: siblings in a tree are equally far from what they follow.
        """
        if mask_function is causal_mask_function or (window is not None and self.num_keys <= window):
            return self.mask
        queries = self.query_positions[:, None, :, None]
        keys = self.key_positions
        if keys is None:
            keys = torch.arange(self.num_keys, device=queries.device)[None]
        rows = torch.arange(queries.shape[0], device=queries.device)[:, None, None, None]
        allowed = mask_function(rows, torch.zeros_like(rows), queries, keys[:, None, None, :])
        return allowed if self.mask is None else allowed & self.mask


class _Current(threading.local):
    step: Step | None = None


current = _Current()
"""The step of the forward that this thread is in; the runtime sets it, our mask function reads it."""


def step_mask(
    *, mask_function: MaskFunction, local_size: int | None = None, use_vmap: bool = False, **request: object
) -> Tensor | None:
    """Mask function: answers from the current step; outside of one, the stock SDPA mask."""
    if current.step is None:
        mask: Tensor | None = sdpa_mask(
            mask_function=mask_function, local_size=local_size, use_vmap=use_vmap, **request
        )
        return mask
    if use_vmap:
        raise UnsupportedModelError(
            "expected causal or sliding-window attention, got a model with mask rules of its own; "
            "secondguess cannot decode it, generate with Transformers instead"
        )
    return current.step.visible(mask_function, local_size)


def grouped_query_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    dropout: float = 0.0,
    **unused: object,
) -> tuple[Tensor, None]:
    """Attention, grouped where there are fewer key heads than query heads; returns `[row, query, head, size]`.

    Args:
        module: the attention layer that calls; only named in errors.
        query: `[row, head, query, size]`.
        key: `[row, kv_head, key, size]`, as the cache returns it.
        value: `[row, kv_head, key, value_size]`.
        attention_mask: bool, True where a query sees a key; None means causal (for one query: sees all).
        scaling: factor on the scores; the inverse root of the head size by default.
        softcap: scores are squashed to `softcap * tanh(score / softcap)` (Gemma 2).
        s_aux: per head, the score of a key that attracts attention and has no value (gpt-oss).
        position_bias: added to the scores.
        dropout: must be zero.
    """
    if dropout or any(isinstance(extra, Tensor) for name, extra in unused.items() if name != "position_ids"):
        extras = sorted(name for name, extra in unused.items() if isinstance(extra, Tensor))
        raise UnsupportedModelError(
            f"expected plain attention, got {type(module).__name__} with dropout {dropout} and inputs {extras}: "
            "they would be ignored; secondguess cannot decode this model"
        )
    if softcap is not None or s_aux is not None or position_bias is not None:
        return _explicit(query, key, value, attention_mask, scaling, softcap, s_aux, position_bias), None
    num_rows, num_heads, num_queries, _ = query.shape
    num_kv_heads = key.shape[1]
    if attention_mask is None and num_queries > 1:
        grouped = num_heads != num_kv_heads
        out = scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=grouped
        )
        return out.transpose(1, 2), None
    group = num_heads // num_kv_heads
    if group > 1:
        query = query.reshape(num_rows, num_kv_heads, group * num_queries, -1)
        if attention_mask is not None and num_queries > 1:
            attention_mask = attention_mask.repeat(1, 1, group, 1)
    out = attend_as_several(query, key, value, attention_mask, scaling)
    return out.reshape(num_rows, num_heads, num_queries, -1).transpose(1, 2), None


def attend_as_several(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None = None
) -> Tensor:
    """Masked attention `[row, kv_head, query, size]`, in which a lone query rounds as it would among others.

    On a CPU a product with a single row takes other instructions; two of them take those of any number.
    """
    if query.shape[2] > 1 or query.device.type != "cpu":
        return scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)
    twice = query.expand(-1, -1, 2, -1)
    return scaled_dot_product_attention(twice, key, value, attn_mask=mask, scale=scaling)[:, :, :1]


def _explicit(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    softcap: float | None,
    sinks: Tensor | None,
    position_bias: Tensor | None,
) -> Tensor:
    """The same, score by score, for what SDPA has no words for; the softmax is at least in float32."""
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
    if mask is not None:
        # finite, so that a query that sees nothing (the owner's padding) stays a number
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    if sinks is not None:
        sink = sinks.reshape(1, -1, 1, 1).expand(num_rows, -1, num_queries, 1)
        scores = torch.cat([scores, sink.to(scores.dtype)], dim=-1)
    exact = torch.float64 if scores.dtype == torch.float64 else torch.float32
    weights = scores.softmax(-1, dtype=exact)[..., :num_keys].to(value.dtype)
    out = weights.reshape(num_rows, num_kv_heads, -1, num_keys) @ value
    return out.reshape(num_rows, num_heads, num_queries, -1).transpose(1, 2)


def register() -> None:
    """Make `IMPLEMENTATION` known to Transformers; doing it twice changes nothing."""
    AttentionInterface.register(IMPLEMENTATION, grouped_query_attention)
    AttentionMaskInterface.register(IMPLEMENTATION, step_mask)
