"""Optimal trees: plans against an exhaustive search, acceptance rates from finished rounds, costs from timed passes."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest

from distribution_cases import PAIRS, ROUNDING, after_prompt, dist_error, play
from plan_cases import SHARES, all_trees, most_by_hand, most_planned, worth
from secondguess.core import Draft, Row
from secondguess.drafters import make_drafter
from secondguess.drafters.model import ModelDrafter
from secondguess.drafters.optimal_tree import (
    FIRST_RENEWAL,
    PRIOR_ACCEPTANCE,
    Costs,
    OptimalTree,
    PassTimes,
    PlanTables,
    RankAcceptance,
    measure_costs,
    plan_tree,
)
from secondguess.errors import BadInputError
from secondguess.proof.fakes import TableModel, random_probs
from secondguess.runtime.base import ForwardOutput


def costs_of(at_thirteen: float, draft: float = 0.05) -> Costs:
    """A target whose passes rise from 1 to so much over 13 queries, and a draft model whose passes are all alike."""
    return Costs(PassTimes(((1, 1.0), (13, at_thirteen))), PassTimes(((1, draft), (13, draft))))


FLAT = costs_of(1.0)


@pytest.mark.parametrize(
    ("num_nodes", "num_levels"),
    [(1, 1), (2, 1), (3, 1), (2, 2), (3, 2), (4, 2), (5, 2), (3, 3), (4, 3), (5, 3)],
)
def test_the_planned_tree_is_the_best_of_all_trees(num_nodes: int, num_levels: int) -> None:
    assert most_planned(num_nodes, num_levels) == pytest.approx(most_by_hand(num_nodes, num_levels))
    planned = frozenset(PlanTables(SHARES, num_nodes, num_levels).paths(num_nodes, num_levels))
    assert planned in all_trees(num_nodes, num_levels)
    assert worth(planned) == pytest.approx(most_by_hand(num_nodes, num_levels))


def test_trees_are_wide_if_nodes_are_free_and_children_are_equally_likely() -> None:
    tree = plan_tree([0.3, 0.28, 0.26], FLAT, most_nodes=12)
    assert {(0,), (1,), (2,)} <= tree.paths
    assert len(tree.paths) == 12


def test_trees_are_chains_if_nodes_are_expensive() -> None:
    tree = plan_tree([0.8, 0.08, 0.02], costs_of(2.8, draft=0.02), most_nodes=12)
    assert tree.depth > 2
    assert tree.paths == {(0,) * depth for depth in range(1, tree.depth + 1)}


def test_a_single_node_is_planned_if_nothing_pays() -> None:
    assert plan_tree(SHARES, costs_of(25.0, draft=0.5), 12).paths == {(0,)}


def test_pass_times_are_interpolated_and_validated() -> None:
    times = PassTimes(((1, 1.0), (3, 2.0), (7, 4.0)))
    assert [times.at(count) for count in (1, 2, 3, 5, 7, 9)] == [1.0, 1.5, 2.0, 3.0, 4.0, 5.0]
    for measured in (((1, 1.0),), ((2, 1.0), (3, 1.0)), ((1, 0.0), (2, 1.0)), ((1, 1.0), (1, 2.0))):
        with pytest.raises(BadInputError):
            PassTimes(measured)


def test_the_cost_of_a_level_is_a_pass_over_all_nodes_above_it() -> None:
    """A chain's levels are cheaper than a tree's."""
    costs = Costs(PassTimes(((1, 10.0), (2, 10.0))), PassTimes(((1, 1.0), (11, 11.0))))
    assert costs.of_tree([(0,)]) == 11
    assert costs.of_tree([(0,), (0, 0), (0, 0, 0)]) == 10 + 1 + 2 + 3
    assert costs.of_tree([(0,), (1,), (0, 0), (1, 0), (1, 0, 0)]) == 10 + 1 + 3 + 5


def test_acceptance_rates_by_rank_are_those_of_the_rounds() -> None:
    """A root with three children, of which the second has two: 30 % first, 50 % second, and below it always the second."""
    acceptance, rng, parents = RankAcceptance(), random.Random(1), [-1, -1, -1, 1, 1]
    for _ in range(3000):
        fate = rng.random()
        acceptance.learn(parents, [0] if fate < 0.3 else [1, 4] if fate < 0.8 else [])
    # The first rank was tried 1.5 times a round, 0.3 times with success; the second 1.5 and 1 times; the third once in vain.
    assert acceptance.shares[:3] == pytest.approx([0.2, 2 / 3, 0.0], abs=0.05)
    assert acceptance.shares[3:] == list(PRIOR_ACCEPTANCE[3:])


def test_the_plan_changes_only_after_rounds_that_are_over() -> None:
    shape = OptimalTree(6, costs_of(2.2))
    first = shape.tree
    for _ in range(FIRST_RENEWAL - 1):
        shape.learn([[-1, -1, -1]], [[]])
        assert shape.tree is first
    shape.learn([[-1, -1, -1], []], [[], [0]])  # a row that somebody else drafted for is no news
    assert shape.tree is not first
    assert shape.acceptance.shares[0] < PRIOR_ACCEPTANCE[0]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class TimedModel(TableModel):
    def __init__(self, clock: Clock, per_query: float, context_length: int = 1000) -> None:
        super().__init__(4, random_probs(4, 1), context_length)
        self.clock, self.per_query = clock, per_query

    def score(self, rows: Sequence[Row], draft: Draft) -> ForwardOutput:
        self.clock.now += 1.0 + self.per_query * draft.num_nodes
        return super().score(rows, draft)


def test_costs_are_measured_on_a_scratch_row_that_is_released() -> None:
    clock = Clock()
    target, draft_model = TimedModel(clock, 0.5), TimedModel(clock, 0.1)
    costs = measure_costs(target, draft_model, most_nodes=12, clock=clock)
    assert [costs.target.at(count) for count in (1, 2, 7, 13)] == pytest.approx([1.0, 1.5, 4.0, 7.0])
    assert [costs.draft_model.at(count) for count in (1, 7, 13)] == pytest.approx([1.0, 1.6, 2.2])
    assert target.num_live_rows == draft_model.num_live_rows == 0


def test_an_unmeasurable_pass_is_reported() -> None:
    with pytest.raises(BadInputError, match=r"^expected passes .* got: a context of 8 positions"):
        measure_costs(TimedModel(Clock(), 0.1, context_length=8), TableModel(4, random_probs(4, 1)), 12)
    target = TableModel(4, random_probs(4, 1))
    with pytest.raises(BadInputError, match="no time by the clock"):
        measure_costs(target, target, 12, clock=itertools.repeat(1.0).__next__)
    with pytest.raises(BadInputError, match="expected a loaded target to plan the trees"):
        make_drafter("model:x,tree=optimal", target_vocab_size=4, load_draft_model=lambda _: target)


def test_planned_trees_are_lossless_and_their_rounds_are_learned_from() -> None:
    pair = PAIRS["ternary"]
    shape = OptimalTree(3, FLAT)
    drafter = ModelDrafter(TableModel(3, pair.drafter), "model:table,tree=optimal", 3, shape)
    branches = play(pair, drafter, "auto", "fixed:2")
    assert dist_error(branches, after_prompt(pair.target), num_tokens=3) < ROUNDING
    assert shape.acceptance.shares != list(PRIOR_ACCEPTANCE)
