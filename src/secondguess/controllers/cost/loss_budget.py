"""Budget of the time that drafting may lose, in plain rounds (rounds without drafts)."""

from __future__ import annotations

from collections.abc import Sequence

from secondguess.core import Row

FIRST_BUDGET = 3.5
"""Time that may be lost at the beginning."""
INCOME = 0.006
"""Share of the elapsed time that may be lost."""
MAX_BUDGET = 16.0
"""Largest budget: gains further back are not lost again."""
MAX_LOSS = 6.0
"""Deficit at which all drafting stops, also of drafts that are expected to pay."""


class LossBudget:
    """Wall-clock balance of drafting: what it gained, less what it lost, and an income.

    Without a budget nothing is tried, and at a deficit of MAX_LOSS nothing is drafted until the income has covered what
    is beyond. A time that is longer than expected counts as a disturbance by other load on the machine until the
    fourth in a row. With R the loss of one round of drafting, any N rounds on a quiet machine therefore lose at most
    MAX_BUDGET + MAX_LOSS + INCOME * N + 4 R (1 + INCOME * N). The prefill of a draft model serves all later rounds
    of its row and is charged to them.
    """

    def __init__(self) -> None:
        self.balance = FIRST_BUDGET
        self._excesses = (0.0, 0.0, 0.0)
        self._outstanding: dict[Row, tuple[float, float]] = {}

    @property
    def allows_trials(self) -> bool:
        """True if drafts may be tried that are not expected to pay."""
        return self.balance >= 0

    @property
    def is_spent(self) -> bool:
        """True while nothing may be drafted."""
        return self.balance < -MAX_LOSS

    def record(self, rows: Sequence[Row], gain: float, elapsed: float, excess: float | None = None) -> None:
        """Record a round.

        Args:
            gain: plain rounds that it gained (negative: lost).
            elapsed: time that it took.
            excess: time that other load on the machine may have added to drafting, of which the fourth in a row counts;
                None for a plain round.
        """
        if excess is not None:
            self._charge(max(min(excess, *self._excesses), 0.0))
            self._excesses = (excess, *self._excesses[:2])
        for row in rows if self._outstanding else ():
            left, share = self._outstanding.pop(row, (0.0, 0.0))
            gain -= min(left, share)
            if left > share:
                self._outstanding[row] = left - share, share
        self.balance = min(self.balance + gain + INCOME * elapsed, MAX_BUDGET)

    def _charge(self, time: float) -> None:
        """Charge a time that may not be drafting's fault: alone it must not stop drafting for thousands of rounds."""
        self.balance -= min(time, max(self.balance + MAX_LOSS + 1, 0.0))

    def defer(self, row: Row, cost: float, num_rounds: float) -> None:
        """Charge a cost over the next rounds of a row."""
        left = cost + self._outstanding.get(row, (0.0, 0.0))[0]
        self._outstanding[row] = left, left / max(num_rounds, 1.0)

    def renew(self) -> None:
        """Allow trials again: the machine has changed its speed."""
        self.balance = max(self.balance, FIRST_BUDGET / 2)

    def release(self, row: Row) -> None:
        """Charge what is outstanding of a row that has ended."""
        self._charge(self._outstanding.pop(row, (0.0, 0.0))[0])
