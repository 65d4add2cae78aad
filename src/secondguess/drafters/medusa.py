"""Medusa drafter: heads on the target's last hidden state, one per depth (arXiv 2401.10774).

Use `medusa:PATH`, or `medusa:PATH,tree=4x2x1` for trees.

The output of a head does not depend on the draft tokens before it, so all nodes of a level share
one distribution. Drafts are samples from these distributions and are verified like any other; the
paper's typical acceptance changes the output distribution and is not offered.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from secondguess.core import Draft, Row, Verdict
from secondguess.drafters.sampling_drafter import HeadDrafter, expand_to_batch
from secondguess.drafters.trees import TreeShape
from secondguess.heads.learning import LAST_HIDDEN
from secondguess.heads.medusa import MedusaHead
from secondguess.heads.native import medusa_logits
from secondguess.runtime.base import HiddenStates, Runtime
from secondguess.sampling.probs import at_least_float32


class MedusaDrafter(HeadDrafter):
    """Drafter that uses a set of Medusa heads; it keeps one hidden state per row."""

    is_of_package = True
    load_head = staticmethod(MedusaHead.load)
    head: MedusaHead

    def __init__(self, head: MedusaHead, target: Runtime, name: str, shape: TreeShape | None = None) -> None:
        super().__init__(head, target, name, shape)
        self._logits = medusa_logits(head, target)
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
        self._states.pop(row, None)

    def room(self, row: Row) -> int:
        """Return how many levels there are heads for; 0 for a row without a hidden state yet."""
        return min(self.head.config.num_heads, row.room) if row in self._states else 0

    def chain_logits(self, rows: Sequence[Row], active: list[int]) -> Tensor:
        return self._level_logits(rows, active, len(self.chains[active[0]]))

    def tree_logits(self, rows: Sequence[Row], active: list[int], tree: Draft) -> Tensor:
        level = max(tree.num_levels)
        return self._level_logits(rows, active, level)[:, None].expand(-1, tree.num_nodes + 1, -1)

    def _level_logits(self, rows: Sequence[Row], active: list[int], level: int) -> Tensor:
        """Return logits `[row, vocab]` for the nodes of one level; zeros for inactive rows."""
        states = torch.stack([self._states[rows[index]] for index in active])
        return expand_to_batch(at_least_float32(self._logits(states, level)), len(rows), active)
