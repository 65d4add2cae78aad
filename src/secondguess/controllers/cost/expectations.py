"""Expected gain of drafts, from the acceptance of similar ones.

Statistics go from general to specific: by drafter and temperature, by properties of the candidate
that are known in advance (such as the length of a match), by the row's recent acceptance rate.
Nodes are grouped by confidence if they have a draft distribution, and by position otherwise.
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
"""Edges of the confidence bins; nodes of one bin share their statistics."""
BIN_CENTRES = [(low + high) / 2 for low, high in pairwise((0.0, *CONFIDENCE_EDGES, 1.0))]
LEAST_CHANCE = 0.02
"""Distance that a corrected confidence keeps from 0 and 1."""
FIRST_GAIN, FIRST_WIDTH, FIRST_SHARE = 1.0, 2.0, 0.7
"""Initial gain in tokens, width in nodes and acceptance rate: high enough to be tried."""
DOUBT = 1.0
"""Exploration bonus of a new kind of draft, in tokens; falls with the square root of the count."""
NO_DOUBT = 0.1
"""Amount subtracted from the exploration bonus.

It is what remains of the bonus after about a hundred drafts, the number that an average covers.
Otherwise drafts that just fail to pay would be made forever.
"""
NEUTRAL, FORGETTING = 0.5, 8.0
"""Value to which a row's acceptance rate returns without drafts, and time constant in rounds."""
DRAFTS_DECAY = 1 - 1 / 100
"""Decay of averages over whole drafts, which cover about a hundred of them."""
DEEP = 8
"""Position from which all nodes of a lookup draft share their statistics."""


class Fates:
    """Decayed sums of tokens gained, nodes drafted and number of drafts."""

    __slots__ = ("count", "gain", "width")

    def __init__(self) -> None:
        self.count = self.gain = self.width = 0.0

    def add(self, gain: float, width: float) -> None:
        self.count = self.count * DRAFTS_DECAY + 1.0
        self.gain = self.gain * DRAFTS_DECAY + gain
        self.width = self.width * DRAFTS_DECAY + width

    def means(self, gain: float, width: float) -> tuple[float, float]:
        """Return the average gain and width, shrunk towards the expected `gain` and `width`."""
        weight = self.count + STRENGTH
        return (self.gain + STRENGTH * gain) / weight, (self.width + STRENGTH * width) / weight


@dataclass
class Standing:
    """Recent acceptance rate of a row's drafts; None before the first draft."""

    NUM_LEVELS: ClassVar[int] = 5

    share: float | None = None

    @property
    def level(self) -> int:
        """Bin of the acceptance rate: 0 before the first draft, then 1 to 4."""
        return 0 if self.share is None else 1 + int(self.share * 3.999)

    def see(self, drafted: int, accepted: int) -> None:
        share = accepted / drafted
        self.share = share if self.share is None else self.share + (share - self.share) / 3

    def move_on(self, num_rounds: int) -> None:
        """Let the acceptance rate return to `NEUTRAL` over rounds without drafts."""
        if self.share is not None:
            self.share = NEUTRAL + (self.share - NEUTRAL) * (1 - 1 / FORGETTING) ** num_rounds


class Kind:
    """Statistics of drafts that are expected to be accepted alike.

    These are the drafts with the same drafter, coupling, temperature and kind of candidate. The
    cells of the statistics are kept here, as they are needed in every round.

    Args:
        nodes, drafts: stores of the statistics.
        of_pool: sums over all drafts of this pool.
        pool: drafter, coupling and temperature.
        own: kind of candidate (`Prospect.kind`).
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
    """Acceptance statistics of nodes and of whole drafts."""

    def __init__(self) -> None:
        self.nodes = Experience(memory=200)
        self.drafts = Experience(memory=100)
        self.standings: dict[Row, Standing] = {}
        self._fates: dict[Hashable, Fates] = {}
        self._kinds: dict[Hashable, Kind] = {}

    def kind(self, row: Row, prospect: Prospect) -> Kind:
        """Return the statistics of drafts like this candidate of this row."""
        # Similar temperatures share statistics, as a server may get any number of them.
        temperature = round(row.params.temperature, 1)
        key = (prospect.part, prospect.kind, row.coupled, temperature)
        kind = self._kinds.get(key)
        if kind is None:
            pool = (prospect.part, row.coupled, temperature)
            of_pool = self._fates.setdefault(pool, Fates())
            kind = self._kinds[key] = Kind(self.nodes, self.drafts, of_pool, pool, prospect.kind)
        return kind

    def of_draft(self, row: Row, kind: Kind) -> tuple[float, float, float, float]:
        """Return expectations about a draft for this row.

        Returns:
            Tokens accepted, nodes drafted, exploration bonus in tokens (what it might gain beyond
            the expectation), and the share of planned drafts that have any nodes.
        """
        standing = self.standings.get(row)
        level = standing.level if standing is not None else 0
        gain, width = kind.of_kind.means(*kind.of_pool.means(FIRST_GAIN, FIRST_WIDTH))
        doubt = max(DOUBT / (1 + kind.of_kind.count) ** 0.5 - NO_DOUBT, 0.0)
        gain_here, width = kind.at_level[level].means(gain, width)
        # At least the kind's average: a row with poor drafts may improve, as only drafts can show.
        return max(gain_here, gain), width, doubt, self.drafts.mean(kind.comes, 1.0)

    def survivals(self, kind: Kind, longest: int) -> list[float]:
        """Return the probabilities that a lookup's first 1, 2, ... nodes are all accepted."""
        mean = self.nodes.mean
        anywhere = mean(kind.anywhere, FIRST_SHARE)
        shares = [mean(path, anywhere) for path in kind.by_position[:longest]]
        shares += shares[-1:] * (longest - len(shares))
        return list(accumulate(shares, mul))

    def of_node(self, kind: Kind, confidence: float) -> tuple[int, float, float]:
        """Return a node's confidence bin, its acceptance probability and that of the next node.

        The bin is for `learn`. Each probability is conditional on all nodes before being accepted.
        """
        level = bisect_right(CONFIDENCE_EDGES, confidence)
        # Prior of the bins: the confidence corrected by the mean error over all bins.
        corrected = confidence + self.nodes.mean(kind.miscalibration, 0.0)
        expected = min(max(corrected, LEAST_CHANCE), 1 - LEAST_CHANCE)
        own = self.nodes.mean(kind.by_confidence[level], expected)
        return level, own, self.nodes.mean(kind.behind[level], own)

    def learn(
        self, row: Row, kind: Kind, levels: Sequence[int], certain: bool, length: int, accepted: int
    ) -> None:
        """Add a draft of `length` nodes, of which `accepted` were accepted.

        Args:
            row: the row.
            kind: statistics to which the draft is added.
            levels: confidence bins of its first nodes, from `of_node`.
            certain: whether its nodes have no draft distribution.
            length: number of nodes.
            accepted: number of accepted nodes.
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
        """Record that a planned draft of this kind had no nodes."""
        self.drafts.add(kind.comes, 0.0)

    def move_on(self, rows: Sequence[Row], num_rounds: int) -> None:
        """Record rounds of these rows without drafts."""
        standings = self.standings
        if standings:
            for row in rows:
                standing = standings.get(row)
                if standing is not None:
                    standing.move_on(num_rounds)
