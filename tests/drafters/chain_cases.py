"""Rounds of drafting for one row, to compare chains drawn at once with those drawn token by token."""

from __future__ import annotations

import random
from array import array
from bisect import bisect_right
from collections.abc import Sequence

import pytest
from torch import Tensor

from families import row_of
from secondguess.core import Budgets, Draft, Row, StoppingRule, Verdict
from secondguess.drafters.sampling_drafter import SamplingDrafter
from secondguess.runtime.base import HiddenStates
from secondguess.runtime.native.runtime import NativeRuntime
from secondguess.runtime.native.sampling import with_confidences
from secondguess.sampling import SamplingParams
from secondguess.sampling.noise import KeyedNoise

SETTINGS = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.6, "min_p": 0.02},
    {"temperature": 1.3, "top_k": 8},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 30, "min_p": 0.01},
)
Drafted = tuple[list[list[int]], Tensor | None, list[tuple[int, float]], list[int]]
"""Tokens, their distributions, the depth and the sum of logits that the controller saw after each, or their groups."""


def random_rule(rng: random.Random) -> StoppingRule | None:
    """Return a rule that stops after one node, after all, or in between; or none."""
    if rng.random() < 0.5:
        return None
    edges = array("d", sorted(rng.random() * 0.2 for _ in range(rng.randint(1, 5))))
    own, following = (array("d", [rng.random() for _ in range(len(edges) + 1)]) for _ in range(2))
    return StoppingRule(edges, own, following, array("d", [rng.random() ** 3 * 0.3 for _ in range(7)]), [])


def run_rounds(
    drafter: SamplingDrafter, target: NativeRuntime | None, rng: random.Random, params: dict[str, float]
) -> list[Drafted]:
    """Return the drafts of some rounds of a row, with what the controller was asked after each node."""
    row = row_of([rng.randrange(50) for _ in range(rng.randint(2, 30))])
    row.params, row.seed = SamplingParams(max_tokens=500, **params), rng.getrandbits(40)
    row.coupled = rng.random() < 0.4
    if target is not None:
        target.request_hidden_states(drafter.hidden_layers)
        drafter.admit([row])
        drafter.begin([row], target.begin([row]))
    drafts: list[Drafted] = []
    for _ in range(rng.randint(1, 4)):
        asked: list[tuple[int, float]] = []
        last, uses_probs, rule = rng.randint(0, 8), rng.random() < 0.6, random_rule(rng)
        walk = [1.0]

        def keep(
            logits: Tensor,
            depth: int,
            acceptance_probs: Sequence[float] | None = None,
            confidences: Sequence[float] | None = None,
            asked: list[tuple[int, float]] = asked,
            last: int = last,
            rule: StoppingRule | None = rule,
            walk: list[float] = walk,
        ) -> list[bool]:
            largest = float(logits.softmax(-1).max())
            assert confidences is None or confidences[0] == pytest.approx(largest, 1e-5)
            if rule is None:
                asked.append((depth, float(logits.sum())))
                return [depth < last]
            group = bisect_right(rule.edges, with_confidences(logits)[1][0])
            rule.groups.append(group)
            walk.append(walk[-1] * rule.own[group])
            return [walk[-1] * rule.following[group] > rule.least[depth]]

        budgets = Budgets([rng.randint(1, 8)], keep, uses_probs or rule is not None, stopping_rule=rule)
        drafter.prepare([row], [0])
        draft = drafter.propose([row], budgets, KeyedNoise.from_rows([row]))
        drafts.append((draft.token_lists, draft.probs, asked, rule.groups if rule else []))
        _commit(row, draft, rng, drafter, target)
    drafter.release(row)
    if target is not None:
        target.release(row)
    return drafts


def _commit(
    row: Row, draft: Draft, rng: random.Random, drafter: SamplingDrafter, target: NativeRuntime | None
) -> None:
    accepted = draft.token_lists[0][: rng.randint(0, draft.num_nodes)]
    verdict = Verdict.from_chain([len(accepted)], [rng.randrange(50)])
    hidden: HiddenStates = {}
    if target is not None:
        hidden = target.score([row], draft).hidden
        target.keep([row], verdict.paths)
    row.tokens += [*accepted, *verdict.next_tokens]
    drafter.observe([row], verdict, hidden)
