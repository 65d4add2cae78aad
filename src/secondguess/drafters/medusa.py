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

from secondguess.core import Draft, Row
from secondguess.drafters.last_state import LastStateDrafter
from secondguess.drafters.sampling_drafter import expand_to_batch
from secondguess.drafters.trees import TreeShape
from secondguess.heads.medusa import MedusaHead
from secondguess.heads.native import medusa_logits
from secondguess.runtime.base import Runtime
from secondguess.sampling.probs import at_least_float32


class MedusaDrafter(LastStateDrafter):
    """Drafter that uses a set of Medusa heads."""

    is_of_package = True
    load_head = staticmethod(MedusaHead.load)
    head: MedusaHead

    def __init__(self, head: MedusaHead, target: Runtime, name: str, shape: TreeShape | None = None) -> None:
        super().__init__(head, target, name, shape)
        self._logits = medusa_logits(head, target)

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
