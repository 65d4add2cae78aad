"""How much time may be lost: to trying (probes) and to being wrong (the guard).

Both are accounts. Probes are paid from an income, a small share of the time that passes; each failure halves the income until
something pays, so over N plain rounds they cost at most PROBING * N of them, and LARGEST_PROBE.

The guard backs up every estimate by the wall clock: it books what drafting rounds really took against what plain rounds
would have taken for the same tokens. Some credit may be saved up, some debt run into; then drafting stops for a while, twice
as long each time until all of the debt is made good. With R the most that a single round can lose (a draft model may have a
whole prompt to read in it), what is lost over any N rounds is,
in plain rounds, at most

    CREDIT + PATIENCE + R  +  (PATIENCE / 2 + R) * log2(1 + N / COOLING)

(`loss_bound`; for N up to 2 ** MOST_DOUBLINGS * COOLING, some sixty thousand rounds).
"""

from __future__ import annotations

import math

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


def loss_bound(num_rounds: int, worst_round: float) -> float:
    """Plain rounds that drafting can lose at most over any stretch of so many rounds.

    Args:
        worst_round: what a single round can lose, in plain rounds: reading the prompts and drafting at full length.
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


class Guard:
    """The wall-clock account of all drafting, in plain rounds."""

    def __init__(self) -> None:
        self._balance = 0.0
        self._limit = -PATIENCE
        self._doublings = 0
        self._num_waiting = 0

    def book(self, won: float) -> None:
        """A round with drafts won so many plain rounds (or, below zero, lost them)."""
        self._balance = min(self._balance + won, CREDIT)
        if self._balance >= 0:
            self._doublings, self._limit = 0, -PATIENCE
        elif self._balance <= self._limit:
            self._num_waiting = COOLING * 2**self._doublings
            self._doublings = min(self._doublings + 1, MOST_DOUBLINGS)
            # The debt stays; before the next, longer stop only half as much may be added to it.
            self._limit = self._balance - PATIENCE / 2

    def wait(self) -> None:
        """A round without drafts has passed."""
        self._num_waiting = max(self._num_waiting - 1, 0)

    @property
    def forbids(self) -> bool:
        """Whether nothing may be drafted for now."""
        return self._num_waiting > 0
