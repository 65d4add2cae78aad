"""Recursive rejection sampling of trees (SpecInfer, Miao et al. 2023, arXiv 2305.09781).

Siblings drawn without replacement: Recursive speculative decoding, Jeon et al. 2024, arXiv
2402.14160.

From the root down, the children of a node are tried in the order in which they were drawn. The
child with token t, drawn from q, is accepted with probability min(1, p(t) / q(t)); otherwise p
becomes max(p - q, 0), normalised, and the next child is tried. After the last accepted node the
next token is drawn from the p that remains after its children's rejections. On a chain this is
token-level rejection. `traversal` accepts more: the tests compare it with this rule.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy
from torch import Tensor

from secondguess.core import Draft, Verdict
from secondguess.sampling.noise import Noise
from secondguess.verifiers.base import Exactness
from secondguess.verifiers.residuals import FloatArray
from secondguess.verifiers.shapes import Shape
from secondguess.verifiers.trees import Level, TokenProbs, TreeVerifier, make_tree_verdict


class RecursiveVerifier(TreeVerifier):
    """Verifier that descends to the first accepted child of each node (trees and chains)."""

    name = "recursive"
    exactness = Exactness.LOSSLESS

    def verify_shape(self, shape: Shape, draft: Draft, target_probs: Tensor, noise: Noise) -> Verdict:
        token_probs = TokenProbs.from_draft(shape, draft, target_probs)
        acceptance_probs: FloatArray = numpy.zeros(draft.tokens.shape)
        dists = list(target_probs.unbind(1))
        for ranks in shape.levels:
            level = Level(token_probs, draft, ranks, dists)
            for rank in ranks:
                acceptance_probs[:, rank.node_index] = level.ratios(rank).clip(max=1.0)
                level.reject(rank, numpy.ones((draft.num_rows, len(rank.nodes))))
        ends = [descend(shape, answers) for answers in noise.accept(acceptance_probs).tolist()]
        return make_tree_verdict(shape, numpy.array(ends, numpy.int64), dists, noise)


def descend(shape: Shape, accepted: Sequence[bool]) -> int:
    """Return the query at which the descent through the first accepted children ends."""
    query = 0
    while (child := next((node for node in shape.children[query] if accepted[node]), None)) is not None:
        query = child + 1
    return query
