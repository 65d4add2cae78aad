"""Time that is spent on preparing computations for later calls, such as capturing a CUDA graph.

It is not part of what a round costs: a controller that learnt from it would stop drafting.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


class _Spent(threading.local):
    seconds = 0.0


_spent = _Spent()


@contextmanager
def preparing() -> Iterator[None]:
    """Count the time inside as preparation of this thread."""
    start = time.perf_counter()
    try:
        yield
    finally:
        _spent.seconds += time.perf_counter() - start


def preparation_time() -> float:
    """Return the seconds that this thread has spent on preparation so far."""
    return _spent.seconds


def working_time() -> float:
    """Return seconds since a fixed moment, without those of preparation."""
    return time.perf_counter() - _spent.seconds
