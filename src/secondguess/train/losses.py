"""Losses that train a drafter towards a target.

With speculative sampling, a draft token is accepted with probability
``alpha = sum_x min(p(x), q(x))``, the overlap of the target's distribution ``p`` and the drafter's
distribution ``q``. A cross-entropy or Kullback-Leibler loss increases it only indirectly.
"LK losses" (Nebius, arXiv 2602.23881) train the overlap itself. Because its gradient vanishes
where the distributions hardly overlap, the hybrid form begins as a divergence and approaches
``1 - alpha`` as the overlap grows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from secondguess.errors import BadInputError
from secondguess.heads.learning import Objective, overlap


def forward_divergence(target_logits: Tensor, draft_logits: Tensor) -> Tensor:
    """Return ``KL(p || q)`` per position, in nats: the usual distillation loss."""
    target_log = target_logits.float().log_softmax(-1)
    draft_log = draft_logits.float().log_softmax(-1)
    return (target_log.exp() * (target_log - draft_log)).sum(-1)


def hybrid_lk_loss(target_logits: Tensor, draft_logits: Tensor, sharpness: float = 3.0) -> Tensor:
    """Return the hybrid LK loss per position (arXiv 2602.23881).

    It is ``lam KL(p || q) + (1 - lam) (1 - alpha)`` with ``lam = exp(-sharpness alpha)`` held
    constant, so each position moves from divergence to overlap at its own rate.
    """
    # One log-softmax per model serves both terms: with a large vocabulary it is most of the cost.
    target_log, draft_log = (logits.float().log_softmax(-1) for logits in (target_logits, draft_logits))
    alpha = torch.minimum(target_log, draft_log).exp().sum(-1)
    weight = torch.exp(-sharpness * alpha.detach())
    divergence = (target_log.exp() * (target_log - draft_log)).sum(-1)
    return weight * divergence + (1.0 - weight) * (1.0 - alpha)


def total_variation(target_logits: Tensor, draft_logits: Tensor) -> Tensor:
    """Return ``1 - alpha`` per position (DistillSpec, arXiv 2310.08461).

    This is the rejection rate of sampled draft tokens.
    """
    return 1.0 - overlap(target_logits, draft_logits)


def top_token_cross_entropy(target_logits: Tensor, draft_logits: Tensor) -> Tensor:
    """Return ``-log q(x)`` per position, in nats, for the target's most probable token x.

    This is the token that greedy decoding accepts. Cross-entropy against the target's whole
    distribution would have the gradient of ``forward_divergence``.
    """
    top = target_logits.argmax(-1, keepdim=True)
    return -draft_logits.float().log_softmax(-1).gather(-1, top)[..., 0]


OBJECTIVES: dict[str, Objective] = {
    "lk": hybrid_lk_loss,
    "kl": forward_divergence,
    "tv": total_variation,
    "ce": top_token_cross_entropy,
}
"""Loss functions by their name for ``--loss``.

Each maps the logits of target and drafter ``[..., vocab]`` to a loss per position ``[...]``.
"""


def objective(name: str) -> Objective:
    """Return the loss function of a name.

    Raises:
        BadInputError: an unknown name.
    """
    if name not in OBJECTIVES:
        raise BadInputError(f"expected a loss among {', '.join(OBJECTIVES)}, got {name!r}")
    return OBJECTIVES[name]
