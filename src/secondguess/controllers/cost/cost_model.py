"""Token rate and costs of nodes in the current round, from measured times.

Both are needed many times in a round and hardly change from one round to the next. The rate is
computed once per round, costs once every few rounds.

The rate is averaged separately by `rate_key`, which distinguishes batch sizes and, for a single
row, kinds of draft candidates. A plain round is a round without drafts.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from secondguess.controllers.cost.round_times import LinearSeconds, RoundTimes, levels_per_cell

RATE_WINDOW = 64
"""Number of rounds over which a pace is averaged."""
LONGEST = 2.0
"""Upper bound to which a round's duration is clipped, as a multiple of the average.

Disturbances are not part of the pace.
"""
RATE_DECAY = 1 - 1 / 8
"""Factor by which the required speedup beyond 1 decays per round without a good draft."""
CACHE_ROUNDS = 16
"""Number of rounds after which costs are recomputed; initially after every round with a draft."""

NUM_CELLS = 16
"""Number of points of a cost curve that are computed together, as most of them are needed."""


@dataclass(slots=True)
class RecentSpeed:
    """Average duration, in plain rounds, and average tokens per row of recent rounds."""

    seconds: float = 1.0
    tokens: float = 1.0

    @property
    def speedup(self) -> float:
        """Speedup over plain decoding, at least 1, as plain decoding is always possible."""
        return max(self.tokens / self.seconds, 1.0)

    def add(self, seconds: float, tokens: float, num_rounds: int) -> None:
        share = 1 - (1 - 1 / RATE_WINDOW) ** num_rounds
        self.seconds += (min(seconds, LONGEST * self.seconds) - self.seconds) * share
        self.tokens += (tokens - self.tokens) * share


class CostModel:
    """Token rate and costs of the current round; `enter` begins a round.

    Attributes:
        times: measured times of rounds.
        rate: tokens per second that drafts of the current round have to exceed.
    """

    def __init__(self) -> None:
        self.times = RoundTimes()
        self.rate = 0.0
        self._num_rows = 0
        self._recent_speeds: dict[Hashable, RecentSpeed] = {}
        self._num_idle = 0
        self._shares: dict[tuple[int, int, int], list[float]] = {}
        self._extensions: dict[tuple[int, int, int], list[float]] = {}
        self._drafts: dict[tuple[int, int], LinearSeconds] = {}
        self._rests: dict[int, list[float]] = {}
        self._num_drafts = self._age = 0

    def enter(self, num_rows: int, rate_key: Hashable) -> None:
        """Begin a round over `num_rows` rows, with the rate of this key."""
        recent_speed = self._recent_speeds.get(rate_key)
        speedup = recent_speed.speedup if recent_speed is not None else 1.0
        # The speedup was measured in other texts and may be out of reach here while no draft is
        # good enough. If it were required for long, a text with good but not that good drafts
        # would run at plain speed.
        speedup = 1 + (speedup - 1) * RATE_DECAY**self._num_idle
        self._num_rows = num_rows
        self.rate = speedup * num_rows / self.times.plain(num_rows)

    def expect(self, tokens: float, seconds: float) -> None:
        """Raise the rate to that of a round with drafts that are expected to gain tokens and add seconds.

        Drafting on until the gain per second falls below the rate of recent rounds gives a higher rate; the highest
        one is found in a few rounds (Dinkelbach 1967), while that of recent rounds follows slowly.
        """
        expected = (self._num_rows + tokens) / (self.times.plain(self._num_rows) + seconds)
        self.rate = max(self.rate, expected)

    def record(self, rate_key: Hashable, seconds: float, tokens: float, worthwhile: bool) -> None:
        """Record a round with drafts.

        Args:
            rate_key: key of its rate.
            seconds: its duration in plain rounds.
            tokens: tokens gained per row.
            worthwhile: True if the drafts were expected to pay, False if they were probes.
        """
        self._add(rate_key, seconds, tokens, 1)
        if not worthwhile:
            self._num_idle += 1
        elif tokens > seconds:
            self._num_idle //= 2

    def record_plain(self, rate_key: Hashable, num_rounds: int) -> None:
        """Record rounds without drafts."""
        self._add(rate_key, 1.0, 1.0, num_rounds)
        self._num_idle += num_rounds

    def _add(self, rate_key: Hashable, seconds: float, tokens: float, num_rounds: int) -> None:
        recent_speed = self._recent_speeds.get(rate_key)
        if recent_speed is None:
            recent_speed = self._recent_speeds[rate_key] = RecentSpeed()
        recent_speed.add(seconds, tokens, num_rounds)
        self._age += num_rounds

    def forget_speeds(self) -> None:
        """Discard the speeds of recent rounds."""
        self._recent_speeds.clear()

    def renew(self) -> None:
        """Discard the cached costs if they are old; call it after each timed round with drafts."""
        self._num_drafts += 1
        if self._age >= CACHE_ROUNDS or self._num_drafts < CACHE_ROUNDS:
            self._age = 0
            for known in (self._shares, self._extensions, self._drafts, self._rests):
                known.clear()

    def shares(self, part: int, longest: int) -> list[float]:
        """Return one row's share of the seconds that drafts of 1, 2, ... `longest` nodes add to a round."""
        key = (self._num_rows, part, longest)
        known = self._shares.get(key)
        if known is None:
            drafting = self._draft_seconds(part, self._num_rows)
            self._rest(longest * self._num_rows)  # computes all points together
            known = self._shares[key] = [
                (drafting.at(width) + self.extra_pass_seconds(0, width * self._num_rows)) / self._num_rows
                for width in range(1, longest + 1)
            ]
        return known

    def extension_seconds(self, part: int, longest: int) -> list[float]:
        """Return the seconds that a node after the first, second, ... adds to a round of a single draft.

        Args:
            longest: largest number of nodes.
        """
        key = (self._num_rows, part, longest)
        known = self._extensions.get(key)
        if known is None:
            step = self.step(part, 1)
            known = self._extensions[key] = [
                step + self.extra_pass_seconds(width, width + 1) for width in range(1, longest)
            ]
        return known

    def extra_pass_seconds(self, before: int, after: int) -> float:
        """Return the seconds that drafts of `after` instead of `before` levels, of all rows together, add to the pass."""
        return max(self._rest(after) - self._rest(before), 0.0)

    def _rest(self, num_levels: int) -> float:
        """Return the seconds, without drafting, of a round whose drafts have `num_levels` levels in all.

        Any draft takes a fixed time, so that those below the first point of the curve cost as much as there.
        """
        cell, above = divmod(num_levels, levels_per_cell(self._num_rows))
        rests = self._rests.get(self._num_rows, ())
        if cell + (above > 0) >= len(rests):
            num_cells = max(cell + 1, 2 * len(rests), NUM_CELLS)
            rests = self._rests[self._num_rows] = self.times.rests(self._num_rows, num_cells)
        if not above:
            return rests[cell]
        before = rests[max(cell, 1)]
        return before + (rests[cell + 1] - before) * above / levels_per_cell(self._num_rows)

    def step(self, part: int, num_rows: int) -> float:
        """Return the seconds of one more draft step over `num_rows` rows; 0 while unknown."""
        return self._draft_seconds(part, num_rows).step

    def drafting(self, part: int, num_rows: int, num_steps: int) -> float:
        """Return the seconds of a draft of `num_steps` steps over `num_rows` rows; 0 while unknown."""
        return self._draft_seconds(part, num_rows).at(num_steps)

    def _draft_seconds(self, part: int, num_rows: int) -> LinearSeconds:
        known = self._drafts.get((part, num_rows))
        if known is None:
            known = self._drafts[part, num_rows] = self.times.draft_seconds(part, num_rows)
        return known
