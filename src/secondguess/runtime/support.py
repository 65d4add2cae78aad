"""Checks for whether a model can be decoded speculatively, and properties of the machine."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch

from secondguess.errors import UnsupportedModelError
from secondguess.runtime.cgroup import cpu_quota

LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
MAX_THREADS = 1023
"""Largest number of threads of the kernels (see `native/team.h`)."""
LENGTH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})


def check_supported(model: Any) -> None:
    """Raise an error with the reason if a model cannot be masked or rolled back.

    Raises:
        UnsupportedModelError: for encoder-decoders, recurrent and hybrid models, models with
            bidirectional attention, models without a language-modelling head, and models without
            the attention interface of Transformers.
    """
    name = type(model).__name__
    check_config(model.config, name)
    check_class(type(model), name)
    if model.get_output_embeddings() is None:
        raise _unsupported(name, "it has no language-modelling head; load it as a causal language model")
    if any(getattr(module, "is_causal", True) is False for module in model.modules()):
        raise _unsupported(name, "its attention looks at both sides, it is not a causal language model")


def check_class(model_class: Any, name: str) -> None:
    """Run the checks of `check_supported` that need only the model class."""
    if model_class._is_stateful:
        raise _unsupported(name, "it has recurrent state, which cannot forget rejected tokens")
    if not model_class._supports_attention_backend:
        raise _unsupported(
            name, "it does not use the attention interface of Transformers, which our masks need"
        )


def check_config(config: Any, name: str) -> None:
    """Run the checks of `check_supported` that need only the configuration."""
    if config.is_encoder_decoder:
        raise _unsupported(name, "it is an encoder-decoder; secondguess decodes decoder-only models")
    found = set(getattr(config.get_text_config(), "layer_types", None) or LAYER_TYPES)
    if found - LAYER_TYPES:
        foreign = ", ".join(sorted(found - LAYER_TYPES))
        raise _unsupported(
            name,
            f"its layers of type {foreign} are recurrent, or no attention that can forget rejected tokens",
        )


def context_length_of(config: Any) -> int | None:
    """Return a model's largest number of positions, or None if its configuration sets no limit.

    Rotary embeddings whose frequencies change with the longest row in the batch ("dynamic",
    "longrope") are used only up to the length at which they start to change: beyond it, a row's
    output would depend on the other rows of the batch.
    """
    limit: int | None = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") in LENGTH_DEPENDENT_ROPE:
        original: int | None = rope.get("original_max_position_embeddings")
        known = [length for length in (limit, original) if length is not None]
        return min(known) if known else None
    return limit


def _unsupported(name: str, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"{name} cannot be decoded speculatively: {reason}")


def has_bfloat16(device: torch.device) -> bool:
    """Return whether torch's bfloat16 products are fast on a device.

    Elsewhere they are ten times slower than float32 products.
    """
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    # the supported torch versions have no public function for this
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


_threads_of_parent: int | None = None


def num_threads() -> int:
    """Return the number of threads of the kernels: torch's, at most the processors of the cgroup.

    More threads than the quota allows would be stopped together for the rest of each period.
    """
    return min(_threads_of_parent or torch.get_num_threads(), _num_processors_of_cgroup())


@lru_cache(maxsize=1)
def _num_processors_of_cgroup() -> int:
    quota = cpu_quota()
    return MAX_THREADS if quota is None else max(1, math.ceil(quota))


def keep_num_threads() -> None:
    """Keep the present `num_threads` when the number of torch's threads changes."""
    global _threads_of_parent
    _threads_of_parent = _threads_of_parent or torch.get_num_threads()
