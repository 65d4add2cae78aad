"""How much time may be lost: to trying (probes) and to being wrong (the guard).

Both are accounts in seconds. Probes are paid from an income, a small share of the time that passes; each failure halves the
income until something pays. The guard books what drafting rounds really took against what plain rounds would
have taken for the same tokens, on the wall clock; credit is forgotten at once, so the account speaks for any stretch of time:

    seconds lost since any moment  <=  SHARE * (seconds since) + PATIENCE plain rounds + the round under way

because at -PATIENCE drafting stops until the income has made up for it.
"""

from __future__ import annotations

PROBING = 0.01
"""Income of the account for probes: this share of the time that passes, at most."""
LARGEST_PROBE = 6.0
"""Probes are saved up for so many plain rounds at most."""
MOST_HALVINGS = 5
SHARE = 0.01
"""Income of the guard's account."""
PATIENCE = 16.0
"""The guard stops drafting after losing so many plain rounds in a row, net of income."""
RECOVERED = 0.5
"""Drafting resumes when this share of the debt is left."""


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
    """The wall-clock account of all drafting."""

    def __init__(self) -> None:
        self._balance = 0.0
        self._stopped = False

    def book(self, seconds: float, plain_seconds: float, plain: float) -> None:
        """A round took `seconds`; its tokens would have taken `plain_seconds` without drafts.

        Args:
            plain: seconds of one plain round.
        """
        self._balance = min(self._balance + SHARE * seconds + plain_seconds - seconds, 0.0)
        if self._balance <= -PATIENCE * plain:
            self._stopped = True
        elif self._balance >= -RECOVERED * PATIENCE * plain:
            self._stopped = False

    @property
    def forbids(self) -> bool:
        """Whether nothing may be drafted for now."""
        return self._stopped
