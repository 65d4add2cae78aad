"""Model info and memory of a checkpoint, determined without reading its weights."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch

from secondguess.runtime.families import FAMILIES, can_fuse
from secondguess.runtime.loading import (
    check_loadable,
    check_quantization,
    check_runtime,
    estimate_load_memory,
    find_checkpoint,
    not_covered,
    pick_device,
    pick_dtype,
    read_config,
    read_tokenizer,
)
from secondguess.runtime.memory import available_memory
from secondguess.runtime.native.decoder import why_not_native
from secondguess.runtime.quiet import quiet
from secondguess.runtime.support import check_supported, context_length_of

with quiet():
    from transformers import AutoModelForCausalLM

DEFAULT_CONTEXT = 4096
"""Context in tokens that is assumed for a model whose configuration sets no limit."""


@dataclass(frozen=True)
class ModelDescription:
    """Model info of a model that can be decoded speculatively.

    Args:
        architecture: class of the model in Transformers.
        attention: number of layers of each type, `full_attention` or `sliding_attention`.
        sliding_window: window of the sliding layers in tokens; None if there are none.
        vocab_size: width of the logits.
        num_tokens: tokens of the tokenizer; the rest of the vocabulary is padding.
        context_length: largest number of positions; None if the configuration sets no limit.
        dtype, device: dtype and device that loading would choose.
        runtime: runtime that loading would choose: `native` or `fused`, provided that a probe at
            loading confirms it, or `transformers`.
        not_native: reason why the kernels do not run the model; empty if they do.
        weights_bytes, cache_bytes: memory for the weights, and for one row that fills the context
            (4096 tokens if there is no limit).
        available_bytes: memory available on the device; None if unknown.
    """

    name: str
    path: str
    architecture: str
    model_type: str
    num_parameters: int
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    vocab_size: int
    num_tokens: int
    context_length: int | None
    attention: dict[str, int]
    sliding_window: int | None
    dtype: str
    device: str
    runtime: str
    not_native: str
    weights_bytes: int
    cache_bytes: int
    available_bytes: int | None


def describe_model(
    name: str,
    *,
    dtype: str = "auto",
    device: str = "auto",
    quantize: str | None = None,
    drafts: bool = False,
    runtime: str = "auto",
) -> ModelDescription:
    """Return model info from the configuration, the tokenizer and the headers of the weight files.

    Args:
        name, dtype, device, quantize, drafts, runtime: as in `load_runtime`.

    Raises:
        BadInputError: if the dtype, device, quantization or runtime is not available.
        CheckpointError: if the checkpoint is missing, broken or of the wrong kind.
        UnsupportedModelError: if the model cannot be decoded speculatively, or not by this
            runtime.
    """
    check_runtime(runtime)
    place = pick_device(device)
    path = find_checkpoint(name)
    config = read_config(path)
    check_loadable(config, path)
    with quiet(), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    check_supported(model)
    text = config.get_text_config()
    context = context_length_of(text)
    number = pick_dtype(dtype, place, config, runtime)
    by_kernels = runtime != "transformers" and why_not_native(config, number, place) is None
    check_quantization(quantize, by_kernels=by_kernels)
    need = estimate_load_memory(
        name,
        dtype=dtype,
        device=device,
        quantize=quantize,
        num_cached_tokens=context or DEFAULT_CONTEXT,
        drafts=drafts,
        runtime=runtime,
    )
    attention = _attention_of(text)
    return ModelDescription(
        name=name,
        path=path,
        architecture=type(model).__name__,
        model_type=config.model_type,
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        num_layers=text.num_hidden_layers,
        hidden_size=text.hidden_size,
        num_heads=text.num_attention_heads,
        num_kv_heads=getattr(text, "num_key_value_heads", None) or text.num_attention_heads,
        vocab_size=model.get_output_embeddings().weight.shape[0],
        num_tokens=len(read_tokenizer(path)),
        context_length=context,
        attention=attention,
        sliding_window=_window_of(text) if "sliding_attention" in attention else None,
        dtype=str(number).removeprefix("torch."),
        device=str(place),
        **_runtime_of(config, number, place, runtime, quantize),
        weights_bytes=need.weights,
        cache_bytes=need.cache,
        available_bytes=available_memory(place),
    )


def _runtime_of(
    config: Any, dtype: torch.dtype, place: torch.device, kind: str, quantize: str | None
) -> dict[str, str]:
    """Return the first permitted runtime that covers the model, as `make_runtime` tries them."""
    obstacle = why_not_native(config, dtype, place)
    if obstacle is None and kind in ("auto", "native"):
        return {"runtime": "native", "not_native": ""}
    not_native = obstacle or f"runtime {kind} was asked for"
    if kind in ("auto", "fused") and quantize is None and can_fuse(config, place):
        return {"runtime": "fused", "not_native": not_native}
    if kind in ("native", "fused"):
        raise not_covered(kind, config, dtype, place, quantize)
    return {"runtime": "transformers", "not_native": not_native}


def _attention_of(config: Any) -> dict[str, int]:
    if config.model_type in FAMILIES:  # a configuration may name windows that are not used
        windows = FAMILIES[config.model_type].windows(config)
        return dict(Counter("sliding_attention" if window else "full_attention" for window in windows))
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        kinds = ["sliding_attention" if _window_of(config) else "full_attention"] * config.num_hidden_layers
    return dict(Counter(kinds))


def _window_of(config: Any) -> int | None:
    window: int | None = getattr(config, "sliding_window", None)
    return window
