"""Ctrl-C, heeded where nothing is lost."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType


class Interruption:
    """While held, the first Ctrl-C is noted; a second one raises KeyboardInterrupt wherever it strikes."""

    def __init__(self) -> None:
        self._wanted = False

    def __enter__(self) -> Interruption:
        self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.signal(signal.SIGINT, self._before)

    def raise_if_wanted(self) -> None:
        """To be called where stopping is clean.

        Raises:
            KeyboardInterrupt: Ctrl-C came since.
        """
        if self._wanted:
            raise KeyboardInterrupt

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.raise_if_wanted()
        self._wanted = True
