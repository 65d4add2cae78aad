"""`secondguess tune`: run drafters and controllers on the user's prompts and keep the fastest.

Successive halving (Jamieson and Talwalkar, arXiv 1502.07943): all candidates decode a few prompts, the slower half
is dropped, the others decode twice as many. First every drafter runs under its default controller, then the best
drafters run under the other controllers, and last the best of all batch sizes run in turns at every batch size.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import ClassVar

from secondguess.bench.config import TuneConfig
from secondguess.bench.harness import Bench
from secondguess.bench.measurement import Progress, Setting
from secondguess.bench.recommendation import PLAIN, losing_sizes, one_for_all, recommend
from secondguess.bench.report import Report
from secondguess.bench.systems import SecondguessSystem, require_different_names, threads
from secondguess.configuration import Configuration, LoadSettings, TuningRecord
from secondguess.controllers import CONTROLLERS, make_controller
from secondguess.stats import Clock
from secondguess.workloads.loading import Workload, load_workload

FIXED_LENGTHS = (1, 2, 3, 4, 5, 6, 8)
MAX_PASSES = 5
NUM_DRAFTERS = 2
"""Drafters that run under all controllers."""
NUM_FINALISTS = 3
"""Systems of each batch size that enter the final runs with plain decoding and the default."""
SHARE_OF_DRAFTERS, SHARE_OF_CONTROLLERS = 0.3, 0.5
"""Largest shares of the time that is left when the step begins."""
WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class Tuning:
    """Results of a tuning: the report of the final runs, and what the configuration needs beside it.

    `dropped` has by batch size the speed-ups of systems that were dropped before the final runs, `drafters` the
    drafter and the controller of each system.
    """

    report: Report
    dropped: dict[int, dict[str, float]]
    drafters: dict[str, tuple[str, str | None]]
    load: LoadSettings

    @property
    def speedups(self) -> dict[int, dict[str, float]]:
        """Speed-ups over plain decoding in the final runs, by batch size and system."""
        return {
            size: {
                result.system: result.against[PLAIN].of_medians if result.speculates else 1.0
                for result in results
            }
            for (_, size), results in self.report.by_setting().items()
        }

    def configuration(self) -> Configuration:
        """Return what `--config` reads: the chosen drafter and controller, and their measurements."""
        speedups, about, bench = self.speedups, self.report.provenance, self.report.workbench
        chosen, (temperature, smallest) = one_for_all(speedups), min(self.report.by_setting())
        rounds = self.report.result(chosen, temperature, smallest).rounds
        assert rounds is not None  # our systems report their rounds
        drafter, controller = self.drafters[chosen]
        losing = losing_sizes(chosen, speedups)
        return Configuration(
            self.load.model_copy(update={"drafter": drafter, "controller": controller}),
            TuningRecord(
                date=about.date.partition("T")[0],
                processor=about.processor or None,
                num_threads=about.num_threads,
                workload=bench.workload,
                workload_sha256=bench.workload_sha256,
                model_sha256=next(iter(about.model_sha256.values())),
                acceptance_rate=rounds.acceptance_rate,
                acceptance_by_position=tuple(round(rate, 3) for rate in rounds.acceptance_by_position)
                or None,
                draft_length=self._best_constant_length(chosen, smallest, rounds.draft_length),
                cost_ratio=round(rounds.cost_ratio, 4) if chosen != PLAIN else None,
                speedup={size: round(own[chosen], 3) for size, own in speedups.items() if size not in losing},
            ),
        )

    def _best_constant_length(self, chosen: str, batch_size: int, mean: float) -> int:
        """Return the fastest constant draft length measured for the chosen drafter; 0 for plain decoding.

        The chosen system's own comes first, then those of the final runs, which cover more prompts than earlier ones.
        Where no constant length was measured, it is the mean draft length of the chosen controller.
        """
        if chosen == PLAIN:
            return 0
        final = self.speedups[batch_size]
        lengths = [
            (name == chosen, name in final, speedup, constant_length(controller))
            for name, speedup in (self.dropped.get(batch_size, {}) | final).items()
            for drafter, controller in [self.drafters[name]]
            if drafter == self.drafters[chosen][0] and constant_length(controller)
        ]
        return max(lengths)[-1] if lengths else max(round(mean), 1)

    def to_toml(self) -> str:
        """Return the configuration, headed by the recommendation as a comment."""
        lines = recommend(self.speedups)
        comment = [line if line.isprintable() else repr(line) for line in lines]
        return "".join(f"# {line}\n" for line in comment) + self.configuration().to_toml()


def run_tune(
    config: TuneConfig,
    progress: Progress = lambda done, total, step: None,
    clock: Clock = time.perf_counter,
) -> Tuning:
    """Find the fastest systems."""
    budget = Budget(60 * config.minutes, clock)
    workload = load_workload(config.prompts, config.num_prompts)
    workload = replace(workload, tasks=("",) * len(workload.tasks))  # batches may mix tasks
    total = len(Tuner.STEPS) + 1
    with threads(config.num_threads) as num_threads:
        progress(0, total, "loading the models")
        tuner = Tuner(config, workload, budget)
        for number, (step, method) in enumerate(Tuner.STEPS.items(), start=1):
            progress(number, total, step)
            tuner.show_run = partial(_show_run, progress, number, total, step)
            method(tuner)
        progress(total, total, "done")
    return tuner.results(num_threads)


def _show_run(progress: Progress, number: int, total: int, step: str, what: str) -> None:
    progress(number, total, f"{step}: {what}")


class Budget:
    """Seconds that may be spent, from now on."""

    def __init__(self, seconds: float, clock: Clock = time.perf_counter) -> None:
        self._clock = clock
        self._end = clock() + seconds

    def until(self, share: float) -> Callable[[], bool]:
        """Return a function that is true until a share of the time left from now on has passed."""
        left = self._end - self._clock()
        end = self._end - left * (1 - share) if left > 0 else self._end
        return lambda: self._clock() < end


class Tuner:
    """A tuning under way, one method per step."""

    def __init__(self, config: TuneConfig, workload: Workload, budget: Budget) -> None:
        self._config, self._budget = config, budget
        self._bench = Bench(config, workload)
        self.measurement = self._bench.measurement
        self._sizes = sorted(config.batch_sizes)
        self._systems: dict[tuple[str, str | None, int], SecondguessSystem] = {}
        self._best: dict[int, list[SecondguessSystem]] = {}
        self.dropped: dict[int, dict[str, float]] = {size: {} for size in self._sizes}
        self._notes: list[str] = []
        self.show_run: Callable[[str], None] = lambda what: None

    def compare_drafters(self) -> None:
        """Run every drafter under its default controller."""
        for size in self._sizes:
            systems = [self._system(size, name, "cost") for name in self._bench.drafters]
            require_different_names(systems)
            self._best[size] = self.halve(size, systems, NUM_DRAFTERS, SHARE_OF_DRAFTERS)

    def compare_controllers(self) -> None:
        """Run the best drafters under all controllers that suit them."""
        for size, best in self._best.items():
            systems = [
                self._system(size, system.drafter, controller)
                for system in best
                for controller in controllers_for(deterministic=not system.has_draft_probs)
            ]
            self._best[size] = self.halve(size, systems, NUM_FINALISTS, SHARE_OF_CONTROLLERS)

    def halve(
        self, size: int, systems: Sequence[SecondguessSystem], keep: int, share: float
    ) -> list[SecondguessSystem]:
        """Return the fastest few by successive halving; plain decoding runs with them."""
        has_time = self._budget.until(share / len(self._config.batch_sizes))
        dropped, num_batches = self.dropped[size], len(self.measurement.batches[size])
        setting, plain = Setting(self._config.temperature, size), self._system(size, "none", None)
        alive, done, step = list(systems), 0, 1
        while len(alive) > keep and done < num_batches and (not done or has_time()):
            end = min(done + step, num_batches)
            for index in range(done, end):
                self.measurement.run_batch([plain, *alive], size, index, self.show_run)
            done, step = end, 2 * step
            runs = {
                name: self.measurement.runs_of(name, setting, range(done))
                for name in (PLAIN, *(system.name for system in alive))
            }
            speeds = {name: median(run.tokens_per_second for run in own) for name, own in runs.items()}
            dropped |= {system.name: speeds[system.name] / speeds[PLAIN] for system in alive}
            alive.sort(key=lambda system: -speeds[system.name])
            alive = alive[: max(keep, (len(alive) + 1) // 2)]
        for system in alive[:keep]:
            dropped.pop(system.name, None)
        return alive[:keep]

    def run_best(self) -> None:
        """Run plain decoding, the default and the best of all batch sizes in turns, at every batch size."""
        best = [(system.drafter, system.controller_name) for found in self._best.values() for system in found]
        chosen = dict.fromkeys([("none", None), (self._bench.models.default_drafter, "cost"), *best])
        self.measurement.forget_runs()
        self._finalists = [self._system(self._sizes[0], *names) for names in chosen]
        self._probe = self._bench.make_probe(self._finalists)
        self._probe.warm_up()
        for number, size in enumerate(self._sizes):
            has_time = self._budget.until(1 / (len(self._sizes) - number))
            systems = [self._system(size, *names) for names in chosen]
            num_batches, num_runs = len(self.measurement.batches[size]), 0
            while num_runs < MAX_PASSES * num_batches and (not num_runs or has_time()):
                self.measurement.run_batch(systems, size, num_runs % num_batches, self.show_run)
                if num_runs % num_batches == 0:
                    self._probe.sample()
                num_runs += 1
            if num_runs < num_batches:
                self._notes.append(
                    f"time was short: the final runs covered {num_runs} of {num_batches} batches of {size}"
                )
            for system in systems:
                self.dropped[size].pop(system.name, None)

    def results(self, num_threads: int) -> Tuning:
        """Return the report of the final runs, with the recommendation among its notes."""
        report = self._bench.report("tune", self._finalists, self._probe, num_threads, self._notes)
        target = self._bench.models.target
        load = LoadSettings(
            model=self._config.model, verifier="auto", dtype=target.dtype, device=target.device
        )
        systems = self._systems.values()
        drafters = {system.name: (system.drafter, system.controller_name) for system in systems}
        tuning = Tuning(report, self.dropped, drafters, load)
        notes = [line.strip("- .:") for line in recommend(tuning.speedups)]
        notes += [_note_dropped(size, dropped) for size, dropped in self.dropped.items() if dropped]
        report.workbench.notes.extend(notes)
        return tuning

    def _system(self, size: int, drafter: str, controller: str | None) -> SecondguessSystem:
        """Return a system that was warmed up at this batch size."""
        key = (drafter, controller, size)
        if key not in self._systems:
            self._systems[key] = SecondguessSystem(self._bench.models, drafter, controller, ends_texts=True)
            self.measurement.warm_up([self._systems[key]], size, WARM_UP_TOKENS)
        return self._systems[key]

    STEPS: ClassVar[dict[str, Callable[[Tuner], None]]] = {
        "comparing drafters": compare_drafters,
        "comparing controllers": compare_controllers,
        "final runs": run_best,
    }


def _note_dropped(size: int, dropped: Mapping[str, float]) -> str:
    shown = [f"{name.removeprefix('secondguess ')} {speedup:.2f}x" for name, speedup in dropped.items()]
    return (
        f"not in the final runs at batch size {size}, because others were faster on the first prompts (speed on those, "
        f"relative to plain decoding on those): {', '.join(shown)}"
    )


def controllers_for(deterministic: bool) -> list[str]:
    """Return the names of all controllers that suit a drafter; a deterministic one has no distributions."""
    adaptive = [kind for kind in CONTROLLERS if kind != "fixed"]
    usable = [name for name in adaptive if not (deterministic and make_controller(name).needs_probs)]
    return [*(f"fixed:{length}" for length in FIXED_LENGTHS), *usable]


def constant_length(controller: str | None) -> int:
    """Return the draft length of a controller `fixed:K`; 0 for another one."""
    kind, _, length = (controller or "").partition(":")
    return int(length) if kind == "fixed" else 0
