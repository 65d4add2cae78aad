"""Suppression of other libraries' warnings, log messages and progress bars."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

LIBRARIES = (
    "accelerate",
    "bitsandbytes",
    "compressed_tensors",
    "gguf",
    "huggingface_hub",
    "torch",
    "torchao",
    "transformers",
)
"""Loggers whose records are suppressed; those of the application, which other threads may write, are not."""

_LOCK = Lock()
_num_active = 0
_levels: dict[logging.Logger, int] = {}


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress warnings, and log records of libraries below ERROR, for imports and for loading checkpoints.

    Contexts of several threads may overlap; the last one to end restores the levels.
    """
    with _LOCK:
        _raise_levels()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        with _LOCK:
            _restore_levels()


def _raise_levels() -> None:
    global _num_active
    _num_active += 1
    for logger in map(logging.getLogger, LIBRARIES):
        if logger.getEffectiveLevel() < logging.ERROR:
            _levels[logger] = logger.level
            logger.setLevel(logging.ERROR)


def _restore_levels() -> None:
    global _num_active
    _num_active -= 1
    if _num_active:
        return
    for logger, level in _levels.items():
        if logger.level == logging.ERROR:  # else set since, for instance by the import of the library
            logger.setLevel(level)
    _levels.clear()


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Suppress messages as `quiet` does, and the progress bars of Transformers."""
    with quiet():
        from transformers.utils import logging as transformers_logging

        is_enabled = transformers_logging.is_progress_bar_enabled()
        transformers_logging.disable_progress_bar()
        try:
            yield
        finally:
            if is_enabled:
                transformers_logging.enable_progress_bar()
