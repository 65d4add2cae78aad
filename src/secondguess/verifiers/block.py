"""Block verification.

Sun, Mendlovic, Leviathan, Aharoni, Ro, Beirami, Suresh 2024, arXiv 2403.10444.

Verifying the block as a whole accepts at least as many tokens as token-level rejection, and no
lossless rule for a single path accepts more. For a row's draft tokens x_1..x_L, with p_i and q_i
the target and draft distributions at x_i:

    w_0 = 1,   w_i = min(1, w_{i-1} p_i(x_i) / q_i(x_i))             weights
    s_i = sum_y max(w_i p_{i+1}(y) - q_{i+1}(y), 0)                  masses of residuals
    h_i = s_i / (s_i + 1 - w_i) for i < L,   h_L = w_L               acceptance probabilities

Each prefix i passes with probability h_i, and the longest prefix that passes is accepted (the
empty one if none does). The next token is drawn from p_{L+1} after the whole draft, otherwise from
the residual after the prefix. P(at least i tokens accepted | x_1..x_i) = w_i.
"""

from __future__ import annotations

import math
from itertools import accumulate

import numpy
from torch import Tensor

from secondguess.core import Draft, Verdict
from secondguess.sampling.noise import Noise
from secondguess.verifiers.base import Exactness, UncoupledVerifier
from secondguess.verifiers.residuals import (
    FloatArray,
    likelihood_ratios,
    make_chain_verdict,
    masses_of_residuals,
)


class BlockVerifier(UncoupledVerifier):
    """Verifier that accepts the longest prefix that passes; optimal for a single path (chains)."""

    name = "block"
    exactness = Exactness.LOSSLESS
    supports_trees = False

    def verify_nodes(self, draft: Draft, target_probs: Tensor, noise: Noise) -> Verdict:
        weights = prefix_weights(likelihood_ratios(draft, target_probs))
        # index i: w_i and the distributions p_{i+1} and q_{i+1}, hence s_i
        masses = masses_of_residuals(weights[:, :-1], draft, target_probs)
        draft_lengths = draft.lengths.tolist()
        rows = zip(weights.tolist(), masses.tolist(), draft_lengths, strict=True)
        acceptance_probs = numpy.array([prefix_acceptance_probs(*row) for row in rows])
        accepted = zip(noise.accept(acceptance_probs).tolist(), draft_lengths, strict=True)
        lengths = numpy.array([_longest_passing(row[:length]) for row, length in accepted])
        return make_chain_verdict(draft, target_probs, lengths, weights, noise)


def prefix_weights(ratios: FloatArray) -> FloatArray:
    """Return `w_0..w_L` `[row, node + 1]`, given `p(x) / q(x)` `[row, node]`.

    Computed in log space: a long product may underflow although a weight may rise again.
    """
    walks = [accumulate(row, _next_log_weight, initial=0.0) for row in ratios.tolist()]
    return numpy.array([list(map(math.exp, walk)) for walk in walks])


def _next_log_weight(log_weight: float, ratio: float) -> float:
    return min(0.0, log_weight + math.log(ratio)) if ratio > 0 else -math.inf


def _longest_passing(passed: list[bool]) -> int:
    """Return the number of nodes of the longest prefix that passes."""
    return max((length for length, passes in enumerate(passed, start=1) if passes), default=0)


def prefix_acceptance_probs(weights: list[float], masses: list[float], length: int) -> list[float]:
    """Return `h_1..h_L` for a chain of `length` nodes, given `w_0, w_1, ...` and `s_0, s_1, ...`.

    Padding has probability 0. 0 / 0 occurs only where w = 1 and p = q: a longer prefix then passes
    for certain, so this probability has no effect.
    """
    acceptance_probs = [0.0] * len(masses)
    for node in range(1, length):
        total = masses[node] + 1 - weights[node]
        acceptance_probs[node - 1] = masses[node] / total if total > 0 else 1.0
    if length:
        acceptance_probs[length - 1] = weights[length]
    return acceptance_probs
