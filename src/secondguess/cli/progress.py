"""Progress display of long-running commands, on standard error."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console

from secondguess.cli.output import print_note

if TYPE_CHECKING:
    from secondguess.api import LLM

Unit = Literal["steps", "percent", "bytes"]

SECONDS_PER_LINE = 10.0
"""Interval between progress lines when standard error is not a terminal."""


@contextmanager
def progress_bar(what: str, unit: Unit = "steps") -> Iterator[Callable[[int, int, str], None]]:
    """Yield a function that shows (done, total, description) in a progress bar.

    Without a terminal, it prints a line every `SECONDS_PER_LINE` seconds instead, so that logs show
    progress and short work prints nothing.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _lines(unit)
        return

    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeRemainingColumn,
    )

    columns_of_units = {"steps": MofNCompleteColumn, "percent": TaskProgressColumn, "bytes": DownloadColumn}
    columns = (BarColumn(), columns_of_units[unit](), TimeRemainingColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True) as bars:
        task = bars.add_task(what, total=None)
        yield lambda done, total, now: bars.update(task, completed=done, total=total, description=now)


def _lines(unit: Unit) -> Callable[[int, int, str], None]:
    last = time.monotonic()

    def show(done: int, total: int, now: str) -> None:
        nonlocal last
        if time.monotonic() - last >= SECONDS_PER_LINE:
            last = time.monotonic()
            amounts = {
                "steps": f"{done:,} of {total:,}",
                "percent": f"{done / max(1, total):.0%}",
                "bytes": f"{done / 1e9:.1f} of {total / 1e9:.1f} GB",
            }
            print_note(f"{now}: {amounts[unit]}" if total else now)

    return show


def load_with_progress(settings: Mapping[str, Any]) -> LLM:
    """Load a target and its drafter with a progress bar of the bytes of their weights."""
    with progress_bar("loading", "bytes") as show:
        from secondguess.api import load
        from secondguess.checkpoint.progress import watching_loading

        with watching_loading(show):
            return load(**settings)
