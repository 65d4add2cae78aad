"""What a second is worth and what nodes cost in the round under way: measured times, put to use.

Both are asked for many times in a round, and hardly change from one round to the next. So the rate is worked out once a round,
and prices once every few rounds.
"""

from __future__ import annotations

from collections.abc import Hashable

from secondguess.controllers.cost.round_times import RoundTimes

PACE_MEMORY = 64
"""Rounds over which the pace of places of one kind is averaged."""
LONGEST = 2.0
"""A round counts for at most this multiple of their average duration: disturbances are not part of the pace."""
HELD_TO = 1 - 1 / 8
"""A round in which no draft was good enough leaves so much of what they are held to beyond plain decoding."""
RENEWAL = 16
"""Prices are worked out anew after so many rounds; in the beginning after each with a draft."""


class Pace:
    """The speed of recent rounds, in plain rounds: averages of what they took and of what they gave per row."""

    __slots__ = ("seconds", "tokens")

    def __init__(self) -> None:
        self.seconds = self.tokens = 1.0

    @property
    def speedup(self) -> float:
        """Over plain decoding, which can always be had."""
        return max(self.tokens / self.seconds, 1.0)

    def see(self, seconds: float, tokens: float, num_rounds: int) -> None:
        share = 1 - (1 - 1 / PACE_MEMORY) ** num_rounds
        self.seconds += (min(seconds, LONGEST * self.seconds) - self.seconds) * share
        self.tokens += (tokens - self.tokens) * share


class Prices:
    """Of one round after the other; `enter` begins a round.

    Attributes:
        rate: tokens per second that can be had in a place like this.
    """

    def __init__(self, longest: int) -> None:
        self.times = RoundTimes()
        self.rate = 0.0
        self._longest = longest
        self._num_rows = 0
        self._paces: dict[Hashable, Pace] = {}
        self._num_idle = 0
        self._shares: dict[tuple[int, int], list[float]] = {}
        self._steps: dict[tuple[int, int], float] = {}
        self._draftings: dict[tuple[int, int, int], float] = {}
        self._widenings: dict[tuple[int, int, int], float] = {}
        self._num_drafts = self._age = 0

    def enter(self, num_rows: int, place: Hashable) -> None:
        """A round over so many rows begins, in a place like this."""
        pace = self._paces.get(place)
        speedup = pace.speedup if pace is not None else 1.0
        # What such places gave in other texts is not to be had here while no draft is good enough. Were drafts held to it for
        # long, a text whose guesses are good, but not that good, would go by at the pace of plain decoding.
        speedup = 1 + (speedup - 1) * HELD_TO**self._num_idle
        self._num_rows = num_rows
        self.rate = speedup * num_rows / self.times.plain(num_rows)

    def book(self, place: Hashable, seconds: float, tokens: float, worthwhile: bool) -> None:
        """A round with drafts took so many plain rounds and gave so many tokens per row.

        Args:
            worthwhile: whether the drafts were good enough, and not just tried.
        """
        self._see(place, seconds, tokens, 1)
        if not worthwhile:
            self._num_idle += 1
        elif tokens > seconds:
            self._num_idle //= 2

    def book_plain(self, place: Hashable, seconds: float, num_rounds: int) -> None:
        """Rounds without drafts took so many plain rounds each."""
        self._see(place, seconds, 1.0, num_rounds)
        self._num_idle += num_rounds

    def _see(self, place: Hashable, seconds: float, tokens: float, num_rounds: int) -> None:
        pace = self._paces.get(place)
        if pace is None:
            pace = self._paces[place] = Pace()
        pace.see(seconds, tokens, num_rounds)
        self._age += num_rounds

    def forget_paces(self) -> None:
        """Forget the speeds of recent rounds."""
        self._paces.clear()

    def renew(self) -> None:
        """A round with drafts was timed: from time to time all prices are worked out anew."""
        self._num_drafts += 1
        if self._age >= RENEWAL or self._num_drafts < RENEWAL:
            self._age = 0
            for known in (self._shares, self._steps, self._draftings, self._widenings):
                known.clear()

    def shares(self, part: int) -> list[float]:
        """One row's share of what drafts of 1, 2, ... nodes add to a round, in seconds."""
        key = (self._num_rows, part)
        known = self._shares.get(key)
        if known is None:
            known = self._shares[key] = [
                (self.times.drafting(part, self._num_rows, width) + self.wider(0, width)) / self._num_rows
                for width in range(1, self._longest + 1)
            ]
        return known

    def wider(self, width: int, wider: int) -> float:
        """Seconds by which nodes make the rest of a round dearer."""
        key = (self._num_rows, width, wider)
        known = self._widenings.get(key)
        if known is None:
            rest = self.times.rest
            known = max(rest(self._num_rows, wider) - rest(self._num_rows, width), 0.0)
            self._widenings[key] = known
        return known

    def step(self, part: int, num_rows: int) -> float:
        """Seconds of a further draft step over so many rows."""
        known = self._steps.get((part, num_rows))
        if known is None:
            known = self._steps[part, num_rows] = self.times.step(part, num_rows)
        return known

    def drafting(self, part: int, num_rows: int, num_steps: int) -> float:
        """Seconds of a draft of so many steps over so many rows."""
        key = (part, num_rows, num_steps)
        known = self._draftings.get(key)
        if known is None:
            known = self._draftings[key] = self.times.drafting(part, num_rows, num_steps)
        return known
