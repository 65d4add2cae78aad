"""Tensors of token ids from lists, and relations of nodes in trees."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

import numpy
import torch
from torch import Tensor


def ancestor_closure(parents: Tensor) -> Tensor:
    """Return `[row, node, node]` bool, True if the second node is the first or its ancestor.

    The relation "itself or parent" is squared until paths of any depth are covered, which takes
    log2(nodes) products.

    Args:
        parents: `[row, node]` int64, -1 at a root.
    """
    num_nodes = parents.shape[1]
    nodes = torch.arange(num_nodes, device=parents.device)
    reach = ((parents[:, :, None] == nodes) | (nodes[:, None] == nodes)).float()
    covered = 1
    while covered < num_nodes - 1:
        reach = (reach @ reach).clamp_(max=1.0)
        covered *= 2
    return reach > 0


def within_vocabulary(chain: list[int], vocab_size: float) -> list[int]:
    """Return a chain up to its first token that the target's logits lack, such as an image token of the prompt."""
    if not chain or max(chain) < vocab_size:
        return chain
    return list(takewhile(lambda token: token < vocab_size, chain))


def token_tensor(ids: Sequence[int] | Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Return an int64 tensor from lists of equal length, much faster than `torch.tensor`."""
    on_host = torch.from_numpy(numpy.array(ids, numpy.int64))
    return on_host if device.type == "cpu" else on_host.to(device)


def padded_tensor(rows: Sequence[Sequence[int]], filler: int, device: torch.device) -> Tensor:
    """Return int64 `[row, i]` from lists of any lengths, padded on the right."""
    lists = padded(rows, filler)
    return token_tensor(lists, device).reshape(len(rows), len(lists[0]) if lists else 0)


def padded(rows: Sequence[Sequence[int]], filler: int) -> list[list[int]]:
    """Return lists padded to the length of the longest."""
    width = max(map(len, rows), default=0)
    return [[*row, *([filler] * (width - len(row)))] for row in rows]
