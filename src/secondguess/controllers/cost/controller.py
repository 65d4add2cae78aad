"""Cost-based controller, the default: draft while the expected gain exceeds the cost.

A node is drafted if its expected gain in tokens, the probability S that it and all nodes before it are accepted,
exceeds its time multiplied by the rate of tokens that are gained otherwise:

    draft node k + 1   iff   S_{k+1}  >  rate * (T_draft + T_target(k + 2) - T_target(k + 1))

T_draft is a draft step, T_target(m) a target pass over m tokens. For the highest sustainable rate this rule is
optimal (optimal stopping of a renewal-reward process; SpecDec++, arXiv 2405.19715, has the threshold form,
SmartSpec, arXiv 2406.14066, the goodput). The rate is that of recent rounds and at least that of plain decoding.

The rest is in three files: `times.py` measures, `acceptance.py` estimates S, `choice.py` compares drafts. If nothing
pays, drafts are tried from time to time, and `loss_budget.py` bounds the time that all drafting may lose.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from secondguess.controllers.base import Controller
from secondguess.controllers.cost.acceptance import CONFIDENCE_EDGES, AcceptanceStats
from secondguess.controllers.cost.choice import Chooser, Proposal, first_with_ties
from secondguess.controllers.cost.loss_budget import FIRST_BUDGET, INCOME, LossBudget
from secondguess.controllers.cost.times import RoundTimes, mean_length
from secondguess.controllers.draft_probs import DraftProbs
from secondguess.core import MAX_DRAFT_LENGTH, Candidate, Draft, Plan, RoundTime, Row, Verdict
from secondguess.names import Name, check_range, options_with_argument, read_options

TRIAL_LENGTH = 2
"""Largest number of levels of a trial. With one level, the fixed cost of drafting may exceed any gain."""
FIRST_PAUSE, LONGEST_PAUSE = 8, 512
"""Rounds between trials while nothing pays: doubled by each trial that lost time."""
LONGEST_REST = 3
"""Largest number of rounds of a batch without planning after one in which nothing paid.

Planning takes 3 % of a round of 16 rows of a model of 135 M parameters.
"""
RATE_DECAY = 1 - 1 / 16
PLAIN_RATE_DECAY = 1 - 1 / 8
"""Decay of the rate of tokens in a round with drafts and in a plain one."""
MAX_SHARED_ROUNDS = 256
"""Largest number of rounds over which a drafter's prefill is charged, as a row may end early."""
RENEWAL_ROUNDS = 64
"""Least number of rounds between two renewals of the budget after changes of the machine's speed."""


@dataclass(frozen=True)
class CostOptions:
    """Options of `cost:LENGTH`.

    Args:
        length: maximum levels per round (in a chain, nodes), 0 to 64; 0 is plain decoding.
    """

    length: int = 16

    def __post_init__(self) -> None:
        check_range("the draft length of the controller cost", self.length, 0, MAX_DRAFT_LENGTH)


class Rate:
    """Decayed tokens per row and plain round, at least 1."""

    def __init__(self) -> None:
        self._tokens = self._time = 0.0

    @property
    def value(self) -> float:
        return max(self._tokens / self._time, 1.0) if self._time else 1.0

    def add(self, tokens: float, time: float, decay: float = RATE_DECAY) -> None:
        self._tokens = self._tokens * decay + tokens
        self._time = self._time * decay + time


class Trials:
    """Rounds until the next trial of a drafter that does not pay."""

    def __init__(self) -> None:
        self._pause = FIRST_PAUSE
        self._wait = 0

    def is_due(self, num_rounds: int) -> bool:
        """Return whether a trial is due in this round; `num_rounds` have passed since the last call, this one included."""
        self._wait -= num_rounds
        return self._wait < 0

    def record(self, gained: bool) -> None:
        """Record a trial; the next one follows at once if it gained."""
        self._wait = 0 if gained else self._pause
        self._pause = FIRST_PAUSE if gained else min(2 * self._pause, LONGEST_PAUSE)


class CostController(Controller):
    """Controller that weighs expected tokens against time, for each row in every round."""

    def __init__(self, options: CostOptions = CostOptions()) -> None:
        self.options = options
        self.name = "cost" if options == CostOptions() else f"cost:{options.length}"
        self.times = RoundTimes()
        self.budget = LossBudget()
        self._acceptance = AcceptanceStats()
        self._rates: defaultdict[Hashable, Rate] = defaultdict(Rate)
        self._trials: defaultdict[int, Trials] = defaultdict(Trials)
        self._chooser = Chooser(self.times, 1, 1.0)
        self._proposals: list[Proposal] = []
        self._rate = Rate()
        self._is_trial = False
        # Rounds without planning after the last plan, those that have passed, and the batch size.
        self._rest = self._rested = self._num_resting = 0
        self._is_renewable, self._since_renewal = False, RENEWAL_ROUNDS

    @classmethod
    def build(cls, name: Name) -> CostController:
        return cls(read_options(CostOptions, options_with_argument(name, "length"), "controller cost"))

    def begin_round(self, rows: Sequence[Row]) -> bool:
        self._proposals, self.measures_plain = [], False
        if any([row.sources or row.params.draft_length is not None for row in rows]):
            return True
        if self._rested < self._rest and len(rows) == self._num_resting:
            self._rested += 1
            return False
        return not self.budget.is_spent

    def plan(self, rows: Sequence[Row], candidates: Sequence[Sequence[Candidate]]) -> list[Plan]:
        self._proposals, self._is_trial = [], False
        # A round with drafts of requested lengths cannot be plain, and one of a single row whose draft is certain
        # would lose it; in a batch there may be no round without one.
        has_own = len(rows) == 1 and candidates[0][0].certain
        can_be_plain = not (has_own or any([row.params.draft_length for row in rows]))
        self.measures_plain = can_be_plain and self.times.needs_plain(len(rows), mean_length(rows))
        kind = next((candidate.kind for candidate in candidates[0] if candidate.longest), None)
        # Tokens inside a match are worth less than others, as decoding is fast there anyway.
        self._rate = self._rates[len(rows), kind if len(rows) == 1 else None]
        if self.times.knows_plain() and not (self.measures_plain or self.budget.is_spent):
            self._chooser = Chooser(self.times, len(rows), self._rate.value)
            self._proposals = self._choose(rows, candidates)
            self._plan_rest(len(rows))
        plans = [Plan(0, 0)] * len(rows)
        for proposal in self._proposals:
            plans[proposal.row] = Plan(proposal.candidate.part, proposal.length)
        return plans

    def _plan_rest(self, num_rows: int) -> None:
        """Set for how many rounds a batch of this size is not planned: twice as many as before if nothing pays."""
        before = self._rest if num_rows == self._num_resting else 0
        pays = bool(self._proposals) or num_rows == 1
        self._rest = 0 if pays else min(2 * before + 1, LONGEST_REST)
        self._rested, self._num_resting = 0, num_rows

    def _choose(self, rows: Sequence[Row], candidates: Sequence[Sequence[Candidate]]) -> list[Proposal]:
        """Return the drafts that pay, or a trial of the best one if none does and a trial is due."""
        best = []
        for index, (row, choices) in enumerate(zip(rows, candidates, strict=True)):
            # Certain drafts need no decision, and a row's own draft length replaces it.
            if row.params.draft_length is None and not choices[0].certain:
                proposals = [self._propose(index, row, choice) for choice in choices]
                best += sorted(filter(None, proposals), key=lambda proposal: -proposal.net)[:1]
        chosen = self._chooser.choose(best, rows)
        if not chosen and best:
            part = max(best, key=lambda proposal: proposal.net).candidate.part
            if self._trials[part].is_due(1 + self._rested) and self.budget.allows_trials:
                trial = first_with_ties(best, 1, rows)
                price = self._chooser.price(trial, TRIAL_LENGTH * len(trial)) / len(rows)
                for proposal in trial:
                    price += self.times.prefill_cost(part, proposal.candidate.num_uncached)
                # The expected price may be wrong, which only a trial can show.
                if self.budget.balance >= min(price, FIRST_BUDGET):
                    chosen, self._is_trial = trial, True
        for proposal in chosen:
            is_new = not proposal.survivals and self.times.is_new(proposal.candidate.part)
            if self._is_trial or is_new or not self.times.knows_passes():
                proposal.length = min(proposal.limit, TRIAL_LENGTH)
        return chosen

    def _propose(self, index: int, row: Row, candidate: Candidate) -> Proposal | None:
        """Return the draft of a candidate; None if it cannot have any nodes, or its prefill cannot be afforded."""
        longest = min(candidate.length_factor * self.options.length, MAX_DRAFT_LENGTH)
        most = row.params.max_draft_length
        # The last token is the target's.
        limit = min(candidate.longest, longest, row.room - 1, longest if most is None else most)
        if limit <= 0:
            return None
        acceptance = self._acceptance.of(row, candidate)
        if candidate.deterministic:
            survivals, gain, width = acceptance.survivals(limit), 0.0, limit
        else:
            survivals, (gain, mean) = [], acceptance.expected_draft
            width = min(max(round(mean), 1), limit)
        prefill = self._prefill_share(row, candidate, gain)
        if prefill is None:
            return None
        bonus = acceptance.exploration_bonus if self.budget.allows_trials else 0.0
        proposal = Proposal(index, candidate, acceptance, limit, prefill, survivals, gain, width, bonus)
        self._chooser.evaluate(proposal)
        return proposal

    def _prefill_share(self, row: Row, candidate: Candidate, gain: float) -> float | None:
        """Return the time of a drafter's prefill per remaining round of the row; None if it cannot be risked."""
        if not candidate.num_uncached:
            return 0.0
        cost = self.times.prefill_cost(candidate.part, candidate.num_uncached)
        if self.times.is_new(candidate.part) and cost > max(self.budget.balance / 2, row.room / 30):
            return None
        return cost / max(min(row.room / (1 + gain), MAX_SHARED_ROUNDS), 1.0)

    def keep_drafting(self, rows: Sequence[Row], draft_probs: DraftProbs, depth: int) -> list[bool]:
        answers = [False] * len(rows)
        confidences = draft_probs.acceptance_estimates if self._proposals else ()
        open_drafts: list[tuple[float, float, Proposal]] = []
        num_nodes = 0
        for proposal in self._proposals:
            if proposal.survivals:
                num_nodes += proposal.length
                continue
            if proposal.is_open:
                own, following = proposal.acceptance.node_probs()
                number = bisect_right(CONFIDENCE_EDGES, confidences[proposal.row])
                proposal.bins.append(number)
                proposal.survival *= own[number]
                proposal.is_open = False
                if depth + 1 < proposal.length:
                    share = following[number]
                    open_drafts.append((proposal.survival * share, share, proposal))
            num_nodes += len(proposal.bins)
        for proposal in self._chooser.extensions(open_drafts, num_nodes) if open_drafts else ():
            proposal.is_open = answers[proposal.row] = True
        return answers

    def learn(self, rows: Sequence[Row], draft: Draft, verdict: Verdict, time: RoundTime) -> None:
        lengths, num_rows = draft.num_levels, len(rows)
        self._acceptance.num_rounds += 1
        self._since_renewal += 1
        if not draft.num_nodes and not self._proposals:
            self._learn_plain(rows, time)
            return
        drafted = [proposal for proposal in self._proposals if lengths[proposal.row]]
        for proposal in self._proposals:
            # A row whose cache the drafter fills first has no draft yet.
            if lengths[proposal.row] or not proposal.candidate.num_uncached:
                accepted = verdict.lengths[proposal.row]
                proposal.acceptance.learn(
                    proposal.bins, lengths[proposal.row], accepted, self._acceptance.num_rounds
                )
        planned = [proposal.row for proposal in self._proposals]
        if not planned:
            return
        tokens = 1 + sum([verdict.lengths[row] for row in planned]) / num_rows
        if sum([lengths[row] for row in planned]) == sum(lengths):
            elapsed = self._learn_times(rows, drafted, lengths, time)
            self._rate.add(tokens, elapsed)
            excess = (time.total - time.prefill) / self.times.plain(num_rows) - elapsed
            self.budget.record(rows, tokens - elapsed, elapsed, excess)
        else:  # With other drafts, whose time is not that of the plan: the expected time counts.
            num_nodes = sum([lengths[row] for row in planned])
            elapsed = 1 + self._chooser.price(drafted, num_nodes) / (num_rows * self._chooser.rate)
            self.budget.record(rows, tokens - elapsed, elapsed)
        if self._is_trial:
            self._trials[self._proposals[0].candidate.part].record(tokens > elapsed)

    def _learn_plain(self, rows: Sequence[Row], time: RoundTime) -> None:
        """Learn from a round without drafts."""
        num_rows = len(rows)
        seconds = time.total - time.plan - time.prefill
        self._is_renewable |= self.times.add_plain(num_rows, mean_length(rows), seconds)
        if self._is_renewable and self._since_renewal >= RENEWAL_ROUNDS:
            self._is_renewable, self._since_renewal = False, 0
            self.budget.renew()
            self._trials.clear()
        self._rate.add(1, 1, PLAIN_RATE_DECAY)
        # At most half of the income, so that trials go on where planning takes long.
        self.budget.record(rows, -min(time.plan / self.times.plain(num_rows), INCOME / 2), 1)

    def _learn_times(
        self, rows: Sequence[Row], drafted: Sequence[Proposal], lengths: Sequence[int], time: RoundTime
    ) -> float:
        """Learn the times of a round with drafts; return what counts of it, in plain rounds."""
        num_rows = len(rows)
        if not drafted:
            return time.total / self.times.plain(num_rows)
        models = [proposal for proposal in drafted if not proposal.survivals]
        # Next to the draft steps of a model, the time of lookups is negligible; alone it is one of the pass.
        drafting = time.draft if models else 0.0
        elapsed = self.times.add_pass(num_rows, sum(lengths), time.total - time.prefill - drafting)
        if models:
            steps = [lengths[proposal.row] for proposal in models]
            part = models[0].candidate.part
            elapsed += self.times.add_draft(part, len(models), max(steps), drafting, num_rows)
        readers = [proposal for proposal in drafted if proposal.candidate.num_uncached]
        num_tokens = sum([proposal.candidate.num_uncached for proposal in readers])
        if num_tokens:
            cost = self.times.add_prefill(readers[0].candidate.part, num_tokens, num_rows, time.prefill)
            for proposal in readers:
                row, share = rows[proposal.row], proposal.candidate.num_uncached / num_tokens
                self.budget.defer(row, cost * share, min(row.room, MAX_SHARED_ROUNDS))
        return elapsed

    def release(self, row: Row) -> None:
        self.budget.release(row)
