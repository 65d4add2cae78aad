"""Buffers of rounds from which a controller has not learned yet.

After a forward pass, which evicts the CPU caches, each call is several times slower than usual. The
controller therefore learns from several rounds at once, and decides once for those with the same candidates.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from secondguess.controllers.cost.proposals import DraftProposal
from secondguess.controllers.cost.round_times import mean_length
from secondguess.core import Candidate, RoundTime, Row

GROUP_SIZE = 8
"""Maximum number of plain rounds that are added to the statistics as one."""
MAX_PLAIN_ROUNDS = 16
"""Maximum number of buffered plain rounds."""
MAX_DRAFTED_ROUNDS = 8
"""Maximum number of buffered rounds with drafts."""
MAX_UNRECORDED_LOSS = 2.0
"""Total loss of buffered rounds with drafts at which they are learned from, in plain rounds."""


@dataclass(slots=True, eq=False)
class Decision:
    """Drafts planned for a round, and for those that repeat it.

    Args:
        rate_key: key of the token rate that drafts are compared with (`CostModel`).
        rate: tokens per second that drafts have to exceed.
        proposals: the drafts, at most one per row.
        explores: True if a batch drafts to learn what drafts cost, with the nodes of a probe, whatever these seem to cost.
        is_probe: True if they are probes.
        is_settled: True if the decision can be repeated before anything is learned from it.
    """

    rate_key: Hashable = None
    rate: float = 0.0
    proposals: Sequence[DraftProposal] = ()
    explores: bool = False
    is_probe: bool = False
    is_settled: bool = False


class DraftedRound(NamedTuple):
    """Round with drafts.

    Args:
        decision: what was planned.
        drafted: the proposals that were drafted.
        confidence_bins: bins of the confidences of the nodes of each.
        lengths: levels drafted, per row.
        accepted: nodes accepted, per row.
        time: duration.
        gain: plain rounds gained (negative: lost).
    """

    decision: Decision
    drafted: Sequence[DraftProposal]
    confidence_bins: Sequence[Sequence[int]]
    lengths: Sequence[int]
    accepted: Sequence[int]
    time: RoundTime
    gain: float


class DraftedRoundBuffer:
    """Buffer of successive rounds of the same rows, and the decisions made since it was empty.

    Attributes:
        rows: the rows.
    """

    def __init__(self) -> None:
        self.rows: tuple[Row, ...] = ()
        self._decisions: dict[Hashable, Decision] = {}
        self._num_repeated = 0
        self._rounds: list[DraftedRound] = []

    def __bool__(self) -> bool:
        return bool(self._rounds)

    def begin(self, rows: Sequence[Row]) -> None:
        """Set the rows of the next rounds; the rounds before must have been taken."""
        assert not self._rounds
        self._decisions.clear()
        self.rows = tuple(rows)

    def keep(self, candidates: Sequence[Sequence[Candidate]], decision: Decision) -> None:
        """Keep a decision for further rounds with the same candidates."""
        self._decisions[tuple(map(tuple, candidates))] = decision

    def decision(self, rows: Sequence[Row], candidates: Sequence[Sequence[Candidate]]) -> Decision | None:
        """Return the decision that applies to this round too, if there is one.

        Rounds that are not added, as they were not drafted as planned, repeat a decision as well: at
        most as often as rounds can be buffered.
        """
        if not self._decisions or tuple(rows) != self.rows or not all([row.room > 1 for row in rows]):
            return None
        self._num_repeated += 1
        if self._num_repeated > MAX_DRAFTED_ROUNDS:
            return None
        return self._decisions.get(tuple(map(tuple, candidates)))

    def add(self, drafted_round: DraftedRound) -> bool:
        """Add a round; return False if the buffer is full now."""
        self._rounds.append(drafted_round)
        return sum(self.gains) > -MAX_UNRECORDED_LOSS and len(self._rounds) < MAX_DRAFTED_ROUNDS

    @property
    def gains(self) -> list[float]:
        """Plain rounds gained by each round."""
        return [each.gain for each in self._rounds]

    def take(self) -> list[DraftedRound]:
        """Return the rounds, empty the buffer and discard the decisions."""
        self._decisions.clear()
        self._num_repeated = 0
        rounds, self._rounds = self._rounds, []
        return rounds


class PlainRounds:
    """Successive plain rounds (rounds without drafts).

    Attributes:
        num: number of rounds.
        context: mean tokens per row halfway through them.
        num_by_rate_key: number of rounds by key of the token rate (`CostModel`).
        seconds: duration of each round without prefill and planning.
    """

    __slots__ = ("context", "num", "num_by_rate_key", "seconds")

    def __init__(self, context: float, rate_keys: Sequence[Hashable], times: Sequence[RoundTime]) -> None:
        self.num = len(times)
        self.context = context
        self.num_by_rate_key = {key: rate_keys.count(key) for key in set(rate_keys)}
        self.seconds = [time.total - time.prefill - time.plan for time in times]


class PlainRoundBuffer:
    """Buffer of successive backoff rounds over the same rows, each with one token per row."""

    def __init__(self) -> None:
        self.rows: tuple[Row, ...] = ()
        self._context = 0.0
        self._rate_keys: list[Hashable] = []
        self._times: list[RoundTime] = []

    def __len__(self) -> int:
        return len(self._times)

    def add(self, rate_key: Hashable, rows: Sequence[Row], time: RoundTime) -> bool:
        """Add a round; return False if the buffer is full or holds rounds of other rows."""
        held = tuple(rows)  # the caller may change its list
        if not self._times:
            self.rows, self._context = held, mean_length(held)
        elif held != self.rows or len(self._times) == MAX_PLAIN_ROUNDS:
            return False
        self._rate_keys.append(rate_key)
        self._times.append(time)
        return True

    @property
    def room(self) -> int:
        """Number of rounds that can follow the next one before the buffer is full."""
        return MAX_PLAIN_ROUNDS - 1 - len(self._times) % MAX_PLAIN_ROUNDS

    def repeat(self, time: RoundTime) -> None:
        """Add a round of the same rows and the same rate key as the one before, for which there is room."""
        self._times.append(time)

    def take(self) -> tuple[tuple[Row, ...], list[PlainRounds]]:
        """Return the rows and their rounds, at most `GROUP_SIZE` together, and empty the buffer."""
        rows, context, rate_keys, times = self.rows, self._context, self._rate_keys, self._times
        self.rows, self._rate_keys, self._times = (), [], []
        rate_keys += rate_keys[-1:] * (len(times) - len(rate_keys))
        rounds = []
        for first in range(0, len(times), GROUP_SIZE):
            group = times[first : first + GROUP_SIZE]
            amidst = context + first + len(group) / 2
            rounds.append(PlainRounds(amidst, rate_keys[first : first + GROUP_SIZE], group))
        return rows, rounds
