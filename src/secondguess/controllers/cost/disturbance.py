"""Detection of other load on the machine, from plain rounds alone.

Preempted rounds take several times as long as the others. They hardly move the median that costs are compared
with, but they do make up most of the time that passes. So the account of what drafting has won or lost (`Guard`)
is kept in mean plain rounds, those of busy moments included, and verdicts that were reached on a busy machine
expire when it becomes quiet.
"""

from __future__ import annotations

WINDOW = 16
"""Plain rounds that are looked at together."""
SLOW = 1.5
"""A plain round that took this many times its usual time was disturbed."""
NUM_BUSY, NUM_QUIET = 4, 1
"""So many disturbed rounds of a window, at least or at most, make a busy or a quiet machine."""


QUIET_EXCESS = 1.1
"""Most that disturbances add to the mean plain round of a quiet machine."""


class Disturbance:
    """Running statistics of plain rounds relative to their usual time.

    Attributes:
        excess: mean of a plain round over its usual time, at least 1.
    """

    def __init__(self) -> None:
        self.excess = 1.0
        self._count = 0
        self._slow = 0  # a bit for each of the last rounds, 1 for a disturbed one
        self._num_seen = 0
        self._was_busy = False

    @property
    def is_busy(self) -> bool:
        return self._slow.bit_count() >= NUM_BUSY

    @property
    def is_quiet(self) -> bool:
        return self._num_seen >= WINDOW and self._slow.bit_count() <= NUM_QUIET

    def add(self, ratio: float) -> bool:
        """Add a plain round over its usual time; return True if a busy machine has become quiet."""
        self._count = min(self._count + 1, WINDOW)
        self.excess = max(self.excess + (ratio - self.excess) / self._count, 1.0)
        return self._see(ratio)

    def add_drafted(self, ratio: float) -> bool:
        """Add a round with drafts over its expected time, which may only make the machine look quieter."""
        return self._see(ratio)

    def _see(self, ratio: float) -> bool:
        self._slow = (self._slow << 1 | (ratio > SLOW)) & (1 << WINDOW) - 1
        self._num_seen += 1
        if not self._slow and not self._was_busy and self.excess <= QUIET_EXCESS:
            return False
        if self.is_busy:
            self._was_busy = True
        if not self.is_quiet:
            return False
        self.excess, self._count = min(self.excess, QUIET_EXCESS), 0
        was_busy, self._was_busy = self._was_busy, False
        return was_busy

    def restart(self) -> None:
        """Forget all rounds: their usual time has changed."""
        self.excess, self._count, self._was_busy = 1.0, 0, False
        self._slow = self._num_seen = 0
