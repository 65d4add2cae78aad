"""Sample and match: draw the text as plain sampling would, and keep the nodes that foretold it.

The target's token behind each query is drawn by a keyed exponential race, and a node is accepted when it is
the token drawn at its parent. What is emitted is always the target's own draw, so any draft is safe: certain
or sampled, chain or tree, chosen by any rule. Drafts drawn by the same race match with chance at least
(1 - TV) / (1 + TV) (Daliri, Musco, Suresh, arXiv 2408.07978), exactly
sum_x 1 / sum_y max(p(y) / p(x), q(y) / q(x)); certain ones match with chance p(x).
"""

from __future__ import annotations

from torch import Tensor

from secondguess.core import Draft, Verdict
from secondguess.noise import Noise
from secondguess.verifiers.base import Exactness, Verifier, follow, query_depths


class CoupledVerifier(Verifier):
    """The text is a function of the seed and the target alone (chains and trees)."""

    name = "coupled"
    exactness = Exactness.DRAFTER_INVARIANT

    def couples(self, seeded: bool) -> bool:
        return True

    def judge(self, draft: Draft, target_probs: Tensor, noise: Noise) -> Verdict:
        return follow(draft, noise.race(target_probs, query_depths(draft)))
