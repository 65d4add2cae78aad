"""Lock for concurrent calls on one `LLM`: their rounds run one at a time."""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from threading import Lock, RLock
from weakref import WeakSet

from secondguess.core import Commit

Loop = Generator[list[Commit], None, None]
"""Decoding loop of one call (`decode.decode`)."""

logger = logging.getLogger(__name__)


class RoundLock:
    """Lock around the rounds of all decoding loops that share models.

    Loops of several threads, and of several streams in one thread, alternate round by round. A
    loop abandoned by its caller is closed by the garbage collector, which can run inside a round
    of another loop in the same thread. Therefore unfinished loops are referenced here, and an
    abandoned one is closed between two rounds.
    """

    def __init__(self) -> None:
        self._reset()
        _all.add(self)

    def _reset(self) -> None:
        self._queue = Lock()
        self._lock = RLock()
        self._is_busy = False
        self._loops: set[Loop] = set()
        self._to_close: deque[Loop] = deque()

    def run_round(self, loop: Loop) -> list[Commit] | None:
        """Run the next round of a loop; return None if the loop has ended."""
        # A thread that has just finished a round finds the queue taken by a thread that waits.
        with self._queue:
            self._lock.acquire()
        try:
            self._loops.add(loop)
            self._is_busy = True
            try:
                return next(loop, None)
            finally:
                self._close_abandoned()
        finally:
            self._lock.release()

    @contextmanager
    def between_rounds(self) -> Iterator[None]:
        """Return a context in which no loop runs a round."""
        with self._queue:
            self._lock.acquire()
        try:
            yield
        finally:
            self._lock.release()

    def close(self, loop: Loop) -> None:
        """Release the state of a loop, at once or after the round in progress."""
        self._to_close.append(loop)
        with self._lock:
            # This thread may already hold the lock, in a round or while it closes another loop.
            if not self._is_busy:
                self._is_busy = True
                self._close_abandoned()

    def _close_abandoned(self) -> None:
        try:
            while self._to_close:
                loop = self._to_close.popleft()
                self._loops.discard(loop)
                try:
                    loop.close()
                except Exception:  # the caller has nothing to do with this loop
                    logger.exception("an abandoned decoding loop could not be closed")
        finally:
            self._is_busy = False


_all: WeakSet[RoundLock] = WeakSet()


def _reset_after_fork() -> None:
    """Replace locks that other threads of the parent process held."""
    for lock in _all:
        lock._reset()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_after_fork)
