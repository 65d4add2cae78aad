"""Checks for whether a model can be decoded speculatively, and properties of its configuration."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from copy import copy
from typing import Any

from secondguess.errors import UnsupportedModelError

MASKED_LAYER_TYPES = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
"""Layer types that a mask describes."""
INDEXED_LAYER_TYPES = frozenset({"indexed_attention", "deepseek_sparse_attention"})
"""Layer types that choose the keys of each query with an index of their own in the cache: both names of one, the second
that of Transformers 5.17."""
RECURRENT_LAYER_TYPES = frozenset({"conv", "hybrid", "hybrid_sliding", "linear_attention"})
"""Layer types with recurrent states, which are kept in snapshots."""
STATES_ONLY_LAYER_TYPES = frozenset({"conv", "linear_attention"})
"""Those among them that cache no keys and values."""
CACHELESS_LAYER_TYPES = frozenset({"mlp", "moe"})
"""Layer types that cache nothing."""
UNCROPPABLE_LAYER_TYPES = {
    "compressed_sparse_attention": "summaries of several tokens",
    "heavily_compressed_attention": "summaries of several tokens",
}
"""Layer types whose cache cannot forget rejected tokens, and what they cache."""
CACHE_PARAMETERS = ("cache", "past_key_values", "cache_params")
"""Names that modules have for their cache: the first since Transformers 5.24, the others before and in remote code."""
POSITION_LIMITS = {"mpt": "max_seq_len", "whisper": "max_target_positions"}
"""Names of the largest number of positions in configurations that have one of their own, by model type."""
LONGER_LIMITS = {"cohere": "model_max_length"}
"""Names of limits that may exceed `max_position_embeddings`, by model type."""
INPUT_POSITIONS = frozenset({"imagegpt"})
"""Model types with a position for each input only: the last pixel of a picture needs none."""
LENGTH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})


def check_supported(model: Any) -> None:
    """Refuse a model whose cache cannot be rolled back, with the reason.

    These are encoder-decoders, models with a cache of their own, with bidirectional attention, or without a
    language-modelling head.
    """
    name = type(model).__name__
    check_config(model.config, name)
    check_class(type(model), name)
    if model.get_output_embeddings() is None:
        raise unsupported(name, "it has no language-modelling head; load it as a causal language model")
    if model._is_stateful and not is_recurrent(model.config):
        raise unsupported(name, "it keeps recurrent states in a cache of its own")
    if not takes_masks(type(model), model.config):
        return  # `RowByRowForward` compares logits instead: cross-attention that is not used may be bidirectional
    # The attention of a vision or audio tower next to the decoder may be bidirectional.
    if any(getattr(module, "is_causal", True) is False for module in model.get_decoder().modules()):
        raise unsupported(name, "its attention is bidirectional; it is not a causal language model")


def check_class(model_class: Any, name: str) -> None:
    """Run the checks of `check_supported` that need only the model class."""
    if not cache_parameter(model_class):
        raise unsupported(name, "it takes no KV cache")


def cache_parameter(model_class: Any) -> str:
    """Return the name that a class has for its cache, as an argument and in its output; empty if it takes none."""
    parameters = inspect.signature(model_class.forward).parameters
    return next((name for name in CACHE_PARAMETERS if name in parameters), "")


def check_config(config: Any, name: str) -> None:
    """Run the checks of `check_supported` that need only the configuration."""
    if config.is_encoder_decoder:
        raise unsupported(name, "it is an encoder-decoder; secondguess decodes decoder-only models")
    if getattr(config.get_text_config(), "num_hidden_layers", None) is None:
        raise unsupported(name, "its configuration does not name one stack of layers (num_hidden_layers)")
    if getattr(config.get_text_config(), "recurrent_kv_cache_mode", "") == "last_loop":
        raise unsupported(
            name, "its first loops read the cache of the last one (recurrent_kv_cache_mode='last_loop')"
        )
    found = _layer_types(config)
    if kept := sorted(found & UNCROPPABLE_LAYER_TYPES.keys()):
        described = ", ".join(f"{kind} ({UNCROPPABLE_LAYER_TYPES[kind]})" for kind in kept)
        raise unsupported(name, f"the cache of its layers cannot forget rejected tokens: {described}")
    known = MASKED_LAYER_TYPES | INDEXED_LAYER_TYPES | RECURRENT_LAYER_TYPES | CACHELESS_LAYER_TYPES
    if unknown := sorted(found - known):
        raise unsupported(
            name, f"nothing is known about the cache of its layers of type {', '.join(unknown)}"
        )


def takes_masks(model_class: Any, config: Any) -> bool:
    """Return whether a module takes our masks, so that one pass serves ragged rows and trees."""
    return bool(model_class._supports_attention_backend) and _layer_types(config) <= MASKED_LAYER_TYPES


def is_recurrent(config: Any) -> bool:
    """Return whether layers have recurrent states."""
    return bool(_layer_types(config) & RECURRENT_LAYER_TYPES)


def _layer_types(config: Any) -> set[str]:
    return set(getattr(config.get_text_config(), "layer_types", None) or ())


def cached_layers(config: Any) -> list[Any]:
    """Return the configuration of each layer that caches keys and values.

    Heads and their sizes may differ between layers, and layers may share the keys of others (Gemma 4).
    """
    text = config.get_text_config()
    num_layers = text.num_hidden_layers
    layers = getattr(text, "per_layer_config", None) or [text] * num_layers
    sharing = getattr(text, "kv_sharing_modes", None) or [None] * num_layers
    kinds = (getattr(text, "layer_types", None) or [None] * num_layers)[:num_layers]
    without = STATES_ONLY_LAYER_TYPES | CACHELESS_LAYER_TYPES
    return [
        _with_sliding_heads(layer) if "sliding" in (kind or "") else layer
        for layer, mode, kind in zip(layers, sharing, kinds, strict=True)
        if mode != "reuse" and kind not in without
    ]


def _with_sliding_heads(layer: Any) -> Any:
    """Return the configuration of a layer with a sliding window, whose heads may be others (Inkling)."""
    names = ("num_key_value_heads", "head_dim", "v_head_dim")
    heads = {name: getattr(layer, f"swa_{name}", None) for name in names}
    if not any(heads.values()):
        return layer
    changed = copy(layer)
    for name, value in heads.items():
        if value is not None:
            setattr(changed, name, value)
    return changed


def num_kv_heads(layer: Any) -> int:
    """Return the number of key heads of a layer."""
    if getattr(layer, "multi_query", False) and not getattr(layer, "new_decoder_architecture", False):
        return 1
    return int(getattr(layer, "num_key_value_heads", None) or layer.num_attention_heads)


def cached_values_per_token(layer: Any) -> int:
    """Return how many numbers a token's keys and values have in a layer."""
    if latent := getattr(layer, "kv_lora_rank", None):  # multi-latent attention caches compressed keys
        return int(latent + layer.qk_rope_head_dim + (getattr(layer, "index_head_dim", None) or 0))
    size = getattr(layer, "head_dim", None) or layer.hidden_size // layer.num_attention_heads
    size_of_values = getattr(layer, "v_head_dim", None) or size
    return int(num_kv_heads(layer) * (size + size_of_values))


def context_length_of(config: Any) -> int | None:
    """Return a model's largest number of positions, or None if its configuration sets no limit.

    Rotary embeddings whose frequencies change with the longest row in the batch ("dynamic",
    "longrope") are used only up to the length at which they start to change: beyond it, a row's
    output would depend on the other rows of the batch. YaRN extends the context even where
    `max_position_embeddings` was left as it was, as model cards of Qwen advise. Doge drops keys beyond
    `keep_window_size` tokens; which of equal ones it drops would depend on the shape of the pass.
    """
    kind = getattr(config, "model_type", "")
    rope = getattr(config, "rope_parameters", None) or {}
    ropes = [rope, *(each for each in rope.values() if isinstance(each, Mapping))]
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None:
        longer = getattr(config, LONGER_LIMITS.get(kind, ""), None) or 0
        positions = max(positions, longer, *map(_yarn_length, ropes))
    others = [getattr(config, name, None) for name in ("keep_window_size", POSITION_LIMITS.get(kind, ""))]
    limit: int | None = min((each for each in (positions, *others) if each is not None), default=None)
    if limit is not None and kind in INPUT_POSITIONS:
        return limit + 1
    changing = [each for each in ropes if each.get("rope_type") in LENGTH_DEPENDENT_ROPE]
    lengths = [limit, *(each.get("original_max_position_embeddings") for each in changing)]
    return min((each for each in lengths if each is not None), default=None)


def _yarn_length(rope: Mapping[str, Any]) -> int:
    """Return the length to which YaRN extends the context; 0 for other rotary positions."""
    factor, original = rope.get("factor"), rope.get("original_max_position_embeddings")
    return int(factor * original) if rope.get("rope_type") == "yarn" and factor and original else 0


def unsupported(name: str, reason: str) -> UnsupportedModelError:
    """Return the error for a model that cannot be decoded speculatively."""
    return UnsupportedModelError(f"{name} cannot be decoded speculatively: {reason}")
