"""Choice of the drafts that pay: tokens that they are expected to gain, less their time at the present rate.

Rows with equal values are treated alike, and where only a few of many rows can be taken, ties are broken by their
tokens: a decision that depended on positions in the batch would depend on something unrelated to the row, which the
exact enumeration (`proof/enumeration.py`), whose batch holds all outcomes of a row, would report as anticipation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate

from secondguess.controllers.cost.acceptance import Acceptance
from secondguess.controllers.cost.times import RoundTimes
from secondguess.core import Candidate, Row

LOOKAHEADS = (1, 2, 4)
"""Numbers of further levels that are considered together."""


@dataclass(slots=True, eq=False)
class Proposal:
    """Draft of a candidate that is considered for a row."""

    row: int  # index of the row in the batch
    candidate: Candidate
    acceptance: Acceptance
    limit: int  # largest number of levels that are possible
    prefill: float  # share of the drafter's prefill in a round, in plain rounds
    survivals: list[float]  # of a lookup, the probabilities that its first 1, 2, ... nodes are accepted
    gain: float  # expected number of tokens gained
    width: int  # expected number of nodes
    bonus: float  # tokens that it might gain beyond `gain`
    net: float = 0.0  # gain and bonus, less its time at the present rate, if it were the only draft
    length: int = 0  # largest number of levels to draft
    # While drafting: bins of the nodes' confidences, the probability that all nodes are accepted, and whether
    # another may follow.
    bins: list[int] = field(default_factory=list)
    survival: float = 1.0
    is_open: bool = True


@dataclass
class Chooser:
    """Choice of drafts at measured times and a rate."""

    times: RoundTimes
    num_rows: int  # batch size
    rate: float  # tokens per row and plain round that are gained otherwise
    pass_costs: dict[int, float] = field(default_factory=dict)

    def pass_cost(self, num_nodes: int) -> float:
        """Return what so many nodes add to the target's pass, in plain rounds."""
        cost = self.pass_costs.get(num_nodes)
        if cost is None:
            cost = self.pass_costs[num_nodes] = self.times.pass_cost(self.num_rows, num_nodes)
        return cost

    def most_rows(self, part: int) -> int:
        """Return for how many rows a part may draft: four times as many as before, as the cost is unknown at first."""
        return max(4 * self.times.most_rows(part), 1)

    def price(self, proposals: Sequence[Proposal], num_nodes: int) -> float:
        """Return the tokens per row that could be gained in the time of drafts with so many nodes in all."""
        time = self.pass_cost(num_nodes)
        if proposals:
            line = self.times.draft_line(proposals[0].candidate.part, len(proposals))
            if line is not None:
                time += line.at(round(sum([proposal.width for proposal in proposals]) / len(proposals)))
            time += sum([proposal.prefill for proposal in proposals])
        return self.num_rows * self.rate * time

    def evaluate(self, proposal: Proposal) -> None:
        """Set the net gain of a proposal, and the length of a lookup."""
        if not proposal.survivals:
            proposal.length = proposal.limit
            proposal.net = proposal.gain + proposal.bonus - self.price([proposal], proposal.width)
            return
        gains = list(accumulate(proposal.survivals))
        proposal.net, proposal.length = max(
            (gain - self.price((), length), length) for length, gain in enumerate(gains, start=1)
        )
        proposal.net += proposal.bonus

    def choose(self, proposals: Sequence[Proposal], rows: Sequence[Row]) -> list[Proposal]:
        """Return the drafts that pay together, lookups cut where their nodes do not pay."""
        if self.num_rows == 1:
            return [proposal for proposal in proposals if proposal.net > 0]
        lookups = [proposal for proposal in proposals if proposal.survivals]
        models = [proposal for proposal in proposals if not proposal.survivals]
        models.sort(key=lambda proposal: proposal.gain, reverse=True)
        # Several models would draft one after the other, each for its rows.
        models = [proposal for proposal in models if proposal.candidate.part == models[0].candidate.part]
        bonus = max([proposal.bonus for proposal in lookups], default=0.0)
        nodes = sorted([value for proposal in lookups for value in proposal.survivals], reverse=True)
        gains = [proposal.gain + proposal.bonus for proposal in models]
        num_nodes = num_models = 0
        widths = list(accumulate([proposal.width for proposal in models], initial=0))

        def price(num_nodes: int, num_models: int) -> float:
            return self.price(models[:num_models], num_nodes + widths[num_models])

        # The time of the pass over all nodes depends on both numbers, so each is chosen given the other.
        for _ in range(2):
            num_nodes = best_count(nodes, partial(price, num_models=num_models), bonus)
            num_models = best_count(gains, partial(price, num_nodes))
        least = nodes[num_nodes - 1] if num_nodes else 2.0
        for proposal in lookups:
            proposal.length = sum([value >= least for value in proposal.survivals])
        if num_models:
            most = self.most_rows(models[0].candidate.part)
            models = first_with_ties(models[:num_models], most, rows)
        return [proposal for proposal in lookups if proposal.length] + models[: num_models and len(models)]

    def extensions(
        self, open_drafts: Sequence[tuple[float, float, Proposal]], num_nodes: int
    ) -> Iterator[Proposal]:
        """Yield the drafts that get another level.

        Args:
            open_drafts: per draft, the probabilities that its next node and, if it is, the one after it are accepted.
            num_nodes: number of nodes of all drafts.
        """
        ordered = sorted(open_drafts, key=lambda draft: draft[0], reverse=True)
        part = ordered[0][2].candidate.part

        def price(count: int, num_levels: int) -> float:
            if not count:
                return 0.0
            line = self.times.draft_line(part, count)
            steps = 0.0 if line is None else line.slope * num_levels
            extra = self.pass_cost(num_nodes + count * num_levels) - self.pass_cost(num_nodes)
            return self.num_rows * self.rate * (steps + extra)

        # A single further level may cost too much where the time of a pass jumps, and several may pay.
        for num_levels in LOOKAHEADS:
            gains = [prob * sum([share**level for level in range(num_levels)]) for prob, share, _ in ordered]
            count = best_count(gains, partial(price, num_levels=num_levels))
            if count:
                break
        return (proposal for *_, proposal in ordered[:count])


def best_count(values: Sequence[float], price: Callable[[int], float], bonus: float = 0.0) -> int:
    """Return how many of descending values to take for the largest sum less its price; all or none of equal values."""
    nothing = price(0) if values else 0.0
    best, taken, total = 0.0, 0, bonus
    for count, value in enumerate(values, start=1):
        total += value
        if count < len(values) and values[count] == value:
            continue
        net = total - price(count) + nothing
        if net > best:
            best, taken = net, count
    return taken


def first_with_ties(ordered: Sequence[Proposal], count: int, rows: Sequence[Row]) -> list[Proposal]:
    """Return the first `count` proposals by net gain; of equal ones those of the first rows by tokens, equal rows together."""
    if count >= len(ordered):
        return list(ordered)
    ranked = sorted(ordered, key=lambda proposal: (-proposal.net, rows[proposal.row].tokens))
    last = ranked[count - 1]
    limit = -last.net, rows[last.row].tokens
    return [proposal for proposal in ranked if (-proposal.net, rows[proposal.row].tokens) <= limit]
