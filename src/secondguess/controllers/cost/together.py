"""Which drafts of a batch pay together: its rows wait for the longest draft, and share what a draft step costs.

Rows that are alike are treated alike. If their places in the batch decided, whether a row is drafted for would depend on what
has nothing to do with it; an enumeration, whose batch holds a row's every fate, would take that for foresight. Where only a
few of many can be taken, their texts decide between those that are worth the same.
"""

from __future__ import annotations

from collections.abc import Sequence

from secondguess.controllers.cost.offers import Offer
from secondguess.controllers.cost.prices import Prices
from secondguess.core import Row

WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Longest drafts that are weighed for a batch, whose rows wait for each other."""


def worthwhile(offers: Sequence[Offer], rows: Sequence[Row], prices: Prices) -> list[Offer]:
    """The offers that pay together, their lengths cut to what is best for all."""
    if len(rows) == 1:  # it waits for nobody
        return [offer for offer in offers if offer.net > 0]
    # What is found out is found out once, however many rows take part.
    doubt = max((offer.doubt for offer in offers), default=0.0)
    longest = max((offer.width for offer in offers), default=0)
    best, taken, best_width = 0.0, [], 0
    for width in WIDTHS:
        net, chosen = _together(offers, rows, width, prices)
        if chosen and net + doubt > best:
            best, taken, best_width = net + doubt, chosen, width
        if width >= longest:
            break
    for offer in taken:
        if offer.certain:
            offer.length = min(offer.length, best_width, offer.num_likely)
    return [offer for offer in taken if offer.length]


def _together(
    offers: Sequence[Offer], rows: Sequence[Row], width: int, prices: Prices
) -> tuple[float, list[Offer]]:
    """What drafts of at most so many nodes bring a batch, in tokens net of their price, and whose they are."""
    rate = prices.rate
    chosen = [offer for offer in offers if offer.certain]
    net = sum(offer.worth(width) for offer in chosen) - rate * prices.wider(0, width)
    models = [(offer.worth(width), offer) for offer in offers if not offer.certain]
    models.sort(key=_first, reverse=True)
    total, best, best_count = 0.0, 0.0, 0
    for count, (worth, offer) in enumerate(models, start=1):
        total += worth - rate * offer.reading
        with_these = total - rate * prices.drafting(offer.part, count, min(width, offer.width))
        if with_these > best:
            best, best_count = with_these, count
    best_count = _with_equals([worth for worth, _ in models], best_count)
    if models:
        # A drafter may cost anything, and reading a whole batch only to find that out is dear: it is tried on one row
        # first, and then on at most twice as many as before. (The batch is judged by what all would bring.)
        most = max(2 * prices.times.most_rows(models[0][1].part), 1)
        chosen += first_few(models[:best_count], most, rows)
    return net + best, chosen


def first_few(ordered: Sequence[tuple[float, Offer]], count: int, rows: Sequence[Row]) -> list[Offer]:
    """The best few: of those that are worth the same the ones whose text comes first, and all that have the same text.

    Args:
        ordered: offers and what they are worth, best first.
    """
    if count >= len(ordered):
        return [offer for _, offer in ordered]
    least = ordered[count - 1][0]
    better = [offer for value, offer in ordered if value > least]
    equal = [(rows[offer.row].tokens, offer) for value, offer in ordered if value == least]
    last = sorted(tokens for tokens, _ in equal)[count - len(better) - 1]
    return better + [offer for tokens, offer in equal if tokens <= last]


def worth_another(chances: list[tuple[float, Offer]], wider: float, prices: Prices) -> list[Offer]:
    """Whose drafts should get another node.

    Args:
        chances: per row that could, that the node is accepted.
        wider: seconds by which the node makes the rest of the round dearer, however many rows have it.
    """
    rate = prices.rate
    if len(chances) == 1:
        chance, offer = chances[0]
        return [offer] if chance > rate * (prices.step(offer.part, 1) + wider) else []
    ordered = sorted(chances, key=_first, reverse=True)
    total, best, best_count = 0.0, 0.0, 0
    for count, (chance, offer) in enumerate(ordered, start=1):
        total += chance
        net = total - rate * (prices.step(offer.part, count) + wider)
        if net > best:
            best, best_count = net, count
    best_count = _with_equals([chance for chance, _ in ordered], best_count)
    return [offer for _, offer in ordered[:best_count]]


def _first(pair: tuple[float, Offer]) -> float:
    return pair[0]


def _with_equals(values: Sequence[float], count: int) -> int:
    """Of values in falling order the first `count`, and those that equal the last of them."""
    while 0 < count < len(values) and values[count] == values[count - 1]:
        count += 1
    return count
