"""Attention for Transformers modules: grouped queries without repeated keys, and tree masks.

The attention function and the mask function are registered under one name. Without the mask
function attention would silently include future tokens, because Transformers then passes no mask
at all. Outside a runtime's forward pass both behave like the stock SDPA implementation, so that a
model with this implementation can still be called directly.
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
MIN_QUERIES = 4
"""Bits were seen to depend on the number of queries below 2 with AMX, and below 4 with AVX-512 bfloat16."""
MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class ForwardStep:
    """Positions and mask of the queries of one forward pass.

    Args:
        mask: `[row or 1, 1, query, key]` bool; None if the causal rule over text positions
            suffices.
        query_positions: `[row or 1, query]` int64, text positions.
        num_keys: number of cache positions that are read.
        key_positions: `[row, key]` int64, text position of the token in each cache position; None
            if the two are equal, as they are unless a tree was drafted.
        start: position of the first query, in the cache and in the text, if all rows' queries are
            consecutive from there; None if rows differ or branch.
        starts: cached positions before each row's first query, for runtimes without masks.
        closure: `[row, query, query]` bool, True at a query's ancestors and itself, for runtimes
            without masks; None for chains.
    """

    mask: Tensor | None
    query_positions: Tensor
    num_keys: int
    key_positions: Tensor | None = None
    start: int | None = None
    starts: Sequence[int] = ()
    closure: Tensor | None = None

    def drop_first(self, count: int) -> ForwardStep:
        """Return the step without its first `count` queries."""
        if count == 0:
            return self
        return replace(
            self,
            mask=None if self.mask is None else self.mask[:, :, count:],
            query_positions=self.query_positions[:, count:],
            start=None if self.start is None else self.start + count,
        )

    def visible(self, mask_function: MaskFunction, window: int | None) -> Tensor | None:
        """Return the mask for a layer type whose causal or sliding-window rule is `mask_function`.

        Windows are counted in text positions: siblings in a tree are equally far from their
        prefix.
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
    step: ForwardStep | None = None


current = _Current()
"""Step of this thread's current forward pass, set by the runtime and read by `step_mask`."""


def step_mask(
    *,
    mask_function: MaskFunction,
    local_size: int | None = None,
    use_vmap: bool = False,
    allow_is_causal_skip: bool = True,
    **request: object,
) -> Tensor | None:
    """Return the mask of the current step, or the stock SDPA mask if there is none."""
    if current.step is None:
        mask: Tensor | None = sdpa_mask(
            mask_function=mask_function,
            local_size=local_size,
            use_vmap=use_vmap,
            allow_is_causal_skip=allow_is_causal_skip,
            **request,
        )
        return mask
    if use_vmap:
        raise UnsupportedModelError(
            "expected causal or sliding-window attention, got a model with mask rules of its own; "
            "secondguess cannot decode it, generate with Transformers instead"
        )
    visible = current.step.visible(mask_function, local_size)
    if visible is None and not allow_is_causal_skip:
        queries = current.step.query_positions
        keys = torch.arange(current.step.num_keys, device=queries.device)
        return keys <= queries[:, None, :, None]
    return visible


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
    is_causal: bool | None = None,
    dropout: float = 0.0,
    **unused: object,
) -> tuple[Tensor, None]:
    """Compute grouped-query attention and return `[row, query, head, size]`.

    Args:
        module: the calling attention layer, used in error messages only.
        query: `[row, head, query, size]`.
        key: `[row, kv_head, key, size]`, as the cache returns it.
        value: `[row, kv_head, key, value_size]`.
        attention_mask: `[row or 1, head or 1, query, key]`, True where a query attends to a key, or
            numbers to add to the scores; None means causal (a single query attends to all keys)
            unless the layer is that of an encoder.
        scaling: factor on the scores; the inverse square root of the head size by default.
        softcap: replaces scores by `softcap * tanh(score / softcap)` (Gemma 2).
        s_aux: score per head of an attention sink, a key without a value (gpt-oss).
        position_bias: added to the scores.
        is_causal: whether a layer without a mask is causal; by default as its module says.
        dropout: must be zero.

    Raises:
        UnsupportedModelError: for dropout and for further tensor inputs, which would be ignored.
    """
    if dropout or any(isinstance(extra, Tensor) for name, extra in unused.items() if name != "position_ids"):
        extras = sorted(name for name, extra in unused.items() if isinstance(extra, Tensor))
        raise UnsupportedModelError(
            f"expected plain attention, got {type(module).__name__} with dropout {dropout} and inputs {extras}: "
            "they would be ignored; secondguess cannot decode this model"
        )
    if softcap is not None or s_aux is not None or position_bias is not None:
        return explicit_attention(
            query, key, value, attention_mask, scaling, softcap, s_aux, position_bias
        ), None
    num_rows, num_heads, num_queries, _ = query.shape
    num_kv_heads = key.shape[1]
    if attention_mask is None and num_queries > 1:
        grouped = num_heads != num_kv_heads
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        out = scaled_dot_product_attention(
            query, key, value, is_causal=causal, scale=scaling, enable_gqa=grouped
        )
        return out.transpose(1, 2).contiguous(), None
    group = num_heads // num_kv_heads
    if group > 1:
        query = query.reshape(num_rows, num_kv_heads, group * num_queries, -1)
        if attention_mask is not None and attention_mask.shape[1] > 1:
            attention_mask = attention_mask.reshape(
                attention_mask.shape[0], num_kv_heads, group * num_queries, -1
            )
        elif attention_mask is not None and num_queries > 1:
            attention_mask = attention_mask.repeat(1, 1, group, 1)
    out = masked_attention(query, key, value, attention_mask, scaling)
    # Modules may use `view`, as the attention functions of Transformers return contiguous tensors.
    return out.reshape(num_rows, num_heads, num_queries, -1).transpose(1, 2).contiguous(), None


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


def register() -> None:
    """Register both functions with Transformers; repeated calls have no effect."""
    AttentionInterface.register(IMPLEMENTATION, grouped_query_attention)
    AttentionMaskInterface.register(IMPLEMENTATION, step_mask)
