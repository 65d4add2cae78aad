"""Calls from several threads on one `LLM`: their rounds are played one at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from threading import RLock

from secondguess.core import Commit

Loop = Generator[list[Commit], None, None]
"""The decoding loop of one call (`decode.decode`)."""


class RoundLock:
    """Lock around the rounds of all decoding loops that share models.

    Loops of several threads, and of several streams in one thread, take turns round by round. A loop whose
    caller abandons it is closed by the garbage collector, which may run inside a round of another loop, in the
    same thread. So loops under way are referenced here, and an abandoned one is closed between two rounds.
    """

    def __init__(self) -> None:
        self._lock = RLock()
        self._is_busy = False
        self._loops: set[Loop] = set()
        self._to_close: deque[Loop] = deque()

    def play_round(self, loop: Loop) -> list[Commit] | None:
        """Play the next round of a loop; return None when it has ended."""
        with self._lock:
            self._loops.add(loop)
            self._is_busy = True
            try:
                return next(loop, None)
            finally:
                self._close_abandoned()

    def close(self, loop: Loop) -> None:
        """Release what a loop still holds, at once or after the round that is being played."""
        self._to_close.append(loop)
        with self._lock:
            # The lock may be held by this very thread, in a round or while it closes another loop.
            if not self._is_busy:
                self._is_busy = True
                self._close_abandoned()

    def _close_abandoned(self) -> None:
        try:
            while self._to_close:
                loop = self._to_close.popleft()
                self._loops.discard(loop)
                loop.close()
        finally:
            self._is_busy = False
