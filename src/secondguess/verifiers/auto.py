"""The default: for each row, the rule that accepts most among those that keep its promise."""

from __future__ import annotations

from torch import Tensor

from secondguess.core import Draft, Row, Verdict
from secondguess.noise import Noise
from secondguess.verifiers import make_verifier
from secondguess.verifiers.base import Exactness, Verifier


class AutoVerifier(Verifier):
    """Greedy match at temperature 0; sample-and-match for certain drafts and coupled rows; else block.

    Samples drawn from a tree are left to the block rule, which refuses them by name.
    """

    name = "auto"
    exactness = Exactness.LOSSLESS

    def __init__(self) -> None:
        self._greedy = make_verifier("greedy")
        self._coupled = make_verifier("coupled")
        self._block = make_verifier("block")

    def couples(self, seeded: bool) -> bool:
        return seeded

    def promise(self, row: Row) -> Exactness:
        return Exactness.DRAFTER_INVARIANT if row.coupled else self.exactness

    def judge(self, draft: Draft, target_probs: Tensor, noise: Noise) -> Verdict:
        if noise.all_greedy:
            return self._greedy.judge(draft, target_probs, noise)
        if draft.probs is None or noise.all_coupled:
            return self._coupled.judge(draft, target_probs, noise)
        if not noise.any_coupled:
            return self._block.judge(draft, target_probs, noise)
        groups = [(self._coupled, noise.coupled), (self._block, ~noise.coupled)]
        parts = []
        for verifier, members in groups:
            rows = members.nonzero()[:, 0]
            parts.append((rows, verifier.judge(draft.select(rows), target_probs[rows], noise.select(rows))))
        return Verdict.merged(parts, draft.num_rows)
