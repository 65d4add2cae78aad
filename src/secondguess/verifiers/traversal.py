"""Traversal verification of sampled trees (Weng et al. 2025, arXiv 2505.12398).

From the leaves to the root, first child first: block verification for trees, and equal to it on a
chain. Pending has weight 1. At a node u with weight w, target distribution p and the distribution
q that its next child was drawn from:

    w_c = min(1, w p(t) / q(t))                  weight of the child with token t
    r = max(w p - q, 0),  s = sum r              residual if the child is rejected
    w <- s / (s + 1 - w),   p <- r / s           then the new weight and target distribution of u

A child starts with weight w_c. When all its descendants have been rejected, it is accepted with
probability equal to its current weight, together with the path to it, and the next token is drawn
from its current p. Pending keeps weight 1, so the traversal ends there at the latest. A child's q
excludes its earlier siblings if siblings are distinct. It may differ between children, but must be
the distribution that the child was drawn from given the siblings before it.
"""

from __future__ import annotations

import numpy
from numpy.typing import NDArray
from torch import Tensor

from secondguess.core import Draft, Verdict
from secondguess.sampling.noise import Noise
from secondguess.verifiers.base import Exactness
from secondguess.verifiers.residuals import FloatArray
from secondguess.verifiers.shapes import Shape
from secondguess.verifiers.trees import Level, TokenProbs, TreeVerifier, make_tree_verdict


class TraversalVerifier(TreeVerifier):
    """Verifier that accepts the first path to pass in post-order traversal (trees and chains)."""

    name = "traversal"
    exactness = Exactness.LOSSLESS

    def verify_shape(self, shape: Shape, draft: Draft, target_probs: Tensor, noise: Noise) -> Verdict:
        acceptance_probs, dists = traverse(shape, draft, target_probs)
        accepted = noise.accept(acceptance_probs)
        return make_tree_verdict(shape, first_accepted(shape.post_order, accepted), dists, noise)


def traverse(shape: Shape, draft: Draft, target_probs: Tensor) -> tuple[FloatArray, list[Tensor]]:
    """Compute the acceptance probabilities of a traversal in which every visited node is rejected.

    Return `[row, node]`, the probability that each node is accepted when visited, 0 for padding; and for each query
    `[row, vocab]`, the distribution of the next token if its node is accepted then, not normalised. The state of a node
    depends on its initial weight and its children's tokens, not on nodes below these: the tree is processed by levels.
    """
    token_probs = TokenProbs.from_draft(shape, draft, target_probs)
    dists = list(target_probs.unbind(1))
    # In log space: a long product of ratios may underflow although a weight may rise again.
    log_weights: FloatArray = numpy.full((draft.num_rows, draft.num_nodes + 1), -numpy.inf)
    log_weights[:, 0] = 0.0
    with numpy.errstate(divide="ignore"):  # log(0) = -inf is intended
        for ranks in shape.levels:
            level = Level(token_probs, draft, ranks, dists)
            for rank in ranks:
                before = log_weights[:, rank.query_index]
                entered = before + numpy.log(level.ratios(rank))
                log_weights[:, rank.node_index + 1] = numpy.minimum(0.0, entered)
                weights = numpy.exp(before)
                masses = level.reject(rank, weights)
                log_weights[:, rank.query_index] = numpy.log(weights_after(weights, masses))
    return numpy.exp(log_weights[:, 1:]), dists


def weights_after(weights: FloatArray, masses: FloatArray) -> FloatArray:
    """Return the weights `s / (s + 1 - w)` `[row, child]` after the rejection of a child.

    0 / 0 occurs only where w = 1 and p = q. The child then had weight 1, so that it or one of its
    descendants was accepted, and the result does not matter.
    """
    totals = masses + 1 - weights
    return numpy.divide(masses, totals, out=numpy.ones_like(masses), where=totals > 0)


def first_accepted(order: list[int], accepted: NDArray[numpy.bool_]) -> NDArray[numpy.int64]:
    """Return the query `[row]` of the first accepted node in this order; 0 (pending) if none."""
    if not order:
        return numpy.zeros(len(accepted), numpy.int64)
    answers = accepted[:, order]
    first = numpy.array(order)[answers.argmax(1)]
    return numpy.where(answers.any(1), first + 1, 0)
