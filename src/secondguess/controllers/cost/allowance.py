"""How much time may be lost: to trying (probes) and to being wrong (the guard).

Both are accounts. Probes are paid from an income, a small share of the time that passes; each failure halves the income until
something pays, so over N plain rounds they cost at most PROBING * N of them, and LARGEST_PROBE.

The guard backs up every estimate by the wall clock: it books what drafting rounds really took against what plain rounds
would have taken for the same tokens. Some credit may be saved up, some debt run into; then drafting stops for a while, twice
as long each time until all of the debt is made good.

What a draft model takes to read a text serves all rounds to come, so it falls due in shares, round by round. What is not due
yet when the row ends, or when drafting stops, falls due at once: it may never be earned back. So the account knows of all that
was lost but for what is outstanding: at most the reading of the texts in flight, and nothing after a stop. With R the most that a
single round of drafting can lose and all of that reading, together, what is lost over any N rounds is, in plain rounds, at most

    CREDIT + PATIENCE + R  +  (PATIENCE / 2 + R) * log2(1 + N / COOLING)

(`loss_bound`; for N up to 2 ** MOST_DOUBLINGS * COOLING, some sixty thousand rounds). For a stretch begins with CREDIT at
most; up to its first stop the balance is above -PATIENCE, and to that comes either what is outstanding, or, with the stop, one
round's loss and what was outstanding: R in both cases. Up to each further stop it is PATIENCE / 2 and R again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from secondguess.core import Row

PROBING = 0.005
"""Income of the account for probes: this share of the time that passes, at most."""
LARGEST_PROBE = 6.0
"""Probes are saved up for so many plain rounds at most."""
MOST_HALVINGS = 5
PATIENCE = 16.0
"""The guard stops drafting when the debt reaches so many plain rounds."""
CREDIT = 16.0
"""Time won is remembered up to so many plain rounds."""
COOLING = 64
"""Rounds for which the first stop lasts."""
MOST_DOUBLINGS = 10
LONGEST_SPREAD = 256
"""The reading of a text falls due within so many rounds: nobody knows whether a text will be as long as it may."""


def loss_bound(num_rounds: int, worst_round: float) -> float:
    """Plain rounds that drafting can lose at most over any stretch of so many rounds.

    Args:
        worst_round: what a single round can lose, in plain rounds: drafting at full length, and reading all texts in flight.
    """
    num_further_stops = math.log2(1 + num_rounds / COOLING)
    return CREDIT + PATIENCE + worst_round + (PATIENCE / 2 + worst_round) * num_further_stops


class Probes:
    """The account from which probes are paid."""

    def __init__(self) -> None:
        self.balance = 0.0
        self._halvings = 0

    def earn(self, seconds: float, plain: float) -> None:
        """Time has passed."""
        income = PROBING * seconds / 2**self._halvings
        self.balance = min(self.balance + income, LARGEST_PROBE * plain)

    def pay(self, lost: float) -> None:
        """A probe lost so many seconds (or, below zero, gained them)."""
        self.balance -= lost

    def failed(self) -> None:
        self._halvings = min(self._halvings + 1, MOST_HALVINGS)

    def succeeded(self) -> None:
        self._halvings = 0


class Outstanding:
    """Costs that serve many rounds to come: each falls due in equal shares, or at once when its row ends."""

    def __init__(self) -> None:
        self._of: dict[Row, tuple[float, float]] = {}

    def __bool__(self) -> bool:
        return bool(self._of)

    def add(self, row: Row, cost: float, num_rounds: float) -> None:
        """Something was spent that serves a row for so many rounds; what it owes already is spread over as many."""
        left, _ = self._of.get(row, (0.0, 0.0))
        left += cost
        self._of[row] = left, left / min(max(num_rounds, 1.0), LONGEST_SPREAD)

    def fall_due(self, rows: Iterable[Row]) -> float:
        """What rows owe for one more round."""
        due = 0.0
        for row in rows:
            left, share = self._of.get(row, (0.0, 0.0))
            if left > share:
                self._of[row] = left - share, share
                due += share
            elif left:
                del self._of[row]
                due += left
        return due

    def settle(self, row: Row) -> float:
        """All that a row owes."""
        return self._of.pop(row, (0.0, 0.0))[0]

    def settle_all(self) -> float:
        due = sum(left for left, _ in self._of.values())
        self._of.clear()
        return due


class Guard:
    """The wall-clock account of all drafting, in plain rounds."""

    def __init__(self) -> None:
        self._balance = 0.0
        self._limit = -PATIENCE
        self._doublings = 0
        self._num_waiting = 0
        self._outstanding = Outstanding()

    def spread(self, row: Row, cost: float, num_rounds: float) -> None:
        """So many plain rounds went into reading a row's text, which serves it for so many rounds to come."""
        self._outstanding.add(row, cost, num_rounds)

    def book(self, won: float, rows: Iterable[Row] = ()) -> None:
        """A round with drafts won so many plain rounds (or, below zero, lost them), reading that is spread left out.

        Args:
            rows: those that took part in it.
        """
        due = self._outstanding.fall_due(rows) if self._outstanding else 0.0
        self._balance = min(self._balance + won - due, CREDIT)
        if self._balance >= 0:
            self._doublings, self._limit = 0, -PATIENCE
        elif self._balance <= self._limit:
            self._num_waiting = COOLING * 2**self._doublings
            self._doublings = min(self._doublings + 1, MOST_DOUBLINGS)
            # What was read will not be used for a while, and may never be.
            self._balance -= self._outstanding.settle_all()
            # The debt stays; before the next, longer stop only half as much may be added to it.
            self._limit = self._balance - PATIENCE / 2

    def wait(self, rows: Iterable[Row] = (), num_rounds: int = 1) -> None:
        """Rounds without drafts have passed."""
        for _ in range(num_rounds):
            if self._num_waiting:
                self._num_waiting -= 1
            elif self._outstanding:
                self.book(0.0, rows)

    def end(self, row: Row) -> None:
        """A row has ended: what was read of it will serve no more."""
        due = self._outstanding.settle(row)
        if due:
            self.book(-due)

    @property
    def forbids(self) -> bool:
        """Whether nothing may be drafted for now."""
        return self._num_waiting > 0
