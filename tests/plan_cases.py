"""Reference plans of trees: all trees of a few nodes, and their expected tokens."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from secondguess.drafters.optimal_tree import PlanTables
from secondguess.drafters.trees import NodePath

SHARES = (0.55, 0.3, 0.1)


def all_trees(num_nodes: int, num_levels: int) -> set[frozenset[NodePath]]:
    """Every tree of so many nodes, on at most so many levels, whose nodes have up to three children."""
    trees: set[frozenset[NodePath]] = {frozenset()}
    for _ in range(num_nodes):
        trees = {tree | {node} for tree in trees for node in _next_nodes(tree, num_levels)}
    return trees


def _next_nodes(tree: frozenset[NodePath], num_levels: int) -> Iterator[NodePath]:
    for parent in [(), *tree]:
        rank = next(rank for rank in range(len(tree) + 1) if (*parent, rank) not in tree)
        if len(parent) < num_levels and rank < len(SHARES):
            yield (*parent, rank)


def worth(tree: frozenset[NodePath]) -> float:
    """Tokens to be expected of it: the sum over its nodes of the chance that they are accepted."""
    return sum(prod(SHARES[rank] for rank in node) for node in tree)


def most_by_hand(num_nodes: int, num_levels: int = 3) -> float:
    return max(map(worth, all_trees(num_nodes, num_levels)), default=0.0)


def most_planned(num_nodes: int, num_levels: int = 3) -> float:
    return PlanTables(SHARES, num_nodes, num_levels).tokens(num_nodes, num_levels)
