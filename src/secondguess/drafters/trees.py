"""Tree shapes, and sampling of draft trees.

SpecInfer, arXiv 2305.09781; EAGLE-2, 2406.16858.

A tree grows level by level. Before a level is drawn, the shape sets the number of children of each
node of the frontier, from the tokens and distributions above. Children are drawn one after another
without replacement, so that siblings differ.

Sampled nodes are never dropped (docs/controllers.md, "Why a controller may not see the tokens"):
dropping a node because of its token would change the output distribution. Where drafts are not
samples (temperature 0), or where keyed races decide the text (coupled rows), any choice is safe:
there the dynamic shape draws more nodes than it needs and keeps the most probable ones.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from operator import mul
from typing import Self

import torch
from torch import Tensor

from secondguess.core import MAX_DRAFT_LENGTH, Draft, KeepDrafting, Row
from secondguess.errors import BadInputError
from secondguess.names import Name, check_range, read_options
from secondguess.sampling.noise import Noise
from secondguess.sampling.probs import compute_tree_draft_probs

MAX_CHILDREN = 16
MAX_NODES = 128
"""Largest number of nodes of a tree: a pass over more costs as much as several plain passes."""


@dataclass
class Node:
    """Node of a draft tree."""

    token: int
    parent: int  # index in the row's tree; -1 for a child of pending
    depth: int  # 0 for a child of pending
    log_prob: float  # natural logarithm of the drafter's probability of the path that ends here
    dist: int = -1  # index, within the batch, of the distribution that it was drawn from


ROOT = Node(token=-1, parent=-1, depth=-1, log_prob=0.0)


class TreeShape(ABC):
    """Rule for the number of children of each node of a growing tree.

    Attributes:
        depth: largest number of levels.
    """

    depth: int

    @abstractmethod
    def num_children(self, frontier: Sequence[Node], dists: Tensor, free: bool) -> list[int]:
        """Return the number of children to draw for each node of the frontier.

        Args:
            frontier: the level drawn last; only `ROOT` at first.
            dists: `[node, vocab]`, distributions of their children.
            free: whether nodes may be dropped afterwards (`keep`).
        """

    def keep(self, nodes: Sequence[Node]) -> list[int]:
        """Return the nodes of a whole tree to keep, parents before children.

        Called only if nodes may be dropped.
        """
        return list(range(len(nodes)))


@dataclass(frozen=True)
class StaticTree(TreeShape):
    """Same tree in every round, with equally many children for all nodes of a level."""

    widths: tuple[int, ...]  # number of children of pending, of each of those, etc.
    depth: int = field(init=False)

    def __post_init__(self) -> None:
        num_nodes = sum(accumulate(self.widths, mul))
        if num_nodes > MAX_NODES:
            raise BadInputError(f"expected a tree of at most {MAX_NODES} nodes, got {num_nodes}")
        object.__setattr__(self, "depth", len(self.widths))

    def num_children(self, frontier: Sequence[Node], dists: Tensor, free: bool) -> list[int]:
        return [self.widths[node.depth + 1] for node in frontier]


@dataclass(frozen=True)
class DynamicTree(TreeShape):
    """Tree of the nodes that are most probable under the drafter (EAGLE-2).

    If nodes may be dropped, each level expands the `width` most probable nodes of the frontier by
    `width` children each, and the `nodes` most probable nodes of the whole tree are kept. If not,
    each level draws its share of `nodes`, allotted before drawing to the children expected to be
    most probable: the probability of the parent's path times the largest probabilities of its
    children.
    """

    nodes: int  # largest number of nodes of the whole tree
    width: int  # largest number of children of a node, and of nodes expanded in a level
    depth: int  # largest number of levels

    def num_children(self, frontier: Sequence[Node], dists: Tensor, free: bool) -> list[int]:
        if free:
            order = sorted(range(len(frontier)), key=lambda index: -frontier[index].log_prob)
            expanded = set(order[: self.width])
            return [self.width if index in expanded else 0 for index in range(len(frontier))]
        share = max(self.nodes // self.depth, 1)
        largest = dists.topk(min(self.width, dists.shape[-1])).values.tolist()
        expected = [
            (math.exp(node.log_prob) * prob, index)
            for index, node in enumerate(frontier)
            for prob in largest[index]
        ]
        chosen = [index for _, index in sorted(expected, key=lambda pair: (-pair[0], pair[1]))[:share]]
        return [chosen.count(index) for index in range(len(frontier))]

    def keep(self, nodes: Sequence[Node]) -> list[int]:
        # A node is at most as probable as its parent and comes after it, so the most probable
        # nodes form a tree.
        order = sorted(range(len(nodes)), key=lambda index: (-nodes[index].log_prob, index))
        return sorted(order[: self.nodes])


@dataclass(frozen=True)
class TreeOptions:
    """Options of a drafter that can draft trees; the sizes are those of a `DynamicTree`."""

    tree: str = ""  # empty for chains; children per node, level by level, as in `3x2x1`; or `dynamic`
    nodes: int = 12
    width: int = 3
    depth: int = 5  # reduced to `nodes` if larger

    def __post_init__(self) -> None:
        check_range("nodes of a dynamic tree", self.nodes, 1, MAX_NODES)
        check_range("width of a dynamic tree", self.width, 1, MAX_CHILDREN)
        check_range("depth of a dynamic tree", self.depth, 1, MAX_DRAFT_LENGTH)
        if self.tree not in ("", "dynamic"):
            self._widths()

    @classmethod
    def from_name(cls, name: Name) -> Self:
        """Read the options of a drafter's name."""
        options = read_options(cls, name.options, f"drafter {name.kind}")
        for key in name.options:
            if key != "tree" and options.tree != "dynamic":
                raise BadInputError(
                    "expected nodes, width and depth with tree=dynamic, "
                    f"got {key} with tree={options.tree or 'nothing'}"
                )
        return options

    @cached_property
    def shape(self) -> TreeShape | None:
        """Requested tree shape; None for chains."""
        if self.tree == "dynamic":
            return DynamicTree(self.nodes, self.width, min(self.depth, self.nodes))
        return StaticTree(tuple(self._widths())) if self.tree else None

    def _widths(self) -> list[int]:
        parts = self.tree.split("x")
        if not all(part.isdecimal() and int(part) > 0 for part in parts) or len(parts) > MAX_DRAFT_LENGTH:
            raise BadInputError(
                f"expected a tree such as 3x2x1 (children per node, level by level) or dynamic, got {self.tree!r}"
            )
        return [int(part) for part in parts]

    def __str__(self) -> str:
        """Return the options as written after a drafter's name."""
        if self.tree == "dynamic":
            return f",tree=dynamic,nodes={self.nodes},width={self.width},depth={self.depth}"
        return f",tree={self.tree}" if self.tree else ""


def read_tree_options(name: Name) -> tuple[str, TreeShape | None]:
    """Return a drafter's full name and its tree shape."""
    options = TreeOptions.from_name(name)
    argument = f":{name.argument}" if name.argument else ""
    return f"{name.kind}{argument}{options}", options.shape


LevelLogits = Callable[[list[int], Draft], Tensor]
"""Function from the active rows and the tree so far to logits `[row, node + 1, vocab]` after
pending and after each node. Only those of the last level of the active rows are used."""


@dataclass(frozen=True)
class Parent:
    """Node (or pending) that is about to get children."""

    row: int  # index in the batch
    index: int  # index in the row's tree; -1 for pending
    node: Node  # `ROOT` for pending
    num_children: int
    first_child: int  # index in the row's tree


class TreeBuilder:
    """Trees of a batch while they grow, each of at most `limits` levels."""

    def __init__(self, rows: Sequence[Row], shape: TreeShape, limits: Sequence[int], noise: Noise) -> None:
        self.rows = rows
        self.shape = shape
        self.limits = [min(limit, shape.depth) for limit in limits]
        self.noise = noise
        self.nodes: list[list[Node]] = [[] for _ in rows]
        self.frontiers: list[list[int]] = [[-1] if limit else [] for limit in self.limits]
        coupled, greedy = noise.coupled.tolist(), noise.greedy.tolist()
        self.free = [is_coupled or noise.all_greedy for is_coupled in coupled]
        self._greedy = greedy
        self._dists: list[Tensor] = []
        self._num_dists = 0

    def draft(self, with_probs: bool) -> Draft:
        """Return the nodes drawn so far as a draft."""
        device = self.noise.device
        width = max(map(len, self.nodes), default=0)

        def padded(what: Callable[[Node], int], padding: int) -> Tensor:
            values = [[*map(what, nodes), *([padding] * (width - len(nodes)))] for nodes in self.nodes]
            return torch.tensor(values, dtype=torch.long, device=device).reshape(len(values), width)

        lengths = torch.tensor([len(nodes) for nodes in self.nodes], dtype=torch.long, device=device)
        probs = None
        if with_probs and width:
            # Padding nodes get the first distribution, without meaning.
            probs = torch.cat(self._dists)[padded(lambda node: node.dist, 0)]
        return Draft(padded(lambda node: node.token, 0), padded(lambda node: node.parent, -1), lengths, probs)

    def grow(self, active: Sequence[int], logits: Tensor, tree: Draft, depth: int) -> Tensor:
        """Draw the level after `tree`, which holds all nodes drawn so far.

        Return logits `[row, vocab]` after the most probable parent of each row, from which
        `keep_drafting` decides about another level.
        """
        dists, banned = compute_tree_draft_probs(logits, self.rows, tree)
        parent_logits = logits[:, 0].clone()
        for row in active:
            best = max(self.frontiers[row], key=lambda index: self._node(row, index).log_prob)
            parent_logits[row] = logits[row, best + 1]
        if banned is not None:
            is_banned = banned.tolist()
            for row in active:
                row_bans = is_banned[row]
                self.frontiers[row] = [index for index in self.frontiers[row] if not row_bans[index + 1]]
        parents = self._parents(active, dists, logits)
        for row in active:
            self.frontiers[row] = []
        # At temperature 0 the distribution is one-hot: logits rank the other children.
        self._add_children([parent for parent in parents if not self._greedy[parent.row]], dists, None, depth)
        self._add_children([parent for parent in parents if self._greedy[parent.row]], dists, logits, depth)
        return parent_logits

    def _node(self, row: int, index: int) -> Node:
        return self.nodes[row][index] if index >= 0 else ROOT

    def _parents(self, active: Sequence[int], dists: Tensor, logits: Tensor) -> list[Parent]:
        """Return the nodes of the active rows that get children, with the indices of these."""
        found = []
        for row in active:
            frontier = self.frontiers[row]
            queries = [index + 1 for index in frontier]
            nodes = [self._node(row, index) for index in frontier]
            greedy = self._greedy[row]
            frontier_probs = logits[row, queries].softmax(-1) if greedy else dists[row, queries]
            counts = self.shape.num_children(nodes, frontier_probs, self.free[row])
            if greedy and not self.noise.all_greedy:
                # In a batch with sampled rows, a greedy row's one-hot distribution allows a single child.
                counts = [min(count, 1) for count in counts]
            elif max(counts, default=0) > 1:
                counts = list(map(min, counts, (frontier_probs > 0).sum(-1).tolist()))
            first = len(self.nodes[row])
            for index, node, count in zip(frontier, nodes, counts, strict=True):
                if count:
                    found.append(Parent(row, index, node, count, first))
                    first += count
        return found

    def _add_children(
        self, parents: Sequence[Parent], dists: Tensor, logits: Tensor | None, depth: int
    ) -> None:
        """Draw the children of all `parents`; if logits are given, take those ranked highest."""
        if not parents:
            return
        where = (
            torch.tensor([parent.row for parent in parents], device=dists.device),
            torch.tensor([parent.index + 1 for parent in parents], device=dists.device),
        )
        own = dists[where]
        if logits is None:
            ranking, tokens = own, self._sampled(parents, own, depth)
        else:
            ranking = logits[where].softmax(-1)
            max_children = max(parent.num_children for parent in parents)
            tokens = (ranking + own).topk(max_children).indices
        log_probs = ranking.gather(1, tokens).clamp_min(1e-30).log().tolist()
        for number, (parent, children, child_log_probs) in enumerate(
            zip(parents, tokens.tolist(), log_probs, strict=True)
        ):
            row, above = parent.row, parent.node
            for rank in range(parent.num_children):
                self.frontiers[row].append(parent.first_child + rank)
                log_prob = above.log_prob + child_log_probs[rank]
                dist = self._num_dists + number
                self.nodes[row].append(Node(children[rank], parent.index, depth, log_prob, dist))
        self._dists.append(own)
        self._num_dists += len(parents)

    def _sampled(self, parents: Sequence[Parent], dists: Tensor, depth: int) -> Tensor:
        """Draw children `[parent, rank]` without replacement from each parent's distribution.

        All children of one rank are drawn at once; entries without a child hold 0.
        """
        max_children = max(parent.num_children for parent in parents)
        drawn = torch.zeros(len(parents), max_children, dtype=torch.long, device=dists.device)
        left = dists
        for rank in range(max_children):
            members = [number for number, parent in enumerate(parents) if parent.num_children > rank]
            if rank:
                left = left.scatter(1, drawn[:, rank - 1 : rank], 0.0)
            chosen = left if len(members) == len(parents) else left[members]
            if rank:
                chosen = chosen / chosen.sum(-1, keepdim=True)
            noise = self._noise_of([parents[number].row for number in members])
            tokens = noise.draft(chosen, depth, [parents[number].first_child + rank for number in members])
            if len(members) == len(parents):
                drawn[:, rank] = tokens
            else:
                drawn[members, rank] = tokens
        return drawn

    def _noise_of(self, rows: list[int]) -> Noise:
        return self.noise if rows == [0] and len(self.rows) == 1 else self.noise.select(torch.tensor(rows))

    def prune(self) -> None:
        """Drop the nodes that the shape does not keep, in rows where nodes may be dropped."""
        for row, free in enumerate(self.free):
            if free:
                kept = self.shape.keep(self.nodes[row])
                new_index = {old: new for new, old in enumerate(kept)} | {-1: -1}
                nodes = [self.nodes[row][old] for old in kept]
                self.nodes[row] = [replace(node, parent=new_index[node.parent]) for node in nodes]


def draft_trees(
    rows: Sequence[Row],
    shape: TreeShape,
    limits: Sequence[int],
    noise: Noise,
    level_logits: LevelLogits,
    keep_drafting: KeepDrafting | None,
) -> Draft:
    """Draw a tree for each row, level by level, of at most `limits` levels.

    After each level, `keep_drafting` decides per row whether to draw another; None draws all levels.
    """
    builder = TreeBuilder(rows, shape, limits, noise)
    active = [index for index, limit in enumerate(builder.limits) if limit]
    depth = 0
    while active:
        tree = builder.draft(with_probs=False)
        logits = level_logits(active, tree)
        parent_logits = builder.grow(active, logits, tree, depth)
        depth += 1
        active = [index for index in active if depth < builder.limits[index] and builder.frontiers[index]]
        if active and keep_drafting is not None:
            keeps_drafting = keep_drafting(parent_logits, depth - 1)
            active = [index for index in active if keeps_drafting[index]]
    builder.prune()
    return builder.draft(with_probs=not noise.all_greedy)
