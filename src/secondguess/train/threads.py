"""How many threads to use beside other work on the same machine.

A parallel region waits for its slowest thread. When another process holds one of the cores, two threads are slower
than one: on a contended two-core machine a run was measured at a tenth of its speed. So the count follows, step by
step, what the rest of the machine leaves over.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch

_STATISTICS = Path("/proc/stat")


def _busy_seconds() -> float | None:
    """Processor seconds spent by everyone since boot, or None where the system does not say."""
    try:
        numbers = [int(number) for number in _STATISTICS.read_text().split("\n", 1)[0].split()[1:9]]
    except (OSError, ValueError, IndexError):
        return None
    idle = numbers[3] + numbers[4]
    return (sum(numbers) - idle) / os.sysconf("SC_CLK_TCK")


def threads_to_use(others: float, cores: int, tolerance: float = 0.2) -> int:
    """Cores left over when other processes keep ``others`` cores busy on average; a light load is ignored."""
    taken = int(others + 1 - tolerance)
    return max(1, min(cores, cores - taken))


@dataclass
class SpareThreads:
    """Sets the thread count from the load that others caused since the last call."""

    most: int
    _wall: float = field(default_factory=time.monotonic)
    _own: float = field(default_factory=time.process_time)
    _busy: float | None = field(default_factory=_busy_seconds)

    def adapt(self) -> int:
        wall, own, busy = time.monotonic(), time.process_time(), _busy_seconds()
        if busy is None or self._busy is None or wall - self._wall < 0.5:
            return torch.get_num_threads()
        others = ((busy - self._busy) - (own - self._own)) / (wall - self._wall)
        self._wall, self._own, self._busy = wall, own, busy
        count = threads_to_use(others, self.most)
        if count != torch.get_num_threads():
            torch.set_num_threads(count)
        return count
