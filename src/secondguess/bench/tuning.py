"""`secondguess tune`: measure what rounds cost and what guesses are worth, predict every combination, run the best.

texts      the target writes; every drafter guesses along (`recital.py`, `traces.py`)
costs      rounds of every length and batch size, everybody in turns (`round_costs.py`), and prefill
predict    all combinations, replayed (`planner.py`)
verify     the best of them, really run (`trial.py`)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import median

import torch

from secondguess.api import default_drafter, encode, make_row
from secondguess.bench.costs import synchronise
from secondguess.bench.planner import (
    PLAIN,
    Batches,
    Choice,
    Evidence,
    Part,
    choices_of,
    fastest,
    group,
    one_for_all,
    predict,
    split_drafter,
)
from secondguess.bench.recital import make_trace, recite, write_texts
from secondguess.bench.round_costs import Stage
from secondguess.bench.systems import Models
from secondguess.bench.threads import threads
from secondguess.bench.traces import Guess, record
from secondguess.bench.trial import Trial
from secondguess.bench.tune_config import TuneConfig
from secondguess.bench.tune_costs import FEWEST_TURNS, MOST_TURNS, Costs, Joined, RoundTimer
from secondguess.bench.tune_findings import Budget, Findings, Verified
from secondguess.bench.workloads import Workload, load_workload
from secondguess.controllers import make_controller
from secondguess.core import Prospect, Row
from secondguess.drafters import make_drafter
from secondguess.drafters.base import Drafter
from secondguess.errors import BadInputError, SecondGuessError
from secondguess.runtime.base import Runtime
from secondguess.sampling import SamplingParams
from secondguess.stats import Clock
from secondguess.verifiers import make_verifier

Progress = Callable[[int, int, str], None]
"""Told (steps done, steps in all, what is being done)."""

NUM_STEPS = 6
GROUP_SIZE = 4
"""Texts that are written and guessed along at once."""
SHARE_OF_TEXTS, SHARE_OF_COSTS, SHARE_OF_INT8 = 0.3, 0.25, 0.15
"""Of the budget, at most."""
MOST_PASSES = 5
NOTHING = Guess(Prospect(longest=0, certain=True), (), ())
GOLDEN = 0.618034


def run_tune(
    config: TuneConfig,
    progress: Progress = lambda done, total, what: None,
    clock: Clock = time.perf_counter,
) -> Findings:
    """Tune.

    Args:
        clock: by which speeds are measured; the budget is wall-clock time in any case.

    Raises:
        BadInputError: prompts that cannot be read or do not fit the model's context.
        CheckpointError: a model that cannot be loaded, or a drafter of another tokenizer.
    """
    budget = Budget(60 * config.minutes)
    workload = load_workload(config.prompts, config.num_prompts)
    with threads(config.num_threads), torch.inference_mode():
        progress(0, NUM_STEPS, "loading the models")
        tuner = Tuner(config, workload, Models(config.model, config.dtype, config.device), budget, clock)
        budget.book("load")
        for number, (step, what) in enumerate(tuner.steps, start=1):
            progress(number, NUM_STEPS, what)
            step()
            budget.book(what)
        progress(NUM_STEPS, NUM_STEPS, "done")
    tuner.findings.spent = budget.spent
    return tuner.findings


class Tuner:
    """A tuning under way: one method per step, in the order of `steps`."""

    def __init__(
        self, config: TuneConfig, workload: Workload, models: Models, budget: Budget, clock: Clock
    ) -> None:
        self._config, self._models, self._budget, self._clock = config, models, budget, clock
        self._verifier = make_verifier("auto")
        self.findings = Findings(config, workload, models)
        self._prompts = _encoded(models, workload, config)
        self._drafters: dict[str, Drafter] = {
            name: self._make_drafter(name)
            for name in dict.fromkeys(
                part for drafter in self._drafter_names() for part in split_drafter(drafter)
            )
        }
        self._texts: list[list[int]] = []
        self._seconds_of_turn = 0.0
        self._evidence: Evidence | None = None
        if workload.note:
            self.findings.notes.append(workload.note)

    @property
    def steps(self) -> list[tuple[Callable[[], None], str]]:
        return [
            (self.write_and_guess, "texts and guesses"),
            (self.time_rounds, "costs of rounds"),
            (self.time_prefills, "prefill"),
            (self.predict_all, "prediction"),
            (self.look_at_int8, "8 bits"),
            (self.verify, "verification"),
        ]

    def write_and_guess(self) -> None:
        """The target writes, a few prompts at a time, and all drafters guess along, until the share of time is used."""
        config = self._config
        go_on = self._budget.until(SHARE_OF_TEXTS)
        guesses: dict[str, list[list[Guess]]] = {name: [] for name in self._drafters}
        upkeep: dict[str, list[float]] = {name: [] for name in self._drafters}
        lengths: list[int] = []
        for start in range(0, len(self._prompts), GROUP_SIZE):
            indices = range(start, min(start + GROUP_SIZE, len(self._prompts)))
            written = write_texts(
                self._models.target.runtime,
                self._verifier,
                self._rows(indices, config.num_tokens + config.depth),
            )
            places = [
                _text_length(text, self._models.target.end_tokens, config.num_tokens) for text in written
            ]
            for name, drafter in self._drafters.items():
                made, seconds = self._guess(drafter, indices, written, max(places))
                guesses[name] += [of_row[:length] for of_row, length in zip(made, places, strict=True)]
                upkeep[name].append(seconds)
            self._texts += [text[:length] for text, length in zip(written, places, strict=True)]
            lengths += places
            if not go_on():
                break
        self._note_texts(lengths)
        self._prompts = self._prompts[: len(lengths)]
        self.findings.parts = {
            name: Part(guesses[name], drafter.certain) for name, drafter in self._drafters.items()
        }
        self._upkeep = {name: median(seconds) for name, seconds in upkeep.items()}
        self.findings.traces = [
            make_trace("", row, [[NOTHING] * length], length, config.num_tokens)
            for row, length in zip(self._rows(range(len(lengths)), config.num_tokens), lengths, strict=True)
        ]

    def _guess(
        self, drafter: Drafter, indices: Sequence[int], texts: Sequence[Sequence[int]], num_places: int
    ) -> tuple[list[list[Guess]], float]:
        rows = self._rows(indices, num_places + self._config.depth + 2)
        target = self._models.target.runtime
        if drafter.certain or self._config.temperature == 0:
            return recite(drafter, rows, texts, num_places, self._config.depth, target.device)
        traces = record(target, drafter, self._verifier, rows, num_places, self._config.depth)
        return [trace.guesses[0] for trace in traces], 0.0

    def _note_texts(self, lengths: Sequence[int]) -> None:
        config, notes = self._config, self.findings.notes
        if len(lengths) < len(self._prompts):
            notes.append(
                f"time was short: {len(lengths)} of {len(self._prompts)} prompts (more --minutes would use more)"
            )
        num_ended = sum(length < config.num_tokens for length in lengths)
        if num_ended:
            notes.append(f"{num_ended} of {len(lengths)} texts end before {config.num_tokens} tokens")

    def time_rounds(self) -> None:
        """Rounds of every drafter at every batch size, in turns."""
        timer = self._make_timer(self._models.target.runtime)
        start = self._budget.elapsed
        turns = timer.run(MOST_TURNS, self._budget.until(SHARE_OF_COSTS))
        self._seconds_of_turn = (self._budget.elapsed - start) / turns
        self.findings.costs = timer.costs()
        if turns < FEWEST_TURNS + 1:
            self.findings.notes.append(f"time was short: rounds were timed in {turns} turns only")

    def _make_timer(self, target: Runtime) -> RoundTimer:
        make_rows = self._make_rows_for_timing()
        joined = {}
        for name in self._drafter_names():
            names = split_drafter(name)
            models = [place for place, part in enumerate(names) if not self._drafters[part].certain]
            if len(names) > 1 and models:
                joined["+".join(names)] = Joined(self._make_drafter(name), names, models[0])
        return RoundTimer(
            lambda drafter: Stage(target, drafter, self._verifier, make_rows, self._clock),
            self._drafters,
            self._upkeep,
            joined,
            self._config.batch_sizes,
        )

    def _make_rows_for_timing(self) -> Callable[[int], list[Row]]:
        """Rows somewhere in their texts, as they would be while they are written."""
        counter = 0

        def make_rows(num_rows: int) -> list[Row]:
            nonlocal counter
            rows = []
            for _ in range(num_rows):
                index = counter % len(self._prompts)
                text = self._texts[index]
                counter += 1
                length = int(len(text) * (counter * GOLDEN % 1))
                rows.append(self._row(self._prompts[index] + text[:length], 10**6, counter))
            return rows

        return make_rows

    def time_prefills(self) -> None:
        """What each batch takes before its first round."""
        go_on = self._budget.until(0.1)
        members = {size: group(len(self._prompts), size) for size in self._config.batch_sizes}
        seconds: dict[tuple[int, int, str], list[float]] = {}
        for turn in range(4):
            for size, of_size in members.items():
                for number, batch in enumerate(of_size):
                    for name, spent in self._prefill(batch).items():
                        # The first turn allocates.
                        if turn or not go_on():
                            seconds.setdefault((size, number, name), []).append(spent)
            if turn and not go_on():
                break
        batches = {
            size: Batches(
                of_size,
                [median(seconds[size, number, ""]) for number in range(len(of_size))],
                {
                    name: [median(seconds[size, number, name]) for number in range(len(of_size))]
                    for name in self._drafters
                },
            )
            for size, of_size in members.items()
        }
        assert self.findings.costs is not None
        self.findings.costs = self._with_reading(self.findings.costs, batches)
        self._evidence = Evidence(self.findings.traces, self.findings.parts, self.findings.costs.of, batches)

    def _prefill(self, batch: Sequence[int]) -> dict[str, float]:
        """Seconds by drafter, and of the target under the empty name."""
        rows = self._rows(batch, self._config.num_tokens)
        target = self._models.target.runtime
        seconds = {"": self._timed(lambda: target.begin(rows))}
        for name, drafter in self._drafters.items():

            def begin(drafter: Drafter = drafter) -> None:
                drafter.begin(rows)
                drafter.prepare(rows, [0] * len(rows))

            seconds[name] = self._timed(begin)
            for row in reversed(rows):
                drafter.end(row)
        for row in reversed(rows):
            target.end(row)
        return seconds

    def _timed(self, work: Callable[[], object]) -> float:
        device = self._models.target.runtime.device
        synchronise(device)
        start = self._clock()
        work()
        synchronise(device)
        return self._clock() - start

    def _with_reading(self, costs: Costs, batches: Mapping[int, Batches]) -> Costs:
        """Costs with what draft models take to read a token among many."""
        found = batches[max(batches)]
        num_tokens = sum(len(self._prompts[index]) for members in found.members for index in members)
        reading = {
            name: 0.0 if drafter.certain else sum(found.drafter_prefill[name]) / num_tokens
            for name, drafter in self._drafters.items()
        }
        return costs.with_reading(reading)

    def predict_all(self) -> None:
        """Every combination, at every batch size."""
        assert self._evidence is not None
        for size in self._config.batch_sizes:
            self.findings.predictions[size] = {
                choice: predict(choice, self._evidence, size, clock=time.thread_time)
                for choice in choices_of(self._certain_by_drafter())
            }

    def look_at_int8(self) -> None:
        """Predict plain decoding and the best few with weights in 8 bits, from costs of their own along the same texts."""
        config, notes = self._config, self.findings.notes
        if not config.int8:
            return
        if self._models.target.quantize is not None:
            notes.append("the target is in 8 bits already")
            return
        if self._budget.left < 3 * self._seconds_of_turn + 0.3 * self._budget.seconds:
            notes.append("time was short: 8 bits were not looked at")
            return
        try:
            quantized = Models(config.model, config.dtype, config.device, quantize="int8").target
        except SecondGuessError as error:
            notes.append(f"8 bits were not looked at: {error}")
            return
        timer = self._make_timer(quantized.runtime)
        timer.run(MOST_TURNS // 2, self._budget.until(SHARE_OF_INT8))
        assert self._evidence is not None
        self.findings.int8_costs = self._with_reading(timer.costs(), self._evidence.batches)
        evidence = replace(self._evidence, costs=self.findings.int8_costs.of)
        for size, predictions in self.findings.predictions.items():
            for choice in [PLAIN, *fastest(predictions, max(config.num_verified, 1))]:
                speed = predict(choice, evidence, size, clock=time.thread_time)
                predictions[Choice(choice.drafter, choice.controller, "int8")] = speed
        notes.append(
            "8 bits: predicted from the costs of a target in 8 bits and the guesses along the text of the unrounded one; "
            "it changes the model's numbers, and so its text"
        )

    def verify(self) -> None:
        """Run the best few, plain decoding and the default, in turns, as often as time allows."""
        assert self._evidence is not None
        chosen = {size: self._to_verify(size) for size in self._config.batch_sizes}
        if not any(len(choices) > 1 for choices in chosen.values()):
            return
        seconds = sum(
            sum(self.findings.predictions[size][choice].seconds)
            for size, choices in chosen.items()
            for choice in choices
        )
        # A warm-up run of each, and what the loop needs around the runs.
        affordable = max(self._budget.left, 0.0) / (1.2 * seconds) - 0.3
        share = min(1.0, max(affordable, 0.0))
        passes = max(1, min(MOST_PASSES, int(affordable)))
        if share < 1:
            self.findings.notes.append("time was short: the best were run on some of the prompts only")
        self.findings.num_passes = passes
        for size, choices in chosen.items():
            batches = self._evidence.batches[size]
            num_batches = max(1, int(share * len(batches.members)))
            trial = Trial(
                self._models.target.runtime,
                self._verifier,
                self._make_drafter,
                lambda members: self._rows(members, self._config.num_tokens, ends=True),
                self._clock,
            )
            measured = trial.run(choices, batches.members[:num_batches], passes)
            self.findings.verified += [
                Verified(
                    choice,
                    size,
                    predict(choice, self._evidence, size, num_batches, clock=time.thread_time),
                    measured[choice],
                )
                for choice in choices
            ]

    def _to_verify(self, batch_size: int) -> list[Choice]:
        unrounded = {
            choice: speed
            for choice, speed in self.findings.predictions[batch_size].items()
            if choice.quantize is None
        }
        if self._config.num_verified == 0:
            return []
        default = [choice for choice in [self._default()] if choice in unrounded]
        best = fastest(unrounded, self._config.num_verified)
        # What the configuration will most likely hold should be known at every batch size.
        everywhere = one_for_all(
            {
                size: {choice: speed for choice, speed in of.items() if choice.quantize is None}
                for size, of in self.findings.predictions.items()
            }
        )
        return list(dict.fromkeys([PLAIN, *default, *best, everywhere]))

    def _default(self) -> Choice:
        """What is used when nobody chooses."""
        name = default_drafter(self._config.model)
        controller = self._make_drafter(name).default_controller
        # Other kinds of controllers are weighed under their bare names.
        return Choice(name, make_controller(controller).name if controller == "fixed" else controller)

    def _drafter_names(self) -> tuple[str, ...]:
        return self._config.drafters_to_weigh

    def _certain_by_drafter(self) -> dict[str, bool]:
        parts = self.findings.parts
        return {
            name: all(parts[part].certain for part in split_drafter(name)) for name in self._drafter_names()
        }

    def _make_drafter(self, name: str) -> Drafter:
        return make_drafter(
            name,
            target_vocab_size=self._models.target.runtime.vocab_size,
            load_draft_model=lambda path: self._models.draft_model(path).runtime,
            target=self._models.target,
        )

    def _rows(self, indices: Sequence[int], max_tokens: int, ends: bool = False) -> list[Row]:
        return [
            self._row(self._prompts[index], max_tokens, self._config.seed + index, place, ends)
            for place, index in enumerate(indices)
        ]

    def _row(self, tokens: list[int], max_tokens: int, seed: int, stream: int = 0, ends: bool = False) -> Row:
        params = SamplingParams(max_tokens=max_tokens, temperature=self._config.temperature)
        row = make_row(self._models.target, self._verifier, tokens, params)
        if not ends:
            row.end_tokens = frozenset()
        # Known noise, yet the verifier of a request without a seed.
        row.seed, row.stream = seed, stream
        return row


def _encoded(models: Models, workload: Workload, config: TuneConfig) -> list[list[int]]:
    """Token ids of all prompts, refused when one leaves no room for its text and the guesses behind it."""
    prompts = [encode(models.target, prompt) for prompt in workload.prompts]
    room = models.target.runtime.context_length - config.num_tokens - config.depth - 2
    longest = max(map(len, prompts))
    if longest > room:
        raise BadInputError(
            f"expected prompts of at most {max(room, 0)} tokens (the context less {config.num_tokens} new ones and a draft), "
            f"got one of {longest} in {workload.name}; take other prompts or a smaller --max-tokens"
        )
    return prompts


def _text_length(text: Sequence[int], end_tokens: frozenset[int], most: int) -> int:
    """Tokens up to and including the one that ends the text."""
    ends = (place for place, token in enumerate(text[:most], start=1) if token in end_tokens)
    return next(ends, most)
