"""Errors for targets without the layers or the copies that a drafter needs."""

from __future__ import annotations

from secondguess.errors import UnsupportedModelError
from secondguess.runtime.weight_format import WeightFormat


def partial_forward_error() -> UnsupportedModelError:
    """Return the error for a target whose layers cannot be run separately."""
    return UnsupportedModelError(
        "expected a target whose layers run one by one, got one that runs as a whole; load it with runtime native, fused "
        "or graphs if one covers the model (docs/runtimes.md), or use a drafter that does without, such as suffix"
    )


def quantised_copy_error(weight_format: WeightFormat, target: str) -> UnsupportedModelError:
    """Return the error for a target that cannot be copied with quantised weights."""
    return UnsupportedModelError(
        f"cannot copy the target in {weight_format.name}: it is {target}. Targets are copied that the compiled kernels run in "
        "bfloat16, that the graphs runtime runs, or that are Transformers modules mostly of linear layers on a CPU. Load a "
        "checkpoint that is not quantised with dtype bfloat16 and without quantize, or use another drafter, such as suffix."
    )
