"""Compatibility and memory of a target and a draft model, checked without reading any weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from secondguess.errors import BadInputError
from secondguess.runtime.cache import KeyValueCache
from secondguess.runtime.describe import DEFAULT_CONTEXT, ModelDescription
from secondguess.runtime.loading import (
    check_quantization,
    check_tokenizers,
    estimate_load_memory,
    read_tokenizer,
)
from secondguess.runtime.memory import MemoryEstimate, available_memory, peak_memory

INT8 = "int8"
MAX_ROWS = 100_000
MAX_CONTEXT = 100_000_000
"""Limit for a model whose configuration sets none."""


@dataclass(frozen=True)
class MemoryPlanInput:
    """Load settings, batch size and context length that memory is planned for.

    Args:
        dtype, device: as in `load_runtime`.
        rows: number of concurrent sequences.
        context: tokens per sequence.

    Raises:
        BadInputError: if `rows` or `context` is out of range.
    """

    dtype: str = "auto"
    device: str = "auto"
    rows: int = 1
    context: int = DEFAULT_CONTEXT

    def __post_init__(self) -> None:
        if not 1 <= self.rows <= MAX_ROWS:
            raise BadInputError(f"expected rows from 1 to {MAX_ROWS}, got {self.rows}")
        if not 1 <= self.context <= MAX_CONTEXT:
            raise BadInputError(f"expected a context from 1 to {MAX_CONTEXT} tokens, got {self.context}")


@dataclass(frozen=True)
class MemoryPlan:
    """Memory of a target and a drafter when all rows are full.

    Args:
        demand: rows and context that memory is planned for.
        target, drafter: weights and caches; `drafter` is None if it has no model.
        head_bytes: bytes of a head trained for the target, 0 if there is none.
        int8: bytes of the weights in 8 bits, by `target` and `drafter`.
        int8_obstacle: reason why int8 is not available for the target; empty if it is.
        total_bytes: sum of all parts, with what loading temporarily takes beyond it.
        available_bytes: memory available on the device; None if unknown.
    """

    demand: MemoryPlanInput
    target: MemoryEstimate
    drafter: MemoryEstimate | None
    head_bytes: int
    int8: dict[str, int]
    int8_obstacle: str
    total_bytes: int
    available_bytes: int | None

    @property
    def missing_bytes(self) -> int | None:
        """Bytes that are missing; 0 if everything fits, None if available memory is unknown."""
        return None if self.available_bytes is None else max(0, self.total_bytes - self.available_bytes)

    def as_dict(self) -> dict[str, object]:
        missing = self.missing_bytes
        return {
            "rows": self.demand.rows,
            "context": self.demand.context,
            "target": _as_dict(self.target),
            "drafter": None if self.drafter is None else _as_dict(self.drafter),
            "head_bytes": self.head_bytes,
            "total_bytes": self.total_bytes,
            "available_bytes": self.available_bytes,
            "fits": None if missing is None else missing == 0,
            "int8_weights_bytes": self.int8,
            "int8_obstacle": self.int8_obstacle,
        }


def plan_demand(target: ModelDescription, *, rows: int | None, context: int | None) -> MemoryPlanInput:
    """Return the rows and the context to plan memory for.

    Args:
        target: description of the target.
        rows: number of concurrent sequences; 1 by default.
        context: tokens per sequence; by default as many as `load` checks memory for.

    Raises:
        BadInputError: if a number is out of range, or the context exceeds the model's.
    """
    limit = _positions(target)
    if context is not None and context > limit:
        raise BadInputError(f"expected a context of at most {limit} tokens (the model's), got {context}")
    tokens = min(DEFAULT_CONTEXT, limit) if context is None else context
    return MemoryPlanInput(target.dtype, target.device, 1 if rows is None else rows, tokens)


def plan_memory(
    demand: MemoryPlanInput,
    target: ModelDescription,
    drafter: ModelDescription | None,
    *,
    quantize: str | None = None,
    drafter_quantize: str | None = None,
    head_bytes: int = 0,
) -> MemoryPlan:
    """Return the memory of weights and caches, with caches of the size that is really allocated.

    Args:
        demand: rows and context to plan for.
        target: description of the target.
        drafter: description of the draft model; None if the drafter has no model.
        quantize, drafter_quantize: quantization of the target and of the draft model.
        head_bytes: bytes of a head trained for the target.
    """
    need = _need(demand, target, quantize, drafts=False)
    int8 = {"target": _need(demand, target, INT8, drafts=False).weights}
    guessing = None
    if drafter is not None:
        guessing = _need(demand, drafter, drafter_quantize, drafts=True)
        int8["drafter"] = _need(demand, drafter, INT8, drafts=True).weights
    needs = [need] if guessing is None else [need, guessing]
    available = available_memory(torch.device(demand.device))
    total = peak_memory(needs) + head_bytes
    return MemoryPlan(demand, need, guessing, head_bytes, int8, _obstacle_to_int8(target), total, available)


def compatibility_notes(target: ModelDescription, drafter: ModelDescription) -> list[str]:
    """Return remarks on permitted differences between a target and a draft model.

    Raises:
        CheckpointError: if the tokenizers differ.
    """
    check_tokenizers(target.name, read_tokenizer(target.path), drafter.name, read_tokenizer(drafter.path))
    remarks = []
    if drafter.vocab_size != target.vocab_size:
        remarks.append(
            f"vocabularies of {drafter.vocab_size:,} and {target.vocab_size:,} with one tokenizer: the rest is padding"
        )
    if _positions(drafter) < _positions(target):
        remarks.append(
            f"a row that outgrows the draft model's {_positions(drafter):,} tokens goes on without drafts"
        )
    if drafter.num_parameters >= target.num_parameters:
        remarks.append("the draft model is not smaller than the target: it costs more than it can save")
    return remarks


def _obstacle_to_int8(model: ModelDescription) -> str:
    try:
        check_quantization(INT8, by_kernels=not model.not_native)
    except BadInputError as error:
        return str(error)
    return ""


def _positions(model: ModelDescription) -> int:
    return model.context_length or MAX_CONTEXT


def _need(
    demand: MemoryPlanInput, model: ModelDescription, quantize: str | None, drafts: bool
) -> MemoryEstimate:
    # A draft model does not draft for rows longer than its own context.
    tokens = min(demand.context, _positions(model))
    cached = KeyValueCache(torch.device("cpu")).num_tokens_to_allocate(demand.rows, tokens)
    return estimate_load_memory(
        model.name,
        dtype=demand.dtype,
        device=demand.device,
        quantize=quantize,
        num_cached_tokens=cached,
        drafts=drafts,
        runtime=model.runtime,
    )


def _as_dict(need: MemoryEstimate) -> dict[str, int]:
    return {"weights_bytes": need.weights, "cache_bytes": need.cache}
