"""Acceptance of draft tokens, from what the verifier accepted of similar drafts.

A node is *reached* if all nodes before it were accepted. The share accepted among reached nodes, the censored
hazard of survival analysis (Kaplan and Meier 1958), is not biased by drafts that stopped early.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import accumulate, pairwise
from operator import mul

from secondguess.core import Candidate, Row

CONFIDENCE_EDGES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.96, 0.99)
"""Edges of the bins of confidence; nodes of one bin share their statistics."""
BIN_CENTRES = [(low + high) / 2 for low, high in pairwise((0.0, *CONFIDENCE_EDGES, 1.0))]
MAX_POSITION = 8
"""Position from which all nodes of a lookup share their statistics."""
PRIOR_WEIGHT = 4.0
"""Weight of a prior expectation, in observations."""
DECAY = 1 - 1 / 100
"""Factor by which the weight of an observation decays with each further one."""
FADING = 1 - 1 / 50
"""Factor by which the weight of a node's acceptance decays with each draft that could have had this node."""
MAX_AGE = 512
"""Number of rounds after which statistics that were not added to lose half of their weight."""
FIRST_SHARE, FIRST_GAIN, FIRST_WIDTH = 0.8, 1.0, 2.0
"""Expected acceptance of a node, and tokens gained by a draft of so many nodes, of an unknown drafter."""
BONUS = 1.5
"""Tokens that the first draft of a kind might gain beyond the expectation; inversely proportional to the number of drafts."""


class Mean:
    """Decayed mean, shrunk to an expected value while there are few observations."""

    __slots__ = ("count", "total")

    def __init__(self) -> None:
        self.total: float = 0.0
        self.count: float = 0.0

    def add(self, value: float) -> None:
        self.total = self.total * DECAY + value
        self.count = self.count * DECAY + 1

    def fade(self, factor: float) -> None:
        """Reduce the weight of the observations, which otherwise could prevent new ones for ever."""
        self.total *= factor
        self.count *= factor

    def shrunk(self, expected: float) -> float:
        return (self.total + PRIOR_WEIGHT * expected) / (self.count + PRIOR_WEIGHT)


class Acceptance:
    """Statistics of drafts that are expected to be accepted alike.

    Args:
        general: statistics of all drafts of the drafter at this temperature, to which few observations are shrunk.
        expected: acceptance probability of the first node that is expected instead (`Candidate.expected`).
    """

    def __init__(self, general: Acceptance | None = None, expected: float | None = None) -> None:
        self._general, self._expected = general, expected
        self._any_node = Mean()
        self._by_position = [Mean() for _ in range(MAX_POSITION + 1)]
        self._by_confidence = [Mean() for _ in BIN_CENTRES]
        self._next_by_confidence = [Mean() for _ in BIN_CENTRES]
        self._error, self._appears = Mean(), Mean()
        self._gain, self._width = Mean(), Mean()
        self._node_probs: tuple[list[float], list[float]] | None = None
        self._last_round = 0

    def age(self, now: int) -> None:
        """Halve the weight of what was last observed many rounds ago; rounds are numbered."""
        if now - self._last_round > MAX_AGE:
            self._last_round, self._node_probs = now, None
            nodes = (self._any_node, self._error, *self._by_position)
            bins = (*self._by_confidence, *self._next_by_confidence)
            for mean in (*nodes, *bins, self._appears, self._gain, self._width):
                mean.fade(0.5)
        if self._general is not None:
            self._general.age(now)

    @property
    def expected_draft(self) -> tuple[float, float]:
        """Tokens gained by a draft whose length is decided while drafting, and its number of nodes."""
        gain, width = (FIRST_GAIN, FIRST_WIDTH) if self._general is None else self._general.expected_draft
        return self._gain.shrunk(gain), self._width.shrunk(width)

    @property
    def exploration_bonus(self) -> float:
        """Tokens that a draft might gain beyond the expectation; 0 for one whose acceptance is known roughly."""
        return BONUS / (1 + self._gain.count) if self._expected is None else 0.0

    def _shares(self) -> list[float]:
        general = self._general
        if general is None:
            share = self._any_node.shrunk(FIRST_SHARE)
            return [mean.shrunk(share) for mean in self._by_position]
        expected = general._shares()
        if self._expected is not None:
            expected[0] = self._expected
        return [mean.shrunk(share) for mean, share in zip(self._by_position, expected, strict=True)]

    def survivals(self, length: int) -> list[float]:
        """Return the probabilities that the first 1, 2, ... nodes of a lookup are all accepted."""
        shares = self._shares()[:length]
        shares += shares[-1:] * (length - len(shares))
        # A lookup that announces a draft may have none.
        return list(accumulate(shares, mul, initial=self._appears.shrunk(1.0)))[1:]

    def node_probs(self) -> tuple[list[float], list[float]]:
        """Return, by bin of confidence, the acceptance probabilities of a node and of the one after it."""
        if self._node_probs is None:
            error = self._error.shrunk(0.0)
            own = [
                mean.shrunk(min(max(centre + error, 0.02), 0.98))
                for mean, centre in zip(self._by_confidence, BIN_CENTRES, strict=True)
            ]
            following = self._any_node.shrunk(FIRST_SHARE)
            self._node_probs = own, [mean.shrunk(following) for mean in self._next_by_confidence]
        return self._node_probs

    def learn(self, bins: Sequence[int], length: int, accepted: int, now: int = 0) -> None:
        """Add a draft of so many levels and accepted nodes; `bins` are those of the first nodes, none for a lookup."""
        self._node_probs, self._last_round = None, now
        self._appears.add(float(length > 0))
        self._gain.add(accepted)
        self._width.add(max(length, 1))
        for position in range(min(accepted + 1, length)):
            outcome = float(position < accepted)
            self._any_node.add(outcome)
            self._by_position[min(position, MAX_POSITION)].add(outcome)
            if position < len(bins):
                self._by_confidence[bins[position]].add(outcome)
                self._error.add(outcome - BIN_CENTRES[bins[position]])
            if 0 < position <= len(bins):
                self._next_by_confidence[bins[position - 1]].add(outcome)
        if accepted == length <= MAX_POSITION:
            self._by_position[length].fade(FADING)
            if len(bins) >= length > 0:
                self._next_by_confidence[bins[length - 1]].fade(FADING)
        if self._general is not None:
            self._general.learn(bins, length, accepted, now)


class AcceptanceStats:
    """Acceptance by drafter, temperature and kind of candidate."""

    def __init__(self) -> None:
        self.num_rounds = 0
        self._pools: dict[Hashable, Acceptance] = {}
        self._kinds: dict[Hashable, Acceptance] = {}

    def of(self, row: Row, candidate: Candidate) -> Acceptance:
        """Return the statistics of drafts like this candidate of a row."""
        # Similar temperatures share statistics, as a server may get any number of them.
        pool = candidate.part, row.coupled, round(row.params.temperature, 1)
        key = pool, candidate.kind
        if key not in self._kinds:
            general = self._pools.setdefault(pool, Acceptance())
            self._kinds[key] = Acceptance(general, candidate.expected)
        self._kinds[key].age(self.num_rounds)
        return self._kinds[key]
