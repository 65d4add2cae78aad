"""Losses that train a drafter towards a target.

With speculative sampling, a draft token is accepted with probability
``alpha = sum_x min(p(x), q(x))``, the overlap of the target's distribution ``p`` and the drafter's
distribution ``q``. A Kullback-Leibler loss increases it only indirectly. "LK losses" (Nebius,
arXiv 2602.23881) train the overlap itself. Because its gradient vanishes where the distributions
hardly overlap, the hybrid form begins as a divergence and approaches ``1 - alpha`` as the overlap
grows:

    loss = lam KL(p || q) + (1 - lam) (1 - alpha),   lam = exp(-sharpness alpha), held constant

so each position moves from divergence to overlap at its own rate. Sharpness 0 is the divergence
alone, the usual distillation loss; a large one is the rejection rate of sampled draft tokens alone
(DistillSpec, arXiv 2310.08461).

For a reduced draft vocabulary, ``p`` contains the target's probabilities of its tokens, which sum
to less than 1.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from secondguess.errors import BadInputError
from secondguess.heads.learning import Objective


class _LossAndOverlap(torch.autograd.Function):
    """Hybrid loss with a gradient in closed form.

    With a vocabulary of thousands of tokens, reading and writing logits is a large part of a step:
    this takes half the passes of the same formula in separate operations.
    """

    @staticmethod
    def forward(ctx: Any, probs: Tensor, logits: Tensor, sharpness: float) -> tuple[Tensor, Tensor]:
        log_sum = logits.logsumexp(-1, keepdim=True)
        draft_probs = (logits - log_sum).exp_()
        overlap = torch.minimum(probs, draft_probs).sum(-1, keepdim=True)
        weight = (-sharpness * overlap).exp()
        mass = probs.sum(-1, keepdim=True)
        log_ratio = torch.xlogy(probs, probs).sum(-1, keepdim=True) + mass * log_sum
        divergence = log_ratio - torch.linalg.vecdot(probs, logits)[..., None]
        # Only tokens with less probability than in the target raise the overlap.
        raising = torch.where(draft_probs < probs, draft_probs, 0.0)
        scale = weight * mass + (1 - weight) * raising.sum(-1, keepdim=True)
        gradient = draft_probs.mul_(scale).sub_(raising.mul_(1 - weight)).sub_(probs * weight)
        ctx.save_for_backward(gradient)
        losses = (weight * divergence + (1 - weight) * (1 - overlap))[..., 0]
        overlap = overlap[..., 0]
        ctx.mark_non_differentiable(overlap)
        return losses, overlap

    @staticmethod
    def backward(ctx: Any, slope: Tensor, _: Tensor) -> tuple[None, Tensor, None]:
        (gradient,) = ctx.saved_tensors
        return None, gradient * slope[..., None], None


def hybrid_lk_loss(probs: Tensor, logits: Tensor, sharpness: float = 3.0) -> tuple[Tensor, Tensor]:
    """Return the hybrid LK loss and the overlap per position, the latter without gradient.

    `probs` and `logits` are `[..., draft_vocab]`, the target's probabilities and the drafter's logits.
    """
    losses, overlap = _LossAndOverlap.apply(probs, logits.float(), sharpness)  # type: ignore[no-untyped-call]
    return losses, overlap


OBJECTIVES: dict[str, Objective] = {
    "lk": hybrid_lk_loss,
    "kl": partial(hybrid_lk_loss, sharpness=0.0),
    "tv": partial(hybrid_lk_loss, sharpness=1e9),
}
"""Loss functions by their name for ``--loss``."""


def objective(name: str) -> Objective:
    """Return the loss function of a name."""
    if name not in OBJECTIVES:
        raise BadInputError(f"expected a loss among {', '.join(OBJECTIVES)}, got {name!r}")
    return OBJECTIVES[name]
