"""The acceptance predictor: training, agreement of its two implementations, and calibration."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from builtin_pair.acceptance_fit import (
    AcceptanceNet,
    Drafts,
    calibrate,
    calibration_error,
    fit,
    weighted_loss,
)
from secondguess.controllers.predictor import FEATURES, KIND, SCHEMA, Predictor


def predictor_of(net: AcceptanceNet) -> Predictor:
    calibration = {"scales": [1.0], "shifts": [0.0]}
    about = {"kind": KIND, "schema": SCHEMA, "provenance": {}, "features": list(FEATURES)}
    return Predictor({**about, "calibration": calibration, "layers": net.layers()})


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=generator(seed), dtype=torch.float64)


@pytest.fixture
def net() -> AcceptanceNet:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return AcceptanceNet(normal(50, 4, len(FEATURES), seed=1) * 3 + 1)


def test_the_networks_in_numpy_and_torch_are_equal(net: AcceptanceNet) -> None:
    features = normal(200, len(FEATURES), seed=3) * 3 + 1
    # The error of rounding to six digits is small compared with logits of order one.
    logits = predictor_of(net).logits(features.numpy())
    assert logits == pytest.approx(net(features).detach().numpy(), abs=1e-4)
    single = [predictor_of(net).logits([line])[0] for line in features.tolist()[:5]]
    assert single == pytest.approx(logits[:5], abs=1e-12)


def test_extreme_features_do_not_overflow(net: AcceptanceNet) -> None:
    extreme = [[1e6] * len(FEATURES), [-1e6] * len(FEATURES)]
    assert all(0 <= chance <= 1 for chance in predictor_of(net).acceptance_probs(extreme, 0))


def alike(*acceptance_probs: list[float]) -> Drafts:
    """Drafts without features."""
    return Drafts(
        torch.zeros(len(acceptance_probs), len(acceptance_probs[0]), len(FEATURES)),
        torch.tensor(acceptance_probs),
    )


@pytest.mark.parametrize("chance", [0.1, 0.5, 0.9])
def test_the_minimum_of_the_weighted_loss_is_known(chance: float) -> None:
    """Its derivative vanishes at logit a = logit y - log w."""
    least = torch.tensor([[math.log(chance / (1 - chance)) - math.log(6)]], requires_grad=True)
    weighted_loss(least, alike([chance]), 6.0).backward()  # type: ignore[no-untyped-call]
    assert least.grad is not None
    assert least.grad.item() == pytest.approx(0, abs=1e-6)
    by_hand = -(0.7 * math.log(0.4) + 6 * 0.3 * math.log(0.6))
    logit = torch.tensor([[math.log(0.4 / 0.6)]])
    assert weighted_loss(logit, alike([0.7]), 6.0).item() == pytest.approx(by_hand, rel=1e-5)


def test_nodes_count_by_the_probability_that_they_are_reached() -> None:
    drafts = alike([0.5, 0.25, 1.0], [1.0, 0.0, 1.0])
    assert drafts.reached.tolist() == [[1.0, 0.5, 0.125], [1.0, 1.0, 0.0]]
    unreached = weighted_loss(torch.tensor([[0.0, 0.0, 3.0]]), alike([0.5, 0.0, 0.5]), 1.0)
    assert unreached.item() == pytest.approx(math.log(2))


def synthetic(num_drafts: int, depth: int, seed: int) -> tuple[Tensor, Tensor]:
    """True logits, and outcomes drawn from them."""
    logits = normal(num_drafts, depth, seed=seed) * 1.5 + 1.5
    return logits, torch.bernoulli(logits.sigmoid(), generator=generator(seed + 100))


def test_calibration_undoes_a_temperature_and_a_bias_at_every_depth() -> None:
    logits, outcomes = synthetic(20_000, 4, seed=0)
    temperatures, biases = torch.tensor([[1.5, 0.7, 1.2, 0.9], [-1.8, -0.5, 0.8, -1.0]]).double()
    scales, shifts = calibrate(logits * temperatures + biases, outcomes)
    fresh, fresh_outcomes = synthetic(20_000, 4, seed=1)
    warped = fresh * temperatures + biases
    assert calibration_error(warped.sigmoid(), fresh_outcomes) > 0.1
    assert calibration_error((warped * scales + shifts).sigmoid(), fresh_outcomes) < 0.015
    assert scales.tolist() == pytest.approx((1 / temperatures).tolist(), rel=0.1)
    assert shifts.tolist() == pytest.approx((-biases / temperatures).tolist(), abs=0.15)


def test_calibration_does_not_flatten_informative_logits() -> None:
    """Predicting the mean everywhere has no calibration error either."""
    logits, outcomes = synthetic(20_000, 1, seed=2)
    scales, shifts = calibrate(logits / 10, outcomes)
    assert (scales.item(), shifts.item()) == pytest.approx((10, 0), rel=0.1, abs=0.1)
    scales, shifts = calibrate(normal(20_000, 1, seed=4), outcomes)
    assert 0 < scales.item() < 0.1
    mean = outcomes.mean().logit().item()
    assert shifts.item() == pytest.approx(mean, abs=0.05)


def test_calibration_of_few_drafts_stays_finite() -> None:
    scales, shifts = calibrate(torch.ones(1, 3).double(), torch.ones(1, 3).double())
    assert all(0.1 < scale < 10 for scale in scales.tolist())
    assert all(abs(shift) < 4 for shift in shifts.tolist())


def test_the_calibration_error_equals_one_computed_by_hand() -> None:
    predicted = torch.tensor([[0.9], [0.9], [0.1], [0.1]])
    outcomes = torch.tensor([[1.0], [0.0], [0.0], [0.0]])
    # Half of the predictions are 0.9 where 0.5 is right, the others 0.1 where 0 is.
    assert calibration_error(predicted, outcomes) == pytest.approx(0.5 * 0.4 + 0.5 * 0.1)
    # Errors of running products: 0.4 at the first depth; 0.81 predicted and 0.5 true at the second.
    paths, outcomes = torch.tensor([[0.9, 0.9]] * 2), torch.tensor([[1.0, 1.0], [0.0, 1.0]])
    assert calibration_error(paths, outcomes) == pytest.approx((0.4 + 0.31) / 2)


def toy(num_drafts: int, seed: int) -> Drafts:
    """Acceptance rises with confidence alone, and is far from it: a = c^3."""
    confidence = torch.rand(num_drafts, 3, generator=generator(seed), dtype=torch.float64) * 0.94 + 0.05
    features = normal(num_drafts, 3, len(FEATURES), seed=seed + 100)
    features[..., 0] = confidence.log()
    features[..., 1] = confidence.logit()
    return Drafts(features, torch.bernoulli(confidence**3, generator=generator(seed + 200)))


def test_training_learns_how_acceptance_depends_on_confidence() -> None:
    predictor = fit(toy(4000, 0), toy(1000, 1), 6.0, 0, {"source": "toy"})
    for confidence in (0.3, 0.6, 0.9):
        line = [0.0] * len(FEATURES)
        line[0], line[1] = math.log(confidence), math.log(confidence / (1 - confidence))
        for depth in range(3):
            assert predictor.acceptance_probs([line], depth)[0] == pytest.approx(confidence**3, abs=0.1)
    errors = predictor.provenance["held_out_calibration_error"]
    assert isinstance(errors, dict)
    assert errors["calibrated"] < 0.04 < errors["as_trained"]
    assert predictor.provenance["source"] == "toy"
    assert (predictor.provenance["num_training_nodes"], predictor.provenance["num_held_out_nodes"]) == (
        12_000,
        3000,
    )


def test_the_seed_determines_the_predictor() -> None:
    def layers(seed: int) -> object:
        return fit(toy(200, 0), toy(50, 1), 6.0, seed, {}).record["layers"]

    assert layers(1) == layers(1) != layers(2)
