"""Trees of tokens: which node sees which, how deep it hangs, and the masks that say so. Pure functions.

A forward's *queries* are a row's uncached committed tokens followed by its nodes. Seen from the forward both are
one tree whose root is the first uncached token: a chain of committed tokens, then the draft.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

ROOT = -1


def hang_below(
    parents: Sequence[Sequence[int]], lengths: Sequence[int], num_uncached: Sequence[int]
) -> list[list[int]]:
    """Parents of all queries, when each row's draft hangs below the last of its uncached tokens.

    Queries that pad a row are trees of their own: they see themselves only.

    >>> hang_below([[-1, 0, -1]], lengths=[3], num_uncached=[2])
    [[-1, 0, 1, 2, 1]]
    """
    width = max((count + len(row) for count, row in zip(num_uncached, parents, strict=True)), default=0)
    queries = []
    for row, length, count in zip(parents, lengths, num_uncached, strict=True):
        nodes = [count - 1 if parent == ROOT else count + parent for parent in row[:length]]
        committed = list(range(ROOT, count - 1))
        queries.append([*committed, *nodes, *([ROOT] * (width - count - length))])
    return queries


def ancestor_closure(parents: Tensor) -> Tensor:
    """`[row, node, node]` bool: whether the second node is the first itself or one of its ancestors.

    Args:
        parents: `[row, node]` int64, -1 at a root.

    The relation "itself or parent" is squared until paths of any depth are covered: log2(nodes) products.
    """
    num_nodes = parents.shape[1]
    nodes = torch.arange(num_nodes, device=parents.device)
    reach = ((parents[:, :, None] == nodes) | (nodes[:, None] == nodes)).float()
    covered = 1
    while covered < num_nodes - 1:
        reach = (reach @ reach).clamp_(max=1.0)
        covered *= 2
    return reach > 0


def depths(closure: Tensor) -> Tensor:
    """`[row, node]` int64 number of proper ancestors of each node, from its `ancestor_closure`."""
    return closure.sum(-1) - 1


def chain_mask(starts: Tensor, num_queries: int, num_keys: int) -> Tensor:
    """`[row, 1, query, key]` bool: query `t` of a row sees the keys up to slot `starts[row] + t`, included."""
    device = starts.device
    last_seen = starts[:, None] + torch.arange(num_queries, device=device)
    return (torch.arange(num_keys, device=device) <= last_seen[:, :, None])[:, None]


class Stairs:
    """Chain masks of rows that stand equally far, as views of one table instead of a computation per forward.

    In the table query `t` sees key `k` up to `k = t + depth`; shifted by `depth - start` that is the mask of a
    chain that begins at slot `start`.

    Args:
        device: where the table lives.
        shown, hidden: what a mask says where a query sees a key, and where not; True and False, or what is added to
            their score.
        repeats: lines per query, for heads that are folded into queries.
    """

    MOST_QUERIES = 32

    def __init__(
        self,
        device: torch.device,
        shown: Tensor | bool = True,
        hidden: Tensor | bool = False,
        repeats: int = 1,
    ) -> None:
        self._device = device
        self._shown, self._hidden = torch.as_tensor(shown), torch.as_tensor(hidden)
        self._repeats = repeats
        self._table = torch.empty(0, 0)

    def mask(self, start: int, num_queries: int, num_keys: int) -> Tensor:
        """`[1, 1, query * repeats, key]`: what `chain_mask` says for one row, in the stairs' own words."""
        if num_queries > self.MOST_QUERIES:
            return self._lines(start, num_queries, num_keys)
        if 2 * num_keys > self._table.shape[-1]:
            self._table = self._lines(2 * num_keys, self.MOST_QUERIES, 4 * num_keys)
        offset = self._table.shape[-1] // 2 - start
        return self._table[:, :, : num_queries * self._repeats, offset : offset + num_keys]

    def _lines(self, start: int, num_queries: int, num_keys: int) -> Tensor:
        seen = chain_mask(torch.tensor([start], device=self._device), num_queries, num_keys)
        said = torch.where(seen, self._shown.to(self._device), self._hidden.to(self._device))
        return said.repeat_interleave(self._repeats, 2)


def tree_mask(starts: Tensor, closure: Tensor, num_keys: int) -> Tensor:
    """`[row, 1, query, key]` bool: every cached token, and of the queries one's ancestors and oneself.

    Args:
        starts: `[row]` int64, cached tokens per row; query `t` is written to slot `starts[row] + t`.
        closure: `[row, query, query]` bool.
        num_keys: width of the mask, at least `starts + queries` of every row.
    """
    num_rows, num_queries, _ = closure.shape
    cached = torch.arange(num_keys, device=starts.device) < starts[:, None]
    mask = cached[:, None].expand(num_rows, num_queries, num_keys).contiguous()
    return mask.scatter_(2, query_slots(starts, num_queries)[:, None].expand_as(closure), closure)[:, None]


def query_slots(starts: Tensor, num_queries: int) -> Tensor:
    """`[row, query]` int64: the cache slots that a row's queries are written to."""
    return starts[:, None] + torch.arange(num_queries, device=starts.device)
