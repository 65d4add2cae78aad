"""Report of the progress of loading, for displays."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Report = Callable[[int, int, str], None]
"""Function that is called with the bytes that are loaded, those of all weights, and a description."""

_report: ContextVar[Report | None] = ContextVar("report", default=None)


@contextmanager
def watching_loading(report: Report) -> Iterator[None]:
    """Have this thread report what it loads in the context."""
    token = _report.set(report)
    try:
        yield
    finally:
        _report.reset(token)


def report_bytes(done: int, total: int, what: str) -> None:
    """Report the progress of loading to the display, if there is one."""
    if report := _report.get():
        report(done, total, what)
