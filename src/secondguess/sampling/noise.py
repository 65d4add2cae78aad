"""Keyed noise: every random decision is a pure function of (seed, sample, position, purpose).

There is no generator and no state, so a row's noise does not depend on the other rows of the
batch. Verifiers and drafters never receive uniforms. They request *decisions* from `Noise` (accept
with this probability, draw from this distribution), so a test can enumerate all outcomes and
compute the distribution of the result exactly.

Races of coupled rows are keyed by the absolute position alone: all rounds that reach a position
use the same race there, which makes the text independent of the drafter. All other decisions are
also keyed by the position at which the round begins, because the outcome of a round depends on
more random numbers than those of the committed tokens. (Block verification, for example, uses the
whole draft: its outcome implies that all prefixes longer than the accepted one failed. Using their
random numbers again in the next round would bias the text.)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property, lru_cache

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from secondguess.core import Row
from secondguess.runtime.chains import RowNoise
from secondguess.runtime.hashes import (
    ALL_BITS,
    IntArray,
    Purpose,
    hash_of,
    mix_integer,
    scalar_uniforms,
    shift_right,
    uniform_per_token_on_device,
)
from secondguess.sampling.kernels import draw_by_inversion, first_arrivals, kernels_for
from secondguess.sampling.truncation import most_likely
from secondguess.tensors import token_tensor


class Noise(ABC):
    """Random decisions of one round for a batch of rows.

    Attributes:
        coupled: `[row]` bool on the host, rows whose drafts are drawn by the race of their text.
        greedy: `[row]` bool on the host, rows at temperature 0, with one-hot distributions.
        device: device of drafts and distributions.
    """

    coupled: Tensor
    greedy: Tensor
    device: torch.device = torch.device("cpu")

    @cached_property
    def all_greedy(self) -> bool:
        return all(self.greedy.tolist())

    @cached_property
    def all_coupled(self) -> bool:
        return all(self.coupled.tolist())

    @cached_property
    def any_coupled(self) -> bool:
        return any(self.coupled.tolist())

    @abstractmethod
    def draft(
        self,
        dists: Tensor,
        depth: int,
        node: int | Sequence[int] | None = None,
        token_ids: Tensor | None = None,
    ) -> Tensor:
        """Draw tokens `[row]` for one node of each row from probabilities `dists` `[row, vocab]`.

        Args:
            dists: unnormalised, with a positive sum. For distinct siblings, without the earlier
                ones.
            depth: depth of the node; 0 for a child of `pending`. The race of a coupled row is at
                this position, so that siblings are the first arrivals of one race.
            node: index of the node in its row's draft, which keys the noise of uncoupled rows;
                None in a chain, where it equals the depth. A sequence has one index per row: a row
                that was selected several times draws several nodes, each as if drawn alone.
            token_ids: `[vocab]` int64, for `dists` over another vocabulary than the target's: the target's token
                whose arrival time in the race each token has, or an id beyond them. None for the target's.
        """

    def of_rows(self) -> list[RowNoise] | None:
        """Return the source of all decisions about each row; None if they must be requested one by one."""
        return None

    @abstractmethod
    def accept(self, probs: NDArray[numpy.float64]) -> NDArray[numpy.bool_]:
        """Return `[row, node]` decisions, each True with its probability; both on the host."""

    @abstractmethod
    def draw(self, dists: Tensor, depths: Tensor) -> Tensor:
        """Draw tokens `[row]` from `dists` `[row, vocab]`, each after a path of `depths` nodes."""

    @abstractmethod
    def race(self, dists: Tensor, depths: Tensor) -> Tensor:
        """Draw tokens `[row, query]` from `dists` `[row, query, vocab]`, to be matched with drafts.

        `depths` `[row, query]` is the number of nodes before each query. Queries of equal depth
        share their noise. For a coupled row this is an exponential race keyed by absolute
        position, and the row's draft tokens at that depth were drawn by the same race
        (arXiv 2408.07978).
        """

    @abstractmethod
    def select(self, rows: Tensor) -> Noise:
        """Return the noise of some of the rows (`[n]` int64 indices)."""


class KeyedNoise(Noise):
    """Noise computed as a hash of a row's seed and sample index, the absolute position and the purpose.

    `keys` has, per row, a hash of seed and sample index as a signed 64-bit integer, `positions` the position at which the
    round begins.
    """

    def __init__(
        self,
        keys: Sequence[int],
        positions: Sequence[int],
        coupled: Tensor,
        greedy: Tensor,
        device: torch.device | str = "cpu",
    ) -> None:
        self.keys = keys
        self.positions = positions
        self.coupled = coupled
        self.greedy = greedy
        self.device = torch.device(device)

    @classmethod
    def from_rows(cls, rows: Sequence[Row], device: torch.device | str = "cpu") -> KeyedNoise:
        """Return the noise of the round in which these rows continue from their current length."""
        coupled = tuple([row.coupled for row in rows])
        greedy = tuple([row.params.temperature == 0 for row in rows])
        noise = cls(
            keys=[_row_key(row.seed, row.sample_index) for row in rows],
            positions=[len(row.tokens) for row in rows],
            coupled=_bool_tensor(coupled),
            greedy=_bool_tensor(greedy),
            device=device,
        )
        noise.all_greedy, noise.all_coupled, noise.any_coupled = all(greedy), all(coupled), any(coupled)
        return noise

    def draft(
        self,
        dists: Tensor,
        depth: int,
        node: int | Sequence[int] | None = None,
        token_ids: Tensor | None = None,
    ) -> Tensor:
        if self.all_greedy:
            return most_likely(dists)
        nodes = node if isinstance(node, Sequence) else [depth if node is None else node] * len(dists)
        indices = [[number] for number in nodes]
        if not self.any_coupled:
            return self._sample(dists, indices, Purpose.DRAFT)
        raced = self._race(dists, torch.full((len(dists),), depth), token_ids)
        if self.all_coupled:
            return raced
        return torch.where(self.coupled.to(dists.device), raced, self._sample(dists, indices, Purpose.DRAFT))

    def of_rows(self) -> list[RowNoise]:
        return self._of_rows

    @cached_property
    def _of_rows(self) -> list[RowNoise]:
        rows = zip(self.keys, self.positions, self.coupled.tolist(), strict=True)
        return [RowNoise(key & ALL_BITS, position, is_coupled) for key, position, is_coupled in rows]

    def accept(self, probs: NDArray[numpy.float64]) -> NDArray[numpy.bool_]:
        num_rows, num_nodes = probs.shape
        accepted: NDArray[numpy.bool_] = self.uniforms([range(num_nodes)] * num_rows, Purpose.ACCEPT) < probs
        return accepted

    def draw(self, dists: Tensor, depths: Tensor) -> Tensor:
        if self.all_greedy:
            return most_likely(dists)
        return self._sample(dists, [[depth] for depth in depths.tolist()], Purpose.DRAW)

    def race(self, dists: Tensor, depths: Tensor) -> Tensor:
        if self.all_greedy:
            return most_likely(dists)
        if self.all_coupled:
            return self._race(dists, depths)
        # Drafts of uncoupled rows are not drawn by a race: one number per query is enough.
        independent = self._sample(dists, depths.tolist(), Purpose.RACE)
        if not self.any_coupled:
            return independent
        return torch.where(self.coupled.to(dists.device)[:, None], self._race(dists, depths), independent)

    def select(self, rows: Tensor) -> KeyedNoise:
        rows = rows.cpu()
        members = rows.tolist()
        keys, positions = [self.keys[row] for row in members], [self.positions[row] for row in members]
        return KeyedNoise(keys, positions, self.coupled[rows], self.greedy[rows], self.device)

    def _sample(self, dists: Tensor, indices: Indices, purpose: Purpose) -> Tensor:
        """Draw tokens `[row]` or `[row, query]` from `dists` `[..., vocab]`, keyed by index."""
        uniforms = self.uniforms(indices, purpose)
        return draw_by_inversion(dists, uniforms[:, 0] if dists.ndim == 2 else uniforms)

    def uniforms(self, indices: Indices, purpose: Purpose) -> NDArray[numpy.float64]:
        """Return `[row, i]` uniforms, one per index (a depth or node index) of this round."""
        # For a few numbers, the overhead of an array exceeds the computation.
        if sum(map(len, indices)) > _MAX_SCALAR_HASHES:
            keys = hash_of(numpy.array(self.keys), numpy.array(self.positions), Purpose.ROUND)
            # Rows often share one sequence of indices, and converting it takes longer than hashing.
            shared = all(row is indices[0] for row in indices)
            hashes = hash_of(keys[:, None], numpy.array(indices[:1] if shared else indices), purpose)
            return (shift_right(hashes, 12).astype(numpy.float64) + 0.5) * 2.0**-52
        rows = zip(self.keys, self.positions, indices, strict=True)
        return numpy.array([scalar_uniforms(key, position, own, purpose) for key, position, own in rows])

    def _race(self, dists: Tensor, depths: Tensor, token_ids: Tensor | None = None) -> Tensor:
        """Return the first token to arrive: v, with probability `dists[v]`, normalised."""
        kernels = kernels_for(dists)
        if kernels is None:
            return self.arrival_times(dists, depths, token_ids).argmin(-1)
        hashes = _race_hashes(numpy.array(self.keys), numpy.array(self.positions), depths.numpy())
        return first_arrivals(kernels, dists, hashes, token_ids)

    def arrival_times(self, dists: Tensor, depths: Tensor, token_ids: Tensor | None = None) -> Tensor:
        """Return the time at which each token of `dists` `[..., vocab]` arrives at `depths` `[...]`.

        Token v waits an exponential time of rate `dists[v]`. `token_ids` as in `draft`.
        """
        width = dists.shape[-1] if token_ids is None else int(token_ids.max()) + 1
        device = dists.device
        keys, positions = token_tensor(self.keys, device), token_tensor(self.positions, device)
        uniforms = uniform_per_token_on_device(_race_hashes(keys, positions, depths.to(device)), width)
        return -(uniforms if token_ids is None else uniforms[..., token_ids]).log() / dists


@lru_cache(maxsize=256)
def _bool_tensor(values: tuple[bool, ...]) -> Tensor:
    """Return a batch's flags as a tensor; cached, because they stay the same between rounds."""
    return torch.tensor(values, dtype=torch.bool)


Indices = Sequence[Sequence[int]]
"""Depths or node indices that need random numbers, per row; equally many for each row."""

_MAX_SCALAR_HASHES = 64
"""Up to this many numbers are hashed one by one; any array operation costs as much as about 50."""


@lru_cache(maxsize=4096)
def _row_key(seed: int, sample_index: int) -> int:
    """Return the hash of a row's seed and sample index as a signed integer."""
    key = mix_integer(mix_integer(seed) ^ sample_index)
    return key - (1 << 64) if key >= 1 << 63 else key


def _race_hashes(keys: IntArray, positions: IntArray, depths: IntArray) -> IntArray:
    """Return the hashes `[...]` of races at `depths` `[row, ...]` after `positions` `[row]`."""
    shape = (-1, *([1] * (depths.ndim - 1)))
    return hash_of(keys.reshape(shape), positions.reshape(shape) + depths, Purpose.RACE)
