"""Input features of the acceptance predictor: draft distribution, depth and request settings.

Tokens are not among them, so a predictor trained on these features is non-anticipating
(`base.py`). Training and decoding use the same function.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log
from typing import Protocol

FEATURES = (
    "log_confidence",
    "logit_confidence",
    "log_runner_up",
    "entropy",
    "log_depth",
    "log_survival",
    "temperature",
    "coupled",
)
"""Names of the features, in order.

`log_survival` is the sum of `log_confidence` over the nodes before this one, `log_depth` is
log(1 + depth). Temperature and coupling are the request's settings: they affect acceptance but are
not visible in the draft distribution, which is taken before sampling settings.
"""

SMALLEST = 1e-6
"""Distance that probabilities keep from 0 and 1."""
LEAST_SURVIVAL = -20.0
"""Lower bound to which `log_survival` is clipped."""
HIGHEST_TEMPERATURE = 2.0
"""Upper bound to which the temperature is clipped."""


class LawSummary(Protocol):
    """Summary of one node's draft distribution."""

    @property
    def confidence(self) -> float: ...
    @property
    def entropy(self) -> float: ...
    @property
    def runner_up(self) -> float: ...


def node_features(
    confidence: float,
    runner_up: float,
    entropy: float,
    depth: int,
    log_survival: float,
    temperature: float,
    coupled: bool,
) -> list[float]:
    """Return the features of one node, in the order of `FEATURES`.

    Args:
        confidence, runner_up: the two largest probabilities of its draft distribution, before
            sampling settings.
        entropy: entropy of this distribution, in nats.
        depth: 0 for the first node of a draft.
        log_survival: of the nodes before it, see `FEATURES`.
        temperature, coupled: settings of the row.
    """
    certainty = min(max(confidence, SMALLEST), 1 - SMALLEST)
    return [
        log(certainty),
        log(certainty / (1 - certainty)),
        log(max(runner_up, SMALLEST)),
        entropy,
        log(1 + depth),
        max(log_survival, LEAST_SURVIVAL),
        min(temperature, HIGHEST_TEMPERATURE),
        # At temperature 0 coupling has no effect: only one token can be drawn.
        float(coupled and temperature > 0),
    ]


def features_of_path(
    draft_probs: Sequence[LawSummary], temperature: float, coupled: bool
) -> list[list[float]]:
    """Return the features `[node][feature]` of the nodes of one chain."""
    lines: list[list[float]] = []
    log_survival = 0.0
    for depth, dist in enumerate(draft_probs):
        line = node_features(
            dist.confidence, dist.runner_up, dist.entropy, depth, log_survival, temperature, coupled
        )
        log_survival += line[0]
        lines.append(line)
    return lines
