"""Export of a recommended drafter and draft length as another engine's configuration.

To add an engine, add an `ExportTarget` to `engines.py` and one line in `ENGINES`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from secondguess.errors import BadInputError

if TYPE_CHECKING:
    from secondguess.export.base import ExportResult, ExportTarget, Recommendation

ENGINES = {
    "vllm": "secondguess.export.engines:VLLM",
    "sglang": "secondguess.export.engines:SGLANG",
    "llama.cpp": "secondguess.export.engines:LLAMA_CPP",
}
"""Import path `module:name` of each `ExportTarget` by engine name; imported on demand."""


def check_engine(name: str) -> None:
    """Raise a BadInputError for an engine that does not exist, without importing torch."""
    if name not in ENGINES:
        raise BadInputError(f"expected an engine among {', '.join(ENGINES)}, got {name!r}")


def export(recommendation: Recommendation, engine: str) -> ExportResult:
    """Return the configuration of an engine for a recommendation.

    Raises:
        BadInputError: an unknown engine, or one that does not support the drafter, the draft
            length or the dtype.
    """
    check_engine(engine)
    module, _, name = ENGINES[engine].partition(":")
    found: ExportTarget = getattr(import_module(module), name)
    return found.export(recommendation)
