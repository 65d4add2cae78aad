"""A recommendation as another engine's own configuration. To add an engine: one file, one line in `ENGINES`."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from secondguess.errors import BadInputError

if TYPE_CHECKING:
    from secondguess.export.base import Engine, Exported, Recommendation

ENGINES = {
    "vllm": "secondguess.export.vllm:VLLM",
    "sglang": "secondguess.export.sglang:SGLANG",
    "llama.cpp": "secondguess.export.llama_cpp:LLAMA_CPP",
    "transformers": "secondguess.export.transformers:TRANSFORMERS",
    "tensorrt-llm": "secondguess.export.tensorrt_llm:TENSORRT_LLM",
}
"""Name of an engine -> where its `Engine` is; imported only when it is asked for."""


def check_engine(name: str) -> None:
    """Refuse an engine that does not exist, without importing torch.

    Raises:
        BadInputError: listing those there are.
    """
    if name not in ENGINES:
        raise BadInputError(f"expected an engine among {', '.join(ENGINES)}, got {name!r}")


def export(recommendation: Recommendation, engine: str) -> Exported:
    """The recommendation in the words of an engine.

    Raises:
        BadInputError: no such engine, or one that has no counterpart of the drafter, its length or the dtype.
    """
    check_engine(engine)
    module, _, name = ENGINES[engine].partition(":")
    found: Engine = getattr(import_module(module), name)
    return found.export(recommendation)
