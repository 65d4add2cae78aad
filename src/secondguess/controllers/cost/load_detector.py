"""Detection of other load on the machine, from the durations of rounds.

Preempted rounds take several times as long as the others. They hardly move the median with which
costs are compared, but make up most of the elapsed time. The balance of what drafting has gained
or lost (`LossGuard`) is therefore kept in mean plain rounds (rounds without drafts), disturbed ones
included, and decisions made on a busy machine expire when it becomes quiet.
"""

from __future__ import annotations

WINDOW = 16
"""Number of recent rounds considered together."""
SLOW = 1.5
"""Multiple of its expected time above which a round counts as disturbed."""
NUM_BUSY, NUM_QUIET = 4, 1
"""Minimum number of disturbed rounds in a window for a busy machine, maximum for a quiet one."""
MAX_QUIET_SLOWDOWN = 1.1
"""Maximum `slowdown` of a quiet machine."""


class LoadDetector:
    """Running statistics of the durations of rounds relative to their expected time.

    Attributes:
        slowdown: mean plain round over its usual time, at least 1.
    """

    def __init__(self) -> None:
        self.slowdown = 1.0
        self._count = 0
        self._slow = 0  # one bit per recent round, 1 if it was disturbed
        self._num_seen = 0
        self._was_busy = False

    @property
    def is_busy(self) -> bool:
        return self._slow.bit_count() >= NUM_BUSY

    @property
    def is_quiet(self) -> bool:
        return self._num_seen >= WINDOW and self._slow.bit_count() <= NUM_QUIET

    def add(self, ratio: float) -> bool:
        """Add the ratio of a plain round to its usual time.

        Returns:
            True if a busy machine became quiet.
        """
        self._count = min(self._count + 1, WINDOW)
        self.slowdown = max(self.slowdown + (ratio - self.slowdown) / self._count, 1.0)
        return self.add_drafted(ratio)

    def add_drafted(self, ratio: float) -> bool:
        """Add the ratio of a round with drafts to its expected time; `slowdown` is not updated.

        Returns:
            True if a busy machine became quiet.
        """
        self._slow = (self._slow << 1 | (ratio > SLOW)) & (1 << WINDOW) - 1
        self._num_seen += 1
        if not self._slow and not self._was_busy and self.slowdown <= MAX_QUIET_SLOWDOWN:
            return False
        if self.is_busy:
            self._was_busy = True
        if not self.is_quiet:
            return False
        self.slowdown, self._count = min(self.slowdown, MAX_QUIET_SLOWDOWN), 0
        was_busy, self._was_busy = self._was_busy, False
        return was_busy

    def restart(self) -> None:
        """Discard all rounds: their usual time has changed."""
        self.slowdown, self._count, self._was_busy = 1.0, 0, False
        self._slow = self._num_seen = 0
