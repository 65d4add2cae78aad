"""Admission of waiting rows to a batch of limited size: first come, first served.

The scheduler knows neither models nor tokens, only the length that each row may reach.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

RowT = TypeVar("RowT", bound=Hashable)


class Scheduler(Generic[RowT]):
    """Queue of waiting rows, and the rows that have been admitted.

    A row is never overtaken: if the first one does not fit, those behind it wait too, so that a
    long row is not starved by short ones. A row that does not fit is admitted all the same if no
    admitted row can make progress, as waiting would not help it.

    Args:
        fits: returns whether this number of rows, the longest of which may reach this number of
            tokens, fits into memory.
        max_rows: maximum number of admitted rows; a row with several slots counts as as many rows.
    """

    def __init__(self, fits: Callable[[int, int], bool], max_rows: int) -> None:
        self._fits = fits
        self.max_rows = max_rows
        self._waiting: dict[RowT, tuple[int, int]] = {}
        self._admitted: dict[RowT, tuple[int, int]] = {}

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_admitted(self) -> int:
        return len(self._admitted)

    def add(self, row: RowT, longest: int, num_slots: int = 1) -> None:
        """Append a row, which may reach `longest` tokens in each of its cache slots, to the queue."""
        self._waiting[row] = (longest, num_slots)

    def remove(self, row: RowT) -> None:
        """Remove a row that has finished or was cancelled, waiting or admitted."""
        self._waiting.pop(row, None)
        self._admitted.pop(row, None)

    def admit(self, num_active: int) -> list[RowT]:
        """Return the rows that join now, in the order of the queue; `num_active` admitted rows make progress."""
        joining: list[RowT] = []
        longest = max([length for length, _ in self._admitted.values()], default=0)
        num_rows = sum([num_slots for _, num_slots in self._admitted.values()])
        for row, (own, num_slots) in self._waiting.items():
            num_rows, longest = num_rows + num_slots, max(longest, own)
            may_wait = num_active + len(joining) > 0
            if may_wait and (num_rows > self.max_rows or not self._fits(num_rows, longest)):
                break
            self._admitted[row] = (own, num_slots)
            joining.append(row)
        for row in joining:
            del self._waiting[row]
        return joining
