"""Lossless speculative decoding for any Hugging Face causal language model.

Public API. Names are imported on first use, so that `import secondguess` stays fast.
"""

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING

# By default, OpenMP threads (used by torch) spin at barriers for a whole scheduler time slice,
# which stalls processes that share their cores. The variable is read when torch is imported
# (docs/runtimes.md). If it was imported before, `runtime/system/openmp.py` shortens the spins.
if "OMP_WAIT_POLICY" not in os.environ and "GOMP_SPINCOUNT" not in os.environ:
    os.environ["GOMP_SPINCOUNT"] = "5000"
    _torch_spins_long = "torch" in sys.modules
else:
    _torch_spins_long = False

if TYPE_CHECKING:
    from secondguess.api import LLM, load
    from secondguess.beyond.forecasting.forecast import Forecast, forecast
    from secondguess.beyond.images.guidance import GuidedPrompt
    from secondguess.drop_in import custom_generate
    from secondguess.engine.generation import Output
    from secondguess.engine.text_scores import TextScore
    from secondguess.errors import (
        BadInputError,
        CheckpointError,
        OutOfMemoryError,
        SecondGuessError,
        UnsupportedModelError,
    )
    from secondguess.sampling import Grammar, SamplingParams
    from secondguess.sampling.text import Piece
    from secondguess.stats import Stats

__version__ = "0.2.0"

__all__ = [
    "LLM",
    "BadInputError",
    "CheckpointError",
    "Forecast",
    "Grammar",
    "GuidedPrompt",
    "OutOfMemoryError",
    "Output",
    "Piece",
    "SamplingParams",
    "SecondGuessError",
    "Stats",
    "TextScore",
    "UnsupportedModelError",
    "custom_generate",
    "forecast",
    "load",
]

_MODULES = {
    "Forecast": "beyond.forecasting.forecast",
    "LLM": "api",
    "Output": "engine.generation",
    "forecast": "beyond.forecasting.forecast",
    "load": "api",
    "custom_generate": "drop_in",
    "Grammar": "sampling",
    "GuidedPrompt": "beyond.images.guidance",
    "SamplingParams": "sampling",
    "Stats": "stats",
    "Piece": "sampling.text",
    "TextScore": "engine.text_scores",
}


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"secondguess.{_MODULES.get(name, 'errors')}"), name)
