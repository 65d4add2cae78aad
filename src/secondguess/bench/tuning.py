"""`secondguess tune`: run drafters and controllers on the user's prompts and keep the fastest.

Successive halving (Jamieson and Talwalkar, arXiv 1502.07943): all candidates decode a few prompts, the slower half
is dropped, the others decode twice as many. First every drafter runs under its default controller, then the best
drafters run under the other controllers, and last the best of all batch sizes run in turns at every batch size.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from secondguess.api import default_drafter
from secondguess.bench.choices import PLAIN, Choice, Speed, controllers_for, fastest, group
from secondguess.bench.costs import ForwardTimer
from secondguess.bench.encoding import encode_workload, typical_context
from secondguess.bench.predict import Costs
from secondguess.bench.systems import Models, Run, SecondguessSystem
from secondguess.bench.threads import threads
from secondguess.bench.tune_config import TuneConfig
from secondguess.bench.workloads import Workload, load_workload
from secondguess.checkpoint.checkpoint import Checkpoint
from secondguess.errors import SecondGuessError
from secondguess.pairing import resolve_drafter
from secondguess.stats import Clock

Progress = Callable[[int, int, str], None]
"""Called with steps done, steps in all, and the name of the step."""

MOST_PASSES = 5
NUM_DRAFTERS = 2
"""Drafters that run under all controllers."""
SHARE_OF_DRAFTERS, SHARE_OF_CONTROLLERS, SHARE_OF_INT8 = 0.3, 0.5, 0.3
"""Largest shares of the time that is left when the step begins."""
LEAST_FOR_INT8 = 0.05
"""Share of the whole budget below which the target in 8 bits is not loaded."""
WARM_UP_TOKENS = 8


class Budget:
    """Seconds that may be spent, and those spent by step."""

    def __init__(self, seconds: float, clock: Clock = time.perf_counter) -> None:
        self._clock = clock
        self._start = self._mark = clock()
        self.seconds = seconds
        self.spent: dict[str, float] = {}

    @property
    def left(self) -> float:
        return self.seconds - (self._clock() - self._start)

    def book(self, step: str) -> None:
        """Record the seconds since the last call under the name of a step."""
        now = self._clock()
        self.spent[step] = self.spent.get(step, 0.0) + now - self._mark
        self._mark = now

    def until(self, share: float) -> Callable[[], bool]:
        """Return a function that is true until a share of the time left from now on has passed."""
        end = self.left * (1 - share)
        return lambda: self.left > max(end, 0.0)


@dataclass
class Findings:
    """Results of a tuning.

    Args:
        speeds: of the final runs, by batch size and choice.
        dropped: by batch size, speed-ups over plain decoding of choices that were dropped before.
        int8: by batch size, speeds of a target with weights in 8 bits; empty where that was not run.
        costs: of target passes at each batch size.
        num_passes: final runs of a batch, at most.
        notes: remarks for the reader.
        spent: seconds by step.
    """

    config: TuneConfig
    workload: Workload
    models: Models
    num_prompts: int
    longest: int
    speeds: dict[int, dict[Choice, Speed]] = field(default_factory=dict)
    dropped: dict[int, dict[Choice, float]] = field(default_factory=dict)
    int8: dict[int, dict[Choice, Speed]] = field(default_factory=dict)
    costs: dict[int, Costs] = field(default_factory=dict)
    num_passes: int = 0
    notes: list[str] = field(default_factory=list)
    spent: dict[str, float] = field(default_factory=dict)


def run_tune(
    config: TuneConfig,
    progress: Progress = lambda done, total, step: None,
    clock: Clock = time.perf_counter,
) -> Findings:
    """Find the fastest choices.

    Raises:
        BadInputError: prompts that cannot be read or do not fit the model's context.
        CheckpointError: a model that cannot be loaded, or a drafter of another tokenizer.
    """
    budget = Budget(60 * config.minutes, clock)
    workload = load_workload(config.prompts, config.num_prompts)
    with threads(config.num_threads), torch.inference_mode():
        progress(0, len(Tuner.STEPS) + 1, "loading the models")
        checkpoint = Checkpoint.resolve(config.model, dtype=config.dtype, device=config.device)
        for drafter in config.drafters_to_compare:
            resolve_drafter(drafter, checkpoint)
        tuner = Tuner(config, workload, Models(config.model, config.dtype, config.device), budget)
        budget.book("loading")
        for number, (step, method) in enumerate(Tuner.STEPS.items(), start=1):
            progress(number, len(Tuner.STEPS) + 1, step)
            method(tuner)
            budget.book(step)
        progress(len(Tuner.STEPS) + 1, len(Tuner.STEPS) + 1, "done")
    tuner.findings.spent = budget.spent
    return tuner.findings


class Trials:
    """Runs of choices on batches of prompts, at one batch size.

    A choice keeps its controller over all its runs, as a loaded model does.
    """

    def __init__(
        self, models: Models, prompts: Sequence[Sequence[int]], size: int, config: TuneConfig
    ) -> None:
        self.batches = [[prompts[index] for index in members] for members in group(len(prompts), size)]
        self._models, self._config = models, config
        self._systems: dict[Choice, SecondguessSystem] = {}
        self._num_turns = 0
        self._runs: dict[Choice, dict[int, list[Run]]] = {}

    def run(self, choices: Sequence[Choice], numbers: Iterable[int]) -> None:
        """Run all choices on each of these batches, in reverse order on every second one (ABBA)."""
        for choice in choices:
            self.system(choice)
        for number in numbers:
            self._num_turns += 1
            for choice in choices if self._num_turns % 2 else reversed(choices):
                run = self._decode(choice, number, self._config.num_tokens)
                self._runs.setdefault(choice, {}).setdefault(number, []).append(run)

    def system(self, choice: Choice) -> SecondguessSystem:
        """Return the system of a choice, warmed up."""
        system = self._systems.get(choice)
        if system is None:
            controller = choice.controller if choice.speculates else None
            system = SecondguessSystem(self._models, choice.drafter, controller, ends_texts=True)
            self._systems[choice] = system
            self._decode(choice, 0, min(WARM_UP_TOKENS, self._config.num_tokens))
        return system

    def _decode(self, choice: Choice, number: int, num_tokens: int) -> Run:
        config = self._config
        return self._systems[choice].generate_batch(
            self.batches[number], num_tokens, config.temperature, config.seed + number
        )

    def speeds(self, choices: Iterable[Choice], num_batches: int) -> dict[Choice, Speed]:
        """Return speeds over the first few batches."""
        return {
            choice: Speed.of_runs([self._runs[choice][number] for number in range(num_batches)])
            for choice in choices
        }

    def forget_runs(self) -> None:
        """Forget all runs; controllers keep their experience."""
        self._runs.clear()


class Tuner:
    """A tuning under way, one method per step."""

    def __init__(self, config: TuneConfig, workload: Workload, models: Models, budget: Budget) -> None:
        self._config, self._models, self._budget = config, models, budget
        encoded = encode_workload(models.target, workload, config.num_tokens)
        self._prompts = encoded.prompts
        self._trials = {size: Trials(models, self._prompts, size, config) for size in config.batch_sizes}
        self._best: dict[int, list[Choice]] = {}
        longest = max(map(len, self._prompts)) + config.num_tokens
        self.findings = Findings(config, workload, models, len(self._prompts), longest)
        self.findings.notes += [note for note in (workload.note, encoded.note) if note]

    def compare_drafters(self) -> None:
        """Run every drafter under its default controller."""
        choices = [Choice(name, "cost") for name in self._config.drafters_to_compare]
        for size in self._config.batch_sizes:
            self._best[size] = self._halve(size, choices, NUM_DRAFTERS, SHARE_OF_DRAFTERS)

    def compare_controllers(self) -> None:
        """Run the best drafters under all controllers."""
        for size, best in self._best.items():
            choices = [
                Choice(each.drafter, controller)
                for each in best
                for controller in controllers_for(
                    deterministic=not self._trials[size].system(each).has_draft_probs
                )
            ]
            keep = self._config.num_verified
            self._best[size] = self._halve(size, choices, keep, SHARE_OF_CONTROLLERS) if keep else []

    def _halve(self, size: int, choices: Sequence[Choice], keep: int, share: float) -> list[Choice]:
        """Return the fastest few by successive halving; plain decoding runs beside them."""
        trials, has_time = self._trials[size], self._budget.until(share / len(self._trials))
        alive, done, step = list(choices), 0, 1
        while len(alive) > keep:
            numbers = range(done, min(done + step, len(trials.batches)))
            if not numbers or (done and not has_time()):
                break
            trials.run([PLAIN, *alive], numbers)
            done, step = done + len(numbers), 2 * step
            speeds = trials.speeds([PLAIN, *alive], done)
            ordered = fastest(speeds)
            alive = ordered[: max(keep, (len(ordered) + 1) // 2)]
            self._note_dropped(size, speeds, alive)
        if len(alive) > keep:
            speeds = trials.speeds([PLAIN, *alive], done)
            alive = fastest(speeds)[:keep]
            self._note_dropped(size, speeds, alive)
        return alive

    def _note_dropped(self, size: int, speeds: dict[Choice, Speed], alive: Sequence[Choice]) -> None:
        dropped = self.findings.dropped.setdefault(size, {})
        for choice, speed in speeds.items():
            if choice.speculates and choice not in alive:
                dropped[choice] = speed.over(speeds[PLAIN])

    def run_best(self) -> None:
        """Run plain decoding, the default and the best of all batch sizes in turns, at every batch size."""
        found = [choice for best in self._best.values() for choice in best]
        choices = list(dict.fromkeys([PLAIN, self._default(), *found]))
        share = 1 - SHARE_OF_INT8 if self._config.int8 else 1.0
        for place, (size, trials) in enumerate(self._trials.items()):
            has_time = self._budget.until(share / (len(self._trials) - place))
            trials.forget_runs()
            probe = self._make_probe(size)
            probe.warm_up()
            num_batches = len(trials.batches)
            num_runs = 0
            while num_runs < MOST_PASSES * num_batches and (not num_runs or has_time()):
                trials.run(choices, [num_runs % num_batches])
                if num_runs % num_batches == 0:
                    probe.sample()
                num_runs += 1
            num_done = min(num_runs, num_batches)
            if num_done < num_batches:
                self.findings.notes.append(
                    f"time was short: the best ran on {num_done} of {num_batches} batches of {size}"
                )
            self.findings.num_passes = max(self.findings.num_passes, -(-num_runs // num_batches))
            self.findings.speeds[size] = trials.speeds(choices, num_done)
            self.findings.costs[size] = probe.costs()
            for choice in choices:
                self.findings.dropped.get(size, {}).pop(choice, None)

    def _make_probe(self, size: int) -> ForwardTimer:
        context = typical_context(self._prompts, self._config.num_tokens)
        return ForwardTimer(self._models.target.runtime, {}, context, num_sweeps=1, num_rows=size)

    def _default(self) -> Choice:
        """Return the choice of `load` without options."""
        name = default_drafter(self._config.model)
        return Choice(name, "cost")

    def run_int8(self) -> None:
        """Run plain decoding and the best choice of each batch size with the target's weights in 8 bits."""
        config, notes = self._config, self.findings.notes
        if not config.int8:
            return
        if self._models.target.checkpoint.quantize is not None:
            notes.append("the target is in 8 bits already")
            return
        if self._budget.left < LEAST_FOR_INT8 * self._budget.seconds:
            notes.append("time was short: 8 bits were not run")
            return
        try:
            models = Models(config.model, config.dtype, config.device, quantize="int8")
        except SecondGuessError as error:
            notes.append(f"8 bits were not run: {error}")
            return
        for place, (size, speeds) in enumerate(self.findings.speeds.items()):
            trials = Trials(models, self._prompts, size, config)
            has_time = self._budget.until(1 / (len(self.findings.speeds) - place))
            choices = [PLAIN, *fastest(speeds)[:1]]
            done = 0
            while done < len(trials.batches) and (not done or has_time()):
                trials.run(choices, [done])
                done += 1
            self.findings.int8[size] = {
                Choice(choice.drafter, choice.controller, "int8"): speed
                for choice, speed in trials.speeds(choices, done).items()
            }

    STEPS: ClassVar[dict[str, Callable[[Tuner], None]]] = {
        "drafters": compare_drafters,
        "controllers": compare_controllers,
        "the best": run_best,
        "8 bits": run_int8,
    }
