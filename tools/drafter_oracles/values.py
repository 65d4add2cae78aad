"""Weights, states and text of the oracles of drafters, by formulas that need no stored numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from zlib import crc32

import torch
from torch import Tensor

VOCAB_SIZE, WIDTH, NUM_LAYERS, MASK_TOKEN, BLOCK_SIZE = 13, 16, 3, 12, 4
TARGET_LAYERS = (0, 2, 3)
"""Layers that drafters read, of which 0 is the embeddings."""
TEXT = [(7 * index + 3) % 11 for index in range(16)]
ANCHOR = 8
"""Position of the pending token in the text, whose further tokens are those drafted."""


def weights(name: str, shape: Sequence[int]) -> Tensor:
    """Return the weights of a name, around 1 for norms, else around 0."""
    wave = torch.sin(1.3 * torch.arange(prod(shape), dtype=torch.float64) + crc32(name.encode()) % 997)
    return (wave * 0.5 + float("norm" in name)).float().view(*shape)


def head_weights(shapes: Mapping[str, Sequence[int]]) -> dict[str, Tensor]:
    """Return the weights of a drafter, and the map of a reduced vocabulary, if it has one."""
    tensors = {name: weights(name, shape) for name, shape in shapes.items() if name not in ("d2t", "t2d")}
    if "d2t" in shapes:
        ids = torch.arange(shapes["d2t"][0]) * 2
        tensors["d2t"] = ids - torch.arange(len(ids))
        tensors["t2d"] = torch.zeros(VOCAB_SIZE, dtype=torch.bool).index_fill(0, ids, True)
    return tensors


def target_states() -> dict[int, Tensor]:
    """Return the target's states `[position, width]` by layer."""
    return {layer: weights(f"states.{layer}", (len(TEXT), WIDTH)) for layer in range(NUM_LAYERS + 1)}


def target_embeddings() -> Tensor:
    return weights("target.embed", (VOCAB_SIZE, WIDTH))


def target_lm_head() -> Tensor:
    return weights("target.lm_head", (VOCAB_SIZE, WIDTH))
