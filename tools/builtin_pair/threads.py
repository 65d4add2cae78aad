"""Number of threads on a machine that is shared with other processes.

A parallel region waits for its slowest thread. When another process occupies one of the cores, two
threads are slower than one: on a contended two-core machine, a run was measured at a tenth of its
speed. The thread count therefore follows, step by step, the cores that other processes leave idle.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch

_STATISTICS = Path("/proc/stat")
IGNORED_LOAD = 0.2
"""Load of other processes that is ignored, in cores."""


def _busy_seconds() -> float | None:
    """Return the CPU seconds of all processes since boot, or None without `/proc/stat`."""
    try:
        numbers = [int(number) for number in _STATISTICS.read_text().split("\n", 1)[0].split()[1:9]]
    except (OSError, ValueError, IndexError):
        return None
    idle = numbers[3] + numbers[4]
    return (sum(numbers) - idle) / os.sysconf("SC_CLK_TCK")


def threads_to_use(others: float, cores: int, most: int) -> int:
    """Return the cores left if other processes keep ``others`` of them busy, from 1 to ``most``."""
    taken = int(others + 1 - IGNORED_LOAD)
    return max(1, min(most, cores - taken))


@dataclass
class SpareThreads:
    """Thread count that follows the load of other processes.

    Args:
        most: maximum number of threads.
    """

    most: int
    _wall: float = field(default_factory=time.monotonic)
    _own: float = field(default_factory=time.process_time)
    _busy: float | None = field(default_factory=_busy_seconds)

    def adapt(self) -> int:
        """Set the thread count from the load since the last call, and return it."""
        wall, own, busy = time.monotonic(), time.process_time(), _busy_seconds()
        if busy is None or self._busy is None or wall - self._wall < 0.5:
            return torch.get_num_threads()
        others = ((busy - self._busy) - (own - self._own)) / (wall - self._wall)
        self._wall, self._own, self._busy = wall, own, busy
        count = threads_to_use(others, os.cpu_count() or 1, self.most)
        if count != torch.get_num_threads():
            torch.set_num_threads(count)
        return count
