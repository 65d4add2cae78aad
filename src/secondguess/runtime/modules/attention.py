"""Attention for Transformers modules: grouped queries without repeated keys, and tree masks.

The attention function and the mask function are registered under one name. Without the mask
function attention would silently include future tokens, because Transformers then passes no mask
at all. Outside a runtime's forward pass both behave like the stock SDPA implementation, so that a
model with this implementation can still be called directly.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from secondguess.errors import UnsupportedModelError
from secondguess.runtime.decoder.scores import explicit_attention, masked_attention
from secondguess.runtime.step import ForwardStep, MaskFunction
from secondguess.runtime.system.quiet import quiet

with quiet():
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import causal_mask_function, sdpa_mask

IMPLEMENTATION = "secondguess"


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
    rule = None if mask_function is causal_mask_function else mask_function
    visible = current.step.visible(rule, local_size)
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


def register() -> None:
    """Register both functions with Transformers; repeated calls have no effect."""
    AttentionInterface.register(IMPLEMENTATION, grouped_query_attention)
    AttentionMaskInterface.register(IMPLEMENTATION, step_mask)
