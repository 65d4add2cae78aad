"""Positions and mask of the queries of a forward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Rule of Transformers for which keys a query attends to: row, head, and positions of query and key."""


@dataclass(frozen=True)
class ForwardStep:
    """Positions and mask of the queries of one forward pass.

    Args:
        mask: `[row or 1, 1, query, key]` bool; None if the causal rule over text positions
            suffices.
        query_positions: `[row or 1, query]` int64, text positions.
        num_keys: number of cache positions that are read.
        key_positions: `[row, key]` int64, text position of the token in each cache position; None
            if the two are equal, as they are unless a tree was drafted.
        start: position of the first query, in the cache and in the text, if all rows' queries are
            consecutive from there; None if rows differ or branch.
        starts: cached positions before each row's first query, for runtimes without masks.
        closure: `[row, query, query]` bool, True at a query's ancestors and itself, for runtimes
            without masks; None for chains.
    """

    mask: Tensor | None
    query_positions: Tensor
    num_keys: int
    key_positions: Tensor | None = None
    start: int | None = None
    starts: Sequence[int] = ()
    closure: Tensor | None = None

    def drop_first(self, count: int) -> ForwardStep:
        """Return the step without its first `count` queries."""
        if count == 0:
            return self
        return replace(
            self,
            mask=None if self.mask is None else self.mask[:, :, count:],
            query_positions=self.query_positions[:, count:],
            start=None if self.start is None else self.start + count,
        )

    def visible(self, mask_function: MaskFunction | None, window: int | None) -> Tensor | None:
        """Return the mask for a layer type whose rule is `mask_function`, or the causal rule for None.

        Windows are counted in text positions: siblings in a tree are equally far from their
        prefix.
        """
        if mask_function is None or (window is not None and self.num_keys <= window):
            return self.mask
        queries = self.query_positions[:, None, :, None]
        keys = self.key_positions
        if keys is None:
            keys = torch.arange(self.num_keys, device=queries.device)[None]
        rows = torch.arange(queries.shape[0], device=queries.device)[:, None, None, None]
        allowed = mask_function(rows, torch.zeros_like(rows), queries, keys[:, None, None, :])
        return allowed if self.mask is None else allowed & self.mask


def in_window(window: int, rows: Tensor, heads: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    """Return whether queries attend to keys in a sliding window, by their positions; a `MaskFunction` of a window."""
    return (keys <= queries) & (keys > queries - window)
