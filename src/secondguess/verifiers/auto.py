"""Default verifier: for each row, the rule that accepts most and keeps the row's guarantee."""

from __future__ import annotations

import torch
from torch import Tensor

from secondguess.core import Draft, Row, Verdict
from secondguess.sampling.noise import Noise
from secondguess.verifiers import make_verifier
from secondguess.verifiers.base import Exactness, Verifier, verify_groups


class AutoVerifier(Verifier):
    """Verifier that chooses a rule for each row.

    Greedy match at temperature 0; sample and match for drafts without probabilities and for
    coupled rows, which are those with a seed and those of drafters that draw by races; otherwise block
    verification for sampled chains and traversal for sampled trees.
    """

    name = "auto"
    exactness = Exactness.LOSSLESS
    reports_samples = True

    def __init__(self) -> None:
        self._greedy = make_verifier("greedy")
        self._coupled = make_verifier("coupled")
        self._block = make_verifier("block")
        self._traversal = make_verifier("traversal")

    def uses_coupling(self, seeded: bool, draws_by_race: bool = False) -> bool:
        return seeded or draws_by_race

    def guarantee(self, row: Row) -> Exactness:
        return Exactness.DRAFTER_INVARIANT if row.coupled else self.exactness

    def verify(self, draft: Draft, target_probs: Tensor, noise: Noise) -> Verdict:
        if noise.all_greedy:
            return self._greedy.verify(draft, target_probs, noise)
        if draft.probs is None or noise.all_coupled:
            return self._coupled.verify(draft, target_probs, noise)
        if not noise.any_coupled and draft.is_chain:
            return self._block.verify(draft, target_probs, noise)
        # Chosen per row, so that a row's text does not depend on the shape of other rows' drafts.
        branches = torch.tensor(draft.is_branching)
        groups = [
            (self._coupled, noise.coupled),
            (self._traversal, branches & ~noise.coupled),
            (self._block, ~branches & ~noise.coupled),
        ]
        indices = [(verifier, members.nonzero()[:, 0]) for verifier, members in groups]
        return verify_groups(indices, draft, target_probs, noise)
