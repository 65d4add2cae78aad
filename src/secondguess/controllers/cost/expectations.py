"""Expected gain of drafts, from the acceptance of similar ones.

Statistics go from general to specific: by drafter and temperature, by properties of the candidate
that are known in advance (such as the length of a match), by the row's recent acceptance rate.
Nodes are grouped by confidence if they have a draft distribution, and by position otherwise.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import mul
from typing import ClassVar

from secondguess.controllers.cost.acceptance_stats import PRIOR_WEIGHT, AcceptanceStats
from secondguess.core import Candidate, Row

CONFIDENCE_EDGES = array("d", (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.96, 0.99))
"""Edges of the confidence bins; nodes of one bin share their statistics."""
BIN_CENTRES = [(low + high) / 2 for low, high in pairwise((0.0, *CONFIDENCE_EDGES, 1.0))]
MIN_PROB = 0.02
"""Distance that a corrected confidence keeps from 0 and 1."""
FIRST_GAIN, FIRST_WIDTH, FIRST_SHARE = 1.0, 2.0, 0.8
"""Initial gain in tokens, width in nodes and acceptance rate: high enough to be tried."""
EXPLORATION_BONUS = 1.5
"""Exploration bonus of a new kind of draft, in tokens; falls with the square root of the count.

It is about the standard deviation of the tokens gained by a draft.
"""
BONUS_OFFSET = 0.15
"""Amount subtracted from the exploration bonus.

It is what remains of the bonus after about a hundred drafts, the number that an average covers.
Otherwise drafts that just fail to pay would be made forever.
"""
NEUTRAL_RATE, RATE_MEMORY = 0.5, 8.0
"""Value to which a row's acceptance rate returns without drafts, and time constant in rounds."""
DRAFTS_DECAY = 1 - 1 / 100
"""Decay of averages over whole drafts, which cover about a hundred of them."""
MAX_POSITION = 8
"""Position from which all nodes of a lookup draft share their statistics."""


@dataclass(slots=True)
class DraftAverages:
    """Decayed sums of tokens gained, nodes drafted and number of drafts."""

    count: float = 0.0
    gain: float = 0.0
    width: float = 0.0

    def add(self, gain: float, width: float) -> None:
        self.count = self.count * DRAFTS_DECAY + 1.0
        self.gain = self.gain * DRAFTS_DECAY + gain
        self.width = self.width * DRAFTS_DECAY + width

    def means(self, gain: float, width: float) -> tuple[float, float]:
        """Return the average gain and width, shrunk towards the expected `gain` and `width`."""
        weight = self.count + PRIOR_WEIGHT
        return (self.gain + PRIOR_WEIGHT * gain) / weight, (self.width + PRIOR_WEIGHT * width) / weight


@dataclass
class RowHistory:
    """Recent acceptance rate of a row's drafts; None before the first draft."""

    NUM_BINS: ClassVar[int] = 5

    share: float | None = None

    @property
    def rate_bin(self) -> int:
        """Bin of the acceptance rate: 0 before the first draft, then 1 to 4."""
        return 0 if self.share is None else 1 + int(self.share * 3.999)

    def add(self, drafted: int, accepted: int) -> None:
        share = accepted / drafted
        self.share = share if self.share is None else self.share + (share - self.share) / 3

    def decay(self, num_rounds: int) -> None:
        """Let the acceptance rate return to `NEUTRAL_RATE` over rounds without drafts."""
        if self.share is not None:
            self.share = NEUTRAL_RATE + (self.share - NEUTRAL_RATE) * (1 - 1 / RATE_MEMORY) ** num_rounds


class KindStats:
    """Statistics of drafts that are expected to be accepted alike.

    These are the drafts with the same drafter, coupling, temperature and kind of candidate. The
    cells of the statistics are kept here, as they are needed in every round.

    Args:
        nodes, drafts: stores of the statistics.
        pool_averages: sums over all drafts of this pool.
        pool: drafter, coupling and temperature.
        own: kind of candidate (`Candidate.kind`).
    """

    def __init__(
        self,
        nodes: AcceptanceStats,
        drafts: AcceptanceStats,
        pool_averages: DraftAverages,
        pool: Hashable,
        own: Hashable,
    ) -> None:
        self.any_position = nodes.path(("at", pool))
        self.by_position = [
            nodes.path(("at", pool, position), ("at", pool, own, position))
            for position in range(MAX_POSITION + 1)
        ]
        bins = range(len(CONFIDENCE_EDGES) + 1)
        self.by_confidence = [nodes.path(("own", pool, own, number)) for number in bins]
        self.next_by_confidence = [
            nodes.path(("next", pool, own), ("next", pool, own, number)) for number in bins
        ]
        self.miscalibration = nodes.path(("miscalibration", pool, own))
        # Result of `Expectations.node_probs`, until something is learned.
        self.node_probs: tuple[array[float], array[float]] | None = None
        self.appears = drafts.path(("comes", pool, own))
        self.pool_averages, self.averages = pool_averages, DraftAverages()
        self.by_rate_bin = [DraftAverages() for _ in range(RowHistory.NUM_BINS)]


class Expectations:
    """Acceptance statistics of nodes and of whole drafts."""

    def __init__(self) -> None:
        self.nodes = AcceptanceStats(memory=200)
        self.drafts = AcceptanceStats(memory=100)
        self.row_histories: dict[Row, RowHistory] = {}
        self._draft_averages: dict[Hashable, DraftAverages] = {}
        self._kinds: dict[Hashable, KindStats] = {}

    def kind(self, row: Row, candidate: Candidate) -> KindStats:
        """Return the statistics of drafts like this candidate of this row."""
        # Similar temperatures share statistics, as a server may get any number of them.
        temperature = round(row.params.temperature, 1)
        key = (candidate.part, candidate.kind, row.coupled, temperature)
        kind = self._kinds.get(key)
        if kind is None:
            pool = (candidate.part, row.coupled, temperature)
            pool_averages = self._draft_averages.setdefault(pool, DraftAverages())
            kind = self._kinds[key] = KindStats(self.nodes, self.drafts, pool_averages, pool, candidate.kind)
        return kind

    def rate_bin(self, row: Row) -> int:
        """Return the bin of the row's recent acceptance rate (`RowHistory.rate_bin`)."""
        row_history = self.row_histories.get(row)
        return row_history.rate_bin if row_history is not None else 0

    def draft_expectations(self, kind: KindStats, rate_bin: int) -> tuple[float, float, float, float]:
        """Return expectations about a draft for a row of this `rate_bin`.

        Returns:
            Tokens accepted, nodes drafted, exploration bonus in tokens (what it might gain beyond
            the expectation), and the share of planned drafts that have any nodes.
        """
        gain, width = kind.averages.means(*kind.pool_averages.means(FIRST_GAIN, FIRST_WIDTH))
        exploration_bonus = max(EXPLORATION_BONUS / (1 + kind.averages.count) ** 0.5 - BONUS_OFFSET, 0.0)
        gain_here, width = kind.by_rate_bin[rate_bin].means(gain, width)
        # At least the kind's average: a row with poor drafts may improve, as only drafts can show.
        return max(gain_here, gain), width, exploration_bonus, self.drafts.mean(kind.appears, 1.0)

    def survivals(self, kind: KindStats, longest: int) -> list[float]:
        """Return the probabilities that a lookup's first 1, 2, ... nodes are all accepted."""
        mean = self.nodes.mean
        any_position = mean(kind.any_position, FIRST_SHARE)
        shares = [mean(path, any_position) for path in kind.by_position[:longest]]
        shares += shares[-1:] * (longest - len(shares))
        return list(accumulate(shares, mul))

    def node_probs(self, kind: KindStats) -> tuple[array[float], array[float]]:
        """Return, by confidence bin, the acceptance probabilities of a node and of the one after it.

        Each is conditional on all nodes before being accepted.
        """
        if kind.node_probs is None:
            mean, error = self.nodes.mean, self.nodes.mean(kind.miscalibration, 0.0)
            own = [
                # Prior of the bins: the confidence corrected by the mean error over all bins.
                mean(path, min(max(centre + error, MIN_PROB), 1 - MIN_PROB))
                for path, centre in zip(kind.by_confidence, BIN_CENTRES, strict=True)
            ]
            following = [mean(path, FIRST_SHARE) for path in kind.next_by_confidence]
            kind.node_probs = array("d", own), array("d", following)
        return kind.node_probs

    def learn(
        self,
        row: Row,
        kind: KindStats,
        confidence_bins: Sequence[int],
        deterministic: bool,
        length: int,
        accepted: int,
    ) -> None:
        """Add a draft of `length` nodes, of which `accepted` were accepted.

        Args:
            confidence_bins: bins of the confidences of its first nodes.
            deterministic: whether its nodes have no draft distribution.
        """
        add, num_binned = self.nodes.add, len(confidence_bins)
        kind.node_probs = None
        for position in range(min(accepted + 1, length)):
            outcome = 1.0 if position < accepted else 0.0
            if deterministic:
                add(kind.any_position, outcome)
                add(kind.by_position[min(position, MAX_POSITION)], outcome)
            if position < num_binned:
                confidence_bin = confidence_bins[position]
                add(kind.by_confidence[confidence_bin], outcome)
                add(kind.miscalibration, outcome - BIN_CENTRES[confidence_bin])
            if 0 < position <= num_binned:
                add(kind.next_by_confidence[confidence_bins[position - 1]], outcome)
        if accepted == length <= num_binned:
            self.nodes.age(kind.next_by_confidence[confidence_bins[length - 1]])
        row_history = self.row_histories.get(row)
        if row_history is None:
            row_history = self.row_histories[row] = RowHistory()
        self.drafts.add(kind.appears, 1.0)
        for averages in (kind.pool_averages, kind.averages, kind.by_rate_bin[row_history.rate_bin]):
            averages.add(accepted, length)
        row_history.add(length, accepted)

    def add_empty_draft(self, kind: KindStats) -> None:
        """Record that a planned draft of this kind had no nodes."""
        self.drafts.add(kind.appears, 0.0)

    def decay_rows(self, rows: Sequence[Row], num_rounds: int) -> None:
        """Record rounds of these rows without drafts."""
        row_histories = self.row_histories
        if row_histories:
            for row in rows:
                row_history = row_histories.get(row)
                if row_history is not None:
                    row_history.decay(num_rounds)
