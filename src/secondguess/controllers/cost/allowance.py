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
from collections import deque
from collections.abc import Iterable, Sequence

from secondguess.core import Row

PROBING = 0.005
"""Income of the account for probes: this share of the time that passes, at most."""
LARGEST_PROBE = 6.0
"""Probes are saved up for so many plain rounds at most."""
MOST_HALVINGS = 5
SERIES = 4
"""Probes come in series of about so many."""
NUM_FREE, FIRST_WAIT = 3, 8
"""At the beginning, and after the machine has changed its speed, so many series are free; the rounds between them double."""
FREE_TRIAL = 1.0
"""A free trial ends when it has lost so many plain rounds."""
PATIENCE = 16.0
"""The guard stops drafting when the debt reaches so many plain rounds."""
CREDIT = 16.0
"""Time won is remembered up to so many plain rounds."""
COOLING = 64
"""Rounds for which the first stop lasts."""
MOST_DOUBLINGS = 10
NUM_REVIEWED = 16
"""Rounds before a stop, and plain rounds after it, that are compared with each other."""
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
    """The account from which probes are paid, and the trials that are free after the machine has changed its speed."""

    def __init__(self) -> None:
        self.balance = 0.0
        self._halvings = 0
        self._num_free = NUM_FREE  # free trials left
        self._wait = FIRST_WAIT  # rounds until the next of them
        self._free_probes = 0  # left in the free trial under way
        self._free_loss = 0.0  # seconds that it may still lose

    def grant(self) -> None:
        """Allow a few free trials soon: what is known of drafting was learned on a machine of another speed."""
        self._halvings, self._num_free, self._wait = 0, NUM_FREE, 0

    def earn(self, seconds: float, plain: float) -> None:
        """Add the income of rounds that took so many seconds in all."""
        income = PROBING * seconds / 2**self._halvings
        self.balance = min(self.balance + income, LARGEST_PROBE * plain)

    def count_round(self) -> None:
        """Count a round, until the next free series is due."""
        if self._wait:
            self._wait -= 1

    @property
    def is_due(self) -> bool:
        """Whether a free series may begin."""
        return self._num_free > 0 and not self._wait

    def may_begin(self, price: float, plain: float) -> bool:
        """Return whether a series of probes may begin, and begin it.

        Args:
            price: expected seconds of the series.
            plain: seconds of a plain round.
        """
        if self.is_due:
            self._wait = FIRST_WAIT << (NUM_FREE + 1 - self._num_free)
            self._num_free -= 1
            self._free_probes, self._free_loss = SERIES, FREE_TRIAL * plain
            return True
        # The price may be wrong, which only a probe can show: no series is too expensive to be saved up for.
        return self.balance >= min(price, LARGEST_PROBE * plain / 2)

    def may_go_on(self, price: float) -> bool:
        """Return whether another probe of the series, expected to take so many seconds, may follow."""
        return self._free_probes > 0 or self.balance >= price

    def pay(self, lost: float) -> None:
        """A probe lost so many seconds (or, below zero, gained them)."""
        if not self._free_probes:
            self.balance -= lost
            return
        self._free_loss -= lost
        self._free_probes -= 1
        if self._free_loss <= 0:  # too expensive to be repeated soon
            self._free_probes, self._num_free = 0, min(self._num_free, 1)

    def failed(self) -> None:
        if not self._num_free:
            self._halvings = min(self._halvings + 1, MOST_HALVINGS)
        self._free_probes = 0

    def succeeded(self) -> None:
        self._halvings = self._free_probes = 0


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
    """The wall-clock account of all drafting, in plain rounds.

    When drafting stops, the rounds that led to the stop are compared once more, with the plain rounds that follow: if
    those take as long, the machine was the cause, and drafting goes on.
    """

    def __init__(self) -> None:
        self._balance = 0.0
        self._limit = -PATIENCE
        self._doublings = 0
        self._num_waiting = 0
        self._outstanding = Outstanding()
        self._booked: deque[tuple[float, float]] = deque(maxlen=NUM_REVIEWED)
        self._review: Review | None = None

    def spread(self, row: Row, cost: float, num_rounds: float) -> None:
        """So many plain rounds went into reading a row's text, which serves it for so many rounds to come."""
        self._outstanding.add(row, cost, num_rounds)

    def book(self, won: float, rows: Iterable[Row] = (), seconds: float = 0.0, plain: float = 1.0) -> None:
        """Account for a round with drafts, reading that is spread left out.

        Args:
            won: plain rounds that it won (or, below zero, lost).
            rows: those that took part in it.
            seconds: its duration.
            plain: seconds of the plain rounds that `won` was counted in.
        """
        self._booked.append((seconds, plain))
        due = self._outstanding.fall_due(rows) if self._outstanding else 0.0
        self._balance = min(self._balance + won - due, CREDIT)
        if self._balance >= 0:
            self._doublings, self._limit = 0, -PATIENCE
        elif self._balance <= self._limit:
            self._stop()

    def _stop(self) -> None:
        self._review = Review(tuple(self._booked), self._limit, self._doublings)
        self._booked.clear()
        self._num_waiting = COOLING * 2**self._doublings
        self._doublings = min(self._doublings + 1, MOST_DOUBLINGS)
        # What was read will not be used for a while, and may never be.
        self._balance -= self._outstanding.settle_all()
        # The debt stays; before the next, longer stop only half as much may be added to it.
        self._limit = self._balance - PATIENCE / 2

    def wait(self, rows: Iterable[Row] = (), num_rounds: int = 1, seconds: float = 1.0) -> None:
        """Rounds without drafts have passed, which took so many seconds in all."""
        for _ in range(num_rounds):
            if self._num_waiting:
                self._num_waiting -= 1
            elif self._outstanding:
                self.book(0.0, rows)
        if self._review is not None and self._review.add(num_rounds, seconds):
            self._revise(self._review)
            self._review = None

    def _revise(self, review: Review) -> None:
        """Correct the debt by what the machine had caused; end the stop if it would not have come to it."""
        self._balance = min(self._balance + review.correction, CREDIT)
        if self._balance > review.limit:
            self._num_waiting, self._limit, self._doublings = 0, review.limit, review.doublings

    def forgive(self) -> None:
        """Let drafting go on: the machine on which it made a loss has changed its speed."""
        self._balance = min(max(self._balance, -PATIENCE / 2), 0.0)
        self._num_waiting, self._limit, self._doublings = 0, -PATIENCE, 0
        self._booked.clear()
        self._review = None

    def end(self, row: Row) -> None:
        """A row has ended: what was read of it will serve no more."""
        due = self._outstanding.settle(row)
        if due:
            self.book(-due)

    @property
    def forbids(self) -> bool:
        """Whether drafting is stopped for now."""
        return self._num_waiting > 0


class Review:
    """Second look at the rounds that led to a stop.

    Args:
        booked: seconds of each, and of the plain rounds that it was compared with.
        limit, doublings: of the guard before the stop.
    """

    def __init__(self, booked: Sequence[tuple[float, float]], limit: float, doublings: int) -> None:
        self.limit, self.doublings = limit, doublings
        self._booked = booked
        self._num_rounds, self._seconds = 0, 0.0

    def add(self, num_rounds: int, seconds: float) -> bool:
        """Add plain rounds that followed the stop; return True once there are enough."""
        self._num_rounds += num_rounds
        self._seconds += seconds
        return self._num_rounds >= NUM_REVIEWED

    @property
    def correction(self) -> float:
        """Plain rounds by which the loss was overestimated."""
        plain = self._seconds / self._num_rounds
        return sum(seconds * max(1 / before - 1 / plain, 0.0) for seconds, before in self._booked)
