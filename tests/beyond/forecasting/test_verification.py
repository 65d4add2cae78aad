"""Distributions, couplings and residuals of continuous values, against closed forms and quadrature."""

import math

import pytest
import torch
from scipy import integrate, stats

from continuous_cases import (
    PAIRS,
    cdf,
    mixture,
    output_error,
    reflection_error,
    student,
    uniformity,
    verification_holds,
    verified,
)
from secondguess.beyond.forecasting.distributions import Gaussian

ONE_DIMENSIONAL = [name for name in PAIRS if not name.endswith("2d")]
EQUAL = [name for name in PAIRS if name.startswith("equal")]


@pytest.mark.parametrize("name", PAIRS)
def test_accepted_and_corrected_values_have_the_targets_density(name):
    assert output_error(name) < 1e-9


@pytest.mark.parametrize("name", EQUAL)
def test_reflected_values_complete_the_targets_density(name):
    assert reflection_error(name) < 1e-9


@pytest.mark.parametrize("name", ONE_DIMENSIONAL)
def test_verified_values_follow_the_target(name):
    assert verification_holds(name)


@pytest.mark.parametrize("name", ["equal-scales-2d", "unequal-scales-2d"])
def test_verified_vectors_follow_the_target(name):
    target, _ = PAIRS[name]
    assert isinstance(target, Gaussian)
    _, values = verified(name, 30_000)
    assert uniformity(cdf(target, values[:, 0])) > 1e-5


@pytest.mark.parametrize("name", EQUAL)
def test_the_acceptance_rate_is_the_overlap_of_the_densities(name):
    target, draft = PAIRS[name]
    distance = ((target.loc - draft.loc) / target.scale).norm()
    overlap = float(2 * torch.special.ndtr(-distance / 2))
    lengths, _ = verified(name, 30_000)
    assert float(lengths.double().mean()) == pytest.approx(overlap, abs=0.01)


def test_student_samples_are_bailey_s_function_of_the_uniforms():
    dist = student(3.5, 0.4, 1.3)
    for value in (0.2, 1.0, 7.0):

        def radius(angle, value=value):
            return (1 + (value / math.cos(2 * math.pi * angle)) ** 2 / 3.5) ** -1.75

        for angle in (0.01, 0.1, 0.2):
            uniforms = torch.tensor([[radius(angle), angle]], dtype=torch.float64)
            assert float(dist.sample(uniforms)) == pytest.approx(0.4 + 1.3 * value, abs=1e-9)
        above = 2 * integrate.quad(radius, 0, 0.25, epsabs=1e-12)[0]
        assert above == pytest.approx(stats.t.sf(value, 3.5), abs=1e-9)


def test_a_mixture_draws_each_component_with_its_weight():
    dist = mixture((0.3, 0.7), (-50.0, 50.0), (1.0, 1.0))
    uniforms = torch.stack((torch.tensor([0.299999, 0.300001]), torch.tensor([0.5, 0.5])), -1).double()
    assert dist.sample(uniforms).flatten().tolist() == pytest.approx([-50.0, 50.0])
