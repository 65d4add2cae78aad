"""Base class of drafters that read the target's last hidden state at the token before pending."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from secondguess.core import Row, Verdict
from secondguess.drafters.sampling_drafter import HeadDrafter
from secondguess.drafters.trees import TreeShape
from secondguess.heads.learning import LAST_HIDDEN
from secondguess.runtime.base import HiddenStates, Runtime


class LastStateDrafter(HeadDrafter):
    """Drafter that keeps one hidden state per row; a row without one cannot be drafted for yet."""

    def __init__(self, head: Any, target: Runtime, name: str, shape: TreeShape | None = None) -> None:
        super().__init__(head, target, name, shape)
        self._states: dict[Row, Tensor] = {}

    def admit(self, rows: Sequence[Row]) -> list[int | None]:
        return [max(0, len(row.tokens) - 2) for row in rows]

    def begin(self, rows: Sequence[Row], hidden: Sequence[HiddenStates] = ()) -> None:
        for row, row_hidden in zip(rows, hidden, strict=True):
            if row_hidden:
                self._states[row] = row_hidden[LAST_HIDDEN][-1].clone()

    def observe(self, rows: Sequence[Row], verdict: Verdict, hidden: HiddenStates) -> None:
        """Keep the hidden state of the token before the new pending one.

        That token is the last of the accepted path or, if the path is empty, the old pending one.
        """
        super().observe(rows, verdict, hidden)
        if hidden[LAST_HIDDEN].shape[:2] == (1, 1):
            self._states[rows[0]] = hidden[LAST_HIDDEN][0, 0]
            return
        for index, (row, path) in enumerate(zip(rows, verdict.paths, strict=True)):
            # A view would keep the states of the whole round in memory.
            self._states[row] = hidden[LAST_HIDDEN][index, path[-1] + 1 if path else 0].clone()

    def release(self, row: Row) -> None:
        super().release(row)
        self._states.pop(row, None)
