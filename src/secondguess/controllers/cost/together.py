"""Selection of the drafts that pay together in a batch.

The rows of a batch wait for the longest draft and share the cost of draft steps. Rows with equal
values are treated alike. If positions in the batch decided, whether a row is drafted for would
depend on something unrelated to it, and the exact enumeration (`enumeration.py`), whose batch
holds all possible outcomes of a row, would report that as anticipation. If only a few of many rows
can be taken, ties are broken by their tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from secondguess.controllers.cost.offers import Offer
from secondguess.controllers.cost.prices import Prices
from secondguess.core import Row

WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Maximum draft lengths that are considered for a batch."""


def worthwhile(offers: Sequence[Offer], rows: Sequence[Row], prices: Prices) -> list[Offer]:
    """Return the candidates that pay together, with lengths cut to the best one for the batch."""
    if len(rows) == 1:
        return [offer for offer in offers if offer.net > 0]
    # The exploration bonus counts once, however many rows are drafted for.
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
    """Return the net gain in tokens of drafts of at most `width` nodes, and the candidates."""
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
        # A new drafter's cost is unknown, and prefilling a whole batch only to measure it is
        # expensive: it is tried on one row first, then on at most twice as many as before. (The
        # net gain is that of all rows.)
        most = max(2 * prices.times.most_rows(models[0][1].part), 1)
        chosen += first_few(models[:best_count], most, rows)
    return net + best, chosen


def first_few(ordered: Sequence[tuple[float, Offer]], count: int, rows: Sequence[Row]) -> list[Offer]:
    """Return the best `count` candidates.

    Ties are broken by the order of the rows' tokens; rows with the same tokens are taken together,
    so there may be more than `count`.

    Args:
        ordered: values and candidates, best first.
        count: number of candidates wanted.
        rows: the batch.
    """
    if count >= len(ordered):
        return [offer for _, offer in ordered]
    least = ordered[count - 1][0]
    better = [offer for value, offer in ordered if value > least]
    equal = [(rows[offer.row].tokens, offer) for value, offer in ordered if value == least]
    last = sorted(tokens for tokens, _ in equal)[count - len(better) - 1]
    return better + [offer for tokens, offer in equal if tokens <= last]


def worth_another(chances: list[tuple[float, Offer]], wider: float, prices: Prices) -> list[Offer]:
    """Return the candidates whose drafts should get another node.

    Args:
        chances: the probability that the node is accepted, for each row that could get one.
        wider: seconds that the node adds to the rest of the round, however many rows have it.
        prices: costs in the current round.
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
    """Return `count`, increased to include all descending `values` equal to the last one."""
    while 0 < count < len(values) and values[count] == values[count - 1]:
        count += 1
    return count
