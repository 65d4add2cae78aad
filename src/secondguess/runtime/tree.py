"""Token trees: ancestors, node depths and attention masks. Pure functions.

The *queries* of a forward pass are a row's uncached committed tokens followed by its draft nodes.
Together they form one tree, rooted at the first uncached token: a chain of committed tokens, then
the draft.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

ROOT = -1


def attach_drafts(
    parents: Sequence[Sequence[int]], lengths: Sequence[int], num_uncached: Sequence[int]
) -> list[list[int]]:
    """Return the parents of all queries, each draft attached to its row's last uncached token.

    Padding queries are separate trees: they attend to themselves only.

    >>> attach_drafts([[-1, 0, -1]], lengths=[3], num_uncached=[2])
    [[-1, 0, 1, 2, 1]]
    """
    width = max((count + len(row) for count, row in zip(num_uncached, parents, strict=True)), default=0)
    queries = []
    for row, length, count in zip(parents, lengths, num_uncached, strict=True):
        nodes = [count - 1 if parent == ROOT else count + parent for parent in row[:length]]
        committed = list(range(ROOT, count - 1))
        queries.append([*committed, *nodes, *([ROOT] * (width - count - length))])
    return queries


def depths(closure: Tensor) -> Tensor:
    """Return the number of proper ancestors of each node, `[row, node]`, given their closure (`tensors.ancestor_closure`)."""
    return closure.sum(-1) - 1


def chain_mask(starts: Tensor, num_queries: int, num_keys: int) -> Tensor:
    """Return the mask of chains, `[row, 1, query, key]` bool.

    Query `t` of a row attends to the keys up to and including cache position `starts[row] + t`.
    """
    device = starts.device
    last_seen = starts[:, None] + torch.arange(num_queries, device=device)
    return (torch.arange(num_keys, device=device) <= last_seen[:, :, None])[:, None]


class ChainMasks:
    """Masks of chains that start at the same position in all rows, as views of one cached table.

    In the table query `t` attends to key `k` if `k <= t + depth`. Shifted by `depth - start`, that
    is the mask of a chain that begins at cache position `start`.

    Args:
        device: device of the table.
        shown, hidden: mask values of visible and masked keys: True and False, or numbers to add to
            the scores.
        repeats: mask lines per query, for heads that are folded into queries.
    """

    MAX_QUERIES = 32

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
        """Return `chain_mask` of one row in the values `shown` and `hidden`.

        The shape is `[1, 1, query * repeats, key]`.
        """
        if num_queries > self.MAX_QUERIES:
            return self._lines(start, num_queries, num_keys)
        if 2 * num_keys > self._table.shape[-1]:
            self._table = self._lines(2 * num_keys, self.MAX_QUERIES, 4 * num_keys)
        offset = self._table.shape[-1] // 2 - start
        return self._table[:, :, : num_queries * self._repeats, offset : offset + num_keys]

    def _lines(self, start: int, num_queries: int, num_keys: int) -> Tensor:
        seen = chain_mask(torch.tensor([start], device=self._device), num_queries, num_keys)
        said = torch.where(seen, self._shown.to(self._device), self._hidden.to(self._device))
        return said.repeat_interleave(self._repeats, 2)


def tree_mask(starts: Tensor, closure: Tensor, num_keys: int) -> Tensor:
    """Return the mask of trees, `[row, 1, query, key]` bool, given their closure (`tensors.ancestor_closure`).

    Each query attends to every cached token, to its ancestors among the queries and to itself. Query `t` is written to cache
    position `starts[row] + t`.
    """
    num_rows, num_queries, _ = closure.shape
    cached = torch.arange(num_keys, device=starts.device) < starts[:, None]
    mask = cached[:, None].expand(num_rows, num_queries, num_keys).contiguous()
    return mask.scatter_(2, query_slots(starts, num_queries)[:, None].expand_as(closure), closure)[:, None]


def query_slots(starts: Tensor, num_queries: int) -> Tensor:
    """Return the cache positions that each row's queries are written to, `[row, query]` int64."""
    return starts[:, None] + torch.arange(num_queries, device=starts.device)
