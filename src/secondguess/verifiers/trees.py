"""What the rules for sampled trees share: forms of trees, what siblings were drawn from, what is left after a rejection.

A tree is judged node by node, and all that can be known when a node comes up follows from the draft: whatever was
looked at before it was rejected, for else the verdict would stand. So the chance of every node at its visit is computed
beforehand, noise is asked once for all of them, and the answers are read in the rule's own order.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import zip_longest

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from secondguess.core import Draft, Verdict
from secondguess.noise import Noise
from secondguess.verifiers.base import (
    SMALLEST,
    Numbers,
    Verifier,
    at,
    excess,
    plain_verdict,
    require_independent,
    to_host,
)


@dataclass(frozen=True)
class Rank:
    """The children of one rank below the queries of a level: their first ones, or their second ones, ...

    Args:
        nodes: the children, one of each of the level's first queries.
        queries: these queries.
    """

    nodes: tuple[int, ...]
    queries: tuple[int, ...]

    @cached_property
    def node_index(self) -> NDArray[numpy.int64]:
        return numpy.array(self.nodes)

    @cached_property
    def query_index(self) -> NDArray[numpy.int64]:
        return numpy.array(self.queries)


@dataclass(frozen=True)
class Shape:
    """The form of a tree: the parent of each node. Queries are numbered as in `core`: 0 is pending, i + 1 node i."""

    parents: tuple[int, ...]

    @property
    def num_nodes(self) -> int:
        return len(self.parents)

    @cached_property
    def children(self) -> list[list[int]]:
        """The nodes that hang from each query, in the order in which they were drawn."""
        found: list[list[int]] = [[] for _ in range(self.num_nodes + 1)]
        for node, parent in enumerate(self.parents):
            found[parent + 1].append(node)
        return found

    @cached_property
    def earlier(self) -> list[list[int]]:
        """The siblings that were drawn before each node."""
        siblings = [self.children[parent + 1] for parent in self.parents]
        return [nodes[: nodes.index(node)] for node, nodes in enumerate(siblings)]

    @cached_property
    def levels(self) -> list[list[Rank]]:
        """Per depth, from the root on, the ranks of its nodes. What is done to one rank can be done to all its nodes at once.

        The queries with most children stand first, so that those that have a child of a rank are the first ones.
        """
        below = [0]
        found = []
        while parents := [query for query in below if self.children[query]]:
            parents.sort(key=lambda query: -len(self.children[query]))
            by_rank = zip_longest(*[self.children[query] for query in parents])
            nodes = [tuple(node for node in rank if node is not None) for rank in by_rank]
            found.append([Rank(rank, tuple(parents[: len(rank)])) for rank in nodes])
            below = [node + 1 for query in parents for node in self.children[query]]
        return found

    @cached_property
    def from_the_leaves(self) -> list[int]:
        """The nodes in the order of a traversal: children before their parent, the first child's tree first."""

        def below(query: int) -> list[int]:
            return [step for node in self.children[query] for step in (*below(node + 1), node)]

        return below(0)

    @cached_property
    def paths(self) -> list[list[int]]:
        """The nodes from pending down to each query, itself included."""
        found: list[list[int]] = [[]]
        for node, parent in enumerate(self.parents):
            found.append([*found[parent + 1], node])
        return found


@lru_cache(maxsize=256)
def shape_of(parents: tuple[int, ...]) -> Shape:
    """The same few forms come back in every round."""
    return Shape(parents)


class TreeVerifier(Verifier):
    """A rule that judges rows whose drafts have one form together; chains are such a form."""

    def judge(self, draft: Draft, target_probs: Tensor, noise: Noise) -> Verdict:
        require_independent(self.name, noise)
        if draft.num_nodes == 0:
            return plain_verdict(target_probs, noise)
        groups: dict[tuple[int, ...], list[int]] = {}
        for row, parents in enumerate(draft.shapes):
            groups.setdefault(parents, []).append(row)
        if len(groups) == 1:
            return self.judge_alike(shape_of(draft.shapes[0]), draft, target_probs, noise)
        parts = []
        for parents, members in groups.items():
            rows = torch.tensor(members)
            there = rows.to(target_probs.device)
            verdict = self.judge_alike(
                shape_of(parents), draft.select(there), target_probs[there], noise.select(rows)
            )
            parts.append((there, verdict))
        return Verdict.merged(parts, draft.num_rows)

    @abstractmethod
    def judge_alike(self, shape: Shape, draft: Draft, target_probs: Tensor, noise: Noise) -> Verdict:
        """The verdict on rows whose first nodes have this form; nodes behind them are padding."""


NOTHING = 1e-9
"""Mass below which a law without some tokens counts as empty: what was drawn from the rest of it would be mostly rounding."""


@dataclass(frozen=True)
class Sheet:
    """What the laws say of the drafted tokens, on the host.

    Args:
        target: `[row, query, node]`, the target's probability of each node's token behind each query.
        drafted: `[row, node, node]`, that of the second node's token under the law which the draft reports of the first.
        remaining: `[row, node]`, the mass that earlier siblings left of each node's law; 0 where nothing was left to draw.
    """

    target: Numbers
    drafted: Numbers
    remaining: Numbers

    @cached_property
    def drawn(self) -> Numbers:
        """`[row, node]`, the probability of each node's own token under the law that the draft reports of it."""
        return numpy.diagonal(self.drafted, axis1=1, axis2=2).clip(SMALLEST)

    @classmethod
    def of(cls, shape: Shape, draft: Draft, target_probs: Tensor) -> Sheet:
        """Of a draft whose first nodes have this form.

        A certain drafter names tokens, whatever came before: each node has a one-hot law of its own, and a token that
        is named twice is nothing new.
        """
        tokens = draft.tokens[:, None]
        target = to_host(target_probs.gather(2, tokens.expand(-1, target_probs.shape[1], -1)))
        if draft.probs is None:
            drafted = to_host(tokens == draft.tokens[..., None])
        else:
            drafted = to_host(draft.probs.gather(2, tokens.expand(-1, draft.num_nodes, -1)))
        remaining = numpy.ones(draft.tokens.shape)
        late = [node for node in range(shape.num_nodes) if shape.earlier[node]]
        if late and (draft.distinct or draft.probs is None):
            if draft.probs is not None:
                # Siblings report one law: the eldest's total is theirs.
                eldest = {shape.earlier[node][0]: None for node in late}
                totals = to_host(_pick(draft.probs, tuple(eldest)).sum(-1, dtype=torch.float64))
                by_eldest = dict(zip(eldest, totals.T, strict=True))
            for node in late:
                if draft.probs is not None:
                    remaining[:, node] = by_eldest[shape.earlier[node][0]]
                remaining[:, node] -= drafted[:, node, shape.earlier[node]].sum(-1)
        return cls(target, drafted, numpy.where(remaining > NOTHING, remaining, 0.0))


class Level:
    """The queries of one depth that have children, while these are refused rank by rank.

    Args:
        sheet: of the draft.
        ranks: of the level.
        laws: per query `[row, vocab]`, what is left for the target to say there, of any positive total; those of this level
            are replaced as its children are refused.
    """

    def __init__(self, sheet: Sheet, draft: Draft, ranks: Sequence[Rank], laws: list[Tensor]) -> None:
        self._sheet = sheet
        self._draft = draft
        self._laws = laws
        self._left = _beside([laws[query] for query in ranks[0].queries])
        # None as long as nothing was refused: the laws are the target's own.
        self._totals: Numbers | None = None

    def ratios(self, rank: Rank) -> Numbers:
        """`p(t) / q(t)` `[row, child]` of the next children's tokens, under what is left of both laws.

        0 where nothing was left to draw: that token was not drawn, and what nobody drew may always be refused.
        """
        sheet, nodes = self._sheet, rank.node_index
        if self._totals is None:
            known = sheet.target[:, rank.query_index, nodes]
        else:
            count = len(nodes)
            tokens = _pick(self._draft.tokens, rank.nodes)[..., None]
            known = to_host(self._left[:, :count].gather(2, tokens))[..., 0] / self._totals[:, :count]
        ratios: Numbers = known * sheet.remaining[:, nodes] / sheet.drawn[:, nodes]
        return ratios

    def refuse(self, rank: Rank, weights: Numbers) -> Numbers:
        """Leave `(w p - q)+` of the laws, with the q that each child was drawn from; the masses `[row, child]` of that.

        q is the reported law over what earlier siblings left of it. Their tokens need not be cut out: where they were
        refused, p has nothing left there. Where p and q differ by less than rounding, nothing is left that could tell
        them apart, and p stays; so it does where nothing was drawn.
        """
        count = len(rank.nodes)
        before = self._left if self._left.shape[1] == count else self._left[:, :count]
        totals = 1.0 if self._totals is None else self._totals[:, :count]
        remaining = self._sheet.remaining[:, rank.node_index]
        probs = None if self._draft.probs is None else _pick(self._draft.probs, rank.nodes)
        # Both sides times what was left, so that q is read as it stands.
        tokens = self._draft.tokens if probs is not None else _pick(self._draft.tokens, rank.nodes)
        left = excess(weights * remaining / totals, before, probs, tokens)
        masses, laws = left.masses, left.laws
        changes = (masses > 0) & (remaining > 0)
        if changes.all():
            self._totals = masses
            found: Numbers = masses / remaining
        else:
            chosen = torch.from_numpy(changes).to(laws.device)[..., None]
            laws = torch.where(chosen, laws, before) if changes.any() else before
            self._totals = numpy.where(changes, masses, totals)
            found = numpy.where(remaining > 0, masses / numpy.where(remaining > 0, remaining, 1.0), weights)
        self._left = laws
        for query, law in zip(rank.queries, laws.unbind(1), strict=True):
            self._laws[query] = law
        return found


def _beside(laws: Sequence[Tensor]) -> Tensor:
    """`[row, i, vocab]` from i laws `[row, vocab]`; a view of one."""
    return laws[0][:, None] if len(laws) == 1 else torch.stack(list(laws), 1)


def _pick(values: Tensor, nodes: Sequence[int]) -> Tensor:
    """Of `values` `[row, node, ...]` those of some nodes; a view where these stand side by side."""
    first, count = nodes[0], len(nodes)
    if nodes[-1] - first == count - 1 and list(nodes) == list(range(first, first + count)):
        return values.narrow(1, first, count)
    return values.index_select(1, torch.tensor(nodes, device=values.device))


def verdict_at(shape: Shape, queries: NDArray[numpy.int64], laws: Sequence[Tensor], noise: Noise) -> Verdict:
    """Accept the path to each row's query `[row]` and draw what follows it.

    Args:
        shape: of the rows' drafts.
        queries: 0 accepts nothing.
        laws: for each query `[row, vocab]`, what is left to say behind it.
        noise: draws the next token.
    """
    found = [shape.paths[query] for query in queries.tolist()]
    counts = [len(path) for path in found]
    width = max(counts, default=0)
    padded = [[*path, *([-1] * (width - len(path)))] for path in found]
    device = laws[0].device
    paths = torch.tensor(padded, dtype=torch.long, device=device).reshape(len(found), width)
    lengths = torch.tensor(counts, dtype=torch.long, device=device)
    law = laws[int(queries[0])] if len(queries) == 1 else at(torch.stack(list(laws), 1), queries)
    return Verdict(paths, lengths, noise.draw(law, lengths))
