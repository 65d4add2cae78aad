"""What one row's draft should bring and take: the best of the ways in which it could be drafted for.

How far a draft model goes is decided on the way, so it counts with what such drafts have brought; a look-up's guess is weighed
node by node, at once.
"""

from __future__ import annotations

from collections.abc import Sequence

from secondguess.controllers.cost.expectations import Expectations, Kind
from secondguess.controllers.cost.prices import Prices
from secondguess.core import Prospect, Row

CAUTION = 1.2
"""By how much more than it takes the reading of a text must pay."""
UNLIKELY = 0.1
"""A look-up's node that survives less often is not worth a place, though its row waits anyway."""


class Offer:
    """One row's best prospect in a round.

    Args:
        length: most nodes.
        gain, width: tokens that the draft should bring, and nodes that it should have.
        survivals: of a look-up, the chances that its first 1, 2, ... nodes are all accepted.
        doubt: tokens that it might bring beyond that.
        reading: seconds for what the drafter has to read first, spread over the rounds to come.
        net: tokens, when what the draft takes is paid for.
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
        # Of the draft under way: levels of confidence of its nodes, the chance that all are accepted, whether it goes on.
        self.seen: list[int] = []
        self.survival = 1.0
        self.goes_on = True

    @property
    def num_likely(self) -> int:
        """How many nodes are likely enough to be put before the target where others make it wait anyway."""
        return sum(survival >= UNLIKELY for survival in self.survivals)

    def worth(self, width: int) -> float:
        """Tokens that a draft of at most so many nodes should bring."""
        if self.certain:
            return sum(self.survivals[:width])
        return self.gain * min(width / self.width, 1.0)


class Offers:
    """Makes them, from what is expected and what it costs.

    Args:
        longest: nodes that a draft may have.
    """

    def __init__(self, expectations: Expectations, prices: Prices, longest: int) -> None:
        self._expectations, self._prices, self._longest = expectations, prices, longest

    def best(self, index: int, row: Row, choices: Sequence[Prospect], num_rows: int) -> Offer | None:
        """The best for one row, the first of equals; None where nothing can be drafted."""
        # A request may have decided for itself; a row without room ends with the target's own token.
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
            # What is read now serves all the rounds that the row will yet take; but it is spent before anything is won.
            seconds = prices.times.reading(prospect.part, prospect.unread)
            reading = CAUTION * seconds / max(room / (1 + gain), 1.0)
        net = comes * (net + doubt) - rate * reading
        return Offer(index, prospect, kind, length, gain, width, survivals, doubt, reading, net)


def _best_length(survivals: Sequence[float], rate: float, shares: Sequence[float]) -> tuple[float, int]:
    """The most that a look-up's first nodes bring net of their price, and how many they are."""
    best, length = survivals[0] - rate * shares[0], 1
    total = 0.0
    for number, survival in enumerate(survivals):
        total += survival
        net = total - rate * shares[number]
        if net >= best:
            best, length = net, number + 1
    return best, length
