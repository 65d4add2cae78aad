"""Fake models and drafters for tests of this package and of extensions.

They need neither Transformers nor weights and run in milliseconds. `TableModel` is a language
model given by a function from context to probabilities; it checks its caller as strictly as a real
KV cache. `ScriptedDrafter` proposes given tokens; `DistTreeDrafter` samples trees from such a
function.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain

import torch
from torch import Tensor

from secondguess.core import Budgets, Draft, Row, padded_tensor, token_tensor
from secondguess.drafters.base import Drafter
from secondguess.errors import BadInputError
from secondguess.runtime.base import ForwardOutput, HiddenStates, Runtime
from secondguess.sampling.noise import Noise

NextTokenDist = Callable[[tuple[int, ...]], Tensor]


class TableModel(Runtime):
    """Target or draft model whose next-token distribution is a function of the context.

    Args:
        vocab_size: number of tokens.
        dist: maps the whole context (a tuple of token ids) to probabilities `[vocab]`; zeros are
            allowed.
        context_length: reported context length.
    """

    def __init__(self, vocab_size: int, dist: NextTokenDist, context_length: int = 10_000) -> None:
        self.vocab_size = vocab_size
        self.context_length = context_length
        self.num_layers = 0
        self.device = torch.device("cpu")
        self.dist = dist
        self.num_forwards = 0
        self.num_scored_tokens = 0
        self._cached: dict[Row, list[int]] = {}
        self._held: dict[Row, list[list[int]]] = {}

    def admit(self, rows: Sequence[Row], reuse_limits: Sequence[int | None] | None = None) -> list[int]:
        for row in rows:
            if row in self._cached:
                raise BadInputError(
                    "expected a new row, got one that has begun already; call release(row) first"
                )
            self._cached[row] = []
        return [0] * len(rows)

    def prefill(
        self, rows: Sequence[Row], max_tokens: int | None = None, with_hidden: bool = True
    ) -> list[HiddenStates]:
        left = sum(map(self.num_to_prefill, rows)) if max_tokens is None else max_tokens
        for row in rows:
            num_cached = len(self._cached[row])
            self._cached[row] += row.tokens[num_cached : min(num_cached + left, len(row.tokens) - 1)]
            left -= len(self._cached[row]) - num_cached
        return [{}] * len(rows)

    def num_to_prefill(self, row: Row) -> int:
        return max(0, len(row.tokens) - 1 - len(self._cached[row]))

    def score(self, rows: Sequence[Row], draft: Draft) -> ForwardOutput:
        self.num_forwards += 1
        contexts = [self._cache_row(row, draft, index) for index, row in enumerate(rows)]
        # Rows of an enumeration share most contexts: each distribution is computed once.
        places = {context: place for place, context in enumerate(dict.fromkeys(chain(*contexts)))}
        dists = torch.stack([self.dist(context) for context in places])
        with_padding = torch.cat([dists.log(), torch.zeros_like(dists[:1])])
        num_queries = draft.num_nodes + 1
        index = [
            [*(places[context] for context in of_row), *[len(places)] * (num_queries - len(of_row))]
            for of_row in contexts
        ]
        return ForwardOutput(with_padding[torch.tensor(index)], {})

    def _cache_row(self, row: Row, draft: Draft, index: int) -> list[tuple[int, ...]]:
        """Cache a row's tokens and hold its draft; return the contexts of its queries."""
        cached = self._cached[row]
        if cached != row.tokens[: len(cached)]:
            raise BadInputError(
                "expected a cache that is a prefix of the row, got a stale one: keep or rewind it"
            )
        length = int(draft.lengths[index])
        self.num_scored_tokens += len(row.tokens) - len(cached) + length
        self._cached[row] = list(row.tokens)
        paths: list[list[int]] = []
        tokens, parents = draft.tokens[index, :length].tolist(), draft.parents[index, :length].tolist()
        for token, parent in zip(tokens, parents, strict=True):
            paths.append([*([] if parent < 0 else paths[parent]), token])
        self._held[row] = paths
        return [(*row.tokens, *path) for path in ([], *paths)]

    def keep(self, rows: Sequence[Row], paths: Sequence[Sequence[int]]) -> None:
        for row, path in zip(rows, paths, strict=True):
            if path:
                self._cached[row] += self._held[row][path[-1]]
            self._held[row] = []

    def rewind(self, rows: Sequence[Row], lengths: Sequence[int]) -> None:
        for row, length in zip(rows, lengths, strict=True):
            self._cached[row] = self._cached[row][:length]
            self._held[row] = []

    def release(self, row: Row) -> None:
        self._cached.pop(row, None)
        self._held.pop(row, None)

    @property
    def num_live_rows(self) -> int:
        """Number of rows that have begun and not ended."""
        return len(self._cached)


def random_probs(vocab_size: int, seed: int, sharpness: float = 1.5, zeros: float = 0.0) -> NextTokenDist:
    """Return a function that maps each context to a random, but fixed, distribution.

    Args:
        vocab_size: number of tokens.
        seed: different seeds give unrelated distributions.
        sharpness: standard deviation of the logits.
        zeros: probability that a token gets probability zero; the most probable token never does.
    """
    dists: dict[tuple[int, ...], Tensor] = {}

    def dist(context: tuple[int, ...]) -> Tensor:
        if context not in dists:
            generator = torch.Generator().manual_seed(hash((seed, *context)) & 0x7FFFFFFF)
            logits = sharpness * torch.randn(vocab_size, generator=generator, dtype=torch.float64)
            dropped = torch.rand(vocab_size, generator=generator) < zeros
            dropped[int(logits.argmax())] = False
            dists[context] = logits.masked_fill(dropped, -torch.inf).softmax(-1)
        return dists[context]

    return dist


class ScriptedDrafter(Drafter):
    """Deterministic drafter whose chains come from a function of the row.

    Chains are truncated to the row's draft length.
    """

    name = "scripted"
    deterministic = True

    def __init__(self, script: Callable[[Row], Sequence[int]]) -> None:
        self.script = script

    def propose(self, rows: Sequence[Row], budgets: Budgets, noise: Noise) -> Draft:
        chains = [list(self.script(row))[:limit] for row, limit in zip(rows, budgets.lengths, strict=True)]
        return Draft.chains(chains, device=noise.device)


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

    def chance(self, node: int) -> float:
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
            node < 0 or self.grows is None or self.grows(tree.chance(node))
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
