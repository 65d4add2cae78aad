"""Model info, compatibility and memory of checkpoints, determined without reading their weights."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import torch

from secondguess.checkpoint.memory import MemoryEstimate, available_memory, head_memory, peak_memory
from secondguess.checkpoint.plan import DEFAULT_CONTEXT, Checkpoint, require_torchao
from secondguess.checkpoint.verdicts import read_verdict, verdict_file
from secondguess.errors import BadInputError, CheckpointError, UnsupportedModelError
from secondguess.runtime.cache import KeyValueCache
from secondguess.runtime.coverage import unsupported_reason
from secondguess.runtime.decoder.families import FAMILIES, missing_weights, undescribed_reason
from secondguess.runtime.modules.support import cached_layers, check_supported, num_kv_heads
from secondguess.runtime.system.quiet import quiet
from secondguess.runtime.weight_format import INT4, QUANTIZATIONS

MAX_ROWS = 100_000
MAX_CONTEXT = 100_000_000
"""Limit for a model whose configuration sets none."""


@dataclass(frozen=True)
class ModelDescription:
    """Model info of a model that can be decoded speculatively.

    Args:
        architecture: class of the model in Transformers.
        attention: number of layers of each type, such as `full_attention` or `linear_attention`.
        num_heads, num_kv_heads: of the layer with most; 0 without attention.
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


def describe(checkpoint: Checkpoint) -> ModelDescription:
    """Return model info from the configuration, the tokenizer and the headers of the weight files.

    Raises:
        CheckpointError: if the tokenizer or a weight file is broken.
        UnsupportedModelError: if the model cannot be decoded speculatively.
    """
    config, is_described = checkpoint.config, undescribed_reason(checkpoint.config) is None
    if is_described:
        architecture = (
            config.architectures or [re.sub("(Text)?Config$", "ForCausalLM", type(config).__name__)]
        )[0]
        num_parameters, vocab_size = checkpoint.num_parameters, config.vocab_size
        _check_weights(checkpoint)
    else:
        with quiet():
            model = checkpoint.outline()
        check_supported(model)
        architecture, vocab_size = type(model).__name__, model.get_output_embeddings().weight.shape[0]
        num_parameters = sum(parameter.numel() for parameter in model.parameters())
        _check_size(checkpoint, num_parameters)
    text, layers = config.get_text_config(), cached_layers(config)
    need = checkpoint.memory(checkpoint.context_length or DEFAULT_CONTEXT)
    attention = _count_attention_types(text)
    runtime, not_native = checkpoint.runtimes[0], ""
    if runtime == "native" and checkpoint.runtime == "auto" and (refusal := _refusal(checkpoint)):
        runtime, not_native = checkpoint.runtimes[1], refusal
    elif runtime != "native":
        obstacle = unsupported_reason("native", config, checkpoint.dtype, checkpoint.device)
        not_native = obstacle or f"runtime {checkpoint.runtime} was asked for"
    return ModelDescription(
        name=checkpoint.name,
        path=checkpoint.path,
        architecture=architecture,
        model_type=config.model_type,
        num_parameters=num_parameters,
        num_layers=checkpoint.num_layers,
        hidden_size=text.hidden_size,
        num_heads=max((layer.num_attention_heads for layer in layers), default=0),
        num_kv_heads=max(map(num_kv_heads, layers), default=0),
        vocab_size=vocab_size,
        num_tokens=len(checkpoint.tokenizer),
        context_length=checkpoint.context_length,
        attention=attention,
        sliding_window=getattr(text, "sliding_window", None) if "sliding_attention" in attention else None,
        dtype=checkpoint.dtype_name,
        device=str(checkpoint.device),
        runtime=runtime,
        not_native=not_native,
        weights_bytes=need.weights,
        cache_bytes=need.cache,
        available_bytes=available_memory(checkpoint.device),
    )


def _check_weights(checkpoint: Checkpoint) -> None:
    """Check that there are all weights that the configuration asks for, where they can be read one by one."""
    source = checkpoint.files
    source.require_weights()
    if not source.has_single_weights:
        return
    with source.reading("weights"):
        missing = missing_weights(checkpoint.config, source.weights(checkpoint.device))
    if missing and not any("experts" in name for name in missing):  # Transformers may have joined those
        raise CheckpointError(
            f"expected the weights that the configuration of {checkpoint.path} asks for, got none for {len(missing)} of them, "
            f"such as {missing[0]}; copy or download the checkpoint again"
        )


def _check_size(checkpoint: Checkpoint, num_parameters: int) -> None:
    """Check that there are weights and, in unquantised safetensors, as many numbers as the configuration asks for.

    They may have more than that, such as an image encoder.
    """
    source = checkpoint.files
    source.require_weights()
    if checkpoint.encoding is not None or hasattr(checkpoint.config, "quantization_config"):
        return
    stored = source.count_parameters()
    if source.has_single_weights and stored < num_parameters:
        raise CheckpointError(
            f"expected weights of {num_parameters:,} parameters in {checkpoint.path}, as its configuration says, "
            f"got {stored:,}; copy or download the checkpoint again"
        )


def _refusal(checkpoint: Checkpoint) -> str | None:
    """Return why an earlier check at loading refused the kernels; None unless it did in every encoding."""
    found = ""
    for weight_format in checkpoint.weight_formats:
        verdict = read_verdict(verdict_file(checkpoint, weight_format))
        if verdict is None or verdict.passes:
            return None
        found = f"its check at loading failed: {verdict.description}"
    return found


def _count_attention_types(config: Any) -> dict[str, int]:
    if config.model_type in FAMILIES:  # a configuration may name windows that are not used
        windows = FAMILIES[config.model_type].windows(config)
        return dict(Counter("sliding_attention" if window else "full_attention" for window in windows))
    kind = "sliding_attention" if getattr(config, "sliding_window", None) else "full_attention"
    return dict(Counter(getattr(config, "layer_types", None) or [kind] * config.num_hidden_layers))


def compatibility_notes(
    target: ModelDescription, drafter: ModelDescription, one_tokenizer: bool = True
) -> list[str]:
    """Return remarks on permitted differences between a target and a draft model."""
    notes = []
    if one_tokenizer and drafter.vocab_size != target.vocab_size:
        notes.append(
            f"vocabularies of {drafter.vocab_size:,} and {target.vocab_size:,} with one tokenizer: the rest is padding"
        )
    limit = drafter.context_length or MAX_CONTEXT
    if limit < (target.context_length or MAX_CONTEXT):
        notes.append(f"a text beyond the draft model's context of {limit:,} tokens continues without drafts")
    if drafter.num_parameters >= target.num_parameters:
        notes.append("the draft model is not smaller than the target: it costs more than it can save")
    return notes


@dataclass(frozen=True)
class MemoryPlan:
    """Memory of a target and a drafter when all rows are full.

    Args:
        rows: number of concurrent sequences.
        context: tokens per sequence.
        needs: weights and caches by part: `target`, and `drafter` if it has a model.
        quantised: bytes of the weights by quantization and part, where it is available.
        int8_obstacle: reason why int8 is not available for the target; empty if it is.
        head_bytes: bytes of a head trained for the target, 0 if there is none.
        available_bytes: memory available on the device; None if unknown.
    """

    rows: int
    context: int
    needs: dict[str, MemoryEstimate]
    quantised: dict[str, dict[str, int]]
    int8_obstacle: str
    head_bytes: int
    available_bytes: int | None

    @property
    def total_bytes(self) -> int:
        """Sum of all parts, and `loading_bytes`."""
        return peak_memory(self._parts)

    @property
    def loading_bytes(self) -> int:
        """Bytes that loading temporarily takes beyond the sum of all parts."""
        return self.total_bytes - sum(part.total for part in self._parts)

    @property
    def _parts(self) -> list[MemoryEstimate]:
        return [*self.needs.values(), head_memory("head", self.head_bytes)]

    @property
    def missing_bytes(self) -> int | None:
        """Bytes that are missing; 0 if everything fits, None if available memory is unknown."""
        return None if self.available_bytes is None else max(0, self.total_bytes - self.available_bytes)

    def as_dict(self) -> dict[str, object]:
        parts = {
            part: {"weights_bytes": need.weights, "cache_bytes": need.cache}
            for part, need in self.needs.items()
        }
        return {
            "rows": self.rows,
            "context": self.context,
            "target": parts["target"],
            "drafter": parts.get("drafter"),
            "head_bytes": self.head_bytes,
            "total_bytes": self.total_bytes,
            "available_bytes": self.available_bytes,
            "fits": None if self.missing_bytes is None else self.missing_bytes == 0,
            **{f"{name}_weights_bytes": num_bytes for name, num_bytes in self.quantised.items()},
            "int8_obstacle": self.int8_obstacle,
        }


def plan_memory(
    target: Checkpoint,
    drafter: Checkpoint | None = None,
    *,
    rows: int = 1,
    context: int | None = None,
    head_bytes: int = 0,
) -> MemoryPlan:
    """Return the memory of weights and caches, with caches of the size that is really allocated.

    Args:
        target: the target.
        drafter: the draft model; None if the drafter has no model.
        rows: number of concurrent sequences.
        context: tokens per sequence; by default as many as `load` checks memory for.
        head_bytes: bytes of a head trained for the target.

    Raises:
        BadInputError: if a number is out of range, or the context exceeds the model's.
    """
    limit = target.context_length or MAX_CONTEXT
    context = min(DEFAULT_CONTEXT, limit) if context is None else context
    if not 1 <= context <= limit:
        raise BadInputError(f"expected a context from 1 to {limit} tokens (the model's limit), got {context}")
    if not 1 <= rows <= MAX_ROWS:
        raise BadInputError(f"expected rows from 1 to {MAX_ROWS}, got {rows}")
    parts = {"target": target} | ({} if drafter is None else {"drafter": drafter})
    needs = {part: _memory_of_rows(each, rows, context) for part, each in parts.items()}
    quantised = {
        name: {part: size for part, each in parts.items() if (size := _quantised_bytes(each, name))}
        for name in QUANTIZATIONS
    }
    obstacle = ""
    if "target" not in quantised[INT4.name]:  # the kernels do not run it
        try:
            require_torchao()
        except BadInputError as error:
            obstacle = str(error)
    return MemoryPlan(rows, context, needs, quantised, obstacle, head_bytes, available_memory(target.device))


def _quantised_bytes(checkpoint: Checkpoint, quantize: str) -> int | None:
    """Return the bytes of a model's weights under a quantization; None if it is not available."""
    # These runtimes do not run quantised weights.
    runtime = "auto" if checkpoint.runtime in ("fused", "graphs") else checkpoint.runtime
    try:
        return replace(checkpoint, quantize=quantize, runtime=runtime).memory().weights
    except UnsupportedModelError:
        return None


def _memory_of_rows(checkpoint: Checkpoint, rows: int, context: int) -> MemoryEstimate:
    # A draft model does not draft for rows longer than its own context.
    tokens = min(context, checkpoint.context_length or MAX_CONTEXT)
    return checkpoint.memory(KeyValueCache(torch.device("cpu")).num_tokens_to_allocate(rows, tokens))
