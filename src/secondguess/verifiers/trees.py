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

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from secondguess.core import Draft, Verdict
from secondguess.noise import Noise
from secondguess.verifiers.base import (
    SMALLEST,
    Excess,
    Numbers,
    Verifier,
    at,
    excess,
    plain_verdict,
    require_independent,
    to_host,
)


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


@dataclass(frozen=True)
class Guess:
    """One node of each row at its visit: `tokens` `[row]`, and the `law` `[row, vocab]` that they were drawn from when
    the earlier siblings were known; zero everywhere where nothing was left to draw."""

    tokens: Tensor
    law: Tensor

    @classmethod
    def of(cls, draft: Draft, node: int, earlier: Sequence[int], target_law: Tensor) -> Guess:
        """A node behind its earlier siblings.

        Its law is the one that the draft reports of it; of distinct siblings, without the tokens of the earlier ones. A
        certain drafter names tokens, whatever came before: each node has a one-hot law of its own, and a token that is named
        twice is nothing new.
        """
        tokens = draft.tokens[:, node]
        law = _one_hot_like(target_law, tokens) if draft.probs is None else draft.probs[:, node]
        if earlier and (draft.distinct or draft.probs is None):
            law = without(law, draft.tokens[:, list(earlier)])
        return cls(tokens, law)

    def ratios(self, target_law: Tensor) -> Numbers:
        """`p(x) / q(x)` `[row]` on the host.

        0 where nothing was left to draw: that token was not drawn, and what nobody drew may always be refused.
        """
        columns = self.tokens[:, None]
        drawn = to_host(self.law.gather(-1, columns)[:, 0]).clip(SMALLEST)
        found: Numbers = to_host(target_law.gather(-1, columns)[:, 0]) / drawn
        return numpy.where(to_host(self.law.sum(-1)) > 0, found, 0.0)

    def refused(self, weights: Numbers, target_law: Tensor) -> Excess:
        """What a rejection leaves at the parent: the law `(w p - q)+`, normalised, and its mass before that.

        Where p and q differ by less than rounding nothing is left that could tell them apart, and p stays.
        """
        left = excess(weights, target_law, self.law, self.tokens)
        masses = torch.from_numpy(left.masses).to(target_law)[:, None]
        return Excess(torch.where(masses > 0, left.laws / masses, target_law), left.masses)


def _one_hot_like(law: Tensor, tokens: Tensor) -> Tensor:
    return torch.zeros_like(law).scatter_(-1, tokens[:, None], 1.0)


def without(law: Tensor, tokens: Tensor) -> Tensor:
    """Of `law` `[row, vocab]` what remains without some `tokens` `[row, i]`, renormalised; zeros if nothing does."""
    law = law.scatter(-1, tokens, 0.0)
    totals = law.sum(-1, keepdim=True)
    return torch.where(totals > 0, law / totals, 0.0)


def verdict_at(shape: Shape, queries: NDArray[numpy.int64], laws: Tensor, noise: Noise) -> Verdict:
    """Accept the path to each row's query `[row]` and draw what follows it.

    Args:
        shape: of the rows' drafts.
        queries: 0 accepts nothing.
        laws: `[row, query, vocab]`, what is left to say behind each query.
        noise: draws the next token.
    """
    found = [shape.paths[query] for query in queries.tolist()]
    counts = [len(path) for path in found]
    width = max(counts, default=0)
    paths = torch.tensor([[*path, *([-1] * (width - len(path)))] for path in found], dtype=torch.long)
    lengths = torch.tensor(counts, dtype=torch.long, device=laws.device)
    return Verdict(
        paths.reshape(len(found), width).to(laws.device), lengths, noise.draw(at(laws, queries), lengths)
    )
