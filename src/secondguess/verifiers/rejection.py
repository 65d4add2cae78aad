"""Token-level rejection sampling.

Leviathan, Kalman, Matias 2022, arXiv 2211.17192; Chen et al. 2023, arXiv 2302.01318.
"""

from __future__ import annotations

import numpy
from torch import Tensor

from secondguess.core import Draft, Verdict
from secondguess.sampling.noise import Noise
from secondguess.verifiers.base import Exactness, UncoupledVerifier
from secondguess.verifiers.residuals import accepted_prefix, likelihood_ratios, make_chain_verdict


class RejectionVerifier(UncoupledVerifier):
    """Verifier that accepts node x with probability min(1, p(x) / q(x)) (chains).

    After the first rejection the next token is drawn from max(p - q, 0), normalised. Given that
    its predecessors were accepted, a node is accepted with probability 1 - TV(p, q).
    """

    name = "rejection"
    exactness = Exactness.LOSSLESS
    supports_trees = False

    def verify_nodes(self, draft: Draft, target_probs: Tensor, noise: Noise) -> Verdict:
        acceptance_probs = likelihood_ratios(draft, target_probs).clip(max=1.0)
        lengths = accepted_prefix(draft, noise.accept(acceptance_probs))
        return make_chain_verdict(draft, target_probs, lengths, numpy.ones(draft.tokens.shape), noise)
