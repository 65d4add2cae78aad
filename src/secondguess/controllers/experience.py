"""How guesses have fared: decayed counts of nodes that were reached and of those that were accepted.

A node is *reached* when all before it were accepted; then its own fate is seen, whatever comes behind it. So the share
accepted among those reached, the censored hazard of survival analysis (Kaplan and Meier 1958), is not biased by
drafts that stopped early, as an average of accepted lengths would be.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable

STRENGTH = 4.0
"""How many observations the expectation handed in is worth."""


class Experience:
    """Shares by key, each drawn towards an expectation while little has been seen.

    Args:
        memory: how many observations a share remembers, about.
    """

    def __init__(self, memory: float) -> None:
        self._decay = 1 - 1 / memory
        self._cells: dict[Hashable, list[float]] = {}

    def add(self, key: Hashable, value: float) -> None:
        """One observation: 1 or 0 for accepted or not, or any other number to be averaged."""
        cell = self._cells.get(key)
        if cell is None:
            self._cells[key] = [value, 1.0]
        else:
            cell[0] = cell[0] * self._decay + value
            cell[1] = cell[1] * self._decay + 1.0

    def seen(self, key: Hashable) -> float:
        """How many observations are remembered."""
        cell = self._cells.get(key)
        return cell[1] if cell else 0.0

    def mean(self, keys: Iterable[Hashable], expected: float) -> float:
        """The average of the last key, drawn towards that of the key before, and so on to what is expected.

        Args:
            keys: from the general to the special.
        """
        for key in keys:
            cell = self._cells.get(key)
            if cell is not None:
                expected = (cell[0] + STRENGTH * expected) / (cell[1] + STRENGTH)
        return expected
