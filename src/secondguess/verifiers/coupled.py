"""Sample and match: sample the text as plain decoding would, and accept the nodes that match it.

The target's token at each query is drawn with keyed noise (for coupled rows by an exponential
race), and a node is accepted if it is the token drawn at its parent. Every emitted token is the
target's own sample, so any draft is safe: deterministic or sampled, chain or tree, chosen by any
rule. Tokens drafted by the same race match with probability at least (1 - TV) / (1 + TV) (Daliri,
Musco, Suresh, arXiv 2408.07978), exactly sum_x 1 / sum_y max(p(y) / p(x), q(y) / q(x));
deterministic ones match with probability p(x).
"""

from __future__ import annotations

from torch import Tensor

from secondguess.core import Draft, Verdict
from secondguess.sampling.noise import Noise
from secondguess.verifiers.base import Exactness, Verifier, accept_matching, query_depths


class CoupledVerifier(Verifier):
    """Verifier whose text is a function of the seed and the target alone (chains and trees)."""

    name = "coupled"
    exactness = Exactness.DRAFTER_INVARIANT
    reports_samples = True

    def uses_coupling(self, seeded: bool, draws_by_race: bool = False) -> bool:
        return True

    def verify(self, draft: Draft, target_probs: Tensor, noise: Noise) -> Verdict:
        return accept_matching(draft, noise.race(target_probs, query_depths(draft)).tolist())
