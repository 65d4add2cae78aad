"""Expected gain and cost of drafting for one row, and the choice of its best draft candidate.

The length of a draft model's draft is decided while drafting, so its gain is the average of
similar drafts. A lookup candidate is evaluated node by node in advance.
"""

from __future__ import annotations

from collections.abc import Sequence

from secondguess.controllers.cost.expectations import Expectations, Kind
from secondguess.controllers.cost.prices import Prices
from secondguess.core import Prospect, Row

CAUTION = 1.2
"""Factor by which the gain must exceed the amortised cost of a drafter's prefill."""
UNLIKELY = 0.1
"""Probability of a lookup draft's first nodes being accepted at which the draft is cut.

The cut applies even if the row has to wait for longer drafts of other rows anyway.
"""


class Offer:
    """Best draft candidate of one row in a round.

    Args:
        row: index of the row in the batch.
        prospect: the candidate.
        kind: statistics of similar drafts.
        length: maximum number of nodes.
        gain, width: expected number of tokens gained and of nodes drafted.
        survivals: for lookup, the probabilities that its first 1, 2, ... nodes are all accepted.
        doubt: exploration bonus, tokens that it might gain beyond the expectation.
        reading: seconds of drafter prefill, amortised over the row's remaining rounds.
        net: expected tokens, bonus included, less the cost converted to tokens.
    """

    __slots__ = (
        "certain",
        "doubt",
        "gain",
        "goes_on",
        "kind",
        "length",
        "net",
        "part",
        "prospect",
        "reading",
        "row",
        "seen",
        "survival",
        "survivals",
        "width",
    )

    def __init__(
        self,
        row: int,
        prospect: Prospect,
        kind: Kind,
        length: int,
        gain: float,
        width: int,
        survivals: Sequence[float],
        doubt: float,
        reading: float,
        net: float,
    ) -> None:
        self.row, self.prospect, self.kind, self.length = row, prospect, kind, length
        self.part, self.certain = prospect.part, prospect.certain
        self.gain, self.width, self.survivals = gain, width, survivals
        self.doubt, self.reading, self.net = doubt, reading, net
        # State of the current draft: confidence bins of its nodes, the probability that all of
        # them are accepted, and whether it goes on.
        self.seen: list[int] = []
        self.survival = 1.0
        self.goes_on = True

    @property
    def num_likely(self) -> int:
        """Number of nodes likely enough to be drafted if the row has to wait for others anyway."""
        return sum(survival >= UNLIKELY for survival in self.survivals)

    def worth(self, width: int) -> float:
        """Return the expected tokens gained by a draft of at most `width` nodes."""
        if self.certain:
            return sum(self.survivals[:width])
        return self.gain * min(width / self.width, 1.0)


class Offers:
    """Factory of `Offer` objects.

    Args:
        expectations: acceptance statistics.
        prices: costs in the current round.
        longest: maximum number of nodes of a draft.
    """

    def __init__(self, expectations: Expectations, prices: Prices, longest: int) -> None:
        self._expectations, self._prices, self._longest = expectations, prices, longest

    def best(self, index: int, row: Row, choices: Sequence[Prospect], num_rows: int) -> Offer | None:
        """Return the best candidate of one row, the first of equals; None if there is none.

        Args:
            index: of the row in the batch.
            row: the row.
            choices: its draft candidates.
            num_rows: batch size.
        """
        # A row's own `draft_length` takes precedence; its last token is the target's.
        if not self._longest or row.params.draft_length is not None:
            return None
        room = row.room
        if room <= 1:
            return None
        best = None
        for prospect in choices:
            if prospect.longest > 0:
                offer = self._make(index, row, room, prospect, num_rows)
                if best is None or offer.net > best.net:
                    best = offer
        return best

    def _make(self, index: int, row: Row, room: int, prospect: Prospect, num_rows: int) -> Offer:
        expectations, prices = self._expectations, self._prices
        kind = expectations.kind(row, prospect)
        gain, mean_width, doubt, comes = expectations.of_draft(row, kind)
        length = min(prospect.longest, self._longest, room - 1)
        rate, shares = prices.rate, prices.shares(prospect.part)
        survivals: Sequence[float] = ()
        if prospect.certain:
            width = length
            survivals = expectations.survivals(kind, length)
            net, longest = _best_length(survivals, rate, shares)
            if num_rows == 1:
                length = longest
        else:
            width = max(round(mean_width), 1)
            net = gain - rate * shares[min(width, self._longest) - 1]
        reading = 0.0
        if prospect.unread:
            # Prefill serves all remaining rounds of the row, but takes its time before any gain.
            seconds = prices.times.reading(prospect.part, prospect.unread)
            reading = CAUTION * seconds / max(room / (1 + gain), 1.0)
        net = comes * (net + doubt) - rate * reading
        return Offer(index, prospect, kind, length, gain, width, survivals, doubt, reading, net)


def _best_length(survivals: Sequence[float], rate: float, shares: Sequence[float]) -> tuple[float, int]:
    """Return the highest net gain of the first nodes of a lookup draft, and their number."""
    best, length = survivals[0] - rate * shares[0], 1
    total = 0.0
    for number, survival in enumerate(survivals):
        total += survival
        net = total - rate * shares[number]
        if net >= best:
            best, length = net, number + 1
    return best, length
