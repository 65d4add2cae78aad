"""The distillation losses against sums computed by hand."""

from __future__ import annotations

import math

import pytest
import torch

from secondguess.errors import BadInputError
from secondguess.heads.learning import overlap
from secondguess.train.losses import OBJECTIVES, hybrid_lk_loss, objective

TARGET = torch.tensor([0.5, 0.3, 0.15, 0.05])
DRAFT = torch.tensor([0.25, 0.25, 0.4, 0.1])
OVERLAP = 0.25 + 0.25 + 0.15 + 0.05
DIVERGENCE = sum(p * math.log(p / q) for p, q in zip(TARGET.tolist(), DRAFT.tolist(), strict=True))

every_objective = pytest.mark.parametrize("name", sorted(OBJECTIVES))


def test_overlap_is_the_sum_of_minima_and_invariant_to_shifts() -> None:
    assert overlap(TARGET.log() + 3.0, DRAFT.log() - 1.0).item() == pytest.approx(OVERLAP)


@pytest.mark.parametrize("shift", [0.0, 7.0])
def test_the_objectives_equal_values_computed_by_hand(shift: float) -> None:
    share = math.exp(-3 * OVERLAP)
    expected = {
        "tv": 1 - OVERLAP,
        "kl": DIVERGENCE,
        "lk": share * DIVERGENCE + (1 - share) * (1 - OVERLAP),
    }
    found = {name: objective(name)(TARGET, DRAFT.log() + shift) for name in OBJECTIVES}
    assert {name: float(loss) for name, (loss, _) in found.items()} == pytest.approx(expected, abs=1e-6)
    assert [float(each) for _, each in found.values()] == pytest.approx([OVERLAP] * 3)


@pytest.mark.parametrize("mass", [1.0, 0.6])
@pytest.mark.parametrize("sharpness", [0.0, 3.0, 1e9])
def test_the_gradient_is_that_of_the_formula_with_a_constant_weight(sharpness: float, mass: float) -> None:
    """A draft vocabulary may have a part of the target's probability only."""
    generator = torch.Generator().manual_seed(0)
    probs = mass * torch.randn(5, 9, generator=generator, dtype=torch.double).softmax(-1)
    logits = torch.randn(5, 9, generator=generator, dtype=torch.double).requires_grad_()
    draft_log = logits.log_softmax(-1)
    shared = torch.minimum(probs, draft_log.exp()).sum(-1)
    weight = (-sharpness * shared.detach()).exp()
    divergence = (probs * (probs.log() - draft_log)).sum(-1)
    expected = weight * divergence + (1 - weight) * (1 - shared)
    slope = torch.arange(1.0, 6.0)
    (wanted,) = torch.autograd.grad(expected @ slope.double(), logits)
    losses, accepted = hybrid_lk_loss(probs.float(), logits.float(), sharpness)
    assert not accepted.requires_grad
    torch.testing.assert_close(losses, expected.float(), atol=1e-5, rtol=1e-5)
    (found,) = torch.autograd.grad(losses @ slope, logits)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


def test_equal_distributions_have_no_loss() -> None:
    assert hybrid_lk_loss(TARGET, TARGET.log())[0].item() == pytest.approx(0.0, abs=1e-6)


@every_objective
def test_an_objective_is_computed_per_position(name: str) -> None:
    torch.manual_seed(0)
    probs, draft = torch.randn(2, 3, 7).softmax(-1), torch.randn(2, 3, 7)
    losses, _ = objective(name)(probs, draft)
    assert losses.shape == (2, 3)
    torch.testing.assert_close(losses[1, 2], objective(name)(probs[1, 2], draft[1, 2])[0])


@every_objective
def test_every_objective_leads_to_the_targets_prediction(name: str) -> None:
    torch.manual_seed(0)
    target = (3 * torch.randn(4, 7)).softmax(-1)
    draft = torch.zeros(4, 7, requires_grad=True)
    optimizer = torch.optim.Adam([draft], lr=0.1)
    for _ in range(200):
        optimizer.zero_grad()
        objective(name)(target, draft)[0].sum().backward()
        optimizer.step()
    assert torch.equal(draft.argmax(-1), target.argmax(-1))
    assert objective(name)(target, draft)[1].mean() > 0.97


def test_an_unknown_objective_is_refused() -> None:
    with pytest.raises(BadInputError, match="among lk, kl, tv"):
        objective("mse")
