"""What a predictor of acceptance is shown of a node: its law, its place, its row's settings; never its token.

The only things that lead here are summaries of laws (numbers), a depth and a request's settings, so that what is learnt from them
cannot anticipate (`base.py`). The same function serves training and decoding.
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
"""Names of the features, in their order.

`log_survival` is the sum of `log_confidence` over the nodes before this one, `log_depth` the logarithm of 1 + depth. Temperature
and coupling are the request's: the law is the draft model's own, so it does not show them, and they decide what is accepted.
"""

SMALLEST = 1e-6
"""Probabilities are kept this far from 0 and 1."""
LEAST_SURVIVAL = -20.0
HIGHEST_TEMPERATURE = 2.0
"""Beyond these, more of the same makes no difference."""


class LawSummary(Protocol):
    """What is known of one node's law."""

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
    """The features of one node, in the order of `FEATURES`.

    Args:
        confidence, runner_up: the two largest probabilities of its law, before sampling settings.
        entropy: of the law, in nats.
        depth: 0 for the first node of a draft.
        log_survival: of the nodes before it, see `FEATURES`.
        temperature, coupled: of the row.
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
        # At temperature 0 a race has one possible winner.
        float(coupled and temperature > 0),
    ]


def features_of_path(laws: Sequence[LawSummary], temperature: float, coupled: bool) -> list[list[float]]:
    """`[node][feature]` of the nodes of one chain."""
    lines: list[list[float]] = []
    log_survival = 0.0
    for depth, law in enumerate(laws):
        line = node_features(
            law.confidence, law.runner_up, law.entropy, depth, log_survival, temperature, coupled
        )
        log_survival += line[0]
        lines.append(line)
    return lines
