"""Traversal verification of sampled trees (Weng et al. 2025, arXiv 2505.12398).

From the leaves to the root, first child first: block verification for trees, and equal to it on a chain. Pending has
weight 1. At a node u with weight w, its target law p and the law q that its next child was drawn from:

    w_c = min(1, w p(t) / q(t))                                           weight of the child with token t
    r = (w p - q)+,  s = sum r                                            what the child leaves when it is rejected:
    w <- s / (s + 1 - w),   p <- r / s                                    u's new weight and target law

A child is entered with its weight; when all below it has been rejected it is accepted with the weight it then
has, and with it the path that leads to it. The next token is drawn from the law p that it then has. Pending keeps weight 1,
so the traversal ends there at the latest. A child's law q lacks its earlier siblings where these are distinct; it
need not be the same for all children, only be the law that each was drawn from when the ones before it were known.
"""

from __future__ import annotations

import numpy
from numpy.typing import NDArray
from torch import Tensor

from secondguess.core import Draft, Verdict
from secondguess.noise import Noise
from secondguess.verifiers.base import Exactness, Numbers
from secondguess.verifiers.trees import Level, Shape, Sheet, TreeVerifier, verdict_at


class TraversalVerifier(TreeVerifier):
    """Accept the first path, from the leaves up, that the joint law of the tree allows (trees and chains)."""

    name = "traversal"
    exactness = Exactness.LOSSLESS

    def judge_alike(self, shape: Shape, draft: Draft, target_probs: Tensor, noise: Noise) -> Verdict:
        chances, laws = traverse(shape, draft, target_probs)
        accepted = noise.accept(chances)
        return verdict_at(shape, first_accepted(shape.from_the_leaves, accepted), laws, noise)


def traverse(shape: Shape, draft: Draft, target_probs: Tensor) -> tuple[Numbers, list[Tensor]]:
    """The traversal as it goes while everything is refused.

    What happens at a node depends on the weight that it is entered with and on its children's tokens, not on what lies
    below these; so the tree can be gone through level by level.

    Returns:
        `[row, node]`, the chance of each node when it comes up, 0 for padding; and for each query `[row, vocab]`, what is left
        to say behind it then.
    """
    sheet = Sheet.of(shape, draft, target_probs)
    laws = list(target_probs.unbind(1))
    # Logarithms of weights, as a long product of ratios may underflow and rise again.
    log_weights: Numbers = numpy.full((draft.num_rows, draft.num_nodes + 1), -numpy.inf)
    log_weights[:, 0] = 0.0
    with numpy.errstate(divide="ignore"):  # the logarithm of nothing is minus infinity
        for ranks in shape.levels:
            level = Level(sheet, draft, ranks, laws)
            for rank in ranks:
                before = log_weights[:, rank.query_index]
                entered = before + numpy.log(level.ratios(rank))
                log_weights[:, rank.node_index + 1] = numpy.minimum(0.0, entered)
                weights = numpy.exp(before)
                masses = level.refuse(rank, weights)
                log_weights[:, rank.query_index] = numpy.log(weights_after(weights, masses))
    return numpy.exp(log_weights[:, 1:]), laws


def weights_after(weights: Numbers, masses: Numbers) -> Numbers:
    """`s / (s + 1 - w)` `[row, child]`.

    Both vanish only where w = 1 and p = q. The child then had weight 1: it, or something below it, was accepted.
    """
    totals = masses + 1 - weights
    return numpy.divide(masses, totals, out=numpy.ones_like(masses), where=totals > 0)


def first_accepted(order: list[int], accepted: NDArray[numpy.bool_]) -> NDArray[numpy.int64]:
    """The query `[row]` behind the first accepted node in this order; 0, pending, where there is none."""
    if not order:
        return numpy.zeros(len(accepted), numpy.int64)
    answers = accepted[:, order]
    first = numpy.array(order)[answers.argmax(1)]
    return numpy.where(answers.any(1), first + 1, 0)
