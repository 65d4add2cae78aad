"""Progress of long work, on standard error."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console

from secondguess.cli.output import aside

SECONDS_PER_LINE = 10.0
"""Between plain lines, where there is no terminal for a bar."""


@contextmanager
def progress_bar(what: str) -> Iterator[Callable[[int, int, str], None]]:
    """Show a bar while the work lasts; call what it yields with (done, total, what is being done).

    Without a terminal it is a line every `SECONDS_PER_LINE`: a log shows that the work goes on, and short work prints nothing.
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
            aside(f"{now}: {done:,} of {total:,}" if total else now)

    return show
