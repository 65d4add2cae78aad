"""Tables and numbers of reports, as Markdown that is also readable on a terminal."""

from __future__ import annotations

from collections.abc import Sequence


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table with columns of equal width; empty without rows.

    >>> print(table(["method", "tau"], [["a|b", "2.50"]]))
    | method | tau  |
    | ------ | ---- |
    | a\\|b   | 2.50 |
    """
    if not rows:
        return ""
    # Names from files or the command line may contain `|` or line breaks.
    lines = [[" ".join(cell.replace("|", "\\|").split()) for cell in line] for line in (header, *rows)]
    widths = [max(3, *map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join(
        f"| {' | '.join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))} |"
        for line in lines
    )


def show(value: float | str | None, form: str) -> str:
    """Format a value; None gives an empty string."""
    return "" if value is None else format(value, form)


def show_count(number: int, noun: str) -> str:
    """Return a number with its noun, in the plural unless the number is 1.

    >>> show_count(1, "thread"), show_count(2, "thread")
    ('1 thread', '2 threads')
    """
    return f"{number} {noun}{'' if number == 1 else 's'}"
