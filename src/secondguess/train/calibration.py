"""Calibration of acceptance probabilities: sequential temperature and bias scaling by depth.

Controllers use the running product of the acceptance probabilities along a path. The depths are
therefore calibrated in order (DSpark, arXiv 2607.05147): with the shallower depths fixed, the
scale and shift of a depth are those with which the product up to it has the smallest expected
calibration error,

    ECE = sum over bins b of |mean product in b - mean outcome in b| * share of b

The shift is needed because training with a higher weight on rejections (SpecDec++) biases every
logit.
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
"""Number of bins of equal width over [0, 1]."""
ERROR_TOLERANCE = 0.003
"""Smallest significant difference of calibration errors.

Among smaller differences, the log loss decides, so that temperatures vary smoothly.
"""
MIN_DRAFTS_PER_DEPTH = 100
"""Minimum number of drafts with a node at a depth.

From the first depth with fewer, all depths share the calibration of the last one fitted.
"""
LOWEST_SCALE, HIGHEST_SCALE = 0.5, 2.0
"""Bounds of the scales.

Predicting the mean everywhere has no calibration error either, so scales are kept near 1.
"""


def sigmoid(logits: Array) -> Array:
    """Return the logistic function of `logits`, computed without overflow."""
    chances: Array = 0.5 + 0.5 * numpy.tanh(logits / 2)
    return chances


def calibration_error(predicted: Array, outcomes: Array) -> float:
    """Return the expected calibration error of probabilities `[n]` for outcomes `[n]` in 0..1."""
    bins = numpy.minimum((predicted * NUM_BINS).astype(int), NUM_BINS - 1)
    gaps = numpy.bincount(bins, predicted - outcomes, NUM_BINS)
    return float(numpy.abs(gaps).sum() / len(predicted))


def log_loss(predicted: Array, outcomes: Array) -> float:
    """Return the mean negative log-likelihood, in nats."""
    kept = predicted.clip(1e-6, 1 - 1e-6)
    return float(-(outcomes * numpy.log(kept) + (1 - outcomes) * numpy.log(1 - kept)).mean())


def calibrate(logits: Array, chances: Array, real: Flags) -> Calibration:
    """Fit a scale and a shift for every depth.

    Args:
        logits: `[draft, depth]`, output of the network.
        chances: `[draft, depth]`, acceptance probabilities as labels.
        real: `[draft, depth]`, True where the draft has a node.
    """
    scales: list[float] = []
    shifts: list[float] = []
    products, outcomes = numpy.ones(len(logits)), numpy.ones(len(logits))
    for depth in range(logits.shape[1]):
        there = real[:, depth]
        if depth and there.sum() < MIN_DRAFTS_PER_DEPTH:
            break
        outcomes = outcomes * chances[:, depth]
        scale, shift = _best(logits[there, depth], products[there], outcomes[there])
        products = products * sigmoid(scale * logits[:, depth] + shift)
        scales.append(scale)
        shifts.append(shift)
    return Calibration(tuple(scales), tuple(shifts))


def calibrated(logits: Array, calibration: Calibration) -> Array:
    """Return calibrated acceptance probabilities `[draft, depth]`."""
    pairs = numpy.array([calibration.at(depth) for depth in range(logits.shape[1])])
    return sigmoid(logits * pairs[:, 0] + pairs[:, 1])


def path_calibration_error(predicted: Array, chances: Array, real: Flags) -> float:
    """Return the calibration error of running products, averaged over the depths.

    Args:
        predicted: `[draft, depth]`, predicted acceptance probabilities.
        chances: `[draft, depth]`, acceptance probabilities as labels.
        real: `[draft, depth]`, True where the draft has a node.
    """
    products, outcomes = predicted.cumprod(1), chances.cumprod(1)
    errors = [
        calibration_error(products[there, depth], outcomes[there, depth])
        for depth, there in enumerate(real.T)
        if there.any()
    ]
    return sum(errors) / len(errors)


def _best(logits: Array, products: Array, outcomes: Array) -> tuple[float, float]:
    """Return scale and shift for one depth, found by a grid search that is refined three times."""
    tried: list[tuple[float, float, float, float]] = []
    centre, span = (1.0, 0.0), 1.0
    for _ in range(4):
        for scale, shift in _around(centre, span):
            predicted = products * sigmoid(scale * logits + shift)
            loss = log_loss(predicted, outcomes)
            tried.append((calibration_error(predicted, outcomes), loss, scale, shift))
        least = min(error for error, *_ in tried)
        _, _, *best = min(
            (each for each in tried if each[0] <= least + ERROR_TOLERANCE), key=lambda each: each[1]
        )
        centre, span = (best[0], best[1]), span / 3
    return centre


def _around(centre: tuple[float, float], span: float) -> Iterator[tuple[float, float]]:
    """Yield a grid of scales within a factor of 2^span and shifts within 4 span of `centre`."""
    for step in numpy.linspace(-span, span, 7):
        scale = min(max(centre[0] * 2**step, LOWEST_SCALE), HIGHEST_SCALE)
        for shift in numpy.linspace(-4 * span, 4 * span, 13):
            yield float(scale), float(centre[1] + shift)


def without_weight_bias(logits: Array, reject_weight: float) -> Array:
    """Return probabilities without the bias of the weighted loss.

    For a label y and a weight w, the loss has its minimum at the logit log(y / (1 - y)) - log w.
    """
    return sigmoid(logits + math.log(reject_weight))
