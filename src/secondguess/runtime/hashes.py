"""Hash behind keyed noise: a counter-based function of a row's key, a position and a purpose (SplitMix64)."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from functools import lru_cache
from typing import TypeVar

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor


class Purpose(IntEnum):
    """Use of a random number; numbers for different purposes are independent."""

    DRAFT = 1
    ACCEPT = 2
    DRAW = 3
    RACE = 4
    ROUND = 5


IntArray = TypeVar("IntArray", Tensor, NDArray[numpy.int64])
"""64-bit integers that wrap around: a tensor on a device, or an array on the host."""

ALL_BITS = (1 << 64) - 1
GOLDEN = -7046029254386353131  # 2^64 / golden ratio as a signed integer: the step of SplitMix64


def shift_right(values: IntArray, bits: int) -> IntArray:
    """Shift right logically; the operator alone would extend the sign."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)


def mix(values: IntArray) -> IntArray:
    """Apply the finaliser of SplitMix64 (Steele, Lea, Flood 2014).

    Each input bit flips half of the output bits.
    """
    values = values + GOLDEN
    values = (values ^ shift_right(values, 30)) * -4658895280553007687
    values = (values ^ shift_right(values, 27)) * -7723592293110705685
    return values ^ shift_right(values, 31)


def mix_integer(value: int) -> int:
    """Apply `mix` to one number without tensor overhead, for batches of thousands of rows."""
    value = (value + GOLDEN) & ALL_BITS
    value = ((value ^ value >> 30) * -4658895280553007687) & ALL_BITS
    value = ((value ^ value >> 27) * -7723592293110705685) & ALL_BITS
    return value ^ value >> 31


def hash_of(keys: IntArray, indices: IntArray, purpose: int | IntArray) -> IntArray:
    """Return the hashes of keys at indices (positions, depths or node indices) for a purpose."""
    return mix(keys ^ mix(indices * len(Purpose) + purpose))


@lru_cache(maxsize=4096)
def index_hash(index: int, purpose: int) -> int:
    """Return the part of `hash_of` that all rows share, as an unsigned integer."""
    return mix_integer(index * len(Purpose) + purpose)


def scalar_uniforms(key: int, position: int, indices: Sequence[int], purpose: int) -> list[float]:
    """Return the uniforms of one row in the round that begins at a position, one per index.

    They are the top 52 bits of a hash plus one half, strictly between 0 and 1; with 53 bits, adding one half
    would round up to 1.
    """
    round_key = mix_integer((key & ALL_BITS) ^ index_hash(position, Purpose.ROUND))
    return [
        ((mix_integer(round_key ^ index_hash(index, purpose)) >> 12) + 0.5) * 2.0**-52 for index in indices
    ]


def uniform_per_token_on_device(hashes: Tensor, width: int) -> Tensor:
    """Return `[..., token]` uniforms, on the device of the hashes."""
    tokens = torch.arange(width, device=hashes.device)
    mixed = mix(hashes[..., None] + tokens * GOLDEN)
    return (shift_right(mixed, 12).double() + 0.5) * 2.0**-52
