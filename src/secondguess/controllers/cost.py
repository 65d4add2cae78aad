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

from bisect import bisect_right
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from secondguess.controllers.allowance import Guard, Probes
from secondguess.controllers.base import Controller
from secondguess.controllers.experience import Experience
from secondguess.controllers.laws import DraftLaws
from secondguess.controllers.round_times import RoundTimes
from secondguess.core import MAX_DRAFT_LENGTH, Draft, Plan, Prospect, RoundTime, Row, Verdict
from secondguess.names import Name, read_options, require_between, with_argument

CONFIDENCE_EDGES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.96, 0.99)
"""Confidences between two edges are expected to be accepted alike."""
EXPECTED_GAIN, EXPECTED_WIDTH, EXPECTED_SHARE = 1.0, 2.0, 0.7
"""What is believed of guesses of which nothing is known: worth a try."""
DOUBT = 1.0
"""How many tokens a guess of an unknown kind may gain beyond what is expected of it; falls with the root of the count."""
NEUTRAL, FORGETTING = 0.5, 8.0
"""What a row's share of accepted nodes goes back to while nothing is drafted, and in how many rounds."""
DEEP = 8
"""Positions of a look-up's guess from here on are expected to fare alike."""
PACE_MEMORY = 64
"""Rounds over which the rate is averaged."""
RESTING = 4
"""Rounds to let pass before asking again in a place where nothing paid."""
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
class Standing:
    """How a row's drafts have fared lately: the share accepted, and None before the first draft."""

    share: float | None = None

    @property
    def level(self) -> int:
        return 0 if self.share is None else 1 + int(self.share * 3.999)

    def see(self, drafted: int, accepted: int) -> None:
        share = accepted / drafted
        self.share = share if self.share is None else self.share + (share - self.share) / 3

    def move_on(self) -> None:
        """The text went on without a draft: what was seen of it says less and less."""
        if self.share is not None:
            self.share += (NEUTRAL - self.share) / FORGETTING


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


class Kind(NamedTuple):
    """What is expected to fare alike: guesses of one part under one temperature, and what they say of themselves."""

    pool: Hashable
    own: Hashable


@dataclass
class Offer:
    """One row's best prospect in a round: what it is expected to gain, in tokens, with how many nodes."""

    row: int
    prospect: Prospect
    kind: Kind
    length: int
    gain: float
    doubt: float
    width: float
    net: float
    confidences: list[float] = field(default_factory=list)
    survival: float = 1.0
    goes_on: bool = True


class CostController(Controller):
    """Weighs tokens against time in every round, per row of the batch."""

    def __init__(self, options: CostOptions = CostOptions()) -> None:
        self.options = options
        self.name = f"cost:{options.length}"
        self.times = RoundTimes()
        self.probes = Probes()
        self.guard = Guard()
        self._nodes = Experience(memory=200)
        self._rounds = Experience(memory=100)
        self._paces: dict[Hashable, Pace] = {}
        self._place: Hashable = None
        self._standings: dict[Row, Standing] = {}
        self._offers: list[Offer] = []
        self._probing = False
        self._num_rows = 0
        self._num_resting = 0

    @classmethod
    def build(cls, name: Name) -> CostController:
        return cls(read_options(CostOptions, with_argument(name, "length"), "controller cost"))

    def plan(self, rows: Sequence[Row], prospects: Sequence[Sequence[Prospect]]) -> list[Plan]:
        self._offers = []
        place, self._place = self._place, _place(prospects)
        self._num_rows = len(rows)
        nothing = [PLAIN] * len(rows)
        if self._num_resting and place == self._place:
            self._num_resting -= 1
            return nothing
        if self.guard.forbids or self.times.needs_plain(len(rows), _context(rows)):
            return nothing
        offers = [
            self._best_offer(index, row, choices)
            for index, (row, choices) in enumerate(zip(rows, prospects, strict=True))
        ]
        able = sorted((offer for offer in offers if offer is not None), key=lambda offer: -offer.net)
        taken = able[: self._num_worthwhile(able)]
        was_probing, self._probing = self._probing, False
        if taken:
            self.probes.succeeded()
        elif able:
            taken = self._probe(able[0], was_probing)
        # Where nothing pays, nothing will in the very next rounds either: asking again costs time too.
        self._num_resting = 0 if taken else RESTING
        self._offers = taken
        plans = nothing
        for offer in taken:
            plans[offer.row] = Plan(offer.prospect.part, offer.length)
        return plans

    def _rate(self) -> float:
        """Tokens per second that can be had."""
        pace = self._paces.get(self._place)
        speedup = pace.speedup if pace else 1.0
        return speedup * self._num_rows / self.times.plain(self._num_rows)

    def _best_offer(self, index: int, row: Row, choices: Sequence[Prospect]) -> Offer | None:
        best: Offer | None = None
        for prospect in choices:
            if prospect.longest > 0:
                offer = self._offer(index, row, prospect)
                if best is None or offer.net > best.net:
                    best = offer
        return best

    def _offer(self, index: int, row: Row, prospect: Prospect) -> Offer:
        kind = Kind((prospect.part, row.coupled, row.params.temperature), prospect.kind)
        standing = self._standings.get(row)
        level = standing.level if standing else 0
        gain = self._rounds.mean(_levels(kind, level, "gain"), EXPECTED_GAIN)
        width = self._rounds.mean(_levels(kind, level, "width"), EXPECTED_WIDTH)
        length = min(prospect.longest, self.options.length)
        if prospect.certain:
            length = self._length_by_position(kind, prospect.part, length)
        step = self.times.step(prospect.part, self._num_rows) or 0.0
        share = self._num_rows
        extra = width * step / share + self._wider(0, max(round(width), 1)) / share
        # While little has been seen the doubt speaks for trying: what is never tried is never found out.
        doubt = DOUBT / (1 + self._rounds.seen(("gain", kind))) ** 0.5
        net = gain + doubt - self._rate() * extra
        return Offer(index, prospect, kind, length, gain, doubt, width, net)

    def _length_by_position(self, kind: Kind, part: int, longest: int) -> int:
        """How many nodes of a look-up's guess pay, going by how often each position was accepted."""
        survival, length = 1.0, 0
        rate = self._rate()
        step = self.times.step(part, self._num_rows) or 0.0
        value, best, best_length = 0.0, 0.0, 0
        while length < longest:
            survival *= self._nodes.mean(_positions(kind, length), EXPECTED_SHARE)
            value += survival - rate * (step + self._wider(length, length + 1)) / self._num_rows
            length += 1
            if value > best:
                best, best_length = value, length
            elif survival < 0.05:
                break
        return max(best_length, 1)

    def _num_worthwhile(self, offers: Sequence[Offer]) -> int:
        """How many of the offers, best first, to take: rows of a batch wait for the longest draft among them."""
        rate = self._rate()
        gain, width, best, best_count = 0.0, 0, 0.0, 0
        for count, offer in enumerate(offers, start=1):
            gain += offer.gain + offer.doubt
            width = max(width, round(offer.width))
            step = self.times.step(offer.prospect.part, count) or 0.0
            net = gain - rate * (offer.width * step + self._wider(0, max(width, 1)))
            if net > best:
                best, best_count = net, count
        return best_count

    def _wider(self, width: int, wider: int) -> float:
        """Seconds by which nodes make the rest of a round dearer."""
        return self.times.rest(self._num_rows, wider) - self.times.rest(self._num_rows, width)

    def _probe(self, offer: Offer, was_probing: bool) -> list[Offer]:
        """Try one node, if that can be paid for; a series of them, once there is enough for several."""
        price = (self.times.step(offer.prospect.part, 1) or 0.0) + max(self._wider(0, 1), 0.0)
        if self.probes.balance < (price if was_probing else 4 * price):
            if was_probing:
                self.probes.failed()
            return []
        self._probing = True
        offer.length = 1
        return [offer]

    def go_on(self, rows: Sequence[Row], laws: DraftLaws, depth: int) -> list[bool]:
        active = []
        confidences = laws.confidences
        for offer in self._offers:
            if offer.prospect.certain or not offer.goes_on:
                continue
            confidence = confidences[offer.row]
            offer.confidences.append(confidence)
            bin_ = bisect_right(CONFIDENCE_EDGES, confidence)
            offer.survival *= self._nodes.mean(((offer.kind, "own", bin_),), confidence)
            follow = self._nodes.mean(_followers(offer.kind, bin_), EXPECTED_SHARE)
            if depth + 1 < offer.length:
                active.append((offer.survival * follow, offer))
            else:
                offer.goes_on = False
        answers = [False] * len(rows)
        active.sort(key=lambda pair: -pair[0])
        rate = self._rate()
        widest = max((offer.length for offer in self._offers if offer.prospect.certain), default=0)
        wider = self._wider(depth + 1, depth + 2) if depth + 2 > widest else 0.0
        total, best, best_count = 0.0, 0.0, 0
        for count, (chance, offer) in enumerate(active, start=1):
            total += chance
            net = total - rate * ((self.times.step(offer.prospect.part, count) or 0.0) + wider)
            if net > best:
                best, best_count = net, count
        for count, (_, offer) in enumerate(active):
            offer.goes_on = answers[offer.row] = count < best_count
        return answers

    def learn(self, rows: Sequence[Row], draft: Draft, verdict: Verdict, time: RoundTime) -> None:
        num_rows = len(rows)
        if draft.num_nodes == 0:
            for row in rows:
                if row in self._standings:
                    self._standings[row].move_on()
            self.times.see_plain(num_rows, _context(rows), time.total)
            self._pass(num_rows, num_rows, time.total)
            return
        lengths, accepted = draft.lengths.tolist(), verdict.lengths.tolist()
        self._learn_times(num_rows, draft.num_nodes, lengths, time)
        for offer in self._offers:
            length = lengths[offer.row]
            if length:
                self._learn_offer(rows[offer.row], offer, length, accepted[offer.row])
        self._pass(num_rows, num_rows + sum(accepted), time.total)

    def _learn_times(self, num_rows: int, width: int, lengths: Sequence[int], time: RoundTime) -> None:
        self.times.see(num_rows, width, time.total - time.draft - time.prefill)
        by_part: dict[int, list[int]] = {}
        for offer in self._offers:
            if lengths[offer.row] and not offer.prospect.certain:
                by_part.setdefault(offer.prospect.part, []).append(lengths[offer.row])
        for part, drafted in by_part.items():
            num_steps = max(drafted)
            self.times.see_steps(part, round(sum(drafted) / num_steps), num_steps, time.draft)

    def _learn_offer(self, row: Row, offer: Offer, length: int, accepted: int) -> None:
        kind, nodes, rounds = offer.kind, self._nodes, self._rounds
        standing = self._standings.setdefault(row, Standing())
        bins = [bisect_right(CONFIDENCE_EDGES, confidence) for confidence in offer.confidences]
        for place in range(min(accepted + 1, length)):
            outcome = float(place < accepted)
            if offer.prospect.certain:
                for key in _positions(kind, place):
                    nodes.add(key, outcome)
                continue
            if place < len(bins):
                nodes.add((kind, "own", bins[place]), outcome)
            if place and place <= len(bins):
                for key in _followers(kind, bins[place - 1]):
                    nodes.add(key, outcome)
        for key in _levels(kind, standing.level, "gain"):
            rounds.add(key, accepted)
        for key in _levels(kind, standing.level, "width"):
            rounds.add(key, length)
        standing.see(length, accepted)

    def _pass(self, num_rows: int, num_tokens: int, seconds: float) -> None:
        """Book a round."""
        plain = self.times.plain(num_rows)
        plain_seconds = num_tokens * plain / num_rows
        self._paces.setdefault(self._place, Pace()).see(seconds / plain, num_tokens / num_rows)
        self.probes.earn(seconds, plain)
        if self._probing:
            self.probes.pay(seconds - plain_seconds)
        self.guard.book((plain_seconds - seconds) / plain)

    def end(self, row: Row) -> None:
        self._standings.pop(row, None)


# Keys of experience, from the general to the special.


def _positions(kind: Kind, place: int) -> tuple[Hashable, ...]:
    deep = min(place, DEEP)
    return ("at", kind.pool), ("at", kind.pool, deep), ("at", kind, deep)


def _followers(kind: Kind, confidence_bin: int) -> tuple[Hashable, ...]:
    return ("next", kind), ("next", kind, confidence_bin)


def _levels(kind: Kind, level: int, what: str) -> tuple[Hashable, ...]:
    return (what, kind.pool), (what, kind), (what, kind, level)


def _place(prospects: Sequence[Sequence[Prospect]]) -> Hashable:
    """In what kind of place a batch stands: a token saved here is worth what tokens take hereabouts."""
    if len(prospects) > 1:
        return len(prospects)
    return next((choice.kind for choice in prospects[0] if choice.longest > 0), None)


def _context(rows: Sequence[Row]) -> float:
    return sum(len(row.tokens) for row in rows) / len(rows)
