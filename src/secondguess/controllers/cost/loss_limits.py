"""Bounds on the time that drafting may lose: a budget for probes, a guard against wrong estimates.

A probe is a short trial draft while nothing pays. Probes are paid from a budget whose income is a
small share of the elapsed time. Each failed series halves the income until drafting pays again, so
over N plain rounds (rounds without drafts) probes cost at most PROBE_INCOME * N +
MAX_PROBE_BALANCE plain rounds, plus the loss of the last probe.

The guard checks all estimates against the wall clock: it compares the time of rounds with drafts
with the time plain rounds would have taken for the same tokens. (The time of planning rounds that
have no drafts after all is bounded by `MAX_PLAN_SHARE` instead.) Its balance, in plain rounds, is
at most MAX_BALANCE. When it falls to -MAX_LOSS, drafting stops for STOP_ROUNDS rounds, and twice
as long at each further stop until all of the loss is recovered.

The prefill of a draft model serves all later rounds of a row, so it is amortised: recorded in equal
shares, round by round. The rest is recorded at once when the row ends or drafting stops, as it may
never be recovered. The balance therefore includes all losses but the outstanding prefill: at most
that of the rows in flight, and none after a stop. With R the maximum loss of a single round of
drafting plus all of that prefill, the loss over any N rounds is, in plain rounds, at most

    MAX_BALANCE + MAX_LOSS + R  +  (MAX_LOSS / 2 + R) * log2(1 + N / STOP_ROUNDS)

(for N up to 2 ** MAX_DOUBLINGS * STOP_ROUNDS, about 65,000 rounds). The balance is
at most MAX_BALANCE at the beginning and above -MAX_LOSS until the first stop. In addition there is
either outstanding prefill, or at the stop one round's loss and the prefill outstanding then: R in
both cases. (Rounds that are recorded together are recorded before they would exceed the limit.)
Until each further stop it is MAX_LOSS / 2 + R again. All of it starts anew when the machine changes
its speed (`LossGuard.reset`), since the losses were recorded at another speed: the bound holds
between two such changes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from secondguess.core import Row

PROBE_INCOME = 0.005
"""Maximum income of the probe budget, as a share of the elapsed time."""
MAX_PROBE_BALANCE = 6.0
"""Maximum probe budget, in plain rounds."""
MAX_HALVINGS = 5
SERIES = 4
"""Approximate number of probes in a series."""
GRANT = 2.9
"""Probe budget at the beginning, and after the machine has changed its speed, in plain rounds.

Enough for a series of probes whose cost other load made look three times as high, as the first drafts
may all fail then; it would take hundreds of rounds to earn such a series. Less than half of the
maximum, at which a series of any expected cost may begin.
"""
GRANT_INTERVAL = 256.0
"""Minimum time between two grants, in plain rounds.

Where several threads start and end requests, many rounds look as if the machine had changed its speed.
"""
MAX_LOSS = 16.0
"""Loss at which the guard stops drafting, in plain rounds."""
MAX_BALANCE = 16.0
"""Maximum balance of the guard, in plain rounds."""
STOP_ROUNDS = 64
"""Length of the first stop, in rounds."""
MAX_DOUBLINGS = 10
NUM_REVIEWED = 16
"""Number of rounds before a stop, and of plain rounds after it, that are compared."""
MAX_AMORTISATION = 256
"""Maximum number of rounds over which prefill is amortised, as a row may end early."""


class ProbeBudget:
    """Budget for probes, in plain rounds.

    Attributes:
        balance: what the next probes may cost.
    """

    def __init__(self) -> None:
        self.balance = GRANT
        self._halvings = 0
        self._since_grant = GRANT_INTERVAL
        self._is_grant_due = False

    def grant(self) -> None:
        """Allow a series of probes, once `GRANT_INTERVAL` is over: earlier results are from another machine speed."""
        self._is_grant_due = self._since_grant < GRANT_INTERVAL
        if not self._is_grant_due:
            self._since_grant, self._halvings = 0.0, 0
            self.balance = max(self.balance, GRANT)

    def earn(self, elapsed: float) -> None:
        """Add the income of some rounds, which took as long as `elapsed` plain rounds."""
        self._since_grant += elapsed
        if self._is_grant_due:
            self.grant()
        income = PROBE_INCOME * elapsed / 2**self._halvings
        self.balance = min(self.balance + income, MAX_PROBE_BALANCE)

    def may_begin(self, price: float) -> bool:
        """Return whether a series of probes of this expected cost may begin."""
        # Half of the maximum budget is always enough: `price` may be wrong, and only a probe can
        # correct it.
        return self.balance >= min(price, MAX_PROBE_BALANCE / 2)

    def may_continue(self, price: float) -> bool:
        """Return whether the series may go on with a probe of this expected cost."""
        return self.balance >= price

    def pay(self, lost: float) -> None:
        """Charge what a probe lost (negative: gained)."""
        self.balance -= lost

    def record_failure(self) -> None:
        self._is_grant_due = False
        self._halvings = min(self._halvings + 1, MAX_HALVINGS)

    def record_success(self) -> None:
        self._halvings, self._is_grant_due = 0, False


class AmortisedCosts:
    """Costs not recorded yet, which are amortised in equal shares or recorded when their row ends."""

    def __init__(self) -> None:
        self._outstanding: dict[Row, tuple[float, float]] = {}

    def __bool__(self) -> bool:
        return bool(self._outstanding)

    def add(self, row: Row, cost: float, num_rounds: float) -> None:
        """Amortise `cost` and what is outstanding for the row over `num_rounds` rounds."""
        left, _ = self._outstanding.get(row, (0.0, 0.0))
        left += cost
        self._outstanding[row] = left, left / min(max(num_rounds, 1.0), MAX_AMORTISATION)

    def take_shares(self, rows: Iterable[Row]) -> float:
        """Deduct and return the shares of these rows for one round."""
        due = 0.0
        for row in rows:
            left, share = self._outstanding.get(row, (0.0, 0.0))
            if left > share:
                self._outstanding[row] = left - share, share
                due += share
            elif left:
                del self._outstanding[row]
                due += left
        return due

    def pop(self, row: Row) -> float:
        """Remove and return all outstanding cost of a row."""
        return self._outstanding.pop(row, (0.0, 0.0))[0]

    def pop_all(self) -> float:
        due = sum(left for left, _ in self._outstanding.values())
        self._outstanding.clear()
        return due


class LossGuard:
    """Wall-clock balance of all drafting, in plain rounds.

    After a stop, the rounds that led to it are compared with the plain rounds that follow. If
    those take as long, the machine was the cause, and drafting continues.
    """

    def __init__(self) -> None:
        self._balance = 0.0
        self._limit = -MAX_LOSS
        self._doublings = 0
        self._num_waiting = 0
        self._amortised = AmortisedCosts()
        self._recorded: deque[tuple[float, float]] = deque(maxlen=NUM_REVIEWED)
        self._review: Review | None = None

    def amortise(self, row: Row, cost: float, num_rounds: float) -> None:
        """Amortise a row's prefill of `cost` plain rounds over its next `num_rounds` rounds."""
        self._amortised.add(row, cost, num_rounds)

    def record(self, gain: float, rows: Iterable[Row] = (), seconds: float = 0.0, plain: float = 1.0) -> None:
        """Record a round with drafts; prefill that is amortised is not included.

        Args:
            gain: plain rounds that it gained (negative: lost).
            plain: seconds of the plain rounds in which `gain` is counted.
        """
        self._recorded.append((seconds, plain))
        due = self._amortised.take_shares(rows) if self._amortised else 0.0
        self._balance = min(self._balance + gain - due, MAX_BALANCE)
        if self._balance >= 0:
            self._doublings, self._limit = 0, -MAX_LOSS
        elif self._balance <= self._limit:
            self._stop()

    def would_stop(self, gains: Sequence[float]) -> bool:
        """Return whether drafting stops if rounds with these gains, in plain rounds, are recorded."""
        balance, limit = self._balance, self._limit
        for gain in gains:
            balance = min(balance + gain, MAX_BALANCE)
            if balance <= limit:
                return True
            if balance >= 0:
                limit = -MAX_LOSS
        return False

    def _stop(self) -> None:
        self._review = Review(tuple(self._recorded), self._limit, self._doublings)
        self._recorded.clear()
        self._num_waiting = STOP_ROUNDS * 2**self._doublings
        self._doublings = min(self._doublings + 1, MAX_DOUBLINGS)
        # The prefilled cache will not be used for a while, and may never be.
        self._balance -= self._amortised.pop_all()
        # The loss stays; only half as much may be added to it before the next, longer stop.
        self._limit = self._balance - MAX_LOSS / 2

    def record_plain(self, rows: Iterable[Row] = (), num_rounds: int = 1, seconds: float = 1.0) -> None:
        """Record rounds without drafts, which took `seconds` in total."""
        self.wait(rows, num_rounds)
        if self._review is not None and self._review.add(num_rounds, seconds):
            self._revise(self._review)
            self._review = None

    def wait(self, rows: Iterable[Row] = (), num_rounds: int = 1) -> None:
        """Record rounds that were not measured."""
        for _ in range(num_rounds):
            if self._num_waiting:
                self._num_waiting -= 1
            elif self._amortised:
                self.record(0.0, rows)

    def _revise(self, review: Review) -> None:
        """Add back the loss caused by the machine; end the stop if it would not have happened."""
        self._balance = min(self._balance + review.correction, MAX_BALANCE)
        if self._balance > review.limit:
            self._num_waiting, self._limit, self._doublings = 0, review.limit, review.doublings

    def reset(self) -> None:
        """Allow drafting again: its losses were measured at another machine speed."""
        self._balance = min(max(self._balance, -MAX_LOSS / 2), 0.0)
        self._num_waiting, self._limit, self._doublings = 0, -MAX_LOSS, 0
        self._recorded.clear()
        self._review = None

    def release(self, row: Row) -> None:
        """Record the outstanding prefill of a row that has ended."""
        due = self._amortised.pop(row)
        if due:
            self.record(-due)

    @property
    def is_stopped(self) -> bool:
        """True while drafting is stopped."""
        return self._num_waiting > 0


class Review:
    """Comparison of the rounds that led to a stop with the plain rounds after it.

    Args:
        recorded: seconds of each round, and of the plain rounds that it was compared with.
        limit, doublings: state of the guard before the stop.
    """

    def __init__(self, recorded: Sequence[tuple[float, float]], limit: float, doublings: int) -> None:
        self.limit, self.doublings = limit, doublings
        self._recorded = recorded
        self._num_rounds, self._seconds = 0, 0.0

    def add(self, num_rounds: int, seconds: float) -> bool:
        """Add plain rounds that followed the stop; return True once there are enough."""
        self._num_rounds += num_rounds
        self._seconds += seconds
        return self._num_rounds >= NUM_REVIEWED

    @property
    def correction(self) -> float:
        """Amount by which the loss was overestimated, in plain rounds."""
        plain = self._seconds / self._num_rounds
        return sum(seconds * max(1 / before - 1 / plain, 0.0) for seconds, before in self._recorded)
