"""Rounds that pass without anybody being asked, because nothing paid.

Where a kind of guess does not pay, it will not in the very next rounds either, and asking takes time. So it is let alone for a
number of rounds, and for twice as many each time that it does not pay again. A round in which nothing else is on offer passes
unasked; a longer match of a look-up, say, is something else.

What such rounds teach is kept until somebody is asked again: behind a forward, which empties caches, each call is slow.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence

from secondguess.core import Prospect, RoundTime, Row

SHORTEST = 8
"""Rounds of a first rest; one more for each row, since asking takes longer for many."""
MOST_DOUBLINGS = 3
FEW = 8
"""So many rounds are learnt from as one."""
MOST_KEPT = 64
"""So many rounds are kept at most until they are learnt from."""


class Rests:
    """Until when which kinds of guesses are let alone."""

    def __init__(self) -> None:
        self._now = 0
        self._num_rows = 0
        self._until: dict[Hashable, int] = {}
        self._doublings: dict[Hashable, int] = {}

    def cover(self, prospects: Sequence[Sequence[Prospect]]) -> bool:
        """Whether a round begins in which all that is on offer is let alone."""
        self._now += 1
        if len(prospects) != self._num_rows:  # what does not pay for many rows may pay for one
            self._num_rows = len(prospects)
            self._until.clear()
        until, now = self._until, self._now
        for choices in prospects:
            for choice in choices:
                if choice.longest > 0 and until.get(choice.kind, 0) <= now:
                    return False
        return True

    def begin(self, prospects: Sequence[Sequence[Prospect]]) -> None:
        """Nothing of this paid."""
        now, shortest = self._now, SHORTEST + len(prospects)
        for kind in {choice.kind for choices in prospects for choice in choices if choice.longest > 0}:
            if self._until.get(kind, 0) <= now:
                doublings = self._doublings.get(kind, 0)
                self._until[kind] = now + 1 + (shortest << doublings)
                self._doublings[kind] = min(doublings + 1, MOST_DOUBLINGS)

    def end(self) -> None:
        """Something paid: that is news of everything else too."""
        self._until.clear()
        self._doublings.clear()

    def interrupt(self) -> None:
        """Have the next round asked about, whatever is on offer."""
        self._until.clear()


class Rounds:
    """A few plain rounds.

    Attributes:
        num: how many.
        places: in what kinds of places, with how many in each.
        seconds: all of them, of all rounds.
        typical: the median of their seconds, reading left out.
    """

    __slots__ = ("num", "places", "seconds", "typical")

    def __init__(self, places: Sequence[Hashable], times: Sequence[RoundTime]) -> None:
        self.num = len(times)
        self.places = {place: places.count(place) for place in set(places)}
        self.seconds = sum([time.total for time in times])
        self.typical = sorted([time.total - time.prefill for time in times])[self.num // 2]


class Passed:
    """Rounds of the same rows that have passed without anybody being asked, each with one token for each row."""

    def __init__(self) -> None:
        self.rows: tuple[Row, ...] = ()
        self._places: list[Hashable] = []
        self._times: list[RoundTime] = []

    def __len__(self) -> int:
        return len(self._times)

    def add(self, place: Hashable, rows: Sequence[Row], time: RoundTime) -> bool:
        """One more; False where others have to be taken first, as those of other rows have."""
        held = tuple(rows)  # a caller may change its list
        if self._times and (held != self.rows or len(self._times) == MOST_KEPT):
            return False
        self.rows = held
        self._places.append(place)
        self._times.append(time)
        return True

    def take(self) -> Iterator[Rounds]:
        """A few at a time; then there are none."""
        places, times = self._places, self._times
        self._places, self._times = [], []
        for first in range(0, len(times), FEW):
            behind = first + FEW
            yield Rounds(places[first:behind], times[first:behind])
