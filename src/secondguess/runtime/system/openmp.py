"""Bound on the time that torch's OpenMP threads spin."""

from __future__ import annotations

import functools
import threading

import torch

import secondguess

NUM_VALUES = 2**18
"""Values of an operation that torch runs in all its threads."""


@functools.cache
def bound_spinning() -> None:
    """Shorten the spins of torch's OpenMP threads if torch was imported before secondguess.

    `GOMP_SPINCOUNT`, which `import secondguess` sets, is read when torch is imported. libgomp also
    shortens spins while there are more OpenMP threads than processors. Every thread that has run a
    parallel operation has OpenMP threads of its own, so one that does and then waits is enough.
    """
    if not secondguess._torch_spins_long:
        return
    ready = threading.Event()

    def run_and_wait() -> None:
        torch.ones(NUM_VALUES).add_(1)
        ready.set()
        threading.Event().wait()

    threading.Thread(target=run_and_wait, name="secondguess-openmp", daemon=True).start()
    ready.wait()
