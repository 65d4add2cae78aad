"""Results of a benchmark, computed from the runs of its systems."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from statistics import median

from secondguess.bench.costs import Costs, ForwardTimer, predicted_seconds
from secondguess.bench.measurement import Setting
from secondguess.bench.report import Result, Rounds, TaskResult, TextComparison
from secondguess.bench.summary import Ratio, compare, median_interval, sum_stats
from secondguess.bench.systems import Run, System


class Comparison:
    """Runs of systems on the same batches in one setting.

    `runs` are by system in the order of the batches, and leave out systems that cannot run in the setting; `tasks` has
    the task of each batch, `seed` is that of the bootstrap.
    """

    def __init__(
        self,
        setting: Setting,
        systems: Sequence[System],
        runs: Mapping[str, Sequence[Run]],
        tasks: Sequence[str],
        seed: int,
    ) -> None:
        self._setting, self._runs, self._tasks, self._seed = setting, runs, tasks, seed
        self._systems = [system for system in systems if system.name in runs]
        self._speeds = {name: [run.tokens_per_second for run in own] for name, own in runs.items()}
        self._plain = {system.family: system.name for system in self._systems if not system.speculates}

    def results(self, probe: ForwardTimer) -> list[Result]:
        """Return one result per system, with the speeds that the measured costs of passes predict."""
        return [self._result(system, probe) for system in self._systems]

    def _result(self, system: System, probe: ForwardTimer) -> Result:
        name, (temperature, batch_size) = system.name, self._setting
        runs, speeds = self._runs[name], self._speeds[name]
        return Result(
            system=name,
            family=system.family,
            speculates=system.speculates,
            temperature=temperature,
            batch_size=batch_size,
            tokens_per_second=median(speeds),
            interval=median_interval(speeds, self._seed),
            per_batch=speeds,
            against=self._against(name),
            by_task={task: self._of_task(task, system) for task in dict.fromkeys(self._tasks)},
            rounds=summarise_rounds(runs, costs_of(system, probe, runs, batch_size), batch_size),
            equality=self._equality(system) if temperature == 0 else None,
        )

    def _against(self, name: str) -> dict[str, Ratio]:
        baselines = [*self._plain.values(), *self.fastest_speculators().values()]
        return {
            baseline: compare(self._speeds[name], self._speeds[baseline], self._seed)
            for baseline in baselines
            if baseline != name
        }

    def fastest_speculators(self) -> dict[str, str]:
        """Return the fastest speculating system of each family, by median speed."""
        fastest: dict[str, str] = {}
        for system in self._systems:
            if system.speculates:
                best = fastest.setdefault(system.family, system.name)
                fastest[system.family] = max(best, system.name, key=lambda name: median(self._speeds[name]))
        return fastest

    def _of_task(self, task: str, system: System) -> TaskResult:
        indices = [index for index, its_task in enumerate(self._tasks) if its_task == task]
        speeds = [self._speeds[system.name][index] for index in indices]
        found = [self._runs[system.name][index].stats for index in indices]
        stats = [own for own in found if own is not None]
        plain = self._plain.get(system.family, system.name)
        baseline = [self._speeds[plain][index] for index in indices]
        return TaskResult(
            num_batches=len(indices),
            tokens_per_second=median(speeds),
            against_plain=None if plain == system.name else compare(speeds, baseline, self._seed),
            acceptance_length=sum_stats(stats).acceptance_length if stats else None,
        )

    def _equality(self, system: System) -> TextComparison | None:
        """Compare texts with those of the plain decoding of the same family, and its texts with those of ours.

        A runtime that computes something else would still reproduce its own texts.
        """
        reference = self._plain[system.family] if system.speculates else next(iter(self._plain.values()))
        if reference == system.name:
            return None
        return compare_texts(self._runs[system.name], self._runs[reference], reference)


def costs_of(system: System, probe: ForwardTimer, runs: Sequence[Run], batch_size: int) -> Costs:
    """Return the forward costs for the runs of a system in one setting.

    A draft model's step is timed in isolation. A head's step is its drafting time per level, which
    includes processing the committed tokens; rows of a batch share a level's time.
    """
    costs = probe.costs(system.draft_model)
    if system.draft_model is not None or not system.has_draft_probs:
        return costs
    total = sum_stats(run.stats for run in runs if run.stats is not None)
    num_levels = sum(total.drafted_per_position) / batch_size
    return replace(costs, draft_step=total.drafting_seconds / num_levels) if num_levels else costs


def summarise_rounds(runs: Sequence[Run], costs: Costs, batch_size: int = 1) -> Rounds | None:
    """Return round statistics with predicted speeds; None for runs without statistics.

    Batches and trees have no prediction, since their passes differ in cost from those that were timed.
    """
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
