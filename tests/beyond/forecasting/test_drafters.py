"""Drafters of continuous values: fits against closed forms, and what they learn."""

import pytest
import torch

import secondguess
from continuous_cases import noise_of, series, tiny_forecaster
from secondguess.beyond.forecasting.autoregression import AutoregressionDrafter
from secondguess.beyond.forecasting.distributions import Gaussian
from secondguess.beyond.forecasting.drafters import Histories, Problem
from secondguess.beyond.forecasting.kalman import KalmanDrafter, filter_series


def problem(values: torch.Tensor, lags=(1, 2)) -> Problem:
    past = values.double()[None, :, None]
    return Problem({}, past, torch.ones_like(past, dtype=torch.bool), 1, lags, 8)


def first_draft(drafter, values, num_steps=3, num_rows=1):
    drafter.begin(problem(values))
    nothing = Histories(
        torch.arange(num_rows),
        torch.zeros(num_rows, dtype=torch.int64),
        torch.zeros(num_rows, 8, 1, dtype=torch.float64),
        torch.zeros(num_rows, dtype=torch.int64),
    )
    return drafter.propose(nothing, torch.full((num_rows,), num_steps), noise_of(num_rows))


@pytest.mark.parametrize("ratios", [(0.3, 0.0), (0.5, 0.02)])
def test_the_filter_s_likelihood_is_that_of_the_joint_gaussian(ratios):
    """Differences of log likelihoods, since a diffuse slope leaves a constant free."""
    values = torch.randn(12, generator=torch.Generator().manual_seed(1), dtype=torch.float64).cumsum(0)
    trend = ratios[1] > 0

    def joint(level, slope):
        times = torch.arange(1, 12, dtype=torch.float64)
        shared = torch.minimum(times[:, None], times)
        # Number of steps that each slope noise has moved the level, at each time.
        moves = (times[:, None] - times).clamp(min=0)
        covariance = torch.eye(11) + 1 + level * shared + slope * moves @ moves.T
        covariance += 1e6 * trend * times[:, None] * times
        errors, count = values[1:] - values[0], 11 - trend
        variance = errors @ torch.linalg.solve(covariance, errors) / count
        return -(count * variance.log() + torch.logdet(covariance)) / 2

    grid = torch.tensor([ratios, (2.0, ratios[1])], dtype=torch.float64).T[:, :, None, None]
    past = values[None, :, None]
    found = filter_series(
        past, torch.ones_like(past, dtype=torch.bool), grid[0], grid[1], trend
    ).log_likelihood
    expected = joint(*ratios) - joint(2.0, ratios[1])
    assert float(found[0] - found[1]) == pytest.approx(float(expected), abs=1e-4)


def test_a_line_is_continued_with_its_slope():
    draft = first_draft(KalmanDrafter(), 3.0 + 0.5 * torch.arange(40))
    assert draft.values.flatten().tolist() == pytest.approx([23.0, 23.5, 24.0], abs=1e-3)


def test_the_autoregression_finds_its_coefficients():
    generator = torch.Generator().manual_seed(2)
    values = [0.0, 1.0]
    for _ in range(400):
        values.append(1.2 * values[-1] - 0.6 * values[-2] + 0.3 * float(torch.randn((), generator=generator)))
    draft = first_draft(AutoregressionDrafter(), torch.tensor(values), 1)
    assert isinstance(draft.dists, Gaussian)
    assert float(draft.dists.loc) == pytest.approx(1.2 * values[-1] - 0.6 * values[-2], abs=0.1)
    assert float(draft.dists.scale) == pytest.approx(0.3, abs=0.03)


@pytest.mark.parametrize(
    "drafter", [KalmanDrafter(), AutoregressionDrafter()], ids=["trend", "autoregression"]
)
def test_drafts_have_the_distributions_they_claim(drafter):
    values = torch.randn(40, generator=torch.Generator().manual_seed(3)).cumsum(0)
    draft = first_draft(drafter, values, 2, 4000)
    standard = ((draft.values - draft.dists.loc) / draft.dists.scale)[..., 0]
    assert standard.mean(0).tolist() == pytest.approx([0, 0], abs=0.06)
    assert standard.std(0).tolist() == pytest.approx([1, 1], abs=0.05)
    assert float(torch.corrcoef(standard.T)[0, 1]) == pytest.approx(0, abs=0.06)


def test_the_autoregression_imitates_the_target_with_time():
    model, inputs = tiny_forecaster(), series()
    first = AutoregressionDrafter()
    learning = secondguess.forecast(model, **inputs, drafter=first, seed=1)
    crude = type("Crude", (AutoregressionDrafter,), {"observe": lambda *_: None})()
    assert (
        learning.stats.acceptance_length
        > secondguess.forecast(model, **inputs, drafter=crude, seed=1).stats.acceptance_length
    )
