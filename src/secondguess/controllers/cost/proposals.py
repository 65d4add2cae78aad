"""Expected gain and cost of drafting for one row, and the choice of its best draft candidate.

The length of a draft model's draft is decided while drafting, so its gain is the average of
similar drafts. A lookup candidate is evaluated node by node in advance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from secondguess.controllers.cost.cost_model import CostModel
from secondguess.controllers.cost.expectations import Expectations, KindStats
from secondguess.core import MAX_DRAFT_LENGTH, Candidate, Row

PREFILL_MARGIN = 1.2
"""Factor by which the gain must exceed the amortised cost of a drafter's prefill."""
MIN_SURVIVAL = 0.1
"""Probability of a lookup draft's first nodes being accepted at which the draft is cut.

The cut applies even if the row has to wait for longer drafts of other rows anyway.
"""


@dataclass(slots=True, eq=False)
class DraftProposal:
    """Best draft candidate of one row in a round.

    Args:
        row: index of the row in the batch.
        candidate: the candidate.
        kind: statistics of similar drafts.
        length: maximum number of nodes.
        gain, width: expected number of tokens gained and of nodes drafted.
        survivals: for lookup, the probabilities that its first 1, 2, ... nodes are all accepted.
        exploration_bonus: tokens that it might gain beyond the expectation.
        prefill_seconds: seconds of drafter prefill, amortised over the row's remaining rounds.
        net: expected tokens, bonus included, less the cost converted to tokens.
        part, deterministic: those of the candidate.
        seen, survival, goes_on: confidence bins of the nodes drafted, the probability that all of
            them are accepted, and whether drafting goes on.
    """

    row: int
    candidate: Candidate
    kind: KindStats
    length: int
    gain: float
    width: int
    survivals: Sequence[float]
    exploration_bonus: float
    prefill_seconds: float
    net: float
    part: int = field(init=False)
    deterministic: bool = field(init=False)
    seen: list[int] = field(init=False)
    survival: float = field(init=False)
    goes_on: bool = field(init=False)

    def __post_init__(self) -> None:
        self.part, self.deterministic = self.candidate.part, self.candidate.deterministic
        self.restart()

    def restart(self) -> None:
        """Begin a draft."""
        self.seen, self.survival, self.goes_on = [], 1.0, True

    @property
    def num_likely(self) -> int:
        """Number of nodes likely enough to be drafted if the row has to wait for others anyway."""
        return sum(survival >= MIN_SURVIVAL for survival in self.survivals)

    def expected_tokens(self, width: int) -> float:
        """Return the expected tokens gained by a draft of at most `width` nodes."""
        if self.deterministic:
            return sum(self.survivals[:width])
        return self.gain * min(width / self.width, 1.0)


class ProposalMaker:
    """Factory of `DraftProposal` objects.

    Args:
        expectations: acceptance statistics.
        cost_model: costs in the current round.
        longest: maximum number of nodes of a draft, unless its `Candidate.length_factor` permits more.
    """

    def __init__(self, expectations: Expectations, cost_model: CostModel, longest: int) -> None:
        self._expectations, self._cost_model, self._longest = expectations, cost_model, longest

    def best(self, index: int, row: Row, choices: Sequence[Candidate], num_rows: int) -> DraftProposal | None:
        """Return the best candidate of one row, the first of equals; None if there is none.

        Args:
            index: of the row in the batch.
            row: the row.
            choices: its draft candidates.
            num_rows: batch size.
        """
        # A row's own `draft_length` takes precedence; its last token is the target's.
        params = row.params
        if not self._longest or params.draft_length is not None or params.max_draft_length == 0:
            return None
        room = row.room
        if room <= 1:
            return None
        best = None
        for candidate in choices:
            if candidate.longest > 0:
                proposal = self._make(index, row, room, candidate, num_rows)
                if best is None or proposal.net > best.net:
                    best = proposal
        return best

    def _make(self, index: int, row: Row, room: int, candidate: Candidate, num_rows: int) -> DraftProposal:
        expectations, cost_model = self._expectations, self._cost_model
        kind = expectations.kind(row, candidate)
        gain, mean_width, exploration_bonus, appears = expectations.of_draft(row, kind)
        limit = row.params.max_draft_length
        longest = min(candidate.length_factor * self._longest, MAX_DRAFT_LENGTH)
        length = min(candidate.longest, longest if limit is None else min(limit, longest), room - 1)
        rate, shares = cost_model.rate, cost_model.shares(candidate.part, longest)
        survivals: Sequence[float] = ()
        if candidate.deterministic:
            width = length
            survivals = expectations.survivals(kind, length)
            net, best_length = _best_length(survivals, rate, shares)
            if num_rows == 1:
                length = best_length
        else:
            width = max(round(mean_width), 1)
            net = gain - rate * shares[min(width, longest) - 1]
        prefill_seconds = 0.0
        if candidate.num_uncached:
            # Prefill serves all remaining rounds of the row, but takes its time before any gain.
            seconds = cost_model.times.prefill_seconds(candidate.part, candidate.num_uncached)
            prefill_seconds = PREFILL_MARGIN * seconds / max(room / (1 + gain), 1.0)
        net = appears * (net + exploration_bonus) - rate * prefill_seconds
        return DraftProposal(
            index, candidate, kind, length, gain, width, survivals, exploration_bonus, prefill_seconds, net
        )


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
