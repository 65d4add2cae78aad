"""Suppression of other libraries' warnings, log messages and progress bars."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

_LOCK = Lock()
_levels: list[int] = []


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress warnings and log records below ERROR, for imports and for loading checkpoints.

    Contexts of several threads may overlap; the last one to end restores the level.
    """
    with _LOCK:
        _levels.append(_levels[-1] if _levels else logging.root.manager.disable)
        logging.disable(max(_levels[-1], logging.WARNING))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        with _LOCK:
            level = _levels.pop()
            if not _levels:
                logging.disable(level)


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
