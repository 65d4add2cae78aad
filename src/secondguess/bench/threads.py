"""With how many threads torch computes while something is measured."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def threads(number: int | None) -> Iterator[int]:
    """Run with so many torch threads, or as many as there are without a number, and give back the former number.

    Yields:
        How many there are.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(before if number is None else number)
    try:
        yield torch.get_num_threads()
    finally:
        torch.set_num_threads(before)
