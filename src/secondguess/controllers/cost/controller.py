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
drafts), and the cost of further trials is bounded (`allowance.py`).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from secondguess.controllers.base import Controller
from secondguess.controllers.cost.allowance import SERIES, Guard, Probes
from secondguess.controllers.cost.expectations import Expectations
from secondguess.controllers.cost.offers import Offer, Offers
from secondguess.controllers.cost.prices import Prices
from secondguess.controllers.cost.rest import Passed, Rests, Rounds
from secondguess.controllers.cost.round_times import RoundTimes, mean_length
from secondguess.controllers.cost.together import first_few, worth_another, worthwhile
from secondguess.controllers.laws import DraftLaws
from secondguess.core import MAX_DRAFT_LENGTH, Draft, Plan, Prospect, RoundTime, Row, Verdict
from secondguess.names import Name, read_options, require_between, with_argument

PLAIN = Plan(0, 0)
PROBE_LENGTH = 2
"""Maximum levels of a probe. With one level, the fixed cost of drafting may exceed any gain."""
LONGEST_AT_FIRST = 2
"""Maximum levels of a drafter's first drafts, whose cost is not known yet."""


@dataclass(frozen=True)
class CostOptions:
    """Options of `cost:LENGTH`.

    Args:
        length: maximum levels per round (in a chain, nodes), 0 to 64; 0 is plain decoding.
    """

    length: int = 16

    def __post_init__(self) -> None:
        require_between("the draft length of the controller cost", self.length, 0, MAX_DRAFT_LENGTH)


class CostController(Controller):
    """Controller that weighs expected tokens against time, for each row in every round."""

    def __init__(self, options: CostOptions = CostOptions()) -> None:
        self.options = options
        self.name = f"cost:{options.length}"
        self.probes = Probes()
        self.guard = Guard()
        self.expectations = Expectations()
        self._prices = Prices(options.length)
        self._offers_of = Offers(self.expectations, self._prices, options.length)
        self._place: Hashable = None
        self._offers: list[Offer] = []
        self._probing = False
        self._rests = Rests()
        self._resting = False
        self._passed = Passed()

    @classmethod
    def build(cls, name: Name) -> CostController:
        return cls(read_options(CostOptions, with_argument(name, "length"), "controller cost"))

    @property
    def times(self) -> RoundTimes:
        """Measured times of rounds."""
        return self._prices.times

    @times.setter
    def times(self, times: RoundTimes) -> None:
        self._prices.times = times

    def plan(self, rows: Sequence[Row], prospects: Sequence[Sequence[Prospect]]) -> list[Plan]:
        num_rows = len(rows)
        self._offers = []
        was_probing, self._probing = self._probing, False
        self._place = _place(prospects)
        plans = [PLAIN] * num_rows
        # A series of probes is continued even if all candidates are in backoff.
        self.probes.count_round()
        paused = self._rests.cover(rows, prospects)
        self._resting = paused and not was_probing and not self.probes.is_due
        if self._resting:
            return plans
        self._learn_of_rest()
        context = self.times.context = mean_length(rows)
        if self.guard.forbids or self.times.needs_plain(num_rows, context):
            return plans
        self._prices.enter(num_rows, self._place)
        offers = self._best_offers(rows, prospects)
        taken = worthwhile(offers, rows, self._prices)
        if taken:
            self.probes.succeeded()
        elif offers:
            best = first_few([(offer.net, offer) for offer in offers], 1, rows)
            taken = self._probe(best, rows, was_probing)
        if not taken:
            self._rests.begin(rows, prospects)
        elif not self._probing:
            self._rests.end()
        self._offers = taken
        for offer in taken:
            if self.times.is_new(offer.part):
                offer.length = min(offer.length, LONGEST_AT_FIRST)
            plans[offer.row] = Plan(offer.part, offer.length)
        return plans

    def _best_offers(self, rows: Sequence[Row], prospects: Sequence[Sequence[Prospect]]) -> list[Offer]:
        """Return the best candidate of each row that has one, best first."""
        num_rows, offers = len(rows), []
        for index, row in enumerate(rows):
            offer = self._offers_of.best(index, row, prospects[index], num_rows)
            if offer is not None:
                offers.append(offer)
        if num_rows > 1:
            offers.sort(key=_net, reverse=True)
        return offers

    def _probe(self, offers: list[Offer], rows: Sequence[Row], was_probing: bool) -> list[Offer]:
        """Return these candidates shortened to probes if the probe budget allows it, else none.

        Probes come in series: the first one needs a budget for all of them.
        """
        part = offers[0].part
        price = self._prices.drafting(part, len(offers), 1) + self._prices.wider(0, 1)
        price += self.times.reading(part, sum([offer.prospect.unread for offer in offers])) / SERIES
        if was_probing:
            if not self.probes.may_go_on(price):
                self.probes.failed()
                return []
        elif not self.probes.may_begin(SERIES * price, self.times.plain(len(rows))):
            return []
        self._probing = True
        for offer in offers:
            offer.length = min(offer.length, PROBE_LENGTH)
        return offers

    def go_on(self, rows: Sequence[Row], laws: DraftLaws, depth: int) -> list[bool]:
        answers = [False] * len(rows)
        if not self._offers:
            return answers
        confidences = laws.chances
        chances: list[tuple[float, Offer]] = []
        for offer in self._offers:
            if offer.certain or not offer.goes_on:
                continue
            level, own, following = self.expectations.of_node(offer.kind, confidences[offer.row])
            offer.seen.append(level)
            offer.survival *= own
            offer.goes_on = False
            if depth + 1 < offer.length:
                chances.append((offer.survival * following, offer))
        if chances:
            for offer in worth_another(chances, self._deeper(depth + 1), self._prices):
                offer.goes_on = answers[offer.row] = True
        return answers

    def _deeper(self, depth: int) -> float:
        """Return the seconds that nodes at this depth add to the round, without drafting them.

        They are 0 if a lookup draft in the batch is that long anyway.
        """
        if any(offer.certain and offer.length > depth for offer in self._offers):
            return 0.0
        return self._prices.wider(depth, depth + 1)

    def learn(self, rows: Sequence[Row], draft: Draft, verdict: Verdict, time: RoundTime) -> None:
        if self._resting:
            if (
                draft.num_nodes
            ):  # drafts of rows with their own `draft_length`, which may gain more than one token
                self._learn_of_rest()
            else:
                self._pass(rows, time)
            return
        num_rows = len(rows)
        # In levels, as in plans: the cost of all nodes of a level is measured together.
        lengths = draft.depths.tolist() if draft.num_nodes else [0] * num_rows
        drafted = [offer for offer in self._offers if lengths[offer.row]]
        if num_rows - lengths.count(0) > len(drafted):
            return  # rows with their own `draft_length` were drafted for: the plan was not measured
        for offer in self._offers:
            if not lengths[offer.row]:
                self.expectations.learn_nothing(offer.kind)
        if not drafted and not self._offers:
            self._learn_plain(rows, Rounds(mean_length(rows), [self._place], [time]))
            return
        if not drafted:  # the drafter gave no nodes, but took time
            self.expectations.move_on(rows, 1)
            self._book(self._place, rows, num_rows, time.total, 0.0)
            return
        accepted = verdict.lengths.tolist()
        self._learn_times(num_rows, max(lengths), drafted, lengths, time)
        for offer in drafted:
            index = offer.row
            self.expectations.learn(
                rows[index], offer.kind, offer.seen, offer.certain, lengths[index], accepted[index]
            )
        spread = self._learn_reading(rows, drafted, time)
        self._book(self._place, rows, num_rows + sum(accepted), time.total, spread)

    def _learn_plain(self, rows: Sequence[Row], rounds: Rounds) -> None:
        """Learn from rounds in which nothing was to be drafted."""
        self.expectations.move_on(rows, rounds.num)
        changed = self.times.see_plain(len(rows), rounds.context, rounds.seconds)
        plain, total = self.times.plain(len(rows)), sum(rounds.seconds)
        for place, num in rounds.places.items():
            self._prices.book_plain(place, 1.0, num)
        self.probes.earn(total, plain)
        self.guard.wait(rows, rounds.num, total)
        if changed:
            self._begin_anew()

    def _begin_anew(self) -> None:
        """Reset the decisions that were made before the machine changed its speed."""
        self.guard.forgive()
        self.probes.grant()
        self._rests.end()
        self._prices.forget_paces()

    def _pass(self, rows: Sequence[Row], time: RoundTime) -> None:
        """Record a round in which all candidates were in backoff."""
        if not self._passed.add(self._place, rows, time):
            self._learn_of_rest()
            self._passed.add(self._place, rows, time)

    def _learn_of_rest(self) -> None:
        """Learn from the recorded backoff rounds."""
        if self._passed:
            rows, taken = self._passed.take()
            for rounds in taken:
                self._learn_plain(rows, rounds)

    def _learn_times(
        self, num_rows: int, width: int, drafted: Sequence[Offer], lengths: Sequence[int], time: RoundTime
    ) -> None:
        self.times.see(num_rows, width, time.total - time.draft - time.prefill)
        self._prices.renew()
        # Next to the draft steps of a model, the time of a lookup is negligible.
        steppers = [offer for offer in drafted if not offer.certain] or drafted
        steps = [lengths[offer.row] for offer in steppers]
        longest = max(steps)
        self.times.see_steps(steppers[0].part, round(sum(steps) / longest), longest, time.draft)

    def _learn_reading(self, rows: Sequence[Row], drafted: Sequence[Offer], time: RoundTime) -> float:
        """Learn the cost of drafter prefill, amortise it over later rounds and return its seconds.

        Later rounds use the prefilled cache, so `Guard` books its cost in shares.
        """
        readers = [offer for offer in drafted if offer.prospect.unread]
        if not readers:
            return 0.0
        num_tokens = sum([offer.prospect.unread for offer in readers])
        self.times.see_reading(readers[0].part, num_tokens, time.prefill)
        plain_rounds = time.prefill / self.times.plain(len(rows))
        for offer in readers:
            row = rows[offer.row]
            cost = plain_rounds * offer.prospect.unread / num_tokens
            self.guard.spread(row, cost, row.room / (1 + offer.gain))
        return time.prefill

    def _book(
        self, place: Hashable, rows: Sequence[Row], num_tokens: int, seconds: float, spread: float
    ) -> None:
        """Record a round with planned drafts.

        Args:
            place: key of the round's token rate, see `_place`.
            rows: the batch.
            num_tokens: tokens gained by all rows.
            seconds: duration of the round.
            spread: seconds of drafter prefill, which are amortised over later rounds.
        """
        num_rows = len(rows)
        plain = self.times.plain(num_rows)
        plain_seconds = num_tokens * plain / num_rows
        # Disturbed rounds are included in this mean, as they are in `seconds`.
        mean = plain * self.times.disturbance.excess
        self._prices.book(place, seconds / plain, num_tokens / num_rows, worthwhile=not self._probing)
        self.probes.earn(seconds, plain)
        if self._probing:
            self.probes.pay(seconds - plain_seconds)
        won = num_tokens / num_rows - (seconds - spread) / mean
        self.guard.book(won, rows, seconds - spread, mean)

    def end(self, row: Row) -> None:
        self._learn_of_rest()
        self._rests.forget(row)
        self.expectations.standings.pop(row, None)
        self.guard.end(row)


def _net(offer: Offer) -> float:
    return offer.net


def _place(prospects: Sequence[Sequence[Prospect]]) -> Hashable:
    """Return the key of the token rate that drafts are compared with.

    It is the batch size, or for a single row the kind of its first candidate: saved tokens are
    worth less where decoding is fast anyway.
    """
    if len(prospects) > 1:
        return len(prospects)
    for choice in prospects[0]:
        if choice.longest > 0:
            return choice.kind
    return None
