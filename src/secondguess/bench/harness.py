"""The common part of benchmarks and tunings, and a benchmark from its configuration to its report."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from statistics import median

from secondguess.bench.config import BenchConfig, TuneConfig
from secondguess.bench.costs import WIDTHS, Costs, ForwardTimer, typical_context
from secondguess.bench.encoding import encode_workload
from secondguess.bench.measurement import Measurement, Progress
from secondguess.bench.report import Conditions, CostTable, Report
from secondguess.bench.results import make_results
from secondguess.bench.roster import drafters_to_run, make_systems
from secondguess.bench.summary import sum_stats
from secondguess.bench.systems import Models, Run, SecondguessSystem, System, draft_models, threads
from secondguess.workloads.loading import Workload, load_workload
from secondguess.workloads.provenance import public_name


def run_bench(config: BenchConfig, progress: Progress = lambda done, total, what: None) -> Report:
    """Run a benchmark and return its report.

    Ctrl-C ends the run early with a report over the finished prompts (`complete` is False).

    Raises:
        BadInputError: unreadable prompts, or prompts of which too little fits the model's context;
            an unknown name.
        CheckpointError: a model that cannot be loaded.
        KeyboardInterrupt: Ctrl-C before any prompt was finished.
    """
    workload = load_workload(config.prompts, config.num_prompts, config.tasks)
    if workload.note:
        progress(0, 0, workload.note)
    with threads(config.num_threads) as num_threads:
        bench = Bench(config, workload, lambda default: drafters_to_run(config, default), config.temperatures)
        systems, notes = make_systems(config, bench.models)
        probe = bench.make_probe(systems)
        complete = bench.measurement.run(systems, probe, progress)
    report = bench.report(config.name, systems, probe, num_threads, [*notes, *bench.measurement.notes])
    return replace(report, complete=complete)


class Bench:
    """Models, prompts and measurement of a benchmark or a tuning."""

    def __init__(
        self,
        config: BenchConfig | TuneConfig,
        workload: Workload,
        drafters: Callable[[str], Iterable[str]],
        temperatures: Sequence[float],
    ) -> None:
        """Load the models and check the memory.

        Args:
            drafters: returns the drafters to compare, from the target's default one.
        """
        self.models = Models(config.model, config.dtype, config.device)
        self.workload = workload
        self.encoded = encode_workload(self.models.target, workload, config.num_tokens)
        self.drafters = tuple(drafters(self.models.default_drafter))
        longest = config.num_tokens + max(map(len, self.encoded.prompts))
        self.models.check_batch_memory(self.drafters, max(config.batch_sizes), longest)
        self.measurement = Measurement(
            self.encoded.prompts,
            workload.tasks,
            config.num_tokens,
            temperatures,
            config.batch_sizes,
            config.seed,
        )

    def make_probe(self, systems: Sequence[System]) -> ForwardTimer:
        """Return the timer of target passes and of the draft steps of all draft models."""
        target = self.models.target.runtime
        drafting = {name: self.models.draft_model(name).runtime for name in draft_models(systems)}
        shortest = min(runtime.context_length for runtime in (target, *drafting.values()))
        limit = shortest - max(WIDTHS)
        context = typical_context(self.encoded.prompts, self.measurement.num_tokens, limit)
        return ForwardTimer(target, drafting, context)

    def report(
        self,
        name: str,
        systems: Sequence[System],
        probe: ForwardTimer,
        num_threads: int,
        notes: Iterable[str],
    ) -> Report:
        """Return the report of what was measured, with the notes after those on the prompts."""
        measured, workload = self.measurement, self.workload
        runs = measured.finished_runs(systems)
        ours = {system.name: system for system in systems if isinstance(system, SecondguessSystem)}
        costs = {
            setting: {
                name: costs_of(ours[name], probe, own, setting.batch_size)
                for name, own in of.items()
                if name in ours
            }
            for setting, of in runs.items()
        }
        finished = measured.finished_prompts
        tasks = {
            size: [batch.task for batch in batches] for size, batches in measured.finished_batches.items()
        }
        steps = {public_name(model): probe.costs(model).draft_step for model in draft_models(systems)}
        return Report(
            name=name,
            complete=True,
            workbench=Conditions(
                workload=workload.name,
                workload_sha256=workload.sha256,
                workload_note=workload.note,
                num_prompts=len(finished),
                num_prompts_asked=len(workload.prompts),
                num_tokens=measured.num_tokens,
                median_prompt_tokens=median(len(measured.prompts[index]) for index in finished),
                num_prompts_cut=self.encoded.num_truncated,
                tasks=tasks,
                notes=[*self.encoded.notes, *notes],
            ),
            costs=CostTable.of(probe.context_length, probe.costs(), steps),
            results=make_results(systems, runs, costs, tasks, measured.seed),
            provenance=self.models.provenance(num_threads, measured.seed),
        )


def costs_of(system: SecondguessSystem, probe: ForwardTimer, runs: Sequence[Run], batch_size: int) -> Costs:
    """Return the forward costs for the runs of one of our systems in one setting.

    A draft model's step is timed in isolation. A head's step is its drafting time per level, which
    includes processing the committed tokens; rows of a batch share a level's time.
    """
    costs = probe.costs(system.draft_model)
    if system.draft_model is not None or not system.has_draft_probs:
        return costs
    total = sum_stats(run.stats for run in runs if run.stats is not None)
    num_levels = sum(total.drafted_per_position) / batch_size
    return replace(costs, draft_step=total.drafting_seconds / num_levels) if num_levels else costs
