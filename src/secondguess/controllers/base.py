"""The contract of whoever decides how far to guess.

Non-anticipation (DSpark, arXiv 2607.05147, appendix A): whether a *sampled* node is verified may depend on
earlier tokens and on the drafter's law, never on the node's own token. The types enforce it: `budget` is asked
before anything is drawn, `go_on` is shown laws and not tokens, and a node once drawn always stays in the draft.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from secondguess.core import Draft, Row, Verdict


class Controller(ABC):
    """Decides how many nodes to draft."""

    name: str

    @abstractmethod
    def budget(self, row: Row) -> int:
        """The largest number of nodes to draft for this row in the coming round; 0 is plain decoding."""

    def go_on(self, rows: Sequence[Row], laws: Tensor, depth: int) -> Tensor:
        """Per row (`[row]` bool), whether to draft another node after one drawn from `laws` `[row, vocab]`."""
        return torch.ones(len(rows), dtype=torch.bool, device=laws.device)

    def learn(self, rows: Sequence[Row], draft: Draft, verdict: Verdict) -> None:
        """See how the round went; what is learnt serves later rounds."""
