"""Cost-based controller, the default: draft while the expected gain exceeds the cost.

A node is drafted if its expected gain in tokens, the probability S that it and all nodes before it
are accepted, exceeds its cost in seconds times the rate of tokens per second available otherwise:

    draft node k + 1   iff   S_{k+1}  >  rate * (T_draft + T_target(k + 2) - T_target(k + 1))

T_draft is a draft step, T_target(m) a target pass over m tokens. For the highest sustainable rate
this policy is optimal (optimal stopping of a renewal-reward process; SpecDec++, arXiv 2405.19715,
has the threshold form, SmartSpec, arXiv 2406.14066, the goodput). The rate is that of recent
rounds and at least that of plain decoding, so the threshold adapts to text, load and machine.

S is estimated from what the verifier in use accepted: for a draft model from its calibrated
confidences, for n-gram and suffix lookup by position and length of the match. Whether to draft at
all is decided by the recent gain of similar drafts. If nothing pays, rounds are plain (without
drafts), and the cost of further trials is bounded (`loss_limits.py`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from secondguess.controllers.base import Controller
from secondguess.controllers.cost.backoff import Backoffs
from secondguess.controllers.cost.batch_selection import best_with_ties, select_extensions, worthwhile
from secondguess.controllers.cost.cost_model import CostModel
from secondguess.controllers.cost.expectations import CONFIDENCE_EDGES, Expectations
from secondguess.controllers.cost.loss_limits import SERIES, LossGuard, ProbeBudget
from secondguess.controllers.cost.proposals import DraftProposal, ProposalMaker
from secondguess.controllers.cost.round_buffers import (
    Decision,
    DraftedRound,
    DraftedRoundBuffer,
    PlainRoundBuffer,
    PlainRounds,
)
from secondguess.controllers.cost.round_times import RoundTimes, mean_length
from secondguess.controllers.draft_probs import DraftProbs
from secondguess.core import (
    MAX_DRAFT_LENGTH,
    Candidate,
    Draft,
    Plan,
    RoundTime,
    Row,
    Verdict,
)
from secondguess.names import Name, check_range, options_with_argument, read_options

PLAIN = Plan(0, 0)
NOTHING = (Candidate(longest=0, deterministic=True),)
PROBE_LENGTH = 2
"""Maximum levels of a probe. With one level, the fixed cost of drafting may exceed any gain."""
INITIAL_MAX_LENGTH = 2
"""Maximum levels of drafts whose cost is not known yet."""


@dataclass(frozen=True)
class CostOptions:
    """Options of `cost:LENGTH`.

    Args:
        length: maximum levels per round (in a chain, nodes), 0 to 64; 0 is plain decoding.
    """

    length: int = 16

    def __post_init__(self) -> None:
        check_range("the draft length of the controller cost", self.length, 0, MAX_DRAFT_LENGTH)


class CostController(Controller):
    """Controller that weighs expected tokens against time, for each row in every round."""

    def __init__(self, options: CostOptions = CostOptions()) -> None:
        self.options = options
        self.name = "cost" if options == CostOptions() else f"cost:{options.length}"
        self.probe_budget = ProbeBudget()
        self.guard = LossGuard()
        self.expectations = Expectations()
        self._cost_model = CostModel()
        self._proposal_maker = ProposalMaker(self.expectations, self._cost_model, options.length)
        self._decision = Decision()
        self._backoffs = Backoffs(self.expectations.rate_bin)
        self._in_backoff = False
        self._is_paused = False
        self._num_pausable = self._num_paused = 0  # rounds: that may be paused, and since `plan`
        self._paused_plan = 0.0  # time of planning and learning in paused rounds
        self._num_certain = 0
        self._buffered = PlainRoundBuffer()
        self._drafted = DraftedRoundBuffer()

    @classmethod
    def build(cls, name: Name) -> CostController:
        return cls(read_options(CostOptions, options_with_argument(name, "length"), "controller cost"))

    @property
    def times(self) -> RoundTimes:
        """Measured times of rounds."""
        return self._cost_model.times

    @times.setter
    def times(self, times: RoundTimes) -> None:
        self._cost_model.times = times

    def plan(self, rows: Sequence[Row], candidates: Sequence[Sequence[Candidate]]) -> list[Plan]:
        num_rounds = 1 + self._num_paused
        self._num_paused = 0
        self.measures_plain = False
        candidates = self._without_certain(candidates)
        paused = self._backoffs.cover(rows, candidates, num_rounds)
        decision = None
        if not (paused and self._in_backoff):
            decision = self._drafted.decision(rows, candidates)
            if decision is None:
                # A series of probes is continued even if all candidates are in backoff.
                self._in_backoff = paused and not self._decision.is_probe
            else:
                self._cost_model.rate = decision.rate
        if decision is None:
            decision = self._decide(rows, candidates)
        self._decision = decision
        plans = [PLAIN] * len(rows)
        for proposal in decision.proposals:
            proposal.restart()
            proposal.length = min(proposal.length, rows[proposal.row].room - 1)
            plans[proposal.row] = Plan(proposal.part, proposal.length)
        return plans

    def begin_round(self, rows: Sequence[Row]) -> bool:
        self._is_paused = self._num_pausable > 0 and tuple(rows) == self._buffered.rows
        if self._is_paused:
            self._num_pausable -= 1
            self._num_paused += 1
        return not self._is_paused

    def _num_unplanned(self, rows: Sequence[Row], num_constant: int = 0) -> int:
        """Return for how many rounds after this one, which has no drafts, nothing has to be planned.

        Args:
            num_constant: number of rounds for which the candidates stay the same and in backoff.
        """
        if any([row.sources or row.params.draft_length is not None for row in rows]):
            return 0
        num_rounds = max(num_constant, self.times.num_unplanned(len(rows)))
        return num_rounds and min(num_rounds, self._buffered.room)

    def _pause(self, num_rounds: int) -> None:
        """Pause for some rounds after this one, which is learned from with them."""
        if num_rounds:
            self._in_backoff, self._num_pausable = True, num_rounds

    def _without_certain(self, candidates: Sequence[Sequence[Candidate]]) -> Sequence[Sequence[Candidate]]:
        """Return the candidates, none for rows whose draft is certain: these need no decision."""
        self._num_certain = sum([choices[0].certain for choices in candidates])
        if not self._num_certain:
            return candidates
        return [NOTHING if choices[0].certain else choices for choices in candidates]

    def _decide(self, rows: Sequence[Row], candidates: Sequence[Sequence[Candidate]]) -> Decision:
        """Return the decision for a round; a settled one is reused until the controller learns."""
        was_probe, rate_key = self._decision.is_probe, _rate_key(candidates)
        if self._in_backoff:
            self._learn_drafted()
            self._num_pausable = self._num_unplanned(rows, self._backoffs.num_constant(candidates))
            return Decision(rate_key)
        if self._drafted.rows != tuple(rows):
            self._learn_drafted()
            self._drafted.begin(rows)
        self._learn_buffered()
        decision, proposals = self._evaluate(rows, candidates, rate_key)
        if self._drafted and not decision.is_settled:  # what the buffered rounds show may change it
            self._learn_drafted()
            decision, proposals = self._evaluate(rows, candidates, rate_key)
        if self.measures_plain:
            return decision
        if self.guard.is_stopped:
            self._pause(self._num_unplanned(rows))
            return decision
        if decision.proposals:
            self.probe_budget.record_success()
        elif proposals:
            best = best_with_ties([(proposal.net, proposal) for proposal in proposals], 1, rows)
            decision.proposals = self._probe(best, rows, was_probe)
            decision.is_probe = bool(decision.proposals)
            decision.explores = decision.is_probe and len(rows) > 1
        if not decision.proposals:
            self._backoffs.begin()
            self._pause(self._num_unplanned(rows))
        elif not decision.is_probe:
            self._backoffs.end()
        self._limit_lengths(decision, len(rows))
        if decision.is_settled:
            self._drafted.keep(candidates, decision)
        return decision

    def _evaluate(
        self, rows: Sequence[Row], candidates: Sequence[Sequence[Candidate]], rate_key: Hashable
    ) -> tuple[Decision, list[DraftProposal]]:
        """Return the decision to draft what pays, and the best candidates of all rows, best first.

        Nothing is drafted while plain decoding is measured or drafting is stopped.
        """
        context = self.times.context = mean_length(rows)
        self.measures_plain = self.times.needs_plain(len(rows), context)
        if self.guard.is_stopped or self.measures_plain:
            return Decision(rate_key), []
        self._cost_model.enter(len(rows), rate_key)
        proposals = self._proposal_maker.best(rows, candidates)
        drafts = worthwhile(proposals, rows, self._cost_model)
        taken = drafts.chosen
        is_settled = bool(taken) and all(map(_is_settled, taken)) and not drafts.is_trial
        rate, explores = self._cost_model.rate, drafts.is_trial
        return Decision(rate_key, rate, taken, explores=explores, is_settled=is_settled), proposals

    def _limit_lengths(self, decision: Decision, num_rows: int) -> None:
        """Limit drafts whose cost is not known yet, which explore.

        Lookups cost nothing but a longer target pass.
        """
        for proposal in decision.proposals:
            is_new = self.times.is_new(proposal.part) and not proposal.deterministic
            if is_new or not self.times.has_timed_drafts:
                proposal.length = min(proposal.length, INITIAL_MAX_LENGTH)
                if num_rows > 1:
                    decision.explores, decision.is_settled = True, False

    def _probe(
        self, proposals: list[DraftProposal], rows: Sequence[Row], was_probing: bool
    ) -> list[DraftProposal]:
        """Return these candidates shortened to probes if the probe budget allows it, else none.

        Probes come in series: the first one needs a budget for all of them.
        """
        part, model = proposals[0].part, self._cost_model
        num_levels = PROBE_LENGTH if len(rows) > 1 else 1  # those that are certainly drafted
        price = model.drafting(part, len(proposals), num_levels) + model.extra_pass_seconds(
            0, num_levels * len(proposals)
        )
        num_uncached = sum([proposal.candidate.num_uncached for proposal in proposals])
        price = (price + self.times.prefill_seconds(part, num_uncached) / SERIES) / self.times.plain(
            len(rows)
        )
        if was_probing:
            if not self.probe_budget.may_continue(price):
                self.probe_budget.record_failure()
                return []
        elif not self.probe_budget.may_begin(SERIES * price):
            return []
        for proposal in proposals:
            proposal.length = min(proposal.length, PROBE_LENGTH)
        return proposals

    def keep_drafting(self, rows: Sequence[Row], draft_probs: DraftProbs, depth: int) -> list[bool]:
        answers = [False] * len(rows)
        if not self._decision.proposals:
            return answers
        confidences = draft_probs.acceptance_estimates
        acceptance_probs: list[tuple[float, DraftProposal]] = []
        for proposal in self._decision.proposals:
            if proposal.deterministic or not proposal.continues:
                continue
            own, following = self.expectations.node_probs(proposal.estimate.kind)
            confidence_bin = bisect_right(CONFIDENCE_EDGES, confidences[proposal.row])
            proposal.confidence_bins.append(confidence_bin)
            proposal.survival *= own[confidence_bin]
            proposal.continues = False
            if depth + 1 < proposal.length:
                acceptance_probs.append((proposal.survival * following[confidence_bin], proposal))
        for proposal in self._extended(acceptance_probs, depth):
            proposal.continues = answers[proposal.row] = True
        return answers

    def _extended(
        self, acceptance_probs: list[tuple[float, DraftProposal]], depth: int
    ) -> Sequence[DraftProposal]:
        """Return the drafts that should get a node below this depth.

        Args:
            acceptance_probs: the probability that the node is accepted, for each draft that could get one.
            depth: depth of the last nodes.
        """
        if not acceptance_probs:
            return ()
        if self._decision.explores and depth + 1 < PROBE_LENGTH:
            return [proposal for _, proposal in acceptance_probs]
        planned = self._decision.proposals
        num_levels = sum(
            [each.length if each.deterministic else len(each.confidence_bins) for each in planned]
        )
        return select_extensions(acceptance_probs, num_levels, self._cost_model)

    def learn(self, rows: Sequence[Row], draft: Draft, verdict: Verdict, time: RoundTime) -> None:
        if self._is_paused:
            self._buffered.repeat(time)
            self._paused_plan += time.plan
            return
        if not draft.num_nodes and not self.measures_plain:
            self.times.add_plan(len(rows), False, self._paused_plan + time.plan)
            self._paused_plan = 0.0
        if self._in_backoff:
            # Drafts of rows with their own `draft_length` may gain more than one token.
            if draft.num_nodes:
                self._learn_buffered()
            else:
                self._buffer_round(rows, time)
            return
        # In levels, as in plans: the cost of all nodes of a level is measured together.
        lengths = draft.num_levels
        proposals = self._decision.proposals
        drafted = [proposal for proposal in proposals if lengths[proposal.row]]
        if len(rows) - lengths.count(0) > len(drafted) + self._num_certain:
            return  # rows with their own `draft_length` were drafted for: the plan was not measured
        for proposal in proposals:
            # A row whose cache the drafter fills first has no draft yet.
            if not lengths[proposal.row] and not proposal.candidate.num_uncached:
                self.expectations.add_empty_draft(proposal.estimate.kind)
        if drafted:
            self._buffer_drafted(rows, drafted, lengths, verdict.lengths, time)
        else:
            self._learn_undrafted(rows, draft.num_nodes > 0, time)

    def _learn_undrafted(self, rows: Sequence[Row], has_certain: bool, time: RoundTime) -> None:
        """Learn from a round in which none of the planned drafts was made.

        Args:
            has_certain: whether there were drafts that are certain to be accepted.
        """
        decision = self._decision
        if decision.proposals:  # the drafter gave no nodes, but took time
            self._learn_drafted()
            self.expectations.decay_rows(rows, 1)
            self._record(decision, rows, len(rows), time.total, 0.0, time.total)
        elif has_certain:  # time passes, but nothing is measured
            self.guard.wait(rows)
        else:
            self._learn_plain(rows, PlainRounds(mean_length(rows), [decision.rate_key], [time]))

    def _buffer_drafted(
        self,
        rows: Sequence[Row],
        drafted: Sequence[DraftProposal],
        lengths: Sequence[int],
        accepted: Sequence[int],
        time: RoundTime,
    ) -> None:
        """Buffer a round with drafts, and learn from the buffered ones if that cannot wait.

        Args:
            drafted: the proposals that were drafted.
            lengths, accepted: levels drafted, and nodes accepted, per row.
        """
        num_rows, decision = len(rows), self._decision
        gain = 1 + sum(accepted) / num_rows - time.total / self._mean_plain(num_rows)
        confidence_bins = [proposal.confidence_bins for proposal in drafted]
        drafted_round = DraftedRound(decision, drafted, confidence_bins, lengths, accepted, time, gain)
        # The length of a lookup draft is decided in advance, so that one that lost time, or a single
        # one that could have been longer, is learned from at once.
        is_informative = any([proposal.deterministic for proposal in drafted]) and (
            gain < 0 or (num_rows == 1 and _could_be_longer(drafted[0], accepted[0]))
        )
        has_room = self._drafted.add(drafted_round) and not is_informative
        if not has_room or not decision.is_settled or self.guard.would_stop(self._drafted.gains):
            self._learn_drafted()

    def _learn_drafted(self) -> None:
        """Learn from the buffered rounds with drafts."""
        rows = self._drafted.rows
        for decision, drafted, confidence_bins, lengths, accepted, time, _ in self._drafted.take():
            clipped = self._learn_times(len(rows), drafted, lengths, time)
            for proposal, draft_bins in zip(drafted, confidence_bins, strict=True):
                row, length = rows[proposal.row], lengths[proposal.row]
                self.expectations.learn(
                    row,
                    proposal.estimate.kind,
                    draft_bins,
                    proposal.deterministic,
                    length,
                    accepted[proposal.row],
                )
            amortised = self._learn_prefill(rows, drafted, time)
            self._record(
                decision, rows, len(rows) + sum(accepted), time.total, amortised, clipped + time.prefill
            )

    def _learn_plain(self, rows: Sequence[Row], rounds: PlainRounds) -> None:
        """Learn from rounds in which nothing was to be drafted."""
        self.expectations.decay_rows(rows, rounds.num)
        changed = self.times.add_plain(len(rows), rounds.context, rounds.seconds)
        plain, total = self.times.plain(len(rows)), sum(rounds.seconds)
        for rate_key, num in rounds.num_by_rate_key.items():
            self._cost_model.record_plain(rate_key, num)
        self.probe_budget.earn(total / plain)
        self.guard.record_plain(rows, rounds.num, total)
        if changed:
            self._reset_decisions()

    def _reset_decisions(self) -> None:
        """Reset the decisions that were made before the machine changed its speed."""
        self.guard.reset()
        self.probe_budget.grant()
        self._backoffs.end()
        self._num_pausable = 0
        self._cost_model.forget_speeds()

    def _buffer_round(self, rows: Sequence[Row], time: RoundTime) -> None:
        """Record a round in which all candidates were in backoff."""
        rate_key = self._decision.rate_key
        if not self._buffered.add(rate_key, rows, time):
            self._learn_buffered()
            self._buffered.add(rate_key, rows, time)

    def _learn_buffered(self) -> None:
        """Learn from the recorded backoff rounds."""
        if self._buffered:
            rows, taken = self._buffered.take()
            for rounds in taken:
                self._learn_plain(rows, rounds)

    def _learn_times(
        self,
        num_rows: int,
        drafted: Sequence[DraftProposal],
        lengths: Sequence[int],
        time: RoundTime,
    ) -> float:
        """Learn the costs of a round with drafts; return its seconds, clipped if it was disturbed."""
        plan = self.times.add_plan(num_rows, True, time.plan)
        scoring = self.times.add(
            num_rows, sum(lengths), time.total - time.draft - time.prefill - time.plan + plan
        )
        self._cost_model.renew()
        # Next to the draft steps of a model, the time of a lookup is negligible.
        steppers = [proposal for proposal in drafted if not proposal.deterministic] or drafted
        steps = [lengths[proposal.row] for proposal in steppers]
        longest = max(steps)
        part, count = steppers[0].part, round(sum(steps) / longest)
        return scoring + self.times.add_draft_steps(part, count, longest, time.draft)

    def _learn_prefill(self, rows: Sequence[Row], drafted: Sequence[DraftProposal], time: RoundTime) -> float:
        """Learn the cost of drafter prefill, amortise it over later rounds and return its seconds.

        Later rounds use the prefilled cache, so `LossGuard` records its cost in shares.
        """
        readers = [proposal for proposal in drafted if proposal.candidate.num_uncached]
        if not readers:
            return 0.0
        num_tokens = sum([proposal.candidate.num_uncached for proposal in readers])
        self.times.add_prefill(readers[0].part, num_tokens, time.prefill)
        plain_rounds = time.prefill / self.times.plain(len(rows))
        for proposal in readers:
            row = rows[proposal.row]
            cost = plain_rounds * proposal.candidate.num_uncached / num_tokens
            self.guard.amortise(row, cost, row.room / (1 + proposal.estimate.gain))
        return time.prefill

    def _record(
        self,
        decision: Decision,
        rows: Sequence[Row],
        num_tokens: int,
        seconds: float,
        amortised: float,
        clipped: float,
    ) -> None:
        """Record a round with planned drafts.

        Args:
            amortised: seconds of drafter prefill, which are amortised over later rounds.
            clipped: its duration, clipped if it was disturbed.
        """
        num_rows = len(rows)
        plain = self.times.plain(num_rows)
        plain_seconds = num_tokens * plain / num_rows
        mean = self._mean_plain(num_rows)
        is_probe = decision.is_probe
        self._cost_model.record(
            decision.rate_key, clipped / plain, num_tokens / num_rows, worthwhile=not is_probe
        )
        self.probe_budget.earn(seconds / plain)
        if is_probe:
            self.probe_budget.pay((seconds - plain_seconds) / plain)
        gain = num_tokens / num_rows - (seconds - amortised) / mean
        self.guard.record(gain, rows, seconds - amortised, mean)

    def _mean_plain(self, num_rows: int) -> float:
        """Return the mean seconds of a plain round, disturbed ones included."""
        return self.times.plain(num_rows) * self.times.load_detector.slowdown

    def release(self, row: Row) -> None:
        self._learn_drafted()
        self._learn_buffered()
        self._backoffs.forget(row)
        self.expectations.row_histories.pop(row, None)
        self.guard.release(row)


def _is_settled(proposal: DraftProposal) -> bool:
    """Return whether the decision for this draft can be repeated before anything is learned from it."""
    return proposal.net > proposal.estimate.exploration_bonus and not proposal.candidate.num_uncached


def _could_be_longer(lookup: DraftProposal, num_accepted: int) -> bool:
    """Return whether all of a lookup draft was accepted, and its source had more."""
    return num_accepted == lookup.length < len(lookup.estimate.gains) - 1


def _rate_key(candidates: Sequence[Sequence[Candidate]]) -> Hashable:
    """Return the key of the token rate that drafts are compared with.

    It is the batch size, or for a single row the kind of its first candidate: saved tokens are
    worth less where decoding is fast anyway.
    """
    if len(candidates) > 1:
        return len(candidates)
    for choice in candidates[0]:
        if choice.longest > 0:
            return choice.kind
    return None
