"""Decayed acceptance statistics: the share accepted among the nodes that were reached.

A node is *reached* if all nodes before it were accepted; then its own outcome is observed,
whatever follows it. The share accepted among reached nodes, the censored hazard of survival
analysis (Kaplan and Meier 1958), is therefore not biased by drafts that stopped early, unlike an
average of accepted lengths.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

PRIOR_WEIGHT = 4.0
"""Weight of the prior expectation, in observations."""


AGE_DECAY = 1 - 1 / 300
"""Decay of observations after a round that could have added another one and did not."""


@dataclass(slots=True)
class StatCell:
    """Decayed sum and decayed number of observations."""

    total: float = 0.0
    count: float = 0.0


Path = tuple[StatCell, ...]
"""Cells from general to specific."""


class AcceptanceStats:
    """Averages by key, each shrunk towards a more general one while it has few observations.

    Args:
        memory: approximate number of observations in an average.
    """

    def __init__(self, memory: float) -> None:
        self._decay = 1 - 1 / memory
        self._cells: dict[Hashable, StatCell] = {}

    def path(self, *keys: Hashable) -> Path:
        """Return the cells of these keys, general to specific; callers may keep them."""
        return tuple([self._cells.setdefault(key, StatCell()) for key in keys])

    def add(self, path: Path, value: float) -> None:
        """Add an observation: 1 for accepted, 0 for rejected, or any other number to average."""
        decay = self._decay
        for cell in path:
            cell.total = cell.total * decay + value
            cell.count = cell.count * decay + 1.0

    @staticmethod
    def age(path: Path) -> None:
        """Reduce the weight of the observations in these cells.

        Otherwise low averages could prevent new observations permanently.
        """
        for cell in path:
            cell.total *= AGE_DECAY
            cell.count *= AGE_DECAY

    @staticmethod
    def mean(path: Path, expected: float) -> float:
        """Return the average of the last cell, shrunk towards those before it and `expected`."""
        for cell in path:
            if cell.count:
                expected = (cell.total + PRIOR_WEIGHT * expected) / (cell.count + PRIOR_WEIGHT)
        return expected
