"""Rounds of drafting for one row, to compare chains drawn at once with those drawn token by token."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from families import row_of
from secondguess.core import Budgets, Draft, Row, Verdict
from secondguess.drafters.sampling_drafter import SamplingDrafter
from secondguess.runtime.base import HiddenStates
from secondguess.runtime.cpu.runtime import NativeRuntime
from secondguess.sampling import SamplingParams
from secondguess.sampling.noise import KeyedNoise

SETTINGS = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.6, "min_p": 0.02},
    {"temperature": 1.3, "top_k": 8},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 30, "min_p": 0.01},
)
Drafted = tuple[list[list[int]], Tensor | None, list[tuple[int, float]]]
"""Tokens, their distributions, and the depth and the sum of logits that the controller saw after each."""


def run_rounds(
    drafter: SamplingDrafter, target: NativeRuntime | None, rng: random.Random, params: dict[str, float]
) -> list[Drafted]:
    """Return the drafts of some rounds of a row, with what the controller was asked after each node."""
    row = _random_row(rng, params)
    _begin([row], drafter, target)
    drafts: list[Drafted] = []
    for _ in range(rng.randint(1, 4)):
        asked: list[tuple[int, float]] = []
        last, uses_probs = rng.randint(0, 8), rng.random() < 0.8

        def keep(
            logits: Tensor,
            depth: int,
            acceptance_probs: Sequence[float] | None = None,
            confidences: Sequence[float] | None = None,
            asked: list[tuple[int, float]] = asked,
            last: int = last,
        ) -> list[bool]:
            largest = float(logits.softmax(-1).max())
            assert confidences is None or confidences[0] == pytest.approx(largest, 1e-5)
            asked.append((depth, float(logits.sum())))
            return [depth < last]

        budgets = Budgets([rng.randint(1, 8)], keep, uses_probs)
        drafter.prepare([row], [0])
        draft = drafter.propose([row], budgets, KeyedNoise.from_rows([row]))
        drafts.append((draft.token_lists, draft.probs, asked))
        _commit([row], draft, rng, drafter, target)
    _release([row], drafter, target)
    return drafts


DraftedBatch = tuple[Draft, list[tuple[int, list[float]]]]
"""A draft, and the depths and the sums of the logits of all rows that the controller saw."""


@torch.inference_mode()
def run_batches(
    drafter: SamplingDrafter, target: NativeRuntime | None, rng: random.Random
) -> list[DraftedBatch]:
    """Return the drafts of some rounds of a few rows, some of which draft nothing."""
    rows = [_random_row(rng, rng.choice(SETTINGS)) for _ in range(rng.randint(2, 5))]
    _begin(rows, drafter, target)
    drafts = []
    for _ in range(rng.randint(1, 4)):
        limits = [rng.choice((0, 1, 2, 3, 8)) for _ in rows]
        decisions = [[rng.random() < 0.8 for _ in rows] for _ in range(8)]
        asked: list[tuple[int, list[float]]] = []

        def keep(
            logits: Tensor,
            depth: int,
            acceptance_probs: Sequence[float] | None = None,
            confidences: Sequence[float] | None = None,
            asked: list[tuple[int, list[float]]] = asked,
            decisions: list[list[bool]] = decisions,
        ) -> list[bool]:
            asked.append((depth, logits.sum(-1).tolist()))
            return decisions[depth]

        budgets = Budgets(limits, keep, rng.random() < 0.7)
        drafter.prepare(rows, [0] * len(rows))
        draft = drafter.propose(rows, budgets, KeyedNoise.from_rows(rows))
        drafts.append((draft, asked))
        _commit(rows, draft, rng, drafter, target)
    _release(rows, drafter, target)
    return drafts


def compare_batches(
    found: list[DraftedBatch], expected: list[DraftedBatch], *, depths_are_nodes: bool = True
) -> int:
    """Check that drafts have the same bits; return the number of decisions whose logits were compared."""
    num_compared = 0
    for (draft, asked), (other, other_asked) in zip(found, expected, strict=True):
        assert draft.token_lists == other.token_lists
        lengths = draft.lengths.tolist()
        assert lengths == other.lengths.tolist()
        assert [depth for depth, _ in asked] == [depth for depth, _ in other_asked]
        for (depth, sums), (_, other_sums) in zip(asked, other_asked, strict=True):
            if depths_are_nodes:
                drawn = [row for row, length in enumerate(lengths) if length > depth]
                assert [sums[row] for row in drawn] == [other_sums[row] for row in drawn]
                num_compared += 1
        if draft.probs is None or other.probs is None:
            assert draft.probs is other.probs
            continue
        for row, length in enumerate(lengths):
            assert torch.equal(draft.probs[row, :length], other.probs[row, :length])
            assert not draft.probs[row, length:].any()
    return num_compared


def _random_row(rng: random.Random, params: dict[str, float]) -> Row:
    row = row_of([rng.randrange(50) for _ in range(rng.randint(2, 30))])
    row.params, row.seed = SamplingParams(max_tokens=500, **params), rng.getrandbits(40)
    row.coupled = rng.random() < 0.4
    return row


def _begin(rows: Sequence[Row], drafter: SamplingDrafter, target: NativeRuntime | None) -> None:
    if target is not None:
        target.request_hidden_states(drafter.hidden_layers)
        drafter.admit(rows)
        drafter.begin(rows, target.begin(rows))


def _release(rows: Sequence[Row], drafter: SamplingDrafter, target: NativeRuntime | None) -> None:
    for row in rows:
        drafter.release(row)
        if target is not None:
            target.release(row)


def _commit(
    rows: Sequence[Row],
    draft: Draft,
    rng: random.Random,
    drafter: SamplingDrafter,
    target: NativeRuntime | None,
) -> None:
    """Accept a random part of each row's chain."""
    lengths = [rng.randint(0, length) for length in draft.num_levels]
    verdict = Verdict.from_chain(lengths, [rng.randrange(50) for _ in rows])
    hidden: HiddenStates = {}
    if target is not None:
        hidden = target.score(rows, draft).hidden
        target.keep(rows, verdict.paths)
    for row, nodes, length, token in zip(rows, draft.token_lists, lengths, verdict.next_tokens, strict=True):
        row.tokens += [*nodes[:length], token]
    drafter.observe(rows, verdict, hidden)
