"""Buffer of the target's hidden states, read when a row is next drafted for."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from secondguess.core import Row, Verdict
from secondguess.runtime.base import HiddenStates


class HiddenStateBuffer:
    """Hidden states of rows' committed tokens, collected round by round.

    Collecting does as little work as possible, since the states of most rounds may never be read.

    Args:
        layers: layers whose hidden states are kept.
    """

    def __init__(self, layers: Sequence[int]) -> None:
        self.layers = tuple(layers)
        # Each `[position, width]`, or `[1, 1, width]` from a batch of one row, stored as received
        # (it may hold layers of other drafters).
        self._pieces: dict[Row, list[HiddenStates]] = {}

    def begin(self, row: Row, hidden: HiddenStates) -> None:
        """Admit a row, with hidden states `[position, width]` of all its tokens but the last."""
        self._pieces[row] = [{layer: hidden[layer] for layer in self.layers}] if hidden else []

    def observe(self, rows: Sequence[Row], verdict: Verdict, hidden: HiddenStates) -> None:
        """Store the states of pending and the accepted path, out of `[row, node + 1, width]`."""
        if hidden[self.layers[0]].shape[1] == 1:  # no draft: store all states
            if len(rows) == 1:
                self._pieces[rows[0]].append(hidden)
                return
            # A view would keep the states of other rows in memory after these have ended.
            for index, row in enumerate(rows):
                self._pieces[row].append({layer: hidden[layer][index].clone() for layer in self.layers})
            return
        for index, (row, path) in enumerate(zip(rows, verdict.paths, strict=True)):
            queries = [0, *(node + 1 for node in path)]
            self._pieces[row].append({layer: hidden[layer][index, queries] for layer in self.layers})

    def has(self, row: Row) -> bool:
        """Return whether states of a row were stored since the last `take`."""
        return bool(self._pieces[row])

    def take(self, row: Row) -> HiddenStates:
        """Return the stored states of a row, `[position, width]` by layer, and clear them.

        At least one position must be stored (`has`).
        """
        pieces, self._pieces[row] = self._pieces[row], []
        return {layer: torch.cat([piece[layer].flatten(0, -2) for piece in pieces]) for layer in self.layers}

    def release(self, row: Row) -> None:
        self._pieces.pop(row, None)
