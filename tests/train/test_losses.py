"""The distillation losses against sums computed by hand."""

from __future__ import annotations

import math

import pytest
import torch

from secondguess.errors import BadInputError
from secondguess.heads.learning import overlap
from secondguess.train.losses import (
    OBJECTIVES,
    forward_divergence,
    hybrid_lk_loss,
    objective,
)

TARGET = [0.5, 0.3, 0.15, 0.05]
DRAFT = [0.25, 0.25, 0.4, 0.1]
OVERLAP = 0.25 + 0.25 + 0.15 + 0.05
DIVERGENCE = sum(p * math.log(p / q) for p, q in zip(TARGET, DRAFT, strict=True))


def _logits(probabilities: list[float], shift: float = 0.0) -> torch.Tensor:
    return torch.tensor(probabilities).log()[None, None] + shift


def test_overlap_is_the_sum_of_minima_and_invariant_to_shifts() -> None:
    assert overlap(_logits(TARGET, 3.0), _logits(DRAFT, -1.0)).item() == pytest.approx(OVERLAP)


def test_divergence_equals_its_definition() -> None:
    assert forward_divergence(_logits(TARGET), _logits(DRAFT)).item() == pytest.approx(DIVERGENCE)


def test_hybrid_loss_weighs_divergence_and_overlap_by_the_overlap() -> None:
    weight = math.exp(-3 * OVERLAP)
    expected = weight * DIVERGENCE + (1 - weight) * (1 - OVERLAP)
    assert hybrid_lk_loss(_logits(TARGET), _logits(DRAFT)).mean().item() == pytest.approx(expected)
    per_position = OBJECTIVES["lk"](_logits(TARGET), _logits(DRAFT))
    assert per_position.tolist() == [[pytest.approx(expected)]]


def test_the_weight_of_the_hybrid_loss_is_held_constant() -> None:
    draft = _logits(DRAFT).requires_grad_()
    hybrid_lk_loss(_logits(TARGET), draft).mean().backward()
    weight = math.exp(-3 * OVERLAP)
    by_hand = _logits(DRAFT).requires_grad_()
    divergence, alpha = forward_divergence(_logits(TARGET), by_hand), overlap(_logits(TARGET), by_hand)
    (weight * divergence + (1 - weight) * (1 - alpha)).sum().backward()
    torch.testing.assert_close(draft.grad, by_hand.grad)


def test_equal_distributions_have_no_loss() -> None:
    assert hybrid_lk_loss(_logits(TARGET), _logits(TARGET)).mean().item() == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("name", sorted(OBJECTIVES))
def test_an_objective_is_computed_per_position(name: str) -> None:
    torch.manual_seed(0)
    target, draft = torch.randn(2, 3, 7), torch.randn(2, 3, 7)
    losses = objective(name)(target, draft)
    assert losses.shape == (2, 3)
    alone = objective(name)(target[1, 2], draft[1, 2])
    torch.testing.assert_close(losses[1, 2], alone)


@pytest.mark.parametrize("name", sorted(OBJECTIVES))
def test_every_objective_leads_to_the_targets_prediction(name: str) -> None:
    torch.manual_seed(0)
    target = 3 * torch.randn(4, 7)
    draft = torch.zeros(4, 7, requires_grad=True)
    optimizer = torch.optim.Adam([draft], lr=0.1)
    before = overlap(target, draft).mean().item()
    for _ in range(200):
        optimizer.zero_grad()
        objective(name)(target, draft).sum().backward()
        optimizer.step()
    assert torch.equal(draft.argmax(-1), target.argmax(-1))
    if name != "ce":  # cross-entropy wants the top token alone
        assert overlap(target, draft).mean() > max(0.97, before)


def test_the_objectives_equal_values_computed_by_hand() -> None:
    target = torch.tensor([0.7, 0.2, 0.1]).log()
    draft = torch.tensor([0.2, 0.5, 0.3]).log()
    alpha = 0.2 + 0.2 + 0.1
    divergence = 0.7 * math.log(0.7 / 0.2) + 0.2 * math.log(0.2 / 0.5) + 0.1 * math.log(0.1 / 0.3)
    share = math.exp(-3 * alpha)
    expected = {
        "tv": 1 - alpha,
        "kl": divergence,
        "ce": -math.log(0.2),
        "lk": share * divergence + (1 - share) * (1 - alpha),
    }
    assert {name: float(objective(name)(target, draft)) for name in OBJECTIVES} == pytest.approx(expected)


def test_an_unknown_objective_is_refused() -> None:
    with pytest.raises(BadInputError, match="among lk, kl, tv, ce"):
        objective("mse")
