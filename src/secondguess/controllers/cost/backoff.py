"""Backoff of draft candidates that did not pay.

A kind of draft that does not pay for a row will not pay in the very next rounds either, and
evaluating it takes time. It is therefore skipped for a number of rounds, and for twice as many
each time that it does not pay again. If all candidates of a round are in backoff, the round runs
without drafts and nothing is evaluated. A candidate of another kind, such as a longer lookup
match, or of another row is evaluated at once.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from secondguess.core import Candidate, Row

SHORTEST = 8
"""Rounds of the first backoff; one per row is added, as evaluating more rows takes longer."""
MOST_DOUBLINGS = 3


class Backoffs:
    """Backoff state by row and kind of draft candidate."""

    def __init__(self) -> None:
        self._now = 0
        self._num_rows = 0
        self._of: dict[Row, dict[Hashable, Backoff]] = {}

    def cover(
        self, rows: Sequence[Row], candidates: Sequence[Sequence[Candidate]], num_rounds: int = 1
    ) -> bool:
        """Begin the last of `num_rounds` rounds; return whether every candidate is in backoff."""
        self._now += num_rounds
        if len(rows) != self._num_rows:  # what does not pay for many rows may pay for one
            self._num_rows = len(rows)
            self._of.clear()
        from_rows, now = self._of, self._now
        for row, choices in zip(rows, candidates, strict=True):
            backoffs = from_rows.get(row, NO_BACKOFFS)
            for choice in choices:
                if choice.longest > 0:
                    backoff = backoffs.get((choice.part, choice.kind))
                    if backoff is None or backoff.until <= now:
                        return False
        return True

    def num_constant(self, rows: Sequence[Row], candidates: Sequence[Sequence[Candidate]]) -> int:
        """Return for how many more rounds all of these candidates stay the same and in backoff.

        The candidates of a drafter that samples do not depend on the text, unlike those of a lookup
        and of a row's own sources.
        """
        ends = []
        for row, choices in zip(rows, candidates, strict=True):
            if row.sources or row.params.draft_length is not None:
                return 0
            for choice in choices:
                if choice.deterministic or not choice.longest:
                    return 0
                ends.append(self._of[row][choice.part, choice.kind].until)
        return min(ends) - self._now - 1

    def begin(self, rows: Sequence[Row], candidates: Sequence[Sequence[Candidate]]) -> None:
        """Put these candidates in backoff, as none of them paid."""
        now, shortest = self._now, SHORTEST + len(rows)
        for row, choices in zip(rows, candidates, strict=True):
            for choice in choices:
                if choice.longest > 0:
                    backoffs = self._of.setdefault(row, {})
                    backoff = backoffs.setdefault((choice.part, choice.kind), Backoff())
                    if backoff.until <= now:
                        backoff.until = now + 1 + (shortest << backoff.doublings)
                        backoff.doublings = min(backoff.doublings + 1, MOST_DOUBLINGS)

    def end(self) -> None:
        """End all backoff: a candidate paid, so others may pay as well."""
        self._of.clear()

    def forget(self, row: Row) -> None:
        """Discard the state of a row that has ended."""
        self._of.pop(row, None)


@dataclass(slots=True)
class Backoff:
    """Backoff of one row's candidates of one kind.

    Attributes:
        until: number of the round in which it ends.
        doublings: number of times that the length of the next backoff is doubled.
    """

    until: int = 0
    doublings: int = 0


NO_BACKOFFS: Mapping[Hashable, Backoff] = {}
