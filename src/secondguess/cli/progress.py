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
def progress_bar(what: str) -> Iterator[Callable[[int, int, str], None]]:
    """Show a progress bar inside the context.

    Without a terminal, print a line every `SECONDS_PER_LINE` seconds instead, so that logs show
    progress and short work prints nothing.

    Args:
        what: the first description.

    Yields:
        A function to call with (done, total, description).
    """
    if not Console(stderr=True).is_terminal:
        yield _lines()
        return

    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task(what, total=None)
        yield lambda done, total, now: bars.update(task, completed=done, total=total, description=now)


def _lines() -> Callable[[int, int, str], None]:
    last = time.monotonic()

    def show(done: int, total: int, now: str) -> None:
        nonlocal last
        if time.monotonic() - last >= SECONDS_PER_LINE:
            last = time.monotonic()
            print_note(f"{now}: {done:,} of {total:,}" if total else now)

    return show
