"""Number of torch threads during a measurement."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def threads(number: int | None) -> Iterator[int]:
    """Set the number of torch threads (None: leave it) and restore the former number at exit.

    Yields:
        The number of threads in use.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(before if number is None else number)
    try:
        yield torch.get_num_threads()
    finally:
        torch.set_num_threads(before)
