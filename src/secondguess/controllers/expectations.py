"""What guesses are expected to bring, from how like ones have fared: all that the controller `cost` has learnt of text.

Experience is kept from the general to the special: of a drafter's part at a temperature, of what the guess says of itself
beforehand (such as the length of a match), of how the row's drafts have fared lately. Nodes are judged by confidence, where
there is a law, and by position where there is none.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import NamedTuple

from secondguess.controllers.experience import Experience
from secondguess.core import Prospect, Row

CONFIDENCE_EDGES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.96, 0.99)
"""Confidences between two edges are expected to be accepted alike."""
FIRST_GAIN, FIRST_WIDTH, FIRST_SHARE = 1.0, 2.0, 0.7
"""What is believed of guesses of which nothing is known: worth a try."""
DOUBT = 1.0
"""How many tokens a guess of an unknown kind may gain beyond what is expected of it; falls with the root of the count."""
NEUTRAL, FORGETTING = 0.5, 8.0
"""What a row's share of accepted nodes goes back to while nothing is drafted, and in how many rounds."""
DEEP = 8
"""Positions of a look-up's guess from here on are expected to fare alike."""


class Kind(NamedTuple):
    """What is expected to fare alike: guesses of one part under one temperature, and what they say of themselves."""

    pool: Hashable
    own: Hashable


class Expected(NamedTuple):
    """What a draft of some kind should do in a round.

    Args:
        gain: tokens accepted.
        width: nodes drafted.
        doubt: tokens that it might gain beyond that; what is never tried is never found out.
    """

    gain: float
    width: float
    doubt: float


@dataclass
class Standing:
    """How a row's drafts have fared lately: the share accepted; None before the first draft."""

    share: float | None = None

    @property
    def level(self) -> int:
        return 0 if self.share is None else 1 + int(self.share * 3.999)

    def see(self, drafted: int, accepted: int) -> None:
        share = accepted / drafted
        self.share = share if self.share is None else self.share + (share - self.share) / 3

    def move_on(self) -> None:
        """The text went on without a draft: what was seen of it says less and less."""
        if self.share is not None:
            self.share += (NEUTRAL - self.share) / FORGETTING


class Expectations:
    """Experience with nodes and with whole drafts."""

    def __init__(self) -> None:
        self.nodes = Experience(memory=200)
        self.drafts = Experience(memory=100)
        self.standings: dict[Row, Standing] = {}

    @staticmethod
    def kind(row: Row, prospect: Prospect) -> Kind:
        return Kind((prospect.part, row.coupled, row.params.temperature), prospect.kind)

    def of_draft(self, row: Row, kind: Kind) -> Expected:
        """What a draft for this row should bring."""
        standing = self.standings.get(row)
        level = standing.level if standing else 0
        return Expected(
            self.drafts.mean(_levels(kind, level, "gain"), FIRST_GAIN),
            self.drafts.mean(_levels(kind, level, "width"), FIRST_WIDTH),
            DOUBT / (1 + self.drafts.seen(("gain", kind))) ** 0.5,
        )

    def survivals(self, kind: Kind, longest: int) -> list[float]:
        """Of a look-up's guess, the chance that its first 1, 2, ... nodes are all accepted."""
        shares = (self.nodes.mean(_positions(kind, place), FIRST_SHARE) for place in range(longest))
        return list(accumulate(shares, mul))

    def of_node(self, kind: Kind, confidence: float) -> tuple[float, float]:
        """The chance of a node with this confidence, and of the one behind it, given that all before are accepted."""
        confidence_bin = bisect_right(CONFIDENCE_EDGES, confidence)
        own = self.nodes.mean((("own", kind, confidence_bin),), confidence)
        return own, self.nodes.mean(_followers(kind, confidence_bin), FIRST_SHARE)

    def learn(
        self, row: Row, kind: Kind, confidences: Sequence[float], certain: bool, length: int, accepted: int
    ) -> None:
        """A draft of so many nodes, of which so many were accepted."""
        bins = [bisect_right(CONFIDENCE_EDGES, confidence) for confidence in confidences]
        for place in range(min(accepted + 1, length)):
            outcome = float(place < accepted)
            keys: tuple[Hashable, ...] = _positions(kind, place) if certain else ()
            if place < len(bins):
                keys += (("own", kind, bins[place]),)
            if place and place <= len(bins):
                keys += _followers(kind, bins[place - 1])
            for key in keys:
                self.nodes.add(key, outcome)
        standing = self.standings.setdefault(row, Standing())
        for what, number in (("gain", accepted), ("width", length)):
            for key in _levels(kind, standing.level, what):
                self.drafts.add(key, number)
        standing.see(length, accepted)

    def move_on(self, rows: Sequence[Row]) -> None:
        """Rows went on without drafts."""
        for row in rows:
            if row in self.standings:
                self.standings[row].move_on()


# Keys of experience, from the general to the special.


def _positions(kind: Kind, place: int) -> tuple[Hashable, ...]:
    deep = min(place, DEEP)
    return ("at", kind.pool), ("at", kind.pool, deep), ("at", kind, deep)


def _followers(kind: Kind, confidence_bin: int) -> tuple[Hashable, ...]:
    return ("next", kind), ("next", kind, confidence_bin)


def _levels(kind: Kind, level: int, what: str) -> tuple[Hashable, ...]:
    return (what, kind.pool), (what, kind), (what, kind, level)
