"""Kernels of probabilities and draws: equal to torch in float64, or to the same rule in Python."""

from __future__ import annotations

import math

import numpy
import pytest
import torch

from families import needs_kernels
from secondguess.core import Row
from secondguess.params import SamplingParams
from secondguess.runtime.cpu import library
from secondguess.sampling import kernels as sampling
from secondguess.sampling.noise import KeyedNoise
from secondguess.sampling.truncation import make_rule

pytestmark = needs_kernels

WIDTHS = [5, 16, 17, 1100, 32_003]
some_widths = pytest.mark.parametrize("width", WIDTHS)


@pytest.fixture(params=library.units(), ids=lambda unit: unit.name)
def unit(request, monkeypatch):
    monkeypatch.setattr(sampling, "units", lambda: (request.param,))
    return request.param


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


SETTINGS = {
    "temperature": [{"temperature": 0.1}, {}, {"temperature": 3.0}],
    "min-p": [{"min_p": 0.05}, {"min_p": 0.3, "temperature": 0.5}, {}],
    "top-k": [{"top_k": 1}, {"top_k": 20, "temperature": 0.7}, {"top_k": 700}],
    "top-p": [{"top_p": 0.9}, {"top_p": 0.05, "temperature": 0.6}, {"top_p": 0.97}],
    "all": [
        {"top_k": 20, "top_p": 0.8, "temperature": 0.7},
        {"top_p": 0.95, "min_p": 0.02},
        {"top_k": 300, "min_p": 0.1},
    ],
}


@some_widths
@pytest.mark.parametrize("special", ["none", "tie", "masked", "nan", "infinity", "all masked"])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
def test_probabilities_equal_those_of_torch_in_float64(unit, settings, special, width):
    wide = random_logits(3, 2, width + 4)
    set_special(wide.view(6, -1), special)
    logits = wide[:, :, 2:-2]
    params = [SamplingParams(**{"temperature": 1.0, **each}) for each in settings]
    found = make_rule(params, logits.device)(logits)
    expected = make_rule(params, logits.device)(logits.double())
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-37, equal_nan=True)
    assert not found[expected == 0].any()
    assert found[expected > 1e-35].all()
    alone = make_rule(params[1:2], logits.device)(logits[1:2, 1:])
    assert torch.equal(alone.nan_to_num(-1), found[1:2, 1:].nan_to_num(-1))


def test_the_smallest_logits_are_drawn_from_if_there_are_no_others(unit):
    logits = torch.full((1, 1, 5), torch.finfo(torch.float32).min)
    found = make_rule([SamplingParams(temperature=1.0, top_p=0.9)], logits.device)(logits)
    torch.testing.assert_close(found, torch.full((1, 1, 5), 0.2))


@pytest.mark.parametrize("top_k", [2, 3])
def test_top_k_keeps_what_equals_its_last_token(unit, top_k):
    logits = torch.zeros(1, 1, 5000)
    logits[0, 0, [7, 4001]] = 2.0
    logits[0, 0, ::500] = 1.0
    params = SamplingParams(temperature=1.0, top_k=top_k)
    kept = make_rule([params], logits.device)(logits)[0, 0].nonzero()[:, 0].tolist()
    assert kept == sorted({7, 4001} if top_k == 2 else {7, 4001, *range(0, 5000, 500)})


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
            Row(
                [0] * (1 + sample),
                SamplingParams(temperature=1.0),
                sample_index=sample,
                seed=seed,
                coupled=True,
            )
            for sample in range(2)
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
    numpy.testing.assert_array_equal(sampling.residual_masses(factors, p, q), masses)
