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
from secondguess.bench.choices import PLAIN, Choice, Speed, controllers_for, fastest
from secondguess.bench.config import TuneConfig
from secondguess.bench.costs import Costs, ForwardTimer, typical_context
from secondguess.bench.encoding import encode_workload
from secondguess.bench.measurement import Progress, make_batches
from secondguess.bench.systems import Models, Run, SecondguessSystem, threads
from secondguess.checkpoint.checkpoint import Checkpoint
from secondguess.errors import SecondGuessError
from secondguess.pairing import resolve_drafter
from secondguess.stats import Clock
from secondguess.workloads.loading import Workload, load_workload

MOST_PASSES = 5
NUM_DRAFTERS = 2
"""Drafters that run under all controllers."""
SHARE_OF_DRAFTERS, SHARE_OF_CONTROLLERS, SHARE_OF_INT8 = 0.3, 0.5, 0.3
"""Largest shares of the time that is left when the step begins."""
LEAST_FOR_INT8 = 0.05
"""Share of the whole budget below which the target in 8 bits is not loaded."""
WARM_UP_TOKENS = 8


class Budget:
    """Seconds that may be spent, from now on."""

    def __init__(self, seconds: float, clock: Clock = time.perf_counter) -> None:
        self._clock = clock
        self._end = clock() + seconds

    @property
    def left(self) -> float:
        return self._end - self._clock()

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
        notes: remarks for the reader.
    """

    config: TuneConfig
    workload: Workload
    models: Models
    speeds: dict[int, dict[Choice, Speed]] = field(default_factory=dict)
    dropped: dict[int, dict[Choice, float]] = field(default_factory=dict)
    int8: dict[int, dict[Choice, Speed]] = field(default_factory=dict)
    costs: dict[int, Costs] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


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
    total = len(Tuner.STEPS) + 1
    with threads(config.num_threads), torch.inference_mode():
        progress(0, total, "loading the models")
        checkpoint = Checkpoint.resolve(config.model, dtype=config.dtype, device=config.device)
        for drafter in config.drafters_to_compare:
            resolve_drafter(drafter, checkpoint)
        tuner = Tuner(config, workload, Models(config.model, config.dtype, config.device), budget)
        for number, (step, method) in enumerate(Tuner.STEPS.items(), start=1):
            progress(number, total, step)
            method(tuner)
        progress(total, total, "done")
    return tuner.findings


class Trials:
    """Runs of choices on batches of prompts, at one batch size.

    A choice keeps its controller over all its runs, as a loaded model does.
    """

    def __init__(
        self, models: Models, prompts: Sequence[Sequence[int]], size: int, config: TuneConfig
    ) -> None:
        batches = make_batches([""] * len(prompts), size)
        self.batches = [[prompts[index] for index in batch.prompts] for batch in batches]
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
        if choice not in self._systems:
            controller = choice.controller if choice.speculates else None
            system = SecondguessSystem(self._models, choice.drafter, controller, ends_texts=True)
            self._systems[choice] = system
            self._decode(choice, 0, min(WARM_UP_TOKENS, self._config.num_tokens))
        return self._systems[choice]

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
        notes = [workload.note] if workload.note else []
        self.findings = Findings(config, workload, models, notes=[*notes, *encoded.notes])

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
        dropped = self.findings.dropped.setdefault(size, {})
        alive, done, step = list(choices), 0, 1
        while len(alive) > keep and done < len(trials.batches) and (not done or has_time()):
            numbers = range(done, min(done + step, len(trials.batches)))
            trials.run([PLAIN, *alive], numbers)
            done, step = done + len(numbers), 2 * step
            speeds = trials.speeds([PLAIN, *alive], done)
            dropped |= {choice: speeds[choice].over(speeds[PLAIN]) for choice in alive}
            alive = fastest(speeds)[: max(keep, (len(alive) + 1) // 2)]
        for choice in alive[:keep]:
            dropped.pop(choice, None)
        return alive[:keep]

    def run_best(self) -> None:
        """Run plain decoding, the default and the best of all batch sizes in turns, at every batch size."""
        default = Choice(default_drafter(self._config.model), "cost")
        found = [choice for best in self._best.values() for choice in best]
        choices = list(dict.fromkeys([PLAIN, default, *found]))
        context = typical_context(self._prompts, self._config.num_tokens)
        share = 1 - SHARE_OF_INT8 if self._config.int8 else 1.0
        for index, (size, trials) in enumerate(self._trials.items()):
            has_time = self._budget.until(share / (len(self._trials) - index))
            trials.forget_runs()
            probe = ForwardTimer(self._models.target.runtime, {}, context, num_sweeps=1, num_rows=size)
            probe.warm_up()
            num_batches, num_runs = len(trials.batches), 0
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
            self.findings.speeds[size] = trials.speeds(choices, num_done)
            self.findings.costs[size] = probe.costs()
            for choice in choices:
                self.findings.dropped.get(size, {}).pop(choice, None)

    def run_int8(self) -> None:
        """Run plain decoding and the best choice of each batch size with the target's weights in 8 bits."""
        config, notes = self._config, self.findings.notes
        if not config.int8:
            return
        if self._models.target.checkpoint.quantize is not None:
            notes.append("the target is in 8 bits already")
            return
        if self._budget.left < LEAST_FOR_INT8 * 60 * config.minutes:
            notes.append("time was short: 8 bits were not run")
            return
        try:
            models = Models(config.model, config.dtype, config.device, quantize="int8")
        except SecondGuessError as error:
            notes.append(f"8 bits were not run: {error}")
            return
        for index, (size, speeds) in enumerate(self.findings.speeds.items()):
            trials = Trials(models, self._prompts, size, config)
            has_time = self._budget.until(1 / (len(self.findings.speeds) - index))
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
