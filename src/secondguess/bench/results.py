"""Results of a benchmark, computed from the runs of its systems."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from statistics import median

from secondguess.bench.costs import Costs, predicted_seconds
from secondguess.bench.measurement import Setting
from secondguess.bench.report import Result, Rounds, TaskResult, TextComparison
from secondguess.bench.summary import compare, median_interval, sum_stats
from secondguess.bench.systems import Run, System

Runs = Mapping[str, Sequence[Run]]
"""Runs in one setting by system, in the order of its batches; systems that cannot run in it are absent."""


def make_results(
    systems: Sequence[System],
    runs: Mapping[Setting, Runs],
    costs: Mapping[Setting, Mapping[str, Costs]],
    tasks: Mapping[int, Sequence[str]],
    seed: int,
) -> list[Result]:
    """Return one result per setting and system.

    `costs` has the forward costs of the systems that report statistics, `tasks` by batch size the task of each
    batch; `seed` is that of the bootstrap. Within a setting all systems have equally many runs.
    """
    results = []
    for setting, own_runs in runs.items():
        present = [system for system in systems if system.name in own_runs]
        results += _results_at(
            setting, present, own_runs, costs.get(setting, {}), tasks[setting.batch_size], seed
        )
    return results


def _results_at(
    setting: Setting,
    systems: Sequence[System],
    runs: Runs,
    costs: Mapping[str, Costs],
    tasks: Sequence[str],
    seed: int,
) -> list[Result]:
    """Return the results of one setting, in which all systems ran the same batches."""
    plain = {system.family: system.name for system in systems if not system.speculates}
    speeds = {name: [run.tokens_per_second for run in own] for name, own in runs.items()}
    baselines = [*plain.values(), *fastest_speculators(systems, speeds).values()]
    results = []
    for system in systems:
        name, own = system.name, runs[system.name]
        # Speculation has to reproduce the plain decoding of its own family. Plain decodings of other families are
        # compared with ours: a runtime that computes something else would still reproduce its own texts.
        reference = plain[system.family] if system.speculates else next(iter(plain.values()))
        comparable = setting.temperature == 0 and reference != name
        results.append(
            Result(
                system=name,
                family=system.family,
                speculates=system.speculates,
                temperature=setting.temperature,
                batch_size=setting.batch_size,
                tokens_per_second=median(speeds[name]),
                interval=median_interval(speeds[name], seed),
                per_batch=speeds[name],
                against={
                    baseline: compare(speeds[name], speeds[baseline], seed)
                    for baseline in baselines
                    if baseline != name
                },
                by_task=_results_by_task(own, runs.get(plain.get(system.family, name), own), tasks, seed),
                rounds=summarise_rounds(own, costs[name], setting.batch_size) if name in costs else None,
                equality=compare_texts(own, runs[reference], reference) if comparable else None,
            )
        )
    return results


def _results_by_task(
    runs: Sequence[Run], plain: Sequence[Run], tasks: Sequence[str], seed: int
) -> dict[str, TaskResult]:
    """Return a system's results by task; `plain` is `runs` itself where there is nothing to compare with."""
    results = {}
    for task in dict.fromkeys(tasks):
        indices = [index for index, its_task in enumerate(tasks) if its_task == task]
        own = [runs[index] for index in indices]
        speeds = [run.tokens_per_second for run in own]
        baseline = [plain[index].tokens_per_second for index in indices]
        stats = [run.stats for run in own if run.stats is not None]
        results[task] = TaskResult(
            num_batches=len(indices),
            tokens_per_second=median(speeds),
            against_plain=None if plain is runs else compare(speeds, baseline, seed),
            acceptance_length=sum_stats(stats).acceptance_length if stats else None,
        )
    return results


def fastest_speculators(systems: Sequence[System], speeds: Mapping[str, Sequence[float]]) -> dict[str, str]:
    """Return the fastest speculating system of each family, by median speed."""
    fastest: dict[str, str] = {}
    for system in systems:
        if system.speculates:
            best = fastest.setdefault(system.family, system.name)
            fastest[system.family] = max(best, system.name, key=lambda name: median(speeds[name]))
    return fastest


def summarise_rounds(runs: Sequence[Run], costs: Costs, batch_size: int = 1) -> Rounds | None:
    """Return round statistics with predicted speeds; None for runs without statistics."""
    timed = [(run.decode_seconds, run.stats) for run in runs if run.stats is not None]
    if not timed:
        return None
    total = sum_stats(stats for _, stats in timed)
    seconds = sum(total.seconds.values())
    positions = zip(total.accepted_per_position, total.drafted_per_position, strict=False)
    predicted = measured = None
    if batch_size == 1 and total.num_drafted == sum(total.drafted_per_position):
        expected = [(spent, stats, predicted_seconds(stats, costs)) for spent, stats in timed]
        predicted = median(stats.num_tokens / wanted for _, stats, wanted in expected)
        measured = median(wanted / spent for spent, _, wanted in expected)
    return Rounds(
        acceptance_length=total.acceptance_length,
        acceptance_rate=total.acceptance_rate,
        acceptance_by_position=[accepted / drafted for accepted, drafted in positions],
        drafted_by_position=total.drafted_per_position,
        draft_length=total.num_drafted / total.num_rounds,
        cost_ratio=costs.cost_ratio,
        predicted_tokens_per_second=predicted,
        measured_over_predicted=measured,
        share_of_seconds={phase: spent / seconds for phase, spent in total.seconds.items()},
    )


def compare_texts(runs: Sequence[Run], reference_runs: Sequence[Run], reference: str) -> TextComparison:
    """Count texts and tokens that differ from those of the system named `reference`."""
    pairs = [
        pair
        for run, expected in zip(runs, reference_runs, strict=True)
        for pair in zip(run.texts, expected.texts, strict=True)
    ]
    differences = [
        [index for index, (ours, theirs) in enumerate(zip_longest(*pair)) if ours != theirs] for pair in pairs
    ]
    return TextComparison(
        reference=reference,
        num_prompts_differing=sum(map(bool, differences)),
        num_tokens_differing=sum(map(len, differences)),
        num_tokens=sum(len(expected) for _, expected in pairs),
        first_differences=[found[0] if found else None for found in differences],
    )
