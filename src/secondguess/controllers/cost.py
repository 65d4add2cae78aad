"""Draft as far as it pays: expected tokens over expected time, both measured. The default.

A round drafts a node when the chance that the node is accepted, in tokens, exceeds what the node costs, at the rate at which
tokens could be had otherwise:

    draft node k + 1   iff   S_{k+1}  >  rate * (T_draft + T_target(k + 2) - T_target(k + 1))

For the highest rate that can be held, this is the best policy of all (the optimal stopping rule of a renewal-reward
process; SpecDec++, arXiv 2405.19715, has the threshold form, SmartSpec, 2406.14066, the goodput). The rate is that of
recent rounds and at least plain decoding's, so the threshold follows text, load and machine.

S is learnt from what the verifier in use accepted: for a draft model from its confidences, calibrated; for a look-up by
position, given how long its match was. Whether to draft at all is decided by what such drafts have gained lately.
When nothing pays, rounds are plain, and what looking for better costs is bounded (`allowance.py`).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

from secondguess.controllers.allowance import Guard, Probes
from secondguess.controllers.base import Controller
from secondguess.controllers.expectations import Expectations, Expected, Kind
from secondguess.controllers.laws import DraftLaws
from secondguess.controllers.round_times import RoundTimes
from secondguess.core import MAX_DRAFT_LENGTH, Draft, Plan, Prospect, RoundTime, Row, Verdict
from secondguess.names import Name, read_options, require_between, with_argument

PACE_MEMORY = 64
"""Rounds over which the rate is averaged."""
SERIES = 4
"""Probes come in series of about so many."""
RESTING = 8
"""Rounds to let pass before asking again in a place where nothing paid."""
WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Longest drafts that are weighed for a batch, whose rows wait for each other."""
CAUTION = 1.2
"""By how much more than it takes the reading of a text must pay."""
RENEWAL = 16
"""What drafts cost a round is worked out anew after so many of them; in the beginning after each."""
UNLIKELY = 0.1
"""A look-up's node that survives less often is not worth a place, though its row waits anyway."""
PLAIN = Plan(0, 0)


@dataclass(frozen=True)
class CostOptions:
    """Options of `cost:LENGTH`.

    Args:
        length: nodes per round at most, 0 to 64.
    """

    length: int = 16

    def __post_init__(self) -> None:
        require_between("the draft length of the controller cost", self.length, 0, MAX_DRAFT_LENGTH)


@dataclass
class Pace:
    """The speed of recent rounds, in plain rounds: averages of what they took and of what they gave per row."""

    seconds: float = 1.0
    tokens: float = 1.0

    @property
    def speedup(self) -> float:
        """Over plain decoding, which can always be had."""
        return max(self.tokens / self.seconds, 1.0)

    def see(self, seconds: float, tokens: float) -> None:
        self.seconds += (seconds - self.seconds) / PACE_MEMORY
        self.tokens += (tokens - self.tokens) / PACE_MEMORY


@dataclass
class Offer:
    """One row's best prospect in a round.

    Args:
        length: most nodes.
        worths: tokens that the first 1, 2, ... nodes should bring together.
        reading: seconds for what the drafter has to read first, spread over the rounds to come.
        net: tokens, when what the draft takes is paid for.
        confidences, survival, goes_on: of the draft under way.
    """

    row: int
    prospect: Prospect
    kind: Kind
    expected: Expected
    length: int
    worths: list[float]
    reading: float
    net: float
    confidences: list[float] = field(default_factory=list)
    survival: float = 1.0
    goes_on: bool = True

    @property
    def num_likely(self) -> int:
        """How many nodes are likely enough to be put before the target where others make it wait anyway."""
        survivals = [worth - before for before, worth in pairwise([0.0, *self.worths])]
        return sum(survival >= UNLIKELY for survival in survivals)

    def worth(self, width: int) -> float:
        """Tokens that a draft of at most so many nodes should bring."""
        return self.worths[min(width, len(self.worths)) - 1]


class CostController(Controller):
    """Weighs tokens against time in every round, per row of the batch."""

    def __init__(self, options: CostOptions = CostOptions()) -> None:
        self.options = options
        self.name = f"cost:{options.length}"
        self.times = RoundTimes()
        self.probes = Probes()
        self.guard = Guard()
        self.expectations = Expectations()
        self._paces: dict[Hashable, Pace] = {}
        self._place: Hashable = None
        self._offers: list[Offer] = []
        self._probing = False
        self._num_rows = 0
        self._num_resting = 0
        self._shares_of: dict[tuple[int, int], list[float]] = {}
        self._num_since = 0

    @classmethod
    def build(cls, name: Name) -> CostController:
        return cls(read_options(CostOptions, with_argument(name, "length"), "controller cost"))

    def plan(self, rows: Sequence[Row], prospects: Sequence[Sequence[Prospect]]) -> list[Plan]:
        self._offers = []
        was_probing, self._probing = self._probing, False
        place, self._place = self._place, _place(prospects)
        self._num_rows = len(rows)
        plans = [PLAIN] * len(rows)
        if self._num_resting and place == self._place:
            self._num_resting -= 1
            return plans
        if self.guard.forbids or self.times.needs_plain(len(rows), _context(rows)):
            return plans
        offers = self._best_offers(rows, prospects)
        taken = self._worthwhile(offers)
        if taken:
            self.probes.succeeded()
        elif offers:
            taken = self._probe(offers[0], was_probing)
        # Where nothing pays, nothing will in the very next rounds either: asking again costs time too, for every row.
        self._num_resting = 0 if taken else RESTING + len(rows)
        self._offers = taken
        for offer in taken:
            plans[offer.row] = Plan(offer.prospect.part, offer.length)
        return plans

    def _rate(self) -> float:
        """Tokens per second that can be had in a place like this."""
        pace = self._paces.get(self._place)
        speedup = pace.speedup if pace else 1.0
        return speedup * self._num_rows / self.times.plain(self._num_rows)

    def _best_offers(self, rows: Sequence[Row], prospects: Sequence[Sequence[Prospect]]) -> list[Offer]:
        """The best of each row that has any, best first."""
        best: list[Offer] = []
        for index, (row, choices) in enumerate(zip(rows, prospects, strict=True)):
            # A row without room ends with the target's own token; a request may have decided for itself.
            if self.options.length and row.room > 1 and row.params.draft_length is None:
                offers = [self._offer(index, row, prospect) for prospect in choices if prospect.longest > 0]
                best += [max(offers, key=_net)] if offers else []
        return sorted(best, key=_net, reverse=True)

    def _offer(self, index: int, row: Row, prospect: Prospect) -> Offer:
        kind = self.expectations.kind(row, prospect)
        expected = self.expectations.of_draft(row, kind)
        length = min(prospect.longest, self.options.length, row.room - 1)
        rate = self._rate()
        if prospect.certain:
            worths = list(accumulate(self.expectations.survivals(kind, length)))
            shares = self._shares(prospect.part)
            net, longest = max(
                (worths[width - 1] - rate * shares[width - 1], width) for width in range(1, length + 1)
            )
            if self._num_rows == 1:
                length = longest
        else:
            # How far it goes is decided on the way: here it counts with what such drafts have brought.
            width = max(round(expected.width), 1)
            worths = [expected.gain * min((node + 1) / width, 1.0) for node in range(width)]
            net = expected.gain - rate * self._shares(prospect.part)[min(width, self.options.length) - 1]
        # What is read now serves all the rounds that the row will yet take; but it is spent before anything is won.
        num_rounds = max(row.room / (1 + expected.gain), 1.0)
        reading = CAUTION * self.times.reading(prospect.part, prospect.unread) / num_rounds
        net = expected.comes * (net + expected.doubt) - rate * reading
        return Offer(index, prospect, kind, expected, length, worths, reading, net)

    def _shares(self, part: int) -> list[float]:
        """One row's share of what drafts of 1, 2, ... nodes add to a round, in seconds; made anew every few rounds."""
        key = (self._num_rows, part)
        known = self._shares_of.get(key)
        if known is None:
            known = self._shares_of[key] = [
                (self.times.drafting(part, self._num_rows, width) + self._wider(0, width)) / self._num_rows
                for width in range(1, self.options.length + 1)
            ]
        return known

    def _wider(self, width: int, wider: int) -> float:
        """Seconds by which nodes make the rest of a round dearer."""
        return max(self.times.rest(self._num_rows, wider) - self.times.rest(self._num_rows, width), 0.0)

    def _worthwhile(self, offers: list[Offer]) -> list[Offer]:
        """The offers that pay together. The rows of a batch wait for the longest draft: its length is weighed for all."""
        if self._num_rows == 1:
            return [offer for offer in offers if offer.net > 0]
        # What is found out is found out once, however many rows take part.
        doubt = max((offer.expected.doubt for offer in offers), default=0.0)
        longest = max((len(offer.worths) for offer in offers), default=0)
        best, taken, best_width = 0.0, [], 0
        for width in WIDTHS:
            net, chosen = self._together(offers, width)
            if chosen and net + doubt > best:
                best, taken, best_width = net + doubt, chosen, width
            if width >= longest:
                break
        for offer in taken:
            if offer.prospect.certain:
                offer.length = min(offer.length, best_width, offer.num_likely)
        return [offer for offer in taken if offer.length]

    def _together(self, offers: Sequence[Offer], width: int) -> tuple[float, list[Offer]]:
        """What drafts of at most so many nodes bring a batch, in tokens net of their price, and whose they are."""
        rate = self._rate()
        chosen = [offer for offer in offers if offer.prospect.certain]
        net = sum(offer.worth(width) for offer in chosen) - rate * self._wider(0, width)
        models = sorted(
            (offer for offer in offers if not offer.prospect.certain), key=lambda offer: -offer.worth(width)
        )
        total, best, best_count = 0.0, 0.0, 0
        for count, offer in enumerate(models, start=1):
            total += offer.worth(width) - rate * offer.reading
            steps = min(width, len(offer.worths))
            with_these = total - rate * self.times.drafting(offer.prospect.part, count, steps)
            if with_these > best:
                best, best_count = with_these, count
        best_count = _with_equals([offer.worth(width) for offer in models], best_count)
        if models:
            # A drafter may cost anything, and reading a whole batch only to find that out is dear: it is tried on one row
            # first, and then on at most twice as many as before.
            best_count = min(best_count, max(2 * self.times.most_rows(models[0].prospect.part), 1))
        return net + best, chosen + models[:best_count]

    def _probe(self, offer: Offer, was_probing: bool) -> list[Offer]:
        """Try one node, if that can be paid for; a series of them, once there is enough for several."""
        price = self.times.drafting(offer.prospect.part, 1, 1) + max(self._wider(0, 1), 0.0)
        price += self.times.reading(offer.prospect.part, offer.prospect.unread) / SERIES
        if self.probes.balance < (price if was_probing else SERIES * price):
            if was_probing:
                self.probes.failed()
            return []
        self._probing = True
        offer.length = 1
        return [offer]

    def go_on(self, rows: Sequence[Row], laws: DraftLaws, depth: int) -> list[bool]:
        asked = [offer for offer in self._offers if offer.goes_on and not offer.prospect.certain]
        chances: list[tuple[float, Offer]] = []
        for offer in asked:
            confidence = laws.confidences[offer.row]
            own, following = self.expectations.of_node(offer.kind, confidence)
            offer.confidences.append(confidence)
            offer.survival *= own
            offer.goes_on = False
            if depth + 1 < offer.length:
                chances.append((offer.survival * following, offer))
        answers = [False] * len(rows)
        for offer in self._worth_another(chances, depth + 1):
            offer.goes_on = answers[offer.row] = True
        return answers

    def _worth_another(self, chances: list[tuple[float, Offer]], depth: int) -> list[Offer]:
        """Whose draft should get a node at this depth, given the chances that those nodes are accepted."""
        if not chances:
            return []
        ordered = sorted(chances, key=lambda pair: -pair[0])
        totals = accumulate(chance for chance, _ in ordered)
        look_ups = max((offer.length for offer in self._offers if offer.prospect.certain), default=0)
        wider = self._wider(depth, depth + 1) if depth >= look_ups else 0.0
        rate = self._rate()
        best, best_count = 0.0, 0
        for count, (total, (_, offer)) in enumerate(zip(totals, ordered, strict=True), start=1):
            net = total - rate * (self.times.step(offer.prospect.part, count) + wider)
            if net > best:
                best, best_count = net, count
        best_count = _with_equals([chance for chance, _ in ordered], best_count)
        return [offer for _, offer in ordered[:best_count]]

    def learn(self, rows: Sequence[Row], draft: Draft, verdict: Verdict, time: RoundTime) -> None:
        lengths, accepted = draft.lengths.tolist(), verdict.lengths.tolist()
        drafted = [offer for offer in self._offers if lengths[offer.row]]
        if sum(map(bool, lengths)) > len(drafted):
            return  # requests that decide for themselves were drafted for: no news of what was planned
        for offer in self._offers:
            if not lengths[offer.row]:
                self.expectations.learn_nothing(offer.kind)
        if not drafted:
            self.expectations.move_on(rows)
            if not self._offers:  # a draft that came to nothing took its time all the same
                self.times.see_plain(len(rows), _context(rows), time.total - time.prefill)
            self._book(len(rows), len(rows), time.total)
            return
        self._learn_times(len(rows), draft.num_nodes, drafted, lengths, time)
        for offer in drafted:
            index, certain = offer.row, offer.prospect.certain
            self.expectations.learn(
                rows[index], offer.kind, offer.confidences, certain, lengths[index], accepted[index]
            )
        self._book(len(rows), len(rows) + sum(accepted), time.total)

    def _learn_times(
        self, num_rows: int, width: int, drafted: Sequence[Offer], lengths: Sequence[int], time: RoundTime
    ) -> None:
        self.times.see(num_rows, width, time.total - time.draft - time.prefill)
        self._num_since += 1
        if self._num_since % RENEWAL == 0 or self._num_since < RENEWAL:
            self._shares_of.clear()
        readers = [offer.prospect for offer in drafted if offer.prospect.unread]
        if readers:
            num_tokens = sum(prospect.unread for prospect in readers)
            self.times.see_reading(readers[0].part, num_tokens, time.prefill)
        # Beside a model's steps a look-up's take no time worth telling apart.
        models = [offer for offer in drafted if not offer.prospect.certain]
        steppers = models or drafted
        if steppers:
            steps = [lengths[offer.row] for offer in steppers]
            mean_rows = round(sum(steps) / max(steps))
            self.times.see_steps(steppers[0].prospect.part, mean_rows, max(steps), time.draft)

    def _book(self, num_rows: int, num_tokens: int, seconds: float) -> None:
        """Account for a round: its tokens, and the seconds that it took."""
        plain = self.times.plain(num_rows)
        plain_seconds = num_tokens * plain / num_rows
        self._paces.setdefault(self._place, Pace()).see(seconds / plain, num_tokens / num_rows)
        self.probes.earn(seconds, plain)
        if self._probing:
            self.probes.pay(seconds - plain_seconds)
        if self._offers:
            self.guard.book((plain_seconds - seconds) / plain)
        else:
            self.guard.wait()

    def end(self, row: Row) -> None:
        self.expectations.standings.pop(row, None)


def _with_equals(values: Sequence[float], count: int) -> int:
    """Of values in falling order the first `count`, and those that equal the last of them: rows alike are treated alike.

    (Whose place in a batch decided could be drafted for or not by what has nothing to do with it; an enumeration, whose batch
    holds a row's every fate, would take that for foresight.)
    """
    while 0 < count < len(values) and values[count] == values[count - 1]:
        count += 1
    return count


def _net(offer: Offer) -> float:
    return offer.net


def _place(prospects: Sequence[Sequence[Prospect]]) -> Hashable:
    """In what kind of place a batch stands: a token saved here is worth what tokens take hereabouts."""
    if len(prospects) > 1:
        return len(prospects)
    return next((choice.kind for choice in prospects[0] if choice.longest > 0), None)


def _context(rows: Sequence[Row]) -> float:
    """Mean tokens per row."""
    return sum(len(row.tokens) for row in rows) / len(rows)
