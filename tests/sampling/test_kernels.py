"""Kernels of probabilities and draws: equal to torch in float64, or to the same rule in Python."""

from __future__ import annotations

import math

import numpy
import pytest
import torch

from families import needs_kernels
from secondguess.core import Row
from secondguess.runtime.native import library, sampling
from secondguess.sampling.noise import KeyedNoise
from secondguess.sampling.params import SamplingParams

pytestmark = needs_kernels

WIDTHS = [5, 16, 17, 6144, 32_003]
some_widths = pytest.mark.parametrize("width", WIDTHS)


@pytest.fixture(params=library.units(), ids=lambda unit: unit.name)
def unit(request, monkeypatch):
    monkeypatch.setattr(sampling, "units", lambda: (request.param,))


@pytest.fixture
def by_torch(monkeypatch):
    """Run a function without the kernels."""

    def run(function, *arguments):
        with monkeypatch.context() as patch:
            patch.setattr(sampling, "units", tuple)
            return function(*arguments)

    return run


def random_logits(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(shape[-1])) * 4


@some_widths
@pytest.mark.parametrize("special", ["none", "tie", "masked", "nan", "infinity", "all masked"])
def test_the_most_probable_token_and_its_probability_equal_torch(width: int, special: str) -> None:
    logits = random_logits(3, width + 4)[:, 2:-2] / 4
    set_special(logits, special)
    tokens, confidences = sampling.with_confidences(logits)
    assert tokens == logits.numpy().argmax(-1).tolist()
    expected = logits.double().softmax(-1).amax(-1)
    torch.testing.assert_close(
        torch.tensor(confidences).double(), expected, rtol=1e-5, atol=0, equal_nan=True
    )


def set_special(logits, special):
    middle = logits.shape[-1] // 2
    if special == "tie":
        logits[0, middle] = logits[0, -1] = 50.0
    elif special == "masked":
        logits[1, :middle] = -math.inf
    elif special == "nan":
        logits[2, middle] = math.nan
    elif special == "infinity":
        logits[2, middle] = math.inf
    elif special == "all masked":
        logits[:] = -math.inf


@some_widths
@pytest.mark.parametrize("special", ["none", "masked", "nan", "infinity", "all masked"])
def test_softmax(unit, width, special):
    wide = random_logits(3, 2, width + 4)
    set_special(wide.view(6, -1), special)
    logits, temperatures = wide[:, :, 2:-2], [0.1, 1.0, 3.0]
    found = sampling.softmax(logits, temperatures)
    expected = (logits.double() / torch.tensor(temperatures).double()[:, None, None]).softmax(-1)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-37, equal_nan=True)
    assert not found[logits == -math.inf].nan_to_num().any()
    alone = sampling.softmax(logits[1:2, 1:], temperatures[1:2])
    assert torch.equal(alone.nan_to_num(-1), found[1:2, 1:].nan_to_num(-1))


def test_softmax_gives_tokens_that_are_impossible_no_probability(unit):
    logits = torch.tensor([[[0.0, -86.0, -89.0, -1e30, -math.inf]]])
    found = sampling.softmax(logits, [1.0])[0, 0].tolist()
    assert found[1] > 0
    assert found[2:] == [0, 0, 0]


@some_widths
def test_draws_equal_those_of_cumulative_sums(unit, by_torch, width):
    dists = random_logits(2, 4, width).softmax(-1)
    dists[0, :, ::3] = 0.0
    for seed in range(40):
        uniforms = numpy.random.default_rng(seed).random((2, 4))
        drawn = sampling.draw_by_inversion(dists, uniforms)
        assert torch.equal(drawn, by_torch(sampling.draw_by_inversion, dists, uniforms))
        assert torch.equal(
            sampling.draw_by_inversion(dists[:, 1], uniforms[:, 1]), drawn[:, 1]
        )  # not contiguous


@some_widths
def test_races_equal_those_of_all_arrival_times(unit, width):
    dists = random_logits(2, 5, width).softmax(-1)
    dists[0, :, ::3] = 0.0
    depths = torch.arange(5).expand(2, 5)
    for seed in range(20):
        rows = [
            Row([0] * (1 + stream), SamplingParams(temperature=1.0), stream=stream, seed=seed, coupled=True)
            for stream in range(2)
        ]
        noise = KeyedNoise.from_rows(rows)
        assert torch.equal(noise.race(dists, depths), noise.arrival_times(dists, depths).argmin(-1))


@some_widths
def test_residuals_equal_those_of_torch(unit, by_torch, width):
    dists = random_logits(4, 2, 3, width).softmax(-1)
    p, q = dists[:2, :, :2].unbind(0)[0], dists[2:, :, 1:].unbind(0)[0]
    factors = numpy.array([[1.0, 0.3], [0.9, 0.0]])
    residuals, masses = sampling.residuals(factors, p, q)
    expected, expected_masses = by_torch(sampling.residuals, factors, p, q)
    assert torch.equal(residuals, expected)
    numpy.testing.assert_allclose(masses, expected_masses, rtol=1e-5)
