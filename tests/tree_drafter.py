"""Drafter that samples trees from a function of the context, siblings with or without replacement."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from secondguess.core import Budgets, Draft, Row
from secondguess.drafters.base import Drafter
from secondguess.proof.fakes import NextTokenDist
from secondguess.sampling.noise import Noise
from secondguess.tensors import padded_tensor, token_tensor


@dataclass
class _Tree:
    """Draft tree of one row under construction.

    Attributes:
        context: token ids of the row.
        num_levels: largest number of levels.
        queue: parents of the nodes to draw next, in order; -1 is pending.
        paths: nodes on the path to each node, itself included.
        tokens, parents, dists: token, parent and draft distribution of each node.
    """

    context: tuple[int, ...]
    num_levels: int
    queue: deque[int] = field(default_factory=deque)
    paths: list[list[int]] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    dists: list[Tensor] = field(default_factory=list)

    def path(self, node: int) -> list[int]:
        return [] if node < 0 else self.paths[node]

    def text(self, node: int) -> tuple[int, ...]:
        """Return the context followed by the tokens on the path to a node."""
        return (*self.context, *(self.tokens[step] for step in self.path(node)))

    def add(self, token: int, parent: int, dist: Tensor) -> None:
        self.paths.append([*self.path(parent), len(self.tokens)])
        self.tokens.append(token)
        self.parents.append(parent)
        self.dists.append(dist)

    def path_prob(self, node: int) -> float:
        """Return the probability of a node's path under the reported draft distributions."""
        return float(torch.stack([self.dists[step][self.tokens[step]] for step in self.path(node)]).prod())


class DistTreeDrafter(Drafter):
    """Drafter that samples token trees, breadth first and siblings in order.

    Args:
        vocab_size: number of tokens.
        dist: maps the whole context to probabilities `[vocab]`, as in `TableModel`.
        widths: number of children of a node at each depth: (2, 1) draws two children of pending
            and one child of each.
        without_replacement: draw siblings without replacement. Where no token of positive probability is
            left, token 0 fills the node, so that trees keep the same shape in all rows; no
            verifier accepts it.
        grows: maps the probability of a drawn node's path to whether it gets children; None for
            always. It decides about nodes that are not drawn yet, so it may depend on drawn ones.
    """

    name = "sampled-tree"
    deterministic = False
    can_draft_trees = True

    def __init__(
        self,
        vocab_size: int,
        dist: NextTokenDist,
        widths: Sequence[int],
        without_replacement: bool = True,
        grows: Callable[[float], bool] | None = None,
    ) -> None:
        self.vocab_size = vocab_size
        self.dist = dist
        self.widths = widths
        self.without_replacement = without_replacement
        self.grows = grows

    def propose(self, rows: Sequence[Row], budgets: Budgets, noise: Noise) -> Draft:
        trees = [_Tree(tuple(row.tokens), limit) for row, limit in zip(rows, budgets.lengths, strict=True)]
        for tree in trees:
            self._queue_children(tree, -1)
        node = 0
        while any(tree.queue for tree in trees):
            by_depth: dict[int, list[int]] = {}
            for index, tree in enumerate(trees):
                if tree.queue:
                    by_depth.setdefault(len(tree.path(tree.queue[0])), []).append(index)
            for depth, members in by_depth.items():
                chosen = noise.select(torch.tensor(members))
                self._draw([trees[index] for index in members], chosen, depth, node)
            node += 1
        return self._draft(trees)

    def _queue_children(self, tree: _Tree, node: int) -> None:
        """Queue a node's children to be drawn, if it gets any."""
        depth = len(tree.path(node))
        if depth < min(len(self.widths), tree.num_levels) and (
            node < 0 or self.grows is None or self.grows(tree.path_prob(node))
        ):
            tree.queue.extend([node] * self.widths[depth])

    def _draw(self, trees: Sequence[_Tree], noise: Noise, depth: int, node: int) -> None:
        parents = [tree.queue.popleft() for tree in trees]
        dists = [self.dist(tree.text(parent)) for tree, parent in zip(trees, parents, strict=True)]
        offers = [self._sibling_probs(*each) for each in zip(trees, parents, dists, strict=True)]
        tokens = noise.draft(torch.stack(offers), depth, node).tolist()
        for tree, parent, dist, token in zip(trees, parents, dists, tokens, strict=True):
            tree.add(token, parent, dist)
            self._queue_children(tree, node)

    def _sibling_probs(self, tree: _Tree, parent: int, dist: Tensor) -> Tensor:
        """Return the distribution of a node's next child, given the tokens of its earlier children."""
        siblings = [token for token, above in zip(tree.tokens, tree.parents, strict=True) if above == parent]
        if not self.without_replacement or not siblings:
            return dist
        rest = dist.clone()
        rest[siblings] = 0.0
        if rest.sum() <= 0:
            rest[0] = 1.0
        return rest / rest.sum()

    def _draft(self, trees: Sequence[_Tree]) -> Draft:
        host = torch.device("cpu")
        tokens = padded_tensor([tree.tokens for tree in trees], 0, host)
        parents = padded_tensor([tree.parents for tree in trees], -1, host)
        lengths = token_tensor([len(tree.tokens) for tree in trees], host)
        probs = torch.full((*tokens.shape, self.vocab_size), 1 / self.vocab_size, dtype=torch.float64)
        for row, tree in enumerate(trees):
            if tree.dists:
                probs[row, : len(tree.dists)] = torch.stack(tree.dists)
        return Draft(tokens, parents, lengths, probs, self.without_replacement)
