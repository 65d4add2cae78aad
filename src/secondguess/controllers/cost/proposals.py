"""Expected gain and cost of drafting for one row, and the choice of its best draft candidate.

The length of a draft model's draft is decided while drafting, so its gain is the average of
similar drafts. A lookup candidate is evaluated node by node in advance.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import attrgetter
from typing import NamedTuple

from secondguess.controllers.cost.cost_model import CostModel
from secondguess.controllers.cost.expectations import Expectations, KindStats
from secondguess.core import MAX_DRAFT_LENGTH, Candidate, Row

PREFILL_MARGIN = 1.2
"""Factor by which the gain must exceed the amortised cost of a drafter's prefill."""
SURVIVALS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
"""Probabilities of a lookup node and all before it being accepted at which the lookup drafts of a batch may be cut."""


class Estimate(NamedTuple):
    """Expectations about drafts of one kind, which rows with equal candidates and histories share.

    Args:
        kind: statistics of similar drafts.
        gain, width: expected number of tokens gained and of nodes drafted.
        gains: for lookup, the expected tokens gained by the first 0, 1, 2, ... nodes; else empty.
        lengths: for lookup, the number of nodes with at least each of the probabilities `SURVIVALS`; else empty.
        exploration_bonus: tokens that a draft might gain beyond the expectation.
        appears: share of planned drafts that have any nodes.
        net: expected tokens, bonus included, less the cost converted to tokens.
        best_length: for lookup, the number of nodes with this net gain.
    """

    kind: KindStats
    gain: float
    width: int
    gains: Sequence[float]
    lengths: Sequence[int]
    exploration_bonus: float
    appears: float
    net: float
    best_length: int


@dataclass(slots=True, eq=False)
class DraftProposal:
    """Best draft candidate of one row in a round.

    Args:
        row: index of the row in the batch.
        candidate: the candidate.
        estimate: expectations about it.
        length: maximum number of nodes.
        prefill_seconds: seconds of drafter prefill, amortised over the row's remaining rounds.
        net: `estimate.net` less the prefill.
        part, deterministic: those of the candidate.
        confidence_bins, survival, continues: bins of the confidences of the nodes drafted, the
            probability that all of them are accepted, and whether drafting continues.
    """

    row: int
    candidate: Candidate
    estimate: Estimate
    length: int
    prefill_seconds: float
    net: float
    part: int = field(init=False)
    deterministic: bool = field(init=False)
    confidence_bins: list[int] = field(init=False)
    survival: float = field(init=False)
    continues: bool = field(init=False)

    def __post_init__(self) -> None:
        self.part, self.deterministic = self.candidate.part, self.candidate.deterministic
        self.restart()

    def restart(self) -> None:
        """Begin a draft."""
        self.confidence_bins, self.survival, self.continues = [], 1.0, True


class ProposalMaker:
    """Factory of `DraftProposal` objects.

    Args:
        expectations: acceptance statistics.
        cost_model: costs in the current round.
        longest: maximum number of nodes of a draft, unless its `Candidate.length_factor` permits more.
    """

    def __init__(self, expectations: Expectations, cost_model: CostModel, longest: int) -> None:
        self._expectations, self._cost_model, self._longest = expectations, cost_model, longest

    def best(self, rows: Sequence[Row], candidates: Sequence[Sequence[Candidate]]) -> list[DraftProposal]:
        """Return the best candidate of each row that has one, the first of equals; best rows first."""
        estimates: dict[Hashable, Estimate] = {}
        found = [
            self._best_of_row(index, row, candidates[index], len(rows), estimates)
            for index, row in enumerate(rows)
            if row.params.draft_length is None  # else that takes precedence
        ]
        proposals = [proposal for proposal in found if proposal is not None]
        if len(rows) > 1:
            proposals.sort(key=attrgetter("net"), reverse=True)
        return proposals

    def _best_of_row(
        self,
        index: int,
        row: Row,
        choices: Sequence[Candidate],
        num_rows: int,
        estimates: dict[Hashable, Estimate],
    ) -> DraftProposal | None:
        best = None
        # The last token is the target's.
        params, room, rate_bin = row.params, row.room - 1, self._expectations.rate_bin(row)
        limit = room if params.max_draft_length is None else min(params.max_draft_length, room)
        row_key = row.coupled, params.temperature, rate_bin
        for candidate in choices:
            longest = min(candidate.length_factor * self._longest, MAX_DRAFT_LENGTH)
            length = min(candidate.longest, longest, limit)
            if length <= 0:
                continue
            # Without the prefill, which differs between rows.
            key = row_key, candidate.part, candidate.kind, candidate.deterministic, length, longest
            estimate = estimates.get(key)
            if estimate is None:
                kind = self._expectations.kind(row, candidate)
                estimate = estimates[key] = self._estimate(
                    kind, rate_bin, candidate, length, longest, num_rows
                )
            prefill = self._prefill_seconds(row, candidate, estimate) if candidate.num_uncached else 0.0
            net = estimate.net - self._cost_model.rate * prefill
            if best is None or net > best[0]:
                best = net, candidate, estimate, length, prefill
        if best is None:
            return None
        net, candidate, estimate, length, prefill = best
        if num_rows == 1 and estimate.gains:
            length = estimate.best_length
        return DraftProposal(index, candidate, estimate, length, prefill, net)

    def _estimate(
        self, kind: KindStats, rate_bin: int, candidate: Candidate, length: int, longest: int, num_rows: int
    ) -> Estimate:
        expectations, rate = self._expectations, self._cost_model.rate
        gain, mean_width, exploration_bonus, appears = expectations.draft_expectations(kind, rate_bin)
        shares = self._cost_model.shares(candidate.part, longest)
        gains: Sequence[float] = ()
        lengths: Sequence[int] = ()
        if candidate.deterministic:
            survivals = expectations.survivals(kind, length)
            gains = list(accumulate(survivals, initial=0.0))
            lengths = _lengths_by_survival(survivals) if num_rows > 1 else ()
            width = length
            net, best_length = _best_length(gains, rate, shares)
        else:
            width, best_length = max(round(mean_width), 1), 0
            net = gain - rate * shares[min(width, longest) - 1]
        net = appears * (net + exploration_bonus)
        return Estimate(kind, gain, width, gains, lengths, exploration_bonus, appears, net, best_length)

    def _prefill_seconds(self, row: Row, candidate: Candidate, estimate: Estimate) -> float:
        """Return the seconds of a drafter's prefill per round.

        It serves all remaining rounds of the row, but takes its time before any gain.
        """
        seconds = self._cost_model.times.prefill_seconds(candidate.part, candidate.num_uncached)
        return PREFILL_MARGIN * seconds / max(row.room / (1 + estimate.gain), 1.0)


def _lengths_by_survival(survivals: Sequence[float]) -> list[int]:
    """Return the number of nodes with at least each of the probabilities `SURVIVALS`, given theirs in descending order."""
    ascending = survivals[::-1]
    return [len(ascending) - bisect_left(ascending, least) for least in SURVIVALS]


def _best_length(gains: Sequence[float], rate: float, shares: Sequence[float]) -> tuple[float, int]:
    """Return the highest net gain of the first nodes of a lookup draft, and their number; the most of equals."""
    nets = [gain - rate * share for gain, share in zip(gains[1:], shares, strict=False)]
    best = max(nets)
    return best, len(nets) - nets[::-1].index(best)
