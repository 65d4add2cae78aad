"""Ctrl-C handling that stops only at safe points."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType


class DeferredInterrupt:
    """Context manager that defers the first Ctrl-C to the next `raise_if_interrupted`.

    A second Ctrl-C raises KeyboardInterrupt at once.
    """

    def __init__(self) -> None:
        self._wanted = False

    def __enter__(self) -> DeferredInterrupt:
        self._before = signal.signal(signal.SIGINT, self._on_sigint)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.signal(signal.SIGINT, self._before)

    def raise_if_interrupted(self) -> None:
        """Raise KeyboardInterrupt if Ctrl-C was pressed inside this context; call it where stopping is safe."""
        if self._wanted:
            raise KeyboardInterrupt

    def _on_sigint(self, number: int, frame: FrameType | None) -> None:
        self.raise_if_interrupted()
        self._wanted = True
