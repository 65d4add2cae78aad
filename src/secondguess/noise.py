"""Keyed randomness: every random decision is a pure function of (seed, stream, position, purpose).

There is no generator and no state, so a row's noise does not depend on its neighbours in a batch. Verifiers
and drafters never see raw uniforms: they ask `Noise` for *decisions* (accept with this probability, draw from
this law), and a test can answer them exhaustively and so enumerate the law of the outcome.

Races are keyed by absolute position alone: whichever rounds meet a position see the same race there, and that
makes a text independent of the drafter. Everything else is also keyed by the position at which the round
begins, because a round says something about numbers beyond the tokens that it commits. (Block verification,
for one, looks at the whole draft: that the prefixes behind the accepted one failed is news about their
numbers, and to meet these again in the next round would bend the law of the text.)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from enum import IntEnum
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from secondguess.core import Row


class Purpose(IntEnum):
    """What a number is used for; streams with different purposes are independent."""

    DRAFT = 1
    ACCEPT = 2
    DRAW = 3
    RACE = 4
    ROUND = 5


class Noise(ABC):
    """Answers the random questions of one round for a batch of rows.

    Attributes:
        coupled: `[row]` bool, rows whose drafts are drawn with the very race that decides their text.
        greedy: `[row]` bool, rows at temperature 0: their laws are one-hot.
    """

    coupled: Tensor
    greedy: Tensor

    @abstractmethod
    def draft(self, laws: Tensor, depth: int) -> Tensor:
        """Draw node tokens `[row]` at this depth from `laws` `[row, vocab]`."""

    @abstractmethod
    def accept(self, probabilities: Tensor) -> Tensor:
        """`[row, node]` bool: True with the given probability, independently."""

    @abstractmethod
    def draw(self, laws: Tensor, depths: Tensor) -> Tensor:
        """Draw the token `[row]` that follows a path of `depths` nodes from `laws` `[row, vocab]`."""

    @abstractmethod
    def race(self, laws: Tensor, depths: Tensor) -> Tensor:
        """Draw `[row, query]` tokens from `laws` `[row, query, vocab]`, the text of rows that keep what matches.

        `depths` `[row, query]` is how many nodes lie before each query. Queries of one depth share their noise.
        For a coupled row it is an exponential race, keyed by the absolute position, and the row's drafts at
        that depth were drawn by it too (arXiv 2408.07978).
        """

    @abstractmethod
    def select(self, rows: Tensor) -> Noise:
        """The same noise for some of the rows (`[n]` int64 indices)."""


class KeyedNoise(Noise):
    """Noise as a hash of each row's seed and stream, the token's absolute position, and the purpose."""

    def __init__(self, keys: Tensor, positions: Tensor, coupled: Tensor, greedy: Tensor) -> None:
        self.keys = keys
        self.positions = positions
        self.coupled = coupled
        self.greedy = greedy

    @classmethod
    def of_rows(cls, rows: Sequence[Row], device: torch.device | str = "cpu") -> KeyedNoise:
        """Noise for the round in which these rows continue from their current length."""
        keys = [_row_key(row.seed, row.stream) for row in rows]
        return cls(
            keys=torch.tensor(keys, dtype=torch.long, device=device),
            positions=torch.tensor([len(row.tokens) for row in rows], device=device),
            coupled=torch.tensor([row.coupled for row in rows], device=device),
            greedy=torch.tensor([row.params.temperature == 0 for row in rows], device=device),
        )

    def draft(self, laws: Tensor, depth: int) -> Tensor:
        if bool(self.greedy.all()):
            return laws.max(-1).indices
        depths = torch.full_like(self.positions, depth)
        if bool(self.coupled.all()):
            return self._race(laws, depths)
        independent = draw_by_inversion(laws, self._draft_uniforms(depth))
        if not bool(self.coupled.any()):
            return independent
        return torch.where(self.coupled, self._race(laws, depths), independent)

    def accept(self, probabilities: Tensor) -> Tensor:
        nodes = torch.arange(probabilities.shape[1], device=probabilities.device)
        return self._uniforms(nodes.expand(probabilities.shape), Purpose.ACCEPT) < probabilities

    def draw(self, laws: Tensor, depths: Tensor) -> Tensor:
        if bool(self.greedy.all()):
            return laws.max(-1).indices
        return draw_by_inversion(laws, self._uniforms(depths, Purpose.DRAW))

    def race(self, laws: Tensor, depths: Tensor) -> Tensor:
        if bool(self.greedy.all()):
            return laws.max(-1).indices
        if bool(self.coupled.all()):
            return self._race(laws, depths)
        # No draft was drawn by the race of an uncoupled row, so one number per query serves as well as one per token.
        independent = draw_by_inversion(laws, self._uniforms(depths, Purpose.RACE))
        if not bool(self.coupled.any()):
            return independent
        return torch.where(self.coupled[:, None], self._race(laws, depths), independent)

    def select(self, rows: Tensor) -> KeyedNoise:
        return KeyedNoise(self.keys[rows], self.positions[rows], self.coupled[rows], self.greedy[rows])

    def _draft_uniforms(self, depth: int) -> Tensor:
        """`[row]`: what the nodes at one depth are drawn with."""
        if depth >= _DEPTHS_AT_ONCE:
            return self._uniforms(torch.full_like(self.positions, depth), Purpose.DRAFT)
        return self._first_draft_uniforms[:, depth]

    @cached_property
    def _first_draft_uniforms(self) -> Tensor:
        # A hash is two dozen tiny operations, as dear for many depths as for one.
        depths = torch.arange(_DEPTHS_AT_ONCE, device=self.positions.device)
        return self._uniforms(depths.expand(len(self.positions), -1), Purpose.DRAFT)

    @cached_property
    def _round_keys(self) -> Tensor:
        return _hash(self.keys, self.positions, Purpose.ROUND)

    def _uniforms(self, places: Tensor, purpose: Purpose) -> Tensor:
        """One number for each place (`[row]` depths or `[row, node]` indices) of this round."""
        return _to_uniform(_hash(_beside(self._round_keys, places), places, purpose))

    def _race(self, laws: Tensor, depths: Tensor) -> Tensor:
        """The first arrival when token v waits an exponential time of rate laws[v]; P(v first) = laws[v]."""
        tokens = torch.arange(laws.shape[-1], device=laws.device)
        positions = _beside(self.positions, depths) + depths
        hashes = _hash(_beside(self.keys, depths), positions, Purpose.RACE)
        uniforms = _to_uniform(_mix(hashes[..., None] + tokens * _GOLDEN))
        return (-uniforms.log() / laws).argmin(-1)


def draw_by_inversion(laws: Tensor, uniforms: Tensor) -> Tensor:
    """Draw from each of `laws` `[..., vocab]` (any positive total) with its uniform `[...]`, by inverting the sum."""
    totals = laws.double().cumsum(-1)
    total = totals[..., -1:].contiguous()
    index = torch.searchsorted(totals, uniforms[..., None] * total, right=True)
    # Rounding may carry u * total up to the total itself; the last token with mass is then meant.
    return torch.minimum(index, torch.searchsorted(totals, total))[..., 0]


_DEPTHS_AT_ONCE = 16

_ALL_BITS = (1 << 64) - 1
_GOLDEN = -7046029254386353131  # 2^64 / golden ratio as a signed integer: the step of SplitMix64


def _shift_right(values: Tensor, bits: int) -> Tensor:
    """Logical shift; torch's own keeps the sign."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)


def _mix(values: Tensor) -> Tensor:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014): each input bit flips half of the output bits."""
    values = values + _GOLDEN
    values = (values ^ _shift_right(values, 30)) * -4658895280553007687
    values = (values ^ _shift_right(values, 27)) * -7723592293110705685
    return values ^ _shift_right(values, 31)


@lru_cache(maxsize=4096)
def _row_key(seed: int, stream: int) -> int:
    return _signed(_mix_integer(_mix_integer(seed) ^ stream))


def _mix_integer(value: int) -> int:
    """`_mix` of one number, without a tensor's overhead: rows come in thousands."""
    value = (value + _GOLDEN) & _ALL_BITS
    value = ((value ^ value >> 30) * -4658895280553007687) & _ALL_BITS
    value = ((value ^ value >> 27) * -7723592293110705685) & _ALL_BITS
    return value ^ value >> 31


def _hash(keys: Tensor, places: Tensor, purpose: Purpose) -> Tensor:
    return _mix(keys ^ _mix(places * len(Purpose) + purpose))


def _beside(per_row: Tensor, places: Tensor) -> Tensor:
    """`[row]` values shaped to broadcast over `[row, ...]` places."""
    return per_row.reshape(-1, *([1] * (places.dim() - 1)))


def _to_uniform(hashes: Tensor) -> Tensor:
    """The top 52 bits as a float64 strictly between 0 and 1 (with 53 the half added would round up to 1)."""
    return (_shift_right(hashes, 12).double() + 0.5) * 2.0**-52


def _signed(seed: int) -> int:
    seed &= _ALL_BITS
    return seed - (1 << 64) if seed >= 1 << 63 else seed
