"""Results per system, temperature and batch size, over all prompts and per task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from secondguess.bench.measurement import Setting
from secondguess.bench.predict import Costs, predicted_seconds
from secondguess.bench.summary import (
    Ratio,
    compare,
    first_difference,
    median,
    median_interval,
    sum_stats,
)
from secondguess.bench.systems import Run, System


@dataclass(frozen=True)
class Rounds:
    """Statistics of a system's rounds over all prompts.

    Args:
        acceptance_length: tokens per target pass and row, correction or bonus included (tau).
        acceptance_rate: accepted over drafted nodes; None if nothing was drafted.
        acceptance_by_position: accepted over drafted nodes at each depth.
        drafted_by_position: number of nodes drafted at each depth.
        draft_length: mean number of nodes per round.
        cost_ratio: one draft step over one target pass (c). For a draft model the step is timed in
            isolation, for heads it is the drafting time per level; 0 for n-gram and suffix lookup,
            which run no model.
        predicted_tokens_per_second: decoding speed predicted from the draft lengths, c and v(m)
            (median over prompts, without prefill); None for batches and trees, whose passes differ
            in cost from those that were timed.
        measured_over_predicted: measured over predicted decoding speed (median over prompts); 1
            minus it is overhead. None for batches and trees.
        share_of_seconds: share of time of each phase.
    """

    acceptance_length: float
    acceptance_rate: float | None
    acceptance_by_position: list[float]
    drafted_by_position: list[int]
    draft_length: float
    cost_ratio: float
    predicted_tokens_per_second: float | None
    measured_over_predicted: float | None
    share_of_seconds: dict[str, float]


@dataclass(frozen=True)
class TextComparison:
    """Comparison of a system's texts at temperature 0 with those of its reference.

    Args:
        reference: name of the reference: for a speculating system the plain decoding of its
            family, for another family's plain decoding ours.
        num_prompts_differing: number of texts that differ from the reference. Each counts as one
            flip, since everything after the first difference continues another prefix.
        num_tokens_differing: positions at which the tokens differ, those after a flip included.
        num_tokens: positions compared.
        first_differences: per text, the index of the first difference; None if equal.
    """

    reference: str
    num_prompts_differing: int
    num_tokens_differing: int
    num_tokens: int
    first_differences: list[int | None]


@dataclass(frozen=True)
class TaskResult:
    """One system on the prompts of one task.

    Args:
        num_batches: number of batches (at batch size 1: prompts) of this task.
        tokens_per_second: median over these batches.
        against_plain: ratio to the plain decoding of the same family; None for the plain decoding
            itself, and for families without one.
        acceptance_length: tau; None for systems that report no statistics.
    """

    num_batches: int
    tokens_per_second: float
    against_plain: Ratio | None
    acceptance_length: float | None


@dataclass(frozen=True)
class Result:
    """One system at one temperature and batch size.

    Args:
        batch_size: prompts decoded together.
        tokens_per_second: median over batches of all new tokens over seconds, prefill included.
        interval: 95 % percentile-bootstrap interval of `tokens_per_second`; None with too few
            batches (see `summary.MIN_PROMPTS_FOR_INTERVAL`).
        per_batch: tokens/s of each batch (at batch size 1: each prompt), in the workload's order.
        against: ratios to each plain system and to each family's fastest speculating one, by name.
        by_task: results per task.
        rounds: None for systems that report no statistics.
        equality: None at temperatures above 0, for our plain decoding (the reference of every
            family's plain decoding), and for systems that return no token ids.
    """

    system: str
    family: str
    speculates: bool
    temperature: float
    batch_size: int
    tokens_per_second: float
    interval: tuple[float, float] | None
    per_batch: list[float]
    against: dict[str, Ratio]
    by_task: dict[str, TaskResult]
    rounds: Rounds | None
    equality: TextComparison | None


Runs = Mapping[Setting, Sequence[Run]]
"""Runs of one system by setting, in batch order; settings that it does not support are absent."""


def make_results(
    systems: Sequence[System],
    runs: Mapping[str, Runs],
    costs: Mapping[str, Costs],
    tasks: Mapping[int, Sequence[str]],
    seed: int,
) -> list[Result]:
    """Return one result per setting and system.

    Args:
        runs: by system name; in a setting, all systems that support it have equally many runs.
        costs: forward costs by system name, for the systems that report statistics.
        tasks: by batch size, the task of each batch.
        seed: seed of the bootstrap.
    """
    results = []
    for setting in dict.fromkeys(setting for of in runs.values() for setting in of):
        present = [system for system in systems if setting in runs[system.name]]
        own_runs = {system.name: runs[system.name][setting] for system in present}
        results += _results_of(setting, present, own_runs, costs, tasks[setting.batch_size], seed)
    return results


def _results_of(
    setting: Setting,
    systems: Sequence[System],
    runs: Mapping[str, Sequence[Run]],
    costs: Mapping[str, Costs],
    tasks: Sequence[str],
    seed: int,
) -> list[Result]:
    """Return the results of one setting, in which all systems ran the same batches."""
    plain = {system.family: system.name for system in systems if not system.speculates}
    baselines = [system.name for system in systems if not system.speculates]
    speeds = {name: [run.tokens_per_second for run in own] for name, own in runs.items()}
    champions = fastest_speculators(systems, speeds)
    results = []
    for system in systems:
        own, reference = runs[system.name], reference_of(system, plain)
        comparable = all(run.has_token_ids for run in [*own, *runs[reference]])
        results.append(
            Result(
                system=system.name,
                family=system.family,
                speculates=system.speculates,
                temperature=setting.temperature,
                batch_size=setting.batch_size,
                tokens_per_second=median(speeds[system.name]),
                interval=median_interval(speeds[system.name], seed),
                per_batch=speeds[system.name],
                against={
                    baseline: compare(speeds[system.name], speeds[baseline], seed)
                    for baseline in [*baselines, *champions.values()]
                    if baseline != system.name
                },
                by_task=summarise_tasks(own, runs.get(plain.get(system.family, ""), own), tasks, seed),
                rounds=summarise_rounds(own, costs[system.name], setting.batch_size)
                if system.name in costs
                else None,
                equality=compare_texts(own, runs[reference], reference)
                if setting.temperature == 0 and reference != system.name and comparable
                else None,
            )
        )
    return results


def summarise_tasks(
    runs: Sequence[Run], plain: Sequence[Run], tasks: Sequence[str], seed: int
) -> dict[str, TaskResult]:
    """Summarise a system's runs by task.

    Args:
        plain: runs of the family's plain decoding; `runs` itself for the plain decoding, and for
            families without one.
    """
    summaries = {}
    for task in dict.fromkeys(tasks):
        places = [place for place, each in enumerate(tasks) if each == task]
        own = [runs[place] for place in places]
        speeds = [run.tokens_per_second for run in own]
        baseline = [plain[place].tokens_per_second for place in places]
        told = [run.stats for run in own if run.stats is not None]
        summaries[task] = TaskResult(
            num_batches=len(places),
            tokens_per_second=median(speeds),
            against_plain=None if plain is runs else compare(speeds, baseline, seed),
            acceptance_length=sum_stats(told).acceptance_length if told else None,
        )
    return summaries


def reference_of(system: System, plain: Mapping[str, str]) -> str:
    """Return the name of the system whose greedy texts `system` should reproduce.

    Speculation has to reproduce the plain decoding of its own family. Plain decodings of other
    families are compared with ours, since a runtime that is fast because it computes something
    else would still reproduce its own texts.

    Args:
        plain: name of each family's plain system, ours first.
    """
    return plain[system.family] if system.speculates else next(iter(plain.values()))


def fastest_speculators(systems: Sequence[System], speeds: Mapping[str, Sequence[float]]) -> dict[str, str]:
    """Return the fastest speculating system of each family, by median speed."""
    best: dict[str, str] = {}
    for system in (system for system in systems if system.speculates):
        rival = best.get(system.family)
        if rival is None or median(speeds[system.name]) > median(speeds[rival]):
            best[system.family] = system.name
    return best


def summarise_rounds(runs: Sequence[Run], costs: Costs, batch_size: int = 1) -> Rounds | None:
    """Return round statistics with predicted speeds; None for runs without statistics."""
    told = [(run, run.stats) for run in runs if run.stats is not None]
    if not told:
        return None
    total = sum_stats(stats for _, stats in told)
    predicted = [predicted_seconds(stats, costs) for _, stats in told]
    seconds = sum(total.seconds.values())
    single = batch_size == 1 and total.num_drafted == sum(total.drafted_per_position)
    return Rounds(
        acceptance_length=total.acceptance_length,
        acceptance_rate=total.acceptance_rate,
        acceptance_by_position=[
            accepted / drafted
            for accepted, drafted in zip(
                total.accepted_per_position, total.drafted_per_position, strict=False
            )
        ],
        drafted_by_position=total.drafted_per_position,
        draft_length=total.num_drafted / total.num_rounds,
        cost_ratio=costs.cost_ratio,
        predicted_tokens_per_second=median(
            [stats.num_tokens / expected for (_, stats), expected in zip(told, predicted, strict=True)]
        )
        if single
        else None,
        measured_over_predicted=median(
            [expected / run.decode_seconds for (run, _), expected in zip(told, predicted, strict=True)]
        )
        if single
        else None,
        share_of_seconds={phase: spent / seconds for phase, spent in total.seconds.items()},
    )


def compare_texts(runs: Sequence[Run], reference_runs: Sequence[Run], reference: str) -> TextComparison:
    """Count texts and tokens that differ from those of the system named `reference`."""
    pairs = [
        pair
        for run, expected in zip(runs, reference_runs, strict=True)
        for pair in zip(run.texts, expected.texts, strict=True)
    ]
    parted = [first_difference(text, reference) for text, reference in pairs]
    return TextComparison(
        reference=reference,
        num_prompts_differing=sum(place is not None for place in parted),
        num_tokens_differing=sum(
            ours != theirs for text, reference in pairs for ours, theirs in zip(text, reference, strict=False)
        ),
        num_tokens=sum(len(reference) for _, reference in pairs),
        first_differences=parted,
    )
