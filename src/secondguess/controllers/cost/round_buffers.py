"""Buffers of rounds from which a controller has not learned yet.

After a forward pass, which evicts the CPU caches, each call is several times slower than usual. The
controller therefore learns from several rounds at once, and decides once for all of them.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

from secondguess.controllers.cost.proposals import DraftProposal
from secondguess.controllers.cost.round_times import mean_length
from secondguess.core import Candidate, RoundTime, Row

FEW = 8
"""Maximum number of plain rounds that are added to the statistics as one."""
MOST_PLAIN = 16
"""Maximum number of buffered plain rounds."""
MOST_DRAFTED = 8
"""Maximum number of buffered rounds with drafts."""
MAX_UNBOOKED = 2.0
"""Total loss of buffered rounds with drafts at which they are learned from, in plain rounds."""


class DraftedRound(NamedTuple):
    """Round with drafts.

    Args:
        drafted: the proposals that were drafted.
        seen: confidence bins of the nodes of each.
        lengths: levels drafted, per row.
        accepted: nodes accepted, per row.
        time: duration.
        won: plain rounds gained (negative: lost).
    """

    drafted: Sequence[DraftProposal]
    seen: Sequence[Sequence[int]]
    lengths: Sequence[int]
    accepted: Sequence[int]
    time: RoundTime
    won: float


class DraftedRoundBuffer:
    """Buffer of successive rounds with one decision: the same rows, candidates and plans."""

    def __init__(self) -> None:
        self.rows: tuple[Row, ...] = ()
        self._candidates: list[Sequence[Candidate]] = []
        self._rounds: list[DraftedRound] = []

    def decide(self, rows: Sequence[Row], candidates: Sequence[Sequence[Candidate]]) -> None:
        """Set the rows and candidates of the current decision."""
        self.rows, self._candidates = tuple(rows), list(candidates)

    def repeats(self, rows: Sequence[Row], candidates: Sequence[Sequence[Candidate]]) -> bool:
        """Return whether the decision of the buffered rounds, if any, applies to this round too."""
        return (
            bool(self._rounds)
            and tuple(rows) == self.rows
            and list(candidates) == self._candidates
            and all([row.room > 1 for row in rows])
        )

    def add(self, drafted_round: DraftedRound) -> bool:
        """Add a round; return False if the buffer is full now."""
        self._rounds.append(drafted_round)
        return sum(self.won) > -MAX_UNBOOKED and len(self._rounds) < MOST_DRAFTED

    @property
    def won(self) -> list[float]:
        """Plain rounds gained by each round."""
        return [each.won for each in self._rounds]

    def take(self) -> list[DraftedRound]:
        """Return the rounds and empty the buffer."""
        rounds, self._rounds = self._rounds, []
        return rounds


class PlainRounds:
    """Successive plain rounds (rounds without drafts).

    Attributes:
        num: number of rounds.
        context: mean tokens per row halfway through them.
        places: number of rounds by key of the token rate (`CostModel`).
        seconds: duration of each round without prefill.
    """

    __slots__ = ("context", "num", "places", "seconds")

    def __init__(self, context: float, places: Sequence[Hashable], times: Sequence[RoundTime]) -> None:
        self.num = len(times)
        self.context = context
        self.places = {place: places.count(place) for place in set(places)}
        self.seconds = [time.total - time.prefill for time in times]


class PlainRoundBuffer:
    """Buffer of successive backoff rounds over the same rows, each with one token per row."""

    def __init__(self) -> None:
        self.rows: tuple[Row, ...] = ()
        self._context = 0.0
        self._places: list[Hashable] = []
        self._times: list[RoundTime] = []

    def __len__(self) -> int:
        return len(self._times)

    def add(self, place: Hashable, rows: Sequence[Row], time: RoundTime) -> bool:
        """Add a round; return False if the buffer is full or holds rounds of other rows."""
        held = tuple(rows)  # the caller may change its list
        if not self._times:
            self.rows, self._context = held, mean_length(held)
        elif held != self.rows or len(self._times) == MOST_PLAIN:
            return False
        self._places.append(place)
        self._times.append(time)
        return True

    @property
    def room(self) -> int:
        """Number of rounds that can follow the next one before the buffer is full."""
        return MOST_PLAIN - 1 - len(self._times) % MOST_PLAIN

    def repeat(self, time: RoundTime) -> None:
        """Add a round of the same rows and the same place as the one before, for which there is room."""
        self._times.append(time)

    def take(self) -> tuple[tuple[Row, ...], list[PlainRounds]]:
        """Return the rows and their rounds, at most `FEW` together, and empty the buffer."""
        rows, context, places, times = self.rows, self._context, self._places, self._times
        self.rows, self._places, self._times = (), [], []
        places += places[-1:] * (len(times) - len(places))
        rounds = []
        for first in range(0, len(times), FEW):
            few = times[first : first + FEW]
            amidst = context + first + len(few) / 2
            rounds.append(PlainRounds(amidst, places[first : first + FEW], few))
        return rows, rounds
