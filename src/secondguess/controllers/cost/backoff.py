"""Backoff of draft candidates that did not pay.

A kind of draft that does not pay will not pay in the very next rounds either, and evaluating it
takes time. It is therefore skipped for a number of rounds, and for twice as many each time that it
does not pay again. If all candidates of a round are in backoff, the round runs without drafts and
nothing is evaluated. A candidate of another kind, such as a longer lookup match, or of a row that has joined
is evaluated at once.

In a batch, candidates are alike whose kinds, temperatures and recent acceptance rates are equal. Any
draft adds a fixed time to a pass, so one match may not pay where several do: more candidates alike than
before are evaluated, too. Rows of a batch often have other matches than in the round before; if each
had a backoff of its own, most rounds would be evaluated.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from secondguess.core import Candidate, Row

SHORTEST = 8
"""Rounds of the first backoff; one per row is added, as evaluating more rows takes longer."""
MAX_DOUBLINGS = 3


class Backoffs:
    """Backoff state of the candidates of a batch.

    Args:
        rate_bin: returns the bin of a row's recent acceptance rate.
    """

    def __init__(self, rate_bin: Callable[[Row], int]) -> None:
        self._rate_bin = rate_bin
        self._now = 0
        self._num_rows = 0
        self._rows: frozenset[Row] = frozenset()
        self._counts: dict[Hashable, int] = {}
        self._backoffs: dict[Hashable, Backoff] = {}

    def cover(
        self, rows: Sequence[Row], candidates: Sequence[Sequence[Candidate]], num_rounds: int = 1
    ) -> bool:
        """Begin the last of `num_rounds` rounds; return whether every candidate is in backoff."""
        self._now += num_rounds
        has_joined = not self._rows.issuperset(rows)
        if len(rows) != self._num_rows or (has_joined and len(rows) == 1):
            self._num_rows = len(rows)  # what does not pay for many rows may pay for one
            self._backoffs.clear()
        if has_joined:
            self._rows = frozenset(rows)
        self._counts = self._count(rows, candidates)
        covered = [self._covers(key, count) for key, count in self._counts.items()]
        return all(covered) and not (has_joined and covered)

    def _count(self, rows: Sequence[Row], candidates: Sequence[Sequence[Candidate]]) -> dict[Hashable, int]:
        """Return the numbers of candidates that are alike."""
        counts: dict[Hashable, int] = {}
        for row, choices in zip(rows, candidates, strict=True):
            alike = None if len(rows) == 1 else (row.coupled, row.params.temperature, self._rate_bin(row))
            for choice in choices:
                if choice.longest > 0:
                    key = choice.part, choice.kind, alike
                    counts[key] = counts.get(key, 0) + 1
        return counts

    def _covers(self, key: Hashable, count: int) -> bool:
        backoff = self._backoffs.get(key)
        return backoff is not None and backoff.until > self._now and backoff.count >= count

    def num_constant(self, candidates: Sequence[Sequence[Candidate]]) -> int:
        """Return for how many more rounds all of these candidates stay the same and in backoff.

        The candidates of a drafter that samples do not depend on the text, unlike those of a lookup.
        In a batch, acceptance rates may change.
        """
        for choices in candidates:
            if any([choice.deterministic or not choice.longest for choice in choices]):
                return 0
        return min(self._backoffs[key].until for key in self._counts) - self._now - 1

    def begin(self) -> None:
        """Put the candidates of this round in backoff, as none of them paid."""
        now, shortest = self._now, SHORTEST + self._num_rows
        for key, count in self._counts.items():
            backoff = self._backoffs.setdefault(key, Backoff())
            backoff.count = max(backoff.count, count)
            if backoff.until <= now:
                backoff.until, backoff.count = now + 1 + (shortest << backoff.doublings), count
                backoff.doublings = min(backoff.doublings + 1, MAX_DOUBLINGS)

    def end(self) -> None:
        """End all backoff: a candidate paid, so others may pay as well."""
        self._backoffs.clear()

    def forget(self, row: Row) -> None:
        """Forget a row that has ended."""
        self._rows -= {row}


@dataclass(slots=True)
class Backoff:
    """Backoff of candidates that are alike.

    Attributes:
        until: number of the round in which it ends.
        count: number of candidates that did not pay together.
        doublings: number of times that the length of the next backoff is doubled.
    """

    until: int = 0
    count: int = 0
    doublings: int = 0
