"""Token-level rejection (Leviathan, Kalman, Matias 2022, arXiv 2211.17192; Chen et al. 2023, 2302.01318)."""

from __future__ import annotations

from torch import Tensor

from secondguess.core import Draft, Verdict
from secondguess.noise import Noise
from secondguess.verifiers.base import (
    Exactness,
    Verifier,
    law_after,
    likelihood_ratios,
    require_independent_chains,
)


class RejectionVerifier(Verifier):
    """Accept node x with chance min(1, p(x) / q(x)); at the first rejection draw from (p - q)+ normalised.

    A node at any place is accepted with chance 1 - TV(p, q) given that its predecessors were.
    """

    name = "rejection"
    exactness = Exactness.LOSSLESS

    def judge(self, draft: Draft, target_probs: Tensor, noise: Noise) -> Verdict:
        require_independent_chains(self.name, draft, noise)
        chances = likelihood_ratios(draft, target_probs).clamp_max(1.0)
        accepted = noise.accept(chances) & draft.mask
        lengths = accepted.long().cumprod(1).sum(1)
        law = law_after(draft, target_probs, lengths, weights=lengths.new_ones(lengths.shape).double())
        return Verdict.of_chain(lengths, noise.draw(law, lengths))
