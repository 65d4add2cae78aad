"""Token-level rejection (Leviathan, Kalman, Matias 2022, arXiv 2211.17192; Chen et al. 2023, 2302.01318)."""

from __future__ import annotations

import numpy
import torch
from torch import Tensor

from secondguess.core import Draft, Verdict
from secondguess.noise import Noise
from secondguess.verifiers.base import (
    Exactness,
    Verifier,
    likelihood_ratios,
    real_nodes,
    require_independent_chains,
    verdict_of,
)


class RejectionVerifier(Verifier):
    """Accept node x with chance min(1, p(x) / q(x)); at the first rejection draw from (p - q)+ normalised.

    A node at any place is accepted with chance 1 - TV(p, q) given that its predecessors were.
    """

    name = "rejection"
    exactness = Exactness.LOSSLESS

    def judge(self, draft: Draft, target_probs: Tensor, noise: Noise) -> Verdict:
        require_independent_chains(self.name, draft, noise)
        chances = likelihood_ratios(draft, target_probs).clip(max=1.0)
        accepted = noise.accept(torch.from_numpy(chances)).numpy() & real_nodes(draft)
        lengths = accepted.cumprod(1).sum(1)
        return verdict_of(draft, target_probs, lengths, numpy.ones(draft.num_rows), noise)
