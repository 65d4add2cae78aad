"""What guesses are expected to bring, from how like ones have fared: all that the controller `cost` has learnt of text.

Experience is kept from the general to the special: of a drafter's part at a temperature, of what the guess says of itself
beforehand (such as the length of a match), of how the row's drafts have fared lately. Nodes are judged by confidence, where
there is a law, and by position where there is none.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import mul
from typing import ClassVar

from secondguess.controllers.cost.experience import STRENGTH, Experience
from secondguess.core import Prospect, Row

CONFIDENCE_EDGES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.96, 0.99)
"""Confidences between two edges are expected to be accepted alike."""
BIN_CENTRES = [(low + high) / 2 for low, high in pairwise((0.0, *CONFIDENCE_EDGES, 1.0))]
LEAST_CHANCE = 0.02
"""A confidence that is corrected stays so far from 0 and 1."""
FIRST_GAIN, FIRST_WIDTH, FIRST_SHARE = 1.0, 2.0, 0.7
"""What is believed of guesses of which nothing is known: worth a try."""
DOUBT = 1.0
"""How many tokens a guess of an unknown kind may gain beyond what is expected of it; falls with the root of the count."""
NO_DOUBT = 0.1
"""What is left of that after the about hundred drafts that an average remembers, taken off: drafts that just fail to pay
would else be made for ever."""
NEUTRAL, FORGETTING = 0.5, 8.0
"""What a row's share of accepted nodes goes back to while nothing is drafted, and in how many rounds."""
DRAFTS_DECAY = 1 - 1 / 100
"""Averages over whole drafts remember about a hundred of them."""
DEEP = 8
"""Positions of a look-up's guess from here on are expected to fare alike."""


class Fates:
    """Decayed sums of what drafts brought, the nodes that they had, and how many drafts there were."""

    __slots__ = ("count", "gain", "width")

    def __init__(self) -> None:
        self.count = self.gain = self.width = 0.0

    def add(self, gain: float, width: float) -> None:
        self.count = self.count * DRAFTS_DECAY + 1.0
        self.gain = self.gain * DRAFTS_DECAY + gain
        self.width = self.width * DRAFTS_DECAY + width

    def means(self, gain: float, width: float) -> tuple[float, float]:
        """The averages, drawn towards what is expected."""
        weight = self.count + STRENGTH
        return (self.gain + STRENGTH * gain) / weight, (self.width + STRENGTH * width) / weight


@dataclass
class Standing:
    """How a row's drafts have fared lately: the share accepted; None before the first draft."""

    NUM_LEVELS: ClassVar[int] = 5

    share: float | None = None

    @property
    def level(self) -> int:
        """0 before the first draft, then 1 to 4 by the share."""
        return 0 if self.share is None else 1 + int(self.share * 3.999)

    def see(self, drafted: int, accepted: int) -> None:
        share = accepted / drafted
        self.share = share if self.share is None else self.share + (share - self.share) / 3

    def move_on(self, num_rounds: int) -> None:
        """The text went on without drafts: what was seen of it says less and less."""
        if self.share is not None:
            self.share = NEUTRAL + (self.share - NEUTRAL) * (1 - 1 / FORGETTING) ** num_rounds


class Kind:
    """What is expected to fare alike: guesses of one part under one temperature, and what they say of themselves.

    Holds the places of its experience, which are asked for in every round.

    Args:
        nodes, drafts: where experience is kept.
        of_pool: fates of all drafts of this pool.
        pool: part, coupling and temperature.
        own: what the guess says of itself beforehand.
    """

    def __init__(
        self, nodes: Experience, drafts: Experience, of_pool: Fates, pool: Hashable, own: Hashable
    ) -> None:
        self.anywhere = nodes.path(("at", pool))
        self.by_position = [
            nodes.path(("at", pool, place), ("at", pool, own, place)) for place in range(DEEP + 1)
        ]
        bins = range(len(CONFIDENCE_EDGES) + 1)
        self.by_confidence = [nodes.path(("own", pool, own, number)) for number in bins]
        self.behind = [nodes.path(("next", pool, own), ("next", pool, own, number)) for number in bins]
        self.miscalibration = nodes.path(("miscalibration", pool, own))
        self.comes = drafts.path(("comes", pool, own))
        self.of_pool, self.of_kind = of_pool, Fates()
        self.at_level = [Fates() for _ in range(Standing.NUM_LEVELS)]


class Expectations:
    """Experience with nodes and with whole drafts."""

    def __init__(self) -> None:
        self.nodes = Experience(memory=200)
        self.drafts = Experience(memory=100)
        self.standings: dict[Row, Standing] = {}
        self._fates: dict[Hashable, Fates] = {}
        self._kinds: dict[Hashable, Kind] = {}

    def kind(self, row: Row, prospect: Prospect) -> Kind:
        """Of this guess for this row."""
        # Temperatures that differ by little fare alike, and a server meets any number of them.
        temperature = round(row.params.temperature, 1)
        key = (prospect.part, prospect.kind, row.coupled, temperature)
        kind = self._kinds.get(key)
        if kind is None:
            pool = (prospect.part, row.coupled, temperature)
            of_pool = self._fates.setdefault(pool, Fates())
            kind = self._kinds[key] = Kind(self.nodes, self.drafts, of_pool, pool, prospect.kind)
        return kind

    def of_draft(self, row: Row, kind: Kind) -> tuple[float, float, float, float]:
        """What a draft for this row should do in a round: tokens accepted, nodes drafted, doubt, how often it comes.

        Doubt is what it might gain beyond that; what is never tried is never found out. Not every guess that is announced comes.
        """
        standing = self.standings.get(row)
        level = standing.level if standing is not None else 0
        gain, width = kind.of_kind.means(*kind.of_pool.means(FIRST_GAIN, FIRST_WIDTH))
        doubt = max(DOUBT / (1 + kind.of_kind.count) ** 0.5 - NO_DOUBT, 0.0)
        gain_here, width = kind.at_level[level].means(gain, width)
        # A row that fares badly may fare better soon, and only a draft tells: no worse is expected than of all such guesses.
        return max(gain_here, gain), width, doubt, self.drafts.mean(kind.comes, 1.0)

    def survivals(self, kind: Kind, longest: int) -> list[float]:
        """Of a look-up's guess, the chance that its first 1, 2, ... nodes are all accepted."""
        mean = self.nodes.mean
        anywhere = mean(kind.anywhere, FIRST_SHARE)
        shares = [mean(path, anywhere) for path in kind.by_position[:longest]]
        shares += shares[-1:] * (longest - len(shares))
        return list(accumulate(shares, mul))

    def of_node(self, kind: Kind, confidence: float) -> tuple[int, float, float]:
        """Of a node with this confidence: its level (for `learn`), its chance, and that of the one behind it.

        The chances are those of nodes before which all are accepted.
        """
        level = bisect_right(CONFIDENCE_EDGES, confidence)
        # While a bin has seen little, what all bins have shown says more than the drafter's word.
        corrected = confidence + self.nodes.mean(kind.miscalibration, 0.0)
        expected = min(max(corrected, LEAST_CHANCE), 1 - LEAST_CHANCE)
        own = self.nodes.mean(kind.by_confidence[level], expected)
        return level, own, self.nodes.mean(kind.behind[level], own)

    def learn(
        self, row: Row, kind: Kind, levels: Sequence[int], certain: bool, length: int, accepted: int
    ) -> None:
        """A draft of so many nodes, of which so many were accepted.

        Args:
            levels: of the confidences of its first nodes, as `of_node` gave them.
        """
        add, num_levels = self.nodes.add, len(levels)
        for place in range(min(accepted + 1, length)):
            outcome = 1.0 if place < accepted else 0.0
            if certain:
                add(kind.anywhere, outcome)
                add(kind.by_position[min(place, DEEP)], outcome)
            if place < num_levels:
                level = levels[place]
                add(kind.by_confidence[level], outcome)
                add(kind.miscalibration, outcome - BIN_CENTRES[level])
            if 0 < place <= num_levels:
                add(kind.behind[levels[place - 1]], outcome)
        if accepted == length <= num_levels:
            self.nodes.age(kind.behind[levels[length - 1]])
        standing = self.standings.get(row)
        if standing is None:
            standing = self.standings[row] = Standing()
        self.drafts.add(kind.comes, 1.0)
        for fates in (kind.of_pool, kind.of_kind, kind.at_level[standing.level]):
            fates.add(accepted, length)
        standing.see(length, accepted)

    def learn_nothing(self, kind: Kind) -> None:
        """A guess was expected of this kind, and none came."""
        self.drafts.add(kind.comes, 0.0)

    def move_on(self, rows: Sequence[Row], num_rounds: int) -> None:
        """Rows went on without drafts."""
        standings = self.standings
        if standings:
            for row in rows:
                standing = standings.get(row)
                if standing is not None:
                    standing.move_on(num_rounds)
