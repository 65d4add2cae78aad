"""The common part of benchmarks and tunings, and a benchmark from its configuration to its report."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median

from secondguess.bench.config import BenchConfig, TuneConfig
from secondguess.bench.costs import WIDTHS, ForwardTimer, typical_context
from secondguess.bench.encoding import encode_workload
from secondguess.bench.measurement import Measurement, Progress
from secondguess.bench.report import Conditions, CostTable, Report
from secondguess.bench.results import Comparison
from secondguess.bench.roster import drafters_to_run, make_systems
from secondguess.bench.systems import Models, System, draft_models, threads
from secondguess.workloads.loading import Workload, load_workload
from secondguess.workloads.provenance import public_name


def run_bench(config: BenchConfig, progress: Progress = lambda done, total, what: None) -> Report:
    """Run a benchmark and return its report.

    Ctrl-C ends the run early with a report over the finished prompts, or passes if there are none.
    """
    workload = load_workload(config.prompts, config.num_prompts, config.tasks)
    if workload.note:
        progress(0, 0, workload.note)
    with threads(config.num_threads) as num_threads:
        bench = Bench(config, workload)
        systems, notes = make_systems(config, bench.models)
        probe = bench.make_probe(systems)
        complete = bench.measurement.run(systems, probe, progress)
    notes += bench.measurement.notes
    return bench.report(config.name, systems, probe, num_threads, notes, complete)


class Bench:
    """Models, prompts and measurement of a benchmark or a tuning; the memory for them is checked first."""

    def __init__(self, config: BenchConfig | TuneConfig, workload: Workload) -> None:
        named = () if config.runs_all else config.drafters or ()
        self.models = Models(config.model, config.dtype, config.device, drafters=named)
        self.workload = workload
        self.encoded = encode_workload(self.models.target, workload, config.num_tokens)
        self.drafters = drafters_to_run(config, self.models.default_drafter)
        longest = config.num_tokens + max(map(len, self.encoded.prompts))
        self.models.check_batch_memory(self.drafters, max(config.batch_sizes), longest)
        self.measurement = Measurement(self.encoded.prompts, workload.tasks, config)

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
        complete: bool = True,
    ) -> Report:
        """Return the report of what was measured, with the notes after those on the prompts."""
        measured, workload = self.measurement, self.workload
        finished = measured.finished_prompts
        tasks = {
            size: [batch.task for batch in batches] for size, batches in measured.finished_batches.items()
        }
        comparisons = [
            Comparison(setting, systems, runs, tasks[setting.batch_size], measured.seed)
            for setting, runs in measured.finished_runs(systems).items()
        ]
        drafting = {public_name(model): probe.costs(model) for model in draft_models(systems)}
        return Report(
            name=name,
            complete=complete,
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
            costs=CostTable.of(probe.context_length, probe.costs(), drafting),
            results=[result for comparison in comparisons for result in comparison.results(probe)],
            provenance=self.models.provenance(num_threads, measured.seed),
        )
