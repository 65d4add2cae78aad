"""What a target's states said of committed text, kept for a drafter until it asks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from secondguess.core import Row, Verdict
from secondguess.runtime.base import Hidden


class Heard:
    """States of rows' committed tokens, round by round; listening is cheap, since most rounds may never be asked about.

    Args:
        layers: whose states are kept.
    """

    def __init__(self, layers: Sequence[int]) -> None:
        self.layers = tuple(layers)
        # Each `[position, width]`, or a row's only `[1, 1, width]`, as it came: perhaps with layers that others listen to.
        self._pieces: dict[Row, list[Hidden]] = {}

    def begin(self, row: Row, hidden: Hidden) -> None:
        """Admit a row, with the states `[position, width]` of all its tokens but the last."""
        self._pieces[row] = [{layer: hidden[layer] for layer in self.layers}] if hidden else []

    def observe(self, rows: Sequence[Row], verdict: Verdict, hidden: Hidden) -> None:
        """Of the states `[row, node + 1, width]` of a round, those of pending and of the path behind it."""
        if hidden[self.layers[0]].shape[1] == 1:  # nothing was drafted: all of it is wanted
            if len(rows) == 1:
                self._pieces[rows[0]].append(hidden)
                return
            # A view would hold a row's neighbours beyond their ends.
            for index, row in enumerate(rows):
                self._pieces[row].append({layer: hidden[layer][index].clone() for layer in self.layers})
            return
        for index, (row, path) in enumerate(zip(rows, verdict.path_lists(), strict=True)):
            queries = [0, *(node + 1 for node in path)]
            self._pieces[row].append({layer: hidden[layer][index, queries] for layer in self.layers})

    def has(self, row: Row) -> bool:
        """Whether anything was heard of a row since it was last asked about."""
        return bool(self._pieces[row])

    def take(self, row: Row) -> Hidden:
        """All that was heard of a row and not yet taken, `[position, width]` by layer; at least one position."""
        pieces, self._pieces[row] = self._pieces[row], []
        return {layer: torch.cat([piece[layer].flatten(0, -2) for piece in pieces]) for layer in self.layers}

    def end(self, row: Row) -> None:
        self._pieces.pop(row, None)
