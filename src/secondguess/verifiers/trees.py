"""Shared parts of the rules for sampled trees: sibling distributions, residuals.

A tree is verified node by node. A node is visited only after the alternatives before it were
rejected, so its acceptance probability at that moment follows from the draft alone. Therefore the
probabilities of all nodes are computed first, all random decisions are drawn in one call, and the
rule then reads them in its own order.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from secondguess.core import Draft, Verdict
from secondguess.sampling.noise import Noise
from secondguess.verifiers.base import UncoupledVerifier, verify_groups
from secondguess.verifiers.residuals import SMALLEST, FloatArray, at, residual, to_host
from secondguess.verifiers.shapes import Shape, SiblingRank, shape_of


class TreeVerifier(UncoupledVerifier):
    """Base class of rules for trees and chains; rows with drafts of the same shape are batched."""

    def verify_nodes(self, draft: Draft, target_probs: Tensor, noise: Noise) -> Verdict:
        groups: dict[tuple[int, ...], list[int]] = {}
        for row, parents in enumerate(draft.shapes):
            groups.setdefault(parents, []).append(row)
        if len(groups) == 1:
            return self.verify_shape(shape_of(draft.shapes[0]), draft, target_probs, noise)
        members = [(self, torch.tensor(rows)) for rows in groups.values()]
        return verify_groups(members, draft, target_probs, noise)

    @abstractmethod
    def verify_shape(self, shape: Shape, draft: Draft, target_probs: Tensor, noise: Noise) -> Verdict:
        """Verify rows whose first nodes have this shape; further nodes are padding."""


MIN_REMAINING_MASS = 1e-9
"""Mass below which a distribution without its earlier siblings counts as empty.

What remains of it is then mostly rounding error.
"""


@dataclass(frozen=True)
class TokenProbs:
    """Probabilities of the draft tokens, on the host.

    `target` `[row, query, node]` is the target's probability of each node's token at each query, `drafted`
    `[row, node, node]` that of the second node's token under the draft distribution reported for the first node.
    `remaining` `[row, node]` is the mass of each node's draft distribution without the tokens of its earlier siblings; 0
    where nothing was left to draw.
    """

    target: FloatArray
    drafted: FloatArray
    remaining: FloatArray

    @cached_property
    def drawn(self) -> FloatArray:
        """`[row, node]`, the probability of each node's token under its own draft distribution."""
        return numpy.diagonal(self.drafted, axis1=1, axis2=2).clip(SMALLEST)

    @classmethod
    def from_draft(cls, shape: Shape, draft: Draft, target_probs: Tensor) -> TokenProbs:
        """Return the probabilities of a draft whose first nodes have this shape.

        Without `draft.probs` every node has its own one-hot distribution, so that a sibling that
        repeats a token has no mass left.
        """
        tokens = draft.tokens[:, None]
        target = to_host(target_probs.gather(2, tokens.expand(-1, target_probs.shape[1], -1)))
        if draft.probs is None:
            drafted = to_host(tokens == draft.tokens[..., None])
        else:
            drafted = to_host(draft.probs.gather(2, tokens.expand(-1, draft.num_nodes, -1)))
        remaining = numpy.ones(draft.tokens.shape)
        late = [node for node in range(shape.num_nodes) if shape.earlier_siblings[node]]
        if late and (draft.without_replacement or draft.probs is None):
            if draft.probs is not None:
                # Siblings share one reported distribution; its total is read at the first of them.
                eldest = {shape.earlier_siblings[node][0]: None for node in late}
                totals = to_host(_pick(draft.probs, tuple(eldest)).sum(-1, dtype=torch.float64))
                by_eldest = dict(zip(eldest, totals.T, strict=True))
            for node in late:
                if draft.probs is not None:
                    remaining[:, node] = by_eldest[shape.earlier_siblings[node][0]]
                remaining[:, node] -= drafted[:, node, shape.earlier_siblings[node]].sum(-1)
        return cls(target, drafted, numpy.where(remaining > MIN_REMAINING_MASS, remaining, 0.0))


class Level:
    """The queries of one depth that have children, while these are rejected rank by rank.

    `dists` has the residual target distribution `[row, vocab]` of each query, of any positive total; those of this level
    are replaced as children are rejected. All trees of the draft have one shape.
    """

    def __init__(
        self, token_probs: TokenProbs, draft: Draft, ranks: Sequence[SiblingRank], dists: list[Tensor]
    ) -> None:
        self._token_probs = token_probs
        self._draft = draft
        self._dists = dists
        self._left = _stack([dists[query] for query in ranks[0].queries])
        # None until a child is rejected: the target distributions sum to one.
        self._totals: FloatArray | None = None

    def ratios(self, rank: SiblingRank) -> FloatArray:
        """Return `p(t) / q(t)` `[row, child]` for the tokens t of the next children.

        p is the residual target distribution, q the draft distribution without earlier siblings.
        The ratio is 0 where nothing was left to draw: such a node was not sampled, so rejecting it
        is always exact.
        """
        token_probs, nodes = self._token_probs, rank.node_index
        if self._totals is None:
            known = token_probs.target[:, rank.query_index, nodes]
        else:
            count = len(nodes)
            tokens = _pick(self._draft.tokens, rank.nodes)[..., None]
            known = to_host(self._left[:, :count].gather(2, tokens))[..., 0] / self._totals[:, :count]
        ratios: FloatArray = known * token_probs.remaining[:, nodes] / token_probs.drawn[:, nodes]
        return ratios

    def reject(self, rank: SiblingRank, weights: FloatArray) -> FloatArray:
        """Replace each p by `max(w p - q, 0)`; return the masses `[row, child]` of the residuals.

        q is the distribution each child was drawn from: the reported one over the mass left by
        earlier siblings. Their tokens need not be removed from q, as p is 0 there after their
        rejection. p is kept where the residual is empty because p and q differ by less than
        rounding, and where nothing was drawn.
        """
        count = len(rank.nodes)
        before = self._left if self._left.shape[1] == count else self._left[:, :count]
        totals = 1.0 if self._totals is None else self._totals[:, :count]
        remaining = self._token_probs.remaining[:, rank.node_index]
        probs = None if self._draft.probs is None else _pick(self._draft.probs, rank.nodes)
        # p and q are both multiplied by `remaining`, so that q is used as reported.
        tokens = self._draft.tokens if probs is not None else _pick(self._draft.tokens, rank.nodes)
        dists, masses = residual(weights * remaining / totals, before, probs, tokens)
        changes = masses > 0  # never where nothing was drawn: p is multiplied by 0
        if changes.all():
            self._totals = masses
            found: FloatArray = masses / remaining
        else:
            chosen = torch.from_numpy(changes).to(dists.device)[..., None]
            dists = torch.where(chosen, dists, before)
            self._totals = numpy.where(changes, masses, totals)
            found = numpy.where(remaining > 0, masses / numpy.where(remaining > 0, remaining, 1.0), weights)
        self._left = dists
        for query, dist in zip(rank.queries, dists.unbind(1), strict=True):
            self._dists[query] = dist
        return found


def _stack(dists: Sequence[Tensor]) -> Tensor:
    """Stack distributions `[row, vocab]` to `[row, i, vocab]`; a view if there is only one."""
    return dists[0][:, None] if len(dists) == 1 else torch.stack(list(dists), 1)


def _pick(values: Tensor, nodes: Sequence[int]) -> Tensor:
    """Select some nodes of `values` `[row, node, ...]`; a view if they are contiguous."""
    first, count = nodes[0], len(nodes)
    if nodes[-1] - first == count - 1 and list(nodes) == list(range(first, first + count)):
        return values.narrow(1, first, count)
    return values.index_select(1, torch.tensor(nodes, device=values.device))


def make_tree_verdict(
    shape: Shape, queries: NDArray[numpy.int64], dists: Sequence[Tensor], noise: Noise
) -> Verdict:
    """Accept the path to one query per row (`[row]`, 0 accepts nothing) and draw the next token.

    `dists` has for each query the distribution `[row, vocab]` of that token, not normalised.
    """
    paths = [shape.paths[query] for query in queries.tolist()]
    dist = dists[int(queries[0])] if len(queries) == 1 else at(torch.stack(list(dists), 1), queries)
    lengths = torch.tensor([len(path) for path in paths])
    return Verdict(paths, noise.draw(dist, lengths).tolist())
