"""The predictor of acceptance: it learns, its two implementations agree, and calibration makes chances honest."""

from __future__ import annotations

import math

import numpy
import pytest
import torch

from secondguess.controllers.acceptance_features import FEATURES
from secondguess.controllers.predictor import Calibration, Predictor, PredictorNetwork
from secondguess.errors import BadInputError
from secondguess.train.acceptance_fit import AcceptanceNet, Examples, FitOptions, Nodes, fit, weighted_loss
from secondguess.train.calibration import (
    HIGHEST_SCALE,
    LOWEST_SCALE,
    calibrate,
    calibrated,
    calibration_error,
    path_calibration_error,
    sigmoid,
)

UNCALIBRATED = Calibration((1.0,), (0.0,))


def test_the_network_in_numpy_is_the_network_in_torch() -> None:
    generator = torch.Generator().manual_seed(3)
    features = torch.randn(200, len(FEATURES), generator=generator, dtype=torch.float64) * 3 + 1
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = AcceptanceNet(features.mean(0), features.std(0)).double()
    # What rounding to six digits leaves is small beside logits of order one.
    logits = PredictorNetwork(Predictor(net.layers(), UNCALIBRATED)).logits(features.numpy())
    with torch.no_grad():
        assert logits == pytest.approx(net(features).numpy(), abs=1e-4)
    single = [
        PredictorNetwork(Predictor(net.layers(), UNCALIBRATED)).logits([line])[0]
        for line in features.tolist()[:5]
    ]
    assert single == pytest.approx(logits[:5], abs=1e-12)


def test_extreme_features_do_not_overflow() -> None:
    net = AcceptanceNet(torch.zeros(len(FEATURES)), torch.ones(len(FEATURES)))
    network = PredictorNetwork(Predictor(net.layers(), UNCALIBRATED))
    chances = network.chances([[1e6] * len(FEATURES), [-1e6] * len(FEATURES)], 0)
    assert all(0 <= chance <= 1 for chance in chances)


def alike(chances: list[float], reached: list[float] | None = None) -> Nodes:
    """Nodes without features."""
    nothing = torch.zeros(len(chances), len(FEATURES))
    return Nodes(nothing, torch.tensor(chances), torch.tensor(reached or [1.0] * len(chances)))


@pytest.mark.parametrize("chance", [0.1, 0.5, 0.9])
def test_the_weighted_loss_is_least_where_it_should_be(chance: float) -> None:
    """Its derivative vanishes at logit a = logit y - log w."""
    least = torch.tensor([math.log(chance / (1 - chance)) - math.log(6)], requires_grad=True)
    weighted_loss(least, alike([chance]), 6.0).backward()  # type: ignore[no-untyped-call]
    assert least.grad is not None
    assert least.grad.item() == pytest.approx(0, abs=1e-6)
    by_hand = -(0.7 * math.log(0.4) + 6 * 0.3 * math.log(0.6))
    logit = torch.tensor([math.log(0.4 / 0.6)])
    assert weighted_loss(logit, alike([0.7]), 6.0).item() == pytest.approx(by_hand, rel=1e-5)


def test_nodes_count_by_the_chance_that_they_are_reached() -> None:
    chances = numpy.array([[0.5, 0.25, 1.0], [1.0, 0.0, 1.0]])
    real = numpy.array([[True, True, True], [True, True, False]])
    nodes = Examples(numpy.zeros((2, 3, len(FEATURES))), chances, real).nodes()
    assert nodes.reached.tolist() == [1.0, 0.5, 0.125, 1.0, 1.0]
    assert nodes.chances.tolist() == [0.5, 0.25, 1.0, 1.0, 0.0]
    logits = torch.tensor([0.0, 3.0])
    unreached = weighted_loss(logits, alike([0.5, 0.5], [1.0, 0.0]), 1.0)
    assert unreached.item() == pytest.approx(math.log(2))


def synthetic(num_guesses: int, depth: int, seed: int) -> tuple[numpy.ndarray, numpy.ndarray, numpy.ndarray]:
    """True logits, outcomes drawn from them, and which nodes are there."""
    random = numpy.random.default_rng(seed)
    logits = random.normal(1.5, 1.5, (num_guesses, depth))
    outcomes = (random.random((num_guesses, depth)) < sigmoid(logits)).astype(float)
    lengths = random.integers(min(2, depth), depth + 1, num_guesses)
    return logits, outcomes, numpy.arange(depth) < lengths[:, None]


def test_calibration_undoes_a_temperature_and_a_bias_at_every_depth() -> None:
    logits, outcomes, real = synthetic(20_000, 4, seed=0)
    temperatures, biases = numpy.array([1.5, 0.7, 1.2, 0.9]), numpy.array([-1.8, -0.5, 0.8, -1.0])
    warped = logits * temperatures + biases
    calibration = calibrate(warped, outcomes, real)
    fresh, fresh_outcomes, fresh_real = synthetic(20_000, 4, seed=1)
    before = path_calibration_error(sigmoid(fresh * temperatures + biases), fresh_outcomes, fresh_real)
    after = path_calibration_error(
        calibrated(fresh * temperatures + biases, calibration), fresh_outcomes, fresh_real
    )
    assert before > 0.1
    assert after < 0.015
    assert calibration.scales == pytest.approx(1 / temperatures, rel=0.25)
    assert calibration.shifts == pytest.approx(-biases / temperatures, abs=0.35)


def test_calibration_does_not_flatten_what_is_informative() -> None:
    """Saying the mean everywhere has no calibration error either."""
    logits, outcomes, real = synthetic(20_000, 1, seed=2)
    chances = calibrated(logits, calibrate(logits, outcomes, real))
    assert chances.std() > 0.8 * sigmoid(logits).std()
    # Logits that say nothing are not flattened to the mean altogether, nor weak ones blown up without end.
    for useless in (numpy.random.default_rng(4).normal(0, 1, logits.shape), logits / 10):
        (scale,) = calibrate(useless, outcomes, real).scales
        assert LOWEST_SCALE <= scale <= HIGHEST_SCALE


def test_a_depth_that_is_hardly_seen_shares_the_calibration_before_it() -> None:
    logits, outcomes, real = synthetic(2_000, 3, seed=3)
    real[50:, 2] = False
    assert len(calibrate(logits, outcomes, real).scales) == 2


def test_the_calibration_error_by_hand() -> None:
    predicted = numpy.array([0.9, 0.9, 0.1, 0.1])
    outcomes = numpy.array([1.0, 0.0, 0.0, 0.0])
    # Half of the cases say 0.9 and are 0.5, the others say 0.1 and are 0.
    assert calibration_error(predicted, outcomes) == pytest.approx(0.5 * 0.4 + 0.5 * 0.1)
    # Errors of running products: 0.4 at the first depth; 0.81 said and 0.5 true at the second.
    paths, fates = numpy.array([[0.9, 0.9]] * 2), numpy.array([[1.0, 1.0], [0.0, 1.0]])
    there = numpy.ones((2, 2), bool)
    assert path_calibration_error(paths, fates, there) == pytest.approx((0.4 + 0.31) / 2)


def toy(num_guesses: int, seed: int) -> Examples:
    """Acceptance rises with confidence alone, and is far from it: a = c^3."""
    random = numpy.random.default_rng(seed)
    confidence = random.uniform(0.05, 0.99, (num_guesses, 3))
    features = random.normal(size=(num_guesses, 3, len(FEATURES)))
    features[..., 0] = numpy.log(confidence)
    features[..., 1] = numpy.log(confidence / (1 - confidence))
    accepted = (random.random((num_guesses, 3)) < confidence**3).astype(float)
    return Examples(features, accepted, numpy.ones((num_guesses, 3), bool))


def test_training_learns_how_acceptance_depends_on_confidence() -> None:
    lines: list[str] = []
    fitted = fit(toy(8000, 0), toy(1000, 1), FitOptions(num_epochs=16, batch_size=512), 0, lines.append)
    assert len(lines) == 8
    network = PredictorNetwork(Predictor(fitted.layers, fitted.calibration))
    for confidence in (0.3, 0.6, 0.9):
        line = [0.0] * len(FEATURES)
        line[0], line[1] = math.log(confidence), math.log(confidence / (1 - confidence))
        for depth in range(3):
            assert network.chances([line], depth)[0] == pytest.approx(confidence**3, abs=0.1)
    errors = fitted.figures["held_out_calibration_error"]
    assert isinstance(errors, dict)
    assert errors["calibrated"] < 0.06 < errors["as_trained"]


def test_a_seed_gives_one_predictor() -> None:
    def layers(seed: int) -> object:
        return fit(toy(200, 0), toy(50, 1), FitOptions(num_epochs=1), seed, lambda line: None).layers

    assert layers(1) == layers(1) != layers(2)


@pytest.mark.parametrize(
    "changes", [{"reject_weight": 0.0}, {"num_epochs": 0}, {"batch_size": 0}, {"learning_rate": math.nan}]
)
def test_options_that_make_no_sense(changes: dict[str, float]) -> None:
    with pytest.raises(BadInputError):
        FitOptions(**changes)  # type: ignore[arg-type]


def test_examples_of_unequal_shapes_cannot_be_made() -> None:
    with pytest.raises(ValueError, match="shapes"):
        Examples(numpy.zeros((2, 3, len(FEATURES))), numpy.zeros((2, 2)), numpy.ones((2, 3), bool))
