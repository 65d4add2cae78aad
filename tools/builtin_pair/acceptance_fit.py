"""Fit of an acceptance predictor: binary cross-entropy on soft labels, then calibration by depth.

SpecDec++ (arXiv 2405.19715), section 3: a draft token x has the label y = min(1, p(x) / q(x)),
and a predicted acceptance probability a has the loss

    -( y log a + w (1 - y) log(1 - a) ),   w = 6,

so that a missed rejection costs more. SpecDec++ gives all nodes the same weight. Here a node is
weighted by the probability that it is reached, that is, that all nodes before it are accepted:
the controller multiplies probabilities under this condition, and after a rejection the text
continues differently.

The controller uses running products of probabilities along a path. The depths are therefore
calibrated in order (DSpark, arXiv 2607.05147): with the shallower depths fixed, the scale and
shift of a depth minimise the log loss of the product up to it, where DSpark minimises its
calibration error. The shift also removes the bias of the weight w.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy, logsigmoid, silu, softplus

from secondguess.controllers.predictor import FEATURES, KIND, SCHEMA, Predictor

WIDTH = 16
NUM_EPOCHS, BATCH_SIZE, LEARNING_RATE = 40, 256, 0.01
"""Passes over the drafts, drafts per step of Adam, and learning rate, which decays along a cosine."""
PRIOR_DEVIATION = 3.0
"""Standard deviation of the prior of the calibration."""
NUM_BINS = 20
"""Number of bins of equal width over [0, 1] of calibration errors."""


class Drafts(NamedTuple):
    """Features and labels of the nodes of drafts of equal length, in float64.

    Args:
        features: `[draft, depth, feature]`.
        acceptance_probs: `[draft, depth]`, probability that the target accepts each node, given that those
            before it are accepted.
    """

    features: Tensor
    acceptance_probs: Tensor

    @property
    def reached(self) -> Tensor:
        """`[draft, depth]`, probability that all nodes before each one are accepted."""
        return torch.cat(
            [torch.ones_like(self.acceptance_probs[:, :1]), self.acceptance_probs.cumprod(1)[:, :-1]], 1
        )


class AcceptanceNet(nn.Module):
    """Trainable form of the network in `controllers/predictor.py`, with standardised features.

    Args:
        features: `[draft, depth, feature]`, training features, which define the standardisation.
    """

    def __init__(self, features: Tensor) -> None:
        super().__init__()
        self.mean = features.mean((0, 1))
        self.deviation = features.std((0, 1), correction=0).clamp(min=1e-3)
        self.first = nn.Linear(len(FEATURES), WIDTH, dtype=torch.float64)
        self.second = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.last = nn.Linear(WIDTH, 1, dtype=torch.float64)

    def forward(self, features: Tensor) -> Tensor:
        """Return logits `[draft, depth]` for features `[draft, depth, feature]`."""
        hidden = silu(self.first((features - self.mean) / self.deviation))
        hidden = hidden + silu(self.second(hidden))
        logits: Tensor = self.last(hidden)[..., 0]
        return logits

    def layers(self) -> list[dict[str, object]]:
        """Return the layers as in a predictor file, with the standardisation folded into the first."""
        weights = self.first.weight / self.deviation
        folded = (weights, self.first.bias - weights @ self.mean)
        others = [(linear.weight, linear.bias) for linear in (self.second, self.last)]
        return [
            {"biases": _rounded(biases), "weights": list(map(_rounded, weights))}
            for weights, biases in (folded, *others)
        ]


def fit(
    training: Drafts, held_out: Drafts, reject_weight: float, seed: int, provenance: Mapping[str, object]
) -> Predictor:
    """Train and calibrate on the training drafts, and evaluate on the held-out ones.

    Args:
        training: drafts to fit.
        held_out: drafts for the figures only.
        reject_weight: w in the loss above; 1 gives the plain likelihood.
        seed: seed of the initial weights.
        provenance: source of the drafts; the figures are added to it.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = AcceptanceNet(training.features)
        _train(net, training, reject_weight)
    scales, shifts = calibrate(net(training.features).detach(), training.acceptance_probs)
    with torch.no_grad():
        logits = net(held_out.features)
        predictions = {
            "as_trained": logits,
            # For a label y, the loss has its minimum at the logit log(y / (1 - y)) - log w.
            "weight_undone": logits + math.log(reject_weight),
            "calibrated": logits * scales + shifts,
        }
        figures = {
            "reject_weight": reject_weight,
            "num_training_nodes": training.acceptance_probs.numel(),
            "num_held_out_nodes": held_out.acceptance_probs.numel(),
            "training_loss": round(weighted_loss(net(training.features), training, reject_weight).item(), 4),
            "held_out_loss": round(weighted_loss(logits, held_out, reject_weight).item(), 4),
            "held_out_accepted": round(held_out.acceptance_probs.mean().item(), 4),
            "held_out_calibration_error": {
                name: round(calibration_error(each.sigmoid(), held_out.acceptance_probs), 4)
                for name, each in predictions.items()
            },
        }
    return Predictor(
        {
            "kind": KIND,
            "schema": SCHEMA,
            "provenance": {**provenance, **figures},
            "features": list(FEATURES),
            "calibration": {"scales": _rounded(scales), "shifts": _rounded(shifts)},
            "layers": net.layers(),
        }
    )


def _train(net: AcceptanceNet, drafts: Drafts, reject_weight: float) -> None:
    optimizer = torch.optim.Adam(net.parameters(), lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, NUM_EPOCHS)
    for _ in range(NUM_EPOCHS):
        for members in torch.split(torch.randperm(len(drafts.acceptance_probs)), BATCH_SIZE):
            batch = Drafts(drafts.features[members], drafts.acceptance_probs[members])
            optimizer.zero_grad()
            weighted_loss(net(batch.features), batch, reject_weight).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        schedule.step()


def weighted_loss(logits: Tensor, drafts: Drafts, reject_weight: float) -> Tensor:
    """Return the mean loss in nats for logits `[draft, depth]`, weighted by the probability of being reached."""
    losses = drafts.acceptance_probs * softplus(-logits) + reject_weight * (
        1 - drafts.acceptance_probs
    ) * softplus(logits)
    return (drafts.reached * losses).sum() / drafts.reached.sum()


def calibrate(logits: Tensor, acceptance_probs: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scale and the shift `[depth]` of every depth.

    Args:
        logits: `[draft, depth]`, output of the network.
        acceptance_probs: `[draft, depth]`, acceptance probabilities as labels.
    """
    outcomes = acceptance_probs.cumprod(1)
    log_products = torch.zeros_like(logits[:, 0])
    found = []
    for of_depth, outcome in zip(logits.T, outcomes.T, strict=True):
        scale, shift = _calibrate_depth(of_depth, log_products, outcome)
        log_products = log_products + logsigmoid(of_depth * scale + shift)
        found.append((scale, shift))
    scales, shifts = torch.tensor(found).T
    return scales, shifts


def _calibrate_depth(logits: Tensor, log_products: Tensor, outcomes: Tensor) -> tuple[float, float]:
    """Return the scale and shift of one depth, given the products of the depths before it, all `[draft]`.

    A wide normal prior on the logarithm of the scale and on the shift keeps them finite where few
    drafts determine them.
    """
    parameters = logits.new_zeros(2).requires_grad_()
    optimizer = torch.optim.LBFGS([parameters], max_iter=100, line_search_fn="strong_wolfe")

    def evaluate() -> float:
        optimizer.zero_grad()
        log_scale, shift = parameters
        predicted = (log_products + logsigmoid(logits * log_scale.exp() + shift)).exp()
        prior = (parameters / PRIOR_DEVIATION).square().sum() / 2
        loss = binary_cross_entropy(predicted, outcomes) + prior / len(logits)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.item()

    optimizer.step(evaluate)  # type: ignore[no-untyped-call]
    log_scale, shift = parameters.tolist()
    return math.exp(log_scale), shift


def calibration_error(predicted: Tensor, acceptance_probs: Tensor) -> float:
    """Return the expected calibration error of running products, averaged over the depths.

    ECE = sum over bins b of |mean product in b - mean outcome in b| * share of b

    Args:
        predicted: `[draft, depth]`, predicted acceptance probabilities.
        acceptance_probs: `[draft, depth]`, acceptance probabilities as labels.
    """
    products, outcomes = predicted.cumprod(1), acceptance_probs.cumprod(1)
    bins = (products * NUM_BINS).long().clamp(max=NUM_BINS - 1)
    gaps = products.new_zeros(NUM_BINS, products.shape[1]).scatter_add_(0, bins, products - outcomes)
    return float(gaps.abs().sum(0).mean() / len(products))


def _rounded(values: Tensor) -> list[float]:
    # Six significant digits: the rounding error is far below the uncertainty of the fit.
    return [float(f"{value:.6g}") for value in values.tolist()]
