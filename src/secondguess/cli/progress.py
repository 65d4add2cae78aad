"""Progress display of long-running commands, on standard error."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console

from secondguess.cli.output import print_note

SECONDS_PER_LINE = 10.0
"""Interval between progress lines when standard error is not a terminal."""


@contextmanager
def progress_bar(what: str, *, percent: bool = False) -> Iterator[Callable[[int, int, str], None]]:
    """Show a progress bar inside the context.

    Without a terminal, print a line every `SECONDS_PER_LINE` seconds instead, so that logs show
    progress and short work prints nothing.

    Args:
        what: the first description.
        percent: whether to show a percentage instead of two numbers.

    Yields:
        A function to call with (done, total, description).
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _lines(percent)
        return

    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeRemainingColumn,
    )

    amount = TaskProgressColumn() if percent else MofNCompleteColumn()
    columns = (BarColumn(), amount, TimeRemainingColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True) as bars:
        task = bars.add_task(what, total=None)
        yield lambda done, total, now: bars.update(task, completed=done, total=total, description=now)


def _lines(percent: bool) -> Callable[[int, int, str], None]:
    last = time.monotonic()

    def show(done: int, total: int, now: str) -> None:
        nonlocal last
        if time.monotonic() - last >= SECONDS_PER_LINE:
            last = time.monotonic()
            amount = f"{done / max(1, total):.0%}" if percent else f"{done:,} of {total:,}"
            print_note(f"{now}: {amount}" if total else now)

    return show
