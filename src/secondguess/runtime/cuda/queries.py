"""Queries of the rows of a pass, and the inputs that they make."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class RowQueries(NamedTuple):
    """Tokens of a row that a pass runs.

    Args:
        slot: cache slot of the row.
        start: number of cached tokens, which all of these tokens see.
        tokens: tokens that follow each other, then nodes.
        parents: those of the nodes, counted among the nodes; -1 for the last of the tokens before.
    """

    slot: int
    start: int
    tokens: Sequence[int]
    parents: Sequence[int] = ()


def fields_of(
    queries: Sequence[RowQueries], num_rows: int, width: int, context_length: int
) -> list[list[int]]:
    """Return the fields of `PassInputs` but the last, flat, padded to a shape with positions below the context length."""
    num_padded = num_rows - len(queries)
    slots = [row.slot for row in queries] + [0] * num_padded
    starts = [row.start for row in queries] + [-1] * num_padded
    tokens: list[int] = []
    positions: list[int] = []
    ancestors: list[int] = []
    for row in queries:
        count = len(row.tokens) - len(row.parents)
        seen = [(2 << query) - 1 for query in range(count)]
        depths = list(range(count))
        for parent in row.parents:
            query = count - 1 if parent < 0 else count + parent
            seen.append(seen[query] | 1 << len(seen))
            depths.append(depths[query] + 1)
        padding = range(len(seen), width)
        tokens += [*row.tokens, *([0] * len(padding))]
        ancestors += [*seen, *(1 << query for query in padding)]
        depths += [0] * len(padding)
        positions += [min(row.start + depth, context_length - 1) for depth in depths]
    for field in (tokens, positions, ancestors):
        field += [0] * (num_padded * width)
    return [slots, starts, tokens, positions, ancestors]
