"""Rounds that pass without anybody being asked, because nothing paid.

Where a kind of guess does not pay for a row, it will not in the very next rounds either, and asking takes time. So it is let
alone for a number of rounds, and for twice as many each time that it does not pay again. A round in which nothing else is on
offer passes unasked; a longer match of a look-up, say, is something else, and so is another row's.

What such rounds teach is kept until somebody is asked again: behind a forward, which empties caches, each call is slow.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

from secondguess.controllers.cost.round_times import mean_length
from secondguess.core import Prospect, RoundTime, Row

SHORTEST = 8
"""Rounds of a first rest; one more for each row, since asking takes longer for many."""
MOST_DOUBLINGS = 3
FEW = 8
"""So many rounds are learnt from as one."""
MOST_KEPT = 16
"""So many rounds are kept at most until they are learnt from."""


class Rests:
    """Until when which rows' guesses of which kinds are let alone."""

    def __init__(self) -> None:
        self._now = 0
        self._num_rows = 0
        self._of: dict[Row, dict[Hashable, Rest]] = {}

    def cover(self, rows: Sequence[Row], prospects: Sequence[Sequence[Prospect]]) -> bool:
        """Whether a round begins in which all that is on offer is let alone."""
        self._now += 1
        if len(rows) != self._num_rows:  # what does not pay for many rows may pay for one
            self._num_rows = len(rows)
            self._of.clear()
        of_rows, now = self._of, self._now
        for row, choices in zip(rows, prospects, strict=True):
            rests = of_rows.get(row, NO_RESTS)
            for choice in choices:
                if choice.longest > 0:
                    rest = rests.get((choice.part, choice.kind))
                    if rest is None or rest.until <= now:
                        return False
        return True

    def begin(self, rows: Sequence[Row], prospects: Sequence[Sequence[Prospect]]) -> None:
        """Nothing of this paid."""
        now, shortest = self._now, SHORTEST + len(rows)
        for row, choices in zip(rows, prospects, strict=True):
            for choice in choices:
                if choice.longest > 0:
                    rests = self._of.setdefault(row, {})
                    rest = rests.setdefault((choice.part, choice.kind), Rest())
                    if rest.until <= now:
                        rest.until = now + 1 + (shortest << rest.doublings)
                        rest.doublings = min(rest.doublings + 1, MOST_DOUBLINGS)

    def end(self) -> None:
        """Something paid: that is news of everything else too."""
        self._of.clear()

    def forget(self, row: Row) -> None:
        """A row has ended."""
        self._of.pop(row, None)


class Rest:
    """Of one row's guesses of one kind.

    Attributes:
        until: the round in which it is over.
        doublings: of the rest after it.
    """

    __slots__ = ("doublings", "until")

    def __init__(self) -> None:
        self.until = self.doublings = 0


NO_RESTS: Mapping[Hashable, Rest] = {}


class Rounds:
    """A few plain rounds.

    Attributes:
        num: how many.
        context: mean tokens per row amidst them.
        places: in what kinds of places, with how many in each.
        seconds: of each, prefill left out.
    """

    __slots__ = ("context", "num", "places", "seconds")

    def __init__(self, context: float, places: Sequence[Hashable], times: Sequence[RoundTime]) -> None:
        self.num = len(times)
        self.context = context
        self.places = {place: places.count(place) for place in set(places)}
        self.seconds = [time.total - time.prefill for time in times]


class Passed:
    """Rounds of the same rows that have passed without anybody being asked, each with one token for each row."""

    def __init__(self) -> None:
        self._rows: tuple[Row, ...] = ()
        self._context = 0.0
        self._places: list[Hashable] = []
        self._times: list[RoundTime] = []

    def __len__(self) -> int:
        return len(self._times)

    def add(self, place: Hashable, rows: Sequence[Row], time: RoundTime) -> bool:
        """One more; False where others have to be taken first, as those of other rows have."""
        held = tuple(rows)  # a caller may change its list
        if not self._times:
            self._rows, self._context = held, mean_length(held)
        elif held != self._rows or len(self._times) == MOST_KEPT:
            return False
        self._places.append(place)
        self._times.append(time)
        return True

    def take(self) -> tuple[tuple[Row, ...], list[Rounds]]:
        """Whose rounds they were, and the rounds, a few at a time; then there are none."""
        rows, context, places, times = self._rows, self._context, self._places, self._times
        self._rows, self._places, self._times = (), [], []
        rounds = []
        for first in range(0, len(times), FEW):
            few = times[first : first + FEW]
            amidst = context + first + len(few) / 2
            rounds.append(Rounds(amidst, places[first : first + FEW], few))
        return rows, rounds
