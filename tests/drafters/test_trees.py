"""Growing trees: node numbers, calls of controllers, and distributions with few tokens."""

from __future__ import annotations

import math

import pytest
import torch

from secondguess.core import Budgets, Draft, Row
from secondguess.drafters.model import ModelDrafter
from secondguess.drafters.trees import StaticTree, TreeShape, draft_trees
from secondguess.proof.fakes import TableModel, random_probs
from secondguess.sampling import SamplingParams
from secondguess.sampling.noise import KeyedNoise

VOCAB_SIZE = 50


def rows_of(*temperatures: float, coupled: bool = False) -> list[Row]:
    return [
        Row([1, 2, seed], SamplingParams(temperature=temperature, max_tokens=50), seed=seed, coupled=coupled)
        for seed, temperature in enumerate(temperatures)
    ]


class UnevenTree(TreeShape):
    """Three children of pending, then two, none and one."""

    depth = 2

    def num_children(self, frontier, dists, free):
        return [3] if len(frontier) == 1 else [2, 0, 1]


@pytest.mark.parametrize("coupled", [False, True])
def test_nodes_drawn_together_equal_nodes_drawn_one_by_one(coupled: bool) -> None:
    noise = KeyedNoise.from_rows(rows_of(1.0, 1.0, coupled=coupled))
    dists = torch.rand(7, VOCAB_SIZE, dtype=torch.float64)
    rows, nodes = [0, 1, 0, 1, 1, 0, 0], [3, 3, 4, 9, 5, 12, 5]
    together = noise.select(torch.tensor(rows)).draft(dists, 2, nodes)
    alone = [
        int(noise.select(torch.tensor([row])).draft(dist[None], 2, node))
        for row, node, dist in zip(rows, nodes, dists, strict=True)
    ]
    assert together.tolist() == alone
    assert len(set(alone)) > 1


def test_a_tree_contains_the_nodes_drawn_in_turn() -> None:
    """Siblings one after another, without the elder ones, each with the number of its own index."""
    rows = rows_of(1.0, 1.0)
    noise = KeyedNoise.from_rows(rows)
    logits = torch.randn(2, 20, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
    draft = draft_trees(
        rows, UnevenTree(), [2, 1], noise, lambda _, tree: logits[:, : tree.num_nodes + 1], None
    )
    assert draft.shapes == [(-1, -1, -1, 0, 0, 2), (-1, -1, -1)]
    assert draft.probs is not None
    for row, parents in enumerate(draft.shapes):
        own, tokens = noise.select(torch.tensor([row])), draft.tokens[row].tolist()
        for node, parent in enumerate(parents):
            dist = logits[row, parent + 1].softmax(-1)
            torch.testing.assert_close(draft.probs[row, node], dist)
            left = dist.clone()
            left[[tokens[elder] for elder in range(node) if parents[elder] == parent]] = 0.0
            depth = 0 if parent < 0 else 1
            assert tokens[node] == int(own.draft(left[None], depth, node))


def test_no_more_children_than_a_distribution_has_tokens() -> None:
    rows, logits = rows_of(1.0), torch.full((1, 1, VOCAB_SIZE), -torch.inf)
    logits[..., [4, 7]] = 0.0
    noise = KeyedNoise.from_rows(rows)
    draft = draft_trees(rows, StaticTree((5,)), [1], noise, lambda *_: logits, None)
    assert sorted(draft.tokens[0].tolist()) == [4, 7]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_controllers_receive_distributions_before_sampling_settings(temperature: float) -> None:
    """After them a distribution is one-hot at temperature 0, with a confidence of 1."""
    told: list[float] = []

    def keep_drafting(logits: torch.Tensor, depth: int, *_: object) -> list[bool]:
        told.append(float(logits[0].softmax(-1).max()))
        return [True]

    dist = random_probs(VOCAB_SIZE, 1)
    drafter = ModelDrafter(TableModel(VOCAB_SIZE, dist), "model:table", VOCAB_SIZE, StaticTree((2, 2)))
    rows = rows_of(temperature)
    drafter.begin(rows)
    drafter.prepare(rows, [0])
    draft: Draft = drafter.propose(rows, Budgets([2], keep_drafting), KeyedNoise.from_rows(rows))
    assert draft.num_levels == [2]
    assert told == [pytest.approx(float(dist(tuple(rows[0].tokens)).max()))]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("widths", [None, (1, 1), (2, 1)], ids=["chain", "path", "tree"])
def test_a_row_whose_settings_ban_the_narrower_vocabulary_does_not_stop_the_others(
    widths: tuple[int, ...] | None, temperature: float
) -> None:
    narrow = VOCAB_SIZE - 2
    params = SamplingParams(temperature=temperature, logit_bias=dict.fromkeys(range(narrow), -math.inf))
    free = SamplingParams(temperature=temperature)

    def drafted(rows: list[Row]) -> Draft:
        shape = StaticTree(widths) if widths else None
        drafter = ModelDrafter(TableModel(narrow, random_probs(narrow, 1)), "model:table", VOCAB_SIZE, shape)
        drafter.begin(rows)
        drafter.prepare(rows, [0] * len(rows))
        return drafter.propose(
            rows, Budgets([2] * len(rows), lambda *_: [True] * len(rows)), KeyedNoise.from_rows(rows)
        )

    together = drafted([Row([1, 2], params), Row([3], free), Row([4], params)])
    alone = drafted([Row([3], free)])
    assert together.lengths.tolist() == [0, *alone.lengths.tolist(), 0]
    assert together.tokens[1].tolist() == alone.tokens[0].tolist()
    assert drafted([Row([1, 2], params)]).num_nodes == 0
    if temperature:
        torch.testing.assert_close(together.probs[1], alone.probs[0])  # type: ignore[index]
