"""Make a predictor's chances mean what they say: sequential temperature and bias scaling, depth by depth.

What a controller uses is the running product of the chances of a path's nodes. So the depths are calibrated in turn
(DSpark, arXiv 2607.05147): with the earlier ones fixed, scale and shift of a depth are those under which the product up to it has
the smallest calibration error,

    ECE = sum over bins b of |mean product in b - mean outcome in b| * share of b

A shift beside the temperature is needed here: training that weighs rejections more (SpecDec++) biases every logit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy
from numpy.typing import NDArray

from secondguess.controllers.predictor import Calibration

Array = NDArray[numpy.float64]
Flags = NDArray[numpy.bool_]

NUM_BINS = 20
"""Bins of equal width over [0, 1]."""
SLACK = 0.003
"""Calibration errors that differ by less are noise: the log loss decides between them, and temperatures vary smoothly."""
FEWEST = 100
"""A depth at which fewer guesses have a node shares the calibration of the one before it."""
LOWEST_SCALE, HIGHEST_SCALE = 0.5, 2.0
"""An error of nothing is also had by saying the mean everywhere, so scales stay near 1."""


def sigmoid(logits: Array) -> Array:
    """Without overflow."""
    chances: Array = 0.5 + 0.5 * numpy.tanh(logits / 2)
    return chances


def calibration_error(predicted: Array, outcomes: Array) -> float:
    """Expected calibration error of chances `[n]` against outcomes `[n]` from 0 to 1."""
    bins = numpy.minimum((predicted * NUM_BINS).astype(int), NUM_BINS - 1)
    gaps = numpy.bincount(bins, predicted - outcomes, NUM_BINS)
    return float(numpy.abs(gaps).sum() / len(predicted))


def log_loss(predicted: Array, outcomes: Array) -> float:
    """Mean negative log-likelihood, in nats."""
    kept = predicted.clip(1e-6, 1 - 1e-6)
    return float(-(outcomes * numpy.log(kept) + (1 - outcomes) * numpy.log(1 - kept)).mean())


def calibrate(logits: Array, chances: Array, real: Flags) -> Calibration:
    """Scales and shifts for every depth.

    Args:
        logits: `[guess, depth]` of the network.
        chances: `[guess, depth]`, labels from 0 to 1.
        real: `[guess, depth]`, which of them are nodes.
    """
    scales: list[float] = []
    shifts: list[float] = []
    products, outcomes = numpy.ones(len(logits)), numpy.ones(len(logits))
    for depth in range(logits.shape[1]):
        there = real[:, depth]
        if depth and there.sum() < FEWEST:
            break
        outcomes = outcomes * chances[:, depth]
        scale, shift = _best(logits[there, depth], products[there], outcomes[there])
        products = products * sigmoid(scale * logits[:, depth] + shift)
        scales.append(scale)
        shifts.append(shift)
    return Calibration(tuple(scales), tuple(shifts))


def calibrated(logits: Array, calibration: Calibration) -> Array:
    """The chances `[guess, depth]`."""
    pairs = numpy.array([calibration.at(depth) for depth in range(logits.shape[1])])
    return sigmoid(logits * pairs[:, 0] + pairs[:, 1])


def path_error(predicted: Array, chances: Array, real: Flags) -> float:
    """The calibration error of running products, averaged over the depths; arguments `[guess, depth]`."""
    products, outcomes = predicted.cumprod(1), chances.cumprod(1)
    errors = [
        calibration_error(products[there, depth], outcomes[there, depth])
        for depth, there in enumerate(real.T)
        if there.any()
    ]
    return sum(errors) / len(errors)


def _best(logits: Array, products: Array, outcomes: Array) -> tuple[float, float]:
    """Scale and shift for one depth, by a search that narrows down."""
    tried: list[tuple[float, float, float, float]] = []
    centre, span = (1.0, 0.0), 1.0
    for _ in range(4):
        for scale, shift in _around(centre, span):
            predicted = products * sigmoid(scale * logits + shift)
            loss = log_loss(predicted, outcomes)
            tried.append((calibration_error(predicted, outcomes), loss, scale, shift))
        least = min(error for error, *_ in tried)
        _, _, *best = min((each for each in tried if each[0] <= least + SLACK), key=lambda each: each[1])
        centre, span = (best[0], best[1]), span / 3
    return centre


def _around(centre: tuple[float, float], span: float) -> Iterator[tuple[float, float]]:
    """A grid over scales up to a factor of 2^span and shifts up to 4 span away."""
    for step in numpy.linspace(-span, span, 7):
        scale = min(max(centre[0] * 2**step, LOWEST_SCALE), HIGHEST_SCALE)
        for shift in numpy.linspace(-4 * span, 4 * span, 13):
            yield float(scale), float(centre[1] + shift)


def undone(logits: Array, reject_weight: float) -> Array:
    """Chances without the bias of a weighted loss, whose minimum is at logit a - log w."""
    return sigmoid(logits + math.log(reject_weight))
