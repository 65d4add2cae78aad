"""Stop drafting when a rejection has become too likely, by a logistic regression fitted during decoding.

The threshold on the probability of a rejection is that of SpecDec++ (arXiv 2405.19715), which trains a
network beforehand. Here the acceptance probability of a node is a logistic function of summaries of the
drafter's distribution. It begins as the drafter's confidence and is updated after every round by one
Newton step per verified node (recursive Bayesian estimation with a normal approximation of the weights).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy
from numpy.typing import NDArray

from secondguess.controllers.base import Controller
from secondguess.controllers.draft_probs import DraftProbs
from secondguess.core import MAX_DRAFT_LENGTH, Candidate, Draft, Plan, RoundTime, Row, Verdict
from secondguess.names import Name, check_range, options_with_argument, read_options

Features = NDArray[numpy.float64]

FIRST_WEIGHTS = (0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
"""Initial weights of the features in `node_features`: the acceptance probability is the confidence."""
PRIOR_VARIANCE = 0.1
"""Variance of each initial weight."""
SMALLEST = 1e-3
"""Distance that probabilities keep from 0 and 1."""


@dataclass(frozen=True)
class LearnedOptions:
    """Options of `learned:LENGTH,threshold=H`.

    Args:
        length: maximum levels per round (in a chain, nodes), 0 to 64; 0 is plain decoding.
        threshold: draft on while the predicted probability that any draft node is rejected is at
            most this, 0 to 1.
    """

    length: int = 8
    threshold: float = 0.5

    def __post_init__(self) -> None:
        check_range("the draft length of the controller learned", self.length, 0, MAX_DRAFT_LENGTH)
        check_range("the threshold of the controller learned", self.threshold, 0, 1)


class LearnedController(Controller):
    """Controller that drafts on while 1 - a_1 a_2 ... a_k <= threshold, a_i being predicted for node i."""

    needs_probs = True

    def __init__(self, options: LearnedOptions = LearnedOptions()) -> None:
        self.options = options
        self.name = f"learned:{options.length},threshold={options.threshold:g}"
        self._weights = numpy.array(FIRST_WEIGHTS)
        self._covariance = PRIOR_VARIANCE * numpy.eye(len(FIRST_WEIGHTS))
        # Per row of the round: the features of its nodes, and their product of acceptance probabilities.
        self._features: list[list[Features]] = []
        self._survival: list[float] = []
        self._has_dists: list[bool] = []

    @classmethod
    def build(cls, name: Name) -> LearnedController:
        return cls(read_options(LearnedOptions, options_with_argument(name, "length"), "controller learned"))

    def plan(self, rows: Sequence[Row], candidates: Sequence[Sequence[Candidate]]) -> list[Plan]:
        self._features = [[] for _ in rows]
        self._survival = [1.0] * len(rows)
        # Lookup nodes have no distribution: the entries of their rows in `draft_probs` are meaningless.
        self._has_dists = [not choices[0].deterministic for choices in candidates]
        return [Plan(choices[0].part, self.options.length) for choices in candidates]

    def keep_drafting(self, rows: Sequence[Row], draft_probs: DraftProbs, depth: int) -> list[bool]:
        summaries = zip(draft_probs.confidences, draft_probs.runners_up, draft_probs.entropies, strict=True)
        for index, (row, summary) in enumerate(zip(rows, summaries, strict=True)):
            if self._has_dists[index]:
                features = node_features(row, depth, *summary)
                self._features[index].append(features)
                self._survival[index] *= self.acceptance_prob(features)
        return [1 - survival <= self.options.threshold for survival in self._survival]

    def learn(self, rows: Sequence[Row], draft: Draft, verdict: Verdict, time: RoundTime) -> None:
        lengths = draft.num_levels
        for index, accepted in enumerate(verdict.lengths):
            # Levels after the first rejected one have no outcome of their own. The last level may
            # have no features, as `keep_drafting` need not be called after it.
            for depth, features in enumerate(self._features[index][: min(accepted + 1, lengths[index])]):
                self._see(features, depth < accepted)

    def acceptance_prob(self, features: Features) -> float:
        """Return the predicted acceptance probability of a node, given that those before it are accepted."""
        return 0.5 + 0.5 * math.tanh(float(features @ self._weights) / 2)

    def _see(self, features: Features, accepted: bool) -> None:
        prob = self.acceptance_prob(features)
        spread = self._covariance @ features
        variance = prob * (1 - prob)
        spread_of_logit = 1 + variance * float(spread @ features)
        self._weights += spread * ((accepted - prob) / spread_of_logit)
        self._covariance -= numpy.outer(spread, spread) * (variance / spread_of_logit)


def node_features(row: Row, depth: int, confidence: float, runner_up: float, entropy: float) -> Features:
    """Return the features of a node: summaries of its distribution, its depth, and settings of the request.

    The settings affect acceptance and are not visible in the distribution, which is taken before sampling
    settings. Drawn tokens are not among the features, so that the rule is non-anticipating.
    """
    certainty = min(max(confidence, SMALLEST), 1 - SMALLEST)
    temperature = row.params.temperature
    values = (
        1.0,
        math.log(certainty / (1 - certainty)),
        math.log(max(runner_up, SMALLEST)),
        entropy,
        math.log(1 + depth),
        certainty,
        min(temperature, 2.0),
        float(row.coupled and temperature > 0),  # without effect at temperature 0
    )
    return numpy.array(values)
