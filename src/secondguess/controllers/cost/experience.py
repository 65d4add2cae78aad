"""How guesses have fared: decayed counts of nodes that were reached and of those that were accepted.

A node is *reached* when all before it were accepted; then its own fate is seen, whatever comes behind it. So the share
accepted among those reached, the censored hazard of survival analysis (Kaplan and Meier 1958), is not biased by
drafts that stopped early, as an average of accepted lengths would be.
"""

from __future__ import annotations

from collections.abc import Hashable

STRENGTH = 4.0
"""How many observations the expectation handed in is worth."""


AGEING = 1 - 1 / 300
"""Weight of observations after a round that could have brought another one and did not."""


class Cell:
    """A decayed sum of observations, and how many there are in it."""

    __slots__ = ("count", "total")

    def __init__(self) -> None:
        self.total = 0.0
        self.count = 0.0


Path = tuple[Cell, ...]
"""Cells from the general to the special."""


class Experience:
    """Averages by key, each drawn towards a more general one while little has been seen.

    Args:
        memory: how many observations an average remembers, about.
    """

    def __init__(self, memory: float) -> None:
        self._decay = 1 - 1 / memory
        self._cells: dict[Hashable, Cell] = {}

    def path(self, *keys: Hashable) -> Path:
        """The cells of some keys, from the general to the special; to be kept by who asks often."""
        return tuple([self._cells.setdefault(key, Cell()) for key in keys])

    def add(self, path: Path, value: float) -> None:
        """One observation: 1 or 0 for accepted or not, or any other number to be averaged."""
        decay = self._decay
        for cell in path:
            cell.total = cell.total * decay + value
            cell.count = cell.count * decay + 1.0

    @staticmethod
    def age(path: Path) -> None:
        """Reduce the weight of the observations in these cells, so that they do not prevent new ones for good."""
        for cell in path:
            cell.total *= AGEING
            cell.count *= AGEING

    @staticmethod
    def mean(path: Path, expected: float) -> float:
        """The average of the last cell, drawn towards that of the one before, and so on to what is expected."""
        for cell in path:
            if cell.count:
                expected = (cell.total + STRENGTH * expected) / (cell.count + STRENGTH)
        return expected
