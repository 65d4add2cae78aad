"""How fast every combination of drafter, controller and batch size would be, and which of them to take: arithmetic, no model.

Controllers are replayed over recorded guesses on a clock of measured costs (`replay.py`), prefill included, so what is predicted
is what a run takes from token ids to token ids.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from secondguess.bench.replay import Prefill, Replayed, replay
from secondguess.bench.round_costs import RoundCosts
from secondguess.bench.traces import Guess, Trace
from secondguess.controllers import CONTROLLERS, make_controller
from secondguess.errors import BadInputError
from secondguess.stats import Clock, acceptance_rate_of

FIXED_LENGTHS = (1, 2, 3, 4, 5, 6, 8)
WORTH_IT = 1.02
"""Speculation is recommended where it is faster than plain decoding by more than this factor: less is noise."""


@dataclass(frozen=True)
class Choice:
    """One way to decode.

    Args:
        drafter, controller: by name; the drafter `none` is plain decoding.
        quantize: `int8` for a target that computes other numbers; None for the one that was loaded.
    """

    drafter: str = "none"
    controller: str = "fixed:0"
    quantize: str | None = None

    @property
    def speculates(self) -> bool:
        return self.drafter != "none"


PLAIN = Choice()


@dataclass(frozen=True)
class Speed:
    """How fast one choice is on the prompts, predicted or measured.

    Args:
        tokens, seconds: of each batch, from token ids to token ids.
        acceptance_rate: accepted over drafted nodes; None when nothing was drafted.
        draft_length: mean nodes per row and round.
    """

    tokens: tuple[int, ...]
    seconds: tuple[float, ...]
    acceptance_rate: float | None = None
    draft_length: float = 0.0

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.seconds) or not self.tokens:
            raise BadInputError(
                f"expected tokens and seconds of the same batches, at least one, got {len(self.tokens)} and "
                f"{len(self.seconds)}"
            )

    @property
    def tokens_per_second(self) -> float:
        """All tokens over all seconds."""
        return sum(self.tokens) / sum(self.seconds)

    @property
    def per_batch(self) -> list[float]:
        return [count / spent for count, spent in zip(self.tokens, self.seconds, strict=True)]

    def over(self, plain: Speed) -> float:
        """How many times as fast."""
        return self.tokens_per_second / plain.tokens_per_second

    def worst_over(self, plain: Speed) -> tuple[float, int]:
        """The smallest ratio on one batch, and which batch that is."""
        ratios = [ours / theirs for ours, theirs in zip(self.per_batch, plain.per_batch, strict=True)]
        worst = min(ratios)
        return worst, ratios.index(worst)


@dataclass(frozen=True)
class Part:
    """What is known of one drafter that is not made of several.

    Args:
        guesses: `[prompt][place]` along the texts.
        certain: it looks its guesses up.
    """

    guesses: Sequence[Sequence[Guess]]
    certain: bool


@dataclass(frozen=True)
class Batches:
    """How the prompts are decoded together.

    Args:
        members: per batch, the prompts in it.
        prefills: per batch, of the target and by drafter.
    """

    members: Sequence[tuple[int, ...]]
    target_prefill: Sequence[float]
    drafter_prefill: Mapping[str, Sequence[float]] = field(default_factory=dict)

    def first(self, count: int) -> Batches:
        """Only so many batches."""
        return Batches(
            self.members[:count],
            self.target_prefill[:count],
            {name: seconds[:count] for name, seconds in self.drafter_prefill.items()},
        )


def group(num_prompts: int, batch_size: int) -> list[tuple[int, ...]]:
    """Prompts in full batches, all of them at least once; the last batch begins again with the first prompts.

    >>> group(3, 2), group(2, 5)
    ([(0, 1), (2, 0)], [(0, 1, 0, 1, 0)])
    """
    return [
        tuple(place % num_prompts for place in range(start, start + batch_size))
        for start in range(0, num_prompts, batch_size)
    ]


@dataclass(frozen=True)
class Evidence:
    """What was measured, by which everything is predicted.

    Args:
        bare: a trace per prompt without any guess.
        parts: by name, every drafter that is not made of several.
        costs: of rounds, with the parts of a drafter in their order; asked with the names of the parts.
        batches: by batch size.
    """

    bare: Sequence[Trace]
    parts: Mapping[str, Part]
    costs: Callable[[Sequence[str]], RoundCosts]
    batches: Mapping[int, Batches]

    def traces(self, names: Sequence[str]) -> list[Trace]:
        """Per prompt, the trace of a drafter made of these parts; those of `none` guess nothing."""
        return [
            replace(
                trace,
                guesses=[
                    _as_part(self.parts[name].guesses[index], number) for number, name in enumerate(names)
                ],
            )
            if names
            else trace
            for index, trace in enumerate(self.bare)
        ]


def _as_part(guesses: Sequence[Guess], number: int) -> list[Guess]:
    return [replace(guess, prospect=guess.prospect._replace(part=number)) for guess in guesses]


def split_drafter(name: str) -> list[str]:
    """The parts of a drafter, as `Evidence.parts` names them.

    >>> split_drafter("suffix+model:builtin-draft"), split_drafter("none")
    (['suffix', 'model:builtin-draft'], [])
    """
    from secondguess.drafters import parse_drafter_name

    pieces = []
    for part in parse_drafter_name(name):
        argument = "" if part.argument is None else f":{part.argument}"
        options = "".join(f",{key}={value}" for key, value in part.options.items())
        pieces.append(f"{part.kind}{argument}{options}")
    return [] if pieces == ["none"] else pieces


def controllers_for(certain: bool) -> list[str]:
    """All controllers that suit a drafter, by name.

    Args:
        certain: the drafter has no laws to go by.
    """
    adaptive = [kind for kind in CONTROLLERS if kind != "fixed"]
    heard = [name for name in adaptive if not (certain and make_controller(name).needs_laws)]
    return [*(f"fixed:{length}" for length in FIXED_LENGTHS), *heard]


def choices_of(drafters: Mapping[str, bool]) -> list[Choice]:
    """Plain decoding, then every drafter (name -> whether it is certain) under every controller."""
    return [
        PLAIN,
        *(
            Choice(name, controller)
            for name, certain in drafters.items()
            for controller in controllers_for(certain)
        ),
    ]


def predict(
    choice: Choice,
    evidence: Evidence,
    batch_size: int,
    num_batches: int | None = None,
    clock: Clock | None = None,
) -> Speed:
    """What a choice would take for the batches (all, or the first so many), with one controller over all of them.

    Args:
        clock: times the controller's own decisions, which count too.
    """
    names = split_drafter(choice.drafter)
    batches = evidence.batches[batch_size].first(num_batches or len(evidence.batches[batch_size].members))
    by_prompt = evidence.traces(names)
    traces = [by_prompt[index] for members in batches.members for index in members]
    prefills = [
        _prefill(evidence, batches, names, number, batch_size) for number in range(len(batches.members))
    ]
    done = replay(
        make_controller(choice.controller), traces, evidence.costs(names), batch_size, prefills, clock
    )
    return speed_of(done)


def _prefill(
    evidence: Evidence, batches: Batches, names: Sequence[str], number: int, batch_size: int
) -> Prefill:
    seconds = [batches.drafter_prefill[name][number] for name in names]
    certain = [evidence.parts[name].certain for name in names]
    begin = sum(spent for spent, looks_up in zip(seconds, certain, strict=True) if looks_up)
    # A draft model reads a prompt when it first guesses for it, which may be never.
    later = [
        0.0 if looks_up else spent / batch_size for spent, looks_up in zip(seconds, certain, strict=True)
    ]
    return Prefill(batches.target_prefill[number] + begin, later)


def speed_of(done: Sequence[Replayed]) -> Speed:
    """From what was replayed, batch by batch."""
    drafted = sum(each.num_drafted for each in done)
    return Speed(
        tuple(each.num_tokens for each in done),
        tuple(each.seconds for each in done),
        acceptance_rate_of(sum(each.num_accepted for each in done), drafted),
        drafted / sum(each.num_rounds for each in done),
    )


def fastest(speeds: Mapping[Choice, Speed], count: int) -> list[Choice]:
    """The best few that speculate, best first."""
    able = [choice for choice in speeds if choice.speculates]
    return sorted(able, key=lambda choice: -speeds[choice].tokens_per_second)[:count]


def recommend(speeds: Mapping[int, Mapping[Choice, Speed]]) -> dict[int, Choice]:
    """By batch size, the fastest choice, or plain decoding where nothing beats it by more than `WORTH_IT`."""
    best = {}
    for batch_size, of_choices in speeds.items():
        (champion, *_) = fastest(of_choices, 1) or [PLAIN]
        pays = of_choices[champion].over(of_choices[PLAIN]) > WORTH_IT
        best[batch_size] = champion if pays else PLAIN
    return best


def one_for_all(speeds: Mapping[int, Mapping[Choice, Speed]]) -> Choice:
    """The one choice that a configuration holds.

    It must be worth it at the smallest batch size, and slower than plain decoding at none; where all such are slower
    somewhere, at as few as can be (`losing_sizes`: there it does not serve). Of those within `WORTH_IT` of the best of such
    at the smallest batch size, it is the one that does best where it serves (geometric mean of its speed over plain's).
    """
    smallest = min(speeds)
    of_smallest = speeds[smallest]
    least = WORTH_IT * of_smallest[PLAIN].tokens_per_second
    paying = [
        choice
        for choice, speed in of_smallest.items()
        if choice.speculates and speed.tokens_per_second > least
    ]
    if not paying:
        return PLAIN
    lost = {choice: len(losing_sizes(choice, speeds)) for choice in paying}
    able = [choice for choice in paying if lost[choice] == min(lost.values())]
    near = max(of_smallest[choice].tokens_per_second for choice in able) / WORTH_IT
    return max(
        (choice for choice in able if of_smallest[choice].tokens_per_second >= near),
        key=lambda choice: _mean_gain(choice, speeds),
    )


def losing_sizes(choice: Choice, speeds: Mapping[int, Mapping[Choice, Speed]]) -> list[int]:
    """The batch sizes at which a choice is slower than plain decoding, or not known to be as fast."""
    return [size for size, of in speeds.items() if choice not in of or of[choice].over(of[PLAIN]) < 1]


def _mean_gain(choice: Choice, speeds: Mapping[int, Mapping[Choice, Speed]]) -> float:
    lost = losing_sizes(choice, speeds)
    gains = [math.log(of[choice].over(of[PLAIN])) for size, of in speeds.items() if size not in lost]
    return sum(gains) / len(gains)


def acceptance_by_position(guesses: Sequence[Sequence[Guess]]) -> list[float]:
    """Accepted over guessed nodes at each place of a draft, over all places of all texts."""
    longest = max((guess.num_nodes for places in guesses for guess in places), default=0)
    rates = []
    for position in range(longest):
        reached = [
            guess.accepted[position] > position
            for places in guesses
            for guess in places
            if guess.num_nodes > position
        ]
        rates.append(sum(reached) / len(reached))
    return rates


def coverage(guesses: Sequence[Sequence[Guess]]) -> float:
    """The share of places at which there is a guess at all."""
    places = [guess for of_text in guesses for guess in of_text]
    return sum(guess.num_nodes > 0 for guess in places) / len(places) if places else 0.0
