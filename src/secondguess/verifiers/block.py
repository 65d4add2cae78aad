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

import torch
from torch import Tensor
from torch.nn.functional import pad

from secondguess.core import Draft, Verdict
from secondguess.noise import Noise
from secondguess.verifiers.base import (
    Exactness,
    Verifier,
    excess,
    law_after,
    likelihood_ratios,
    require_independent_chains,
)


class BlockVerifier(Verifier):
    """Accept the longest prefix that the block's joint law allows; optimal for a single path."""

    name = "block"
    exactness = Exactness.LOSSLESS

    def judge(self, draft: Draft, target_probs: Tensor, noise: Noise) -> Verdict:
        require_independent_chains(self.name, draft, noise)
        weights = prefix_weights(likelihood_ratios(draft, target_probs))
        chances = prefix_chances(draft, target_probs, weights)
        accepted = noise.accept(chances) & draft.mask
        prefixes = torch.arange(1, draft.num_nodes + 1, device=draft.tokens.device)
        lengths = _with_root(accepted * prefixes, 0).amax(1)
        weight = _with_root(weights, 1.0).gather(1, lengths[:, None])[:, 0]
        law = law_after(draft, target_probs, lengths, weight)
        return Verdict.of_chain(lengths, noise.draw(law, lengths))


def prefix_weights(ratios: Tensor) -> Tensor:
    """`w_1..w_L` `[row, node]` from `p(x) / q(x)` `[row, node]`.

    In log space the capped product is a walk reflected at zero: its running sum, less its maximum so far.
    """
    walk = ratios.log().cumsum(1)
    return (walk - walk.cummax(1).values.clamp_min(0.0)).exp() if walk.numel() else walk


def prefix_chances(draft: Draft, target_probs: Tensor, weights: Tensor) -> Tensor:
    """`h_1..h_L` `[row, node]`; rows end at their own lengths."""
    if draft.num_nodes < 2:
        return weights
    inner = weights[:, :-1]
    draft_probs = None if draft.probs is None else draft.probs[:, 1:]
    surplus = excess(inner, target_probs[:, 1:-1], draft_probs, draft.tokens[:, 1:]).sum(-1).double()
    deficit = 1 - inner
    # Both vanish only where w = 1 and p = q: the next prefix then has weight 1, so this chance cannot matter
    # for a draft that goes on.
    chances = torch.cat([(surplus / (surplus + deficit)).nan_to_num_(1.0), weights[:, -1:]], 1)
    last = torch.arange(draft.num_nodes, device=weights.device) == draft.lengths[:, None] - 1
    return torch.where(last, weights, chances)


def _with_root(values: Tensor, root: float) -> Tensor:
    """`values` `[row, node]` preceded by what holds of the empty prefix."""
    return pad(values, (1, 0), value=root)
