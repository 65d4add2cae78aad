"""Simulated rounds for tests of controllers: a drafter with a given acceptance, and a clock with given costs."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache

from secondguess.controllers.cost.controller import CostController
from secondguess.controllers.draft_probs import DraftProbs
from secondguess.core import Candidate, Draft, Plan, RoundTime, Row, Verdict
from secondguess.sampling import SamplingParams

Chance = Callable[[int, int], float]
"""Of a node's acceptance, given the round and the node's depth."""


class FixedConfidences(DraftProbs):
    """Return distributions with a given confidence."""

    def __init__(self, confidences: Sequence[float]) -> None:
        self.acceptance_probs = None
        self._confidences = list(confidences)


@cache
def draft_of(lengths: tuple[int, ...]) -> Draft:
    return Draft.chains([[0] * length for length in lengths])


@cache
def verdict_of(accepted: tuple[int, ...]) -> Verdict:
    return Verdict.from_chain(accepted, [0] * len(accepted))


@dataclass
class Simulation:
    """Simulated rounds of a drafter and a target, for rows that never end.

    Args:
        chance: of acceptance, by round and depth.
        step: seconds of a draft step; a plain round takes 1.
        node: seconds that a node adds to the target's pass, as one of the longest draft.
        node_of_row: seconds that each node of any row adds to the target's pass.
        deterministic: whether the drafter is a lookup.
        confidence: the drafter's confidence in every node.
        kind: the kind of its candidate, by round.
        length_factor: that of its candidate.
        pauses: whether paused rounds are run without a plan, as the decoding loop does.
        lost: seconds more than plain decoding, after 0, 1, ... rounds.
        delay: seconds on the clock of a phase that takes so many on a quiet machine; given the round since the
            object was made.
    """

    chance: Chance
    step: float = 0.15
    node: float = 0.05
    node_of_row: float = 0.0
    deterministic: bool = False
    confidence: float = 0.5
    prefill: float = 0.0
    pauses: bool = True
    kind: Callable[[int], str] = lambda number: ""
    length_factor: int = 1
    delay: Callable[[random.Random, int, float], float] = lambda rng, number, seconds: seconds
    drafted: list[list[int]] = field(default_factory=list)
    lost: list[float] = field(default_factory=lambda: [0.0])
    seconds: float = 0.0
    tokens: int = 0

    def play(
        self, controller: CostController, num_rounds: int, num_rows: int = 1, seed: int = 0
    ) -> Simulation:
        rng = random.Random(seed)
        rows = [Row([0] * 50, SamplingParams(max_tokens=10**6, temperature=1.0)) for _ in range(num_rows)]
        for number in range(num_rounds):
            candidate = Candidate(
                kind=self.kind(number),
                deterministic=self.deterministic,
                length_factor=self.length_factor,
            )
            if self.pauses and not controller.begin_round(rows):
                plans = [Plan(0, 0)] * num_rows
            else:
                plans = controller.plan(rows, [(candidate,)] * num_rows)
            lengths = [plan.length and 1 for plan in plans]
            depth = 0
            active = [index for index, plan in enumerate(plans) if plan.length > 1]
            while active:
                if not self.deterministic:
                    answers = controller.keep_drafting(
                        rows, FixedConfidences([self.confidence] * num_rows), depth
                    )
                    active = [index for index in active if answers[index]]
                depth += 1
                for index in active:
                    lengths[index] = depth + 1
                active = [index for index in active if plans[index].length > depth + 1]
            accepted = [
                next((d for d in range(length) if rng.random() >= self.chance(number, d)), length)
                for length in lengths
            ]
            now = len(self.drafted)
            drafting = self.delay(rng, now, self.step * max(lengths))
            scoring = 1 + self.node * max(lengths) + self.node_of_row * sum(lengths)
            scoring += self.prefill if max(lengths) else 0
            total = drafting + self.delay(rng, now, scoring)
            for row, gained in zip(rows, accepted, strict=True):
                row.tokens.extend([0] * (gained + 1))
            times = RoundTime(0.0, drafting, total)
            controller.learn(rows, draft_of(tuple(lengths)), verdict_of(tuple(accepted)), times)
            self.drafted.append(lengths)
            self.seconds += total
            self.tokens += sum(accepted) + num_rows
            self.lost.append(self.seconds - self.tokens / num_rows)
        return self

    @property
    def speed(self) -> float:
        """Tokens per row and second; plain decoding has 1."""
        return self.tokens / len(self.drafted[0]) / self.seconds
