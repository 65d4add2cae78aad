"""Shapes of draft trees: levels, siblings and paths, computed once per shape."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import zip_longest

import numpy
from numpy.typing import NDArray


@dataclass(frozen=True)
class SiblingRank:
    """The n-th children of a level's queries: all first children, all second children, ..."""

    nodes: tuple[int, ...]  # the children, one per query
    queries: tuple[int, ...]  # their parents, the first queries of the level

    @cached_property
    def node_index(self) -> NDArray[numpy.int64]:
        return numpy.array(self.nodes)

    @cached_property
    def query_index(self) -> NDArray[numpy.int64]:
        return numpy.array(self.queries)


@dataclass(frozen=True)
class Shape:
    """Shape of a tree: the parent of each node.

    Queries are numbered as in `core`: 0 is pending, i + 1 is node i.
    """

    parents: tuple[int, ...]

    @property
    def num_nodes(self) -> int:
        return len(self.parents)

    @cached_property
    def children(self) -> list[list[int]]:
        """Children of each query, in the order in which they were drawn."""
        found: list[list[int]] = [[] for _ in range(self.num_nodes + 1)]
        for node, parent in enumerate(self.parents):
            found[parent + 1].append(node)
        return found

    @cached_property
    def earlier_siblings(self) -> list[list[int]]:
        """Siblings drawn before each node."""
        siblings = [self.children[parent + 1] for parent in self.parents]
        return [nodes[: nodes.index(node)] for node, nodes in enumerate(siblings)]

    @cached_property
    def levels(self) -> list[list[SiblingRank]]:
        """Ranks of nodes per depth, from the root down; a rank is processed as one batch.

        Queries are sorted by number of children, most first, so those with a child of a given rank
        are always the first ones.
        """
        below = [0]
        found = []
        while parents := [query for query in below if self.children[query]]:
            parents.sort(key=lambda query: -len(self.children[query]))
            by_rank = zip_longest(*[self.children[query] for query in parents])
            nodes = [tuple(node for node in rank if node is not None) for rank in by_rank]
            found.append([SiblingRank(rank, tuple(parents[: len(rank)])) for rank in nodes])
            below = [node + 1 for query in parents for node in self.children[query]]
        return found

    @cached_property
    def post_order(self) -> list[int]:
        """Nodes in post-order: children before their parent, the first child's subtree first."""

        def below(query: int) -> list[int]:
            return [step for node in self.children[query] for step in (*below(node + 1), node)]

        return below(0)

    @cached_property
    def paths(self) -> list[list[int]]:
        """Nodes on the path from pending to each query, including the query's own node."""
        found: list[list[int]] = [[]]
        for node, parent in enumerate(self.parents):
            found.append([*found[parent + 1], node])
        return found


@lru_cache(maxsize=256)
def shape_of(parents: tuple[int, ...]) -> Shape:
    """Return the shape with these parents; cached, as few shapes occur."""
    return Shape(parents)
