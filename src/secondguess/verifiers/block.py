"""Block verification (Sun, Mendlovic, Leviathan, Aharoni, Ro, Beirami, Suresh 2024, arXiv 2403.10444).

Judging the block as a whole accepts at least as much as judging token by token, and no exact rule for one
path accepts more. For a row's drafted tokens x_1..x_L, with p_i and q_i the laws at x_i:

    w_0 = 1,   w_i = min(1, w_{i-1} p_i(x_i) / q_i(x_i))                  weights
    s_i = sum_y (w_i p_{i+1}(y) - q_{i+1}(y))+                             excess
    h_i = s_i / (s_i + 1 - w_i) for i < L,   h_L = w_L                     chances

The longest prefix whose chance h_i comes true is accepted (the empty one if none does); then the next token
is drawn from p_{L+1} after the whole draft, else from the excess behind the prefix. A prefix survives with
P(at least i accepted | x_1..x_i) = w_i.
"""

from __future__ import annotations

import numpy
import torch
from torch import Tensor

from secondguess.core import Draft, Verdict
from secondguess.noise import Noise
from secondguess.verifiers.base import (
    Exactness,
    Numbers,
    Verifier,
    excess,
    likelihood_ratios,
    real_nodes,
    require_independent_chains,
    to_host,
    verdict_of,
)


class BlockVerifier(Verifier):
    """Accept the longest prefix that the block's joint law allows; optimal for a single path."""

    name = "block"
    exactness = Exactness.LOSSLESS

    def judge(self, draft: Draft, target_probs: Tensor, noise: Noise) -> Verdict:
        require_independent_chains(self.name, draft, noise)
        weights = prefix_weights(likelihood_ratios(draft, target_probs))
        chances = prefix_chances(draft, target_probs, weights)
        accepted = noise.accept(torch.from_numpy(chances)).numpy() & real_nodes(draft)
        lengths = (accepted * numpy.arange(1, draft.num_nodes + 1)).max(1, initial=0)
        weight = with_root(weights)[numpy.arange(draft.num_rows), lengths]
        return verdict_of(draft, target_probs, lengths, weight, noise)


def prefix_weights(ratios: Numbers) -> Numbers:
    """`w_1..w_L` `[row, node]` from `p(x) / q(x)` `[row, node]`.

    In log space the capped product is a walk reflected at zero: its running sum, less its maximum so far.
    """
    with numpy.errstate(divide="ignore"):
        walk = numpy.log(ratios).cumsum(1)
    weights: Numbers = numpy.exp(walk - numpy.maximum.accumulate(walk, 1).clip(0.0))
    return weights


def prefix_chances(draft: Draft, target_probs: Tensor, weights: Numbers) -> Numbers:
    """`h_1..h_L` `[row, node]`; rows end at their own lengths."""
    if draft.num_nodes < 2:
        return weights
    inner = weights[:, :-1]
    draft_probs = None if draft.probs is None else draft.probs[:, 1:]
    on_device = torch.from_numpy(inner).to(target_probs.device)
    surplus = to_host(excess(on_device, target_probs[:, 1:-1], draft_probs, draft.tokens[:, 1:]).sum(-1))
    total = surplus + (1 - inner)
    # Both vanish only where w = 1 and p = q: the next prefix then has weight 1, so this chance cannot matter
    # for a draft that goes on.
    chances = weights.copy()
    numpy.divide(surplus, total, out=chances[:, :-1], where=real_nodes(draft)[:, 1:] & (total > 0))
    return chances


def with_root(weights: Numbers) -> Numbers:
    """`[row, node + 1]`: the weights, preceded by that of the empty prefix."""
    return numpy.concatenate([numpy.ones((len(weights), 1)), weights], 1)
