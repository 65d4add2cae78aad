"""Benchmark run, from its configuration to its report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from secondguess.bench.config import BenchConfig
from secondguess.bench.costs import Costs, ForwardTimer, typical_context
from secondguess.bench.encoding import EncodedWorkload, encode_workload
from secondguess.bench.measurement import Measurement, Progress
from secondguess.bench.report import Conditions, CostTable, Report
from secondguess.bench.results import make_results
from secondguess.bench.roster import drafters_to_run, make_systems
from secondguess.bench.summary import sum_stats
from secondguess.bench.systems import Models, Run, SecondguessSystem, System, draft_models, threads
from secondguess.workloads.loading import Workload, load_workload
from secondguess.workloads.provenance import public_name

MAX_PASS_TOKENS = 9
"""Largest number of tokens for which the cost of a target pass is measured."""


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
        models = Models(config.model, config.dtype, config.device)
        encoded = encode_workload(models.target, workload, config.num_tokens)
        models.check_batch_memory(
            drafters_to_run(config, models.default_drafter),
            max(config.batch_sizes),
            config.num_tokens + encoded.longest,
        )
        systems, coverage = make_systems(config, models)
        probe = make_probe(models, systems, encoded, config.num_tokens)
        measured = Measurement(
            encoded.prompts,
            workload.tasks,
            config.num_tokens,
            config.temperatures,
            config.batch_sizes,
            config.seed,
        )
        complete = measured.run(systems, probe, progress)
    report = make_report(config.name, systems, measured, probe, models, workload, encoded, num_threads)
    notes = [*encoded.notes, *coverage, *measured.notes]
    return replace(report, complete=complete, workbench=replace(report.workbench, notes=notes))


def make_probe(
    models: Models, systems: Sequence[System], encoded: EncodedWorkload, num_tokens: int
) -> ForwardTimer:
    """Return the timer of target passes and of the draft steps of all draft models."""
    drafting = {name: models.draft_model(name).runtime for name in draft_models(systems)}
    shortest = min(each.context_length for each in (models.target.runtime, *drafting.values()))
    return ForwardTimer(
        models.target.runtime,
        drafting,
        context=typical_context(encoded.prompts, num_tokens, limit=shortest - MAX_PASS_TOKENS),
        widths=tuple(range(1, MAX_PASS_TOKENS + 1)),
    )


def make_report(
    name: str,
    systems: Sequence[System],
    measured: Measurement,
    probe: ForwardTimer,
    models: Models,
    workload: Workload,
    encoded: EncodedWorkload,
    num_threads: int,
) -> Report:
    """Return the report of what was measured, without notes."""
    ours = [system for system in systems if isinstance(system, SecondguessSystem)]
    runs = measured.finished_runs(systems)
    costs = {
        system.name: {
            setting: costs_of(system, probe, runs[system.name][setting], setting.batch_size)
            for setting in runs[system.name]
        }
        for system in ours
    }
    tasks, finished = measured.finished_tasks, measured.finished_prompts
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
            median_prompt_tokens=median(len(encoded.prompts[index]) for index in finished),
            num_prompts_cut=encoded.num_truncated,
            tasks=tasks,
            notes=[],
        ),
        costs=make_cost_table(
            probe.context_length,
            probe.costs(),
            {public_name(model): probe.costs(model).draft_step for model in draft_models(systems)},
        ),
        results=make_results(systems, runs, costs, tasks, measured.seed),
        provenance=models.provenance(num_threads, measured.seed),
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


def make_cost_table(context_length: int, costs: Costs, draft_steps: dict[str, float]) -> CostTable:
    """Return the cost table of a report.

    Args:
        draft_steps: seconds of one draft step by draft model.
    """
    return CostTable(
        context_length=context_length,
        target_ms={m: 1000 * costs.target[m] for m in sorted(costs.target)},
        curve=costs.curve,
        draft_step_ms={name: 1000 * seconds for name, seconds in draft_steps.items()},
        cost_ratio={name: seconds / costs.target[1] for name, seconds in draft_steps.items()},
    )
