"""What a benchmark says: numbers per system and temperature, as an object, as JSON and as Markdown."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from secondguess.bench.markdown import as_markdown
from secondguess.bench.predict import Costs, predicted_seconds
from secondguess.bench.provenance import Provenance
from secondguess.bench.summary import Ratio, add_up, compare, first_difference, median
from secondguess.bench.systems import Run, System

SCHEMA = 1


@dataclass(frozen=True)
class Rounds:
    """What the rounds of a system did, over all prompts.

    Args:
        acceptance_length: tokens per target pass, correction or bonus included (tau).
        acceptance_rate: accepted over drafted nodes.
        acceptance_by_position: accepted over drafted nodes at each depth.
        draft_length: mean number of nodes per round.
        cost_ratio: one draft step over one target pass (c); 0 for look-ups, which run no model.
        predicted_tokens_per_second: decoding speed that tau, c and v(m) allow (median over prompts, prefill
            excluded).
        measured_over_predicted: measured decoding speed over that (median over prompts); 1 minus it is
            overhead.
        share_of_seconds: where the time went, by phase.
    """

    acceptance_length: float
    acceptance_rate: float
    acceptance_by_position: list[float]
    draft_length: float
    cost_ratio: float
    predicted_tokens_per_second: float
    measured_over_predicted: float
    share_of_seconds: dict[str, float]


@dataclass(frozen=True)
class Equality:
    """Whether a system wrote at temperature 0 what its reference wrote.

    Args:
        reference: the system compared with: for a speculating one its family's plain decoding, for another
            family's plain decoding ours.
        num_prompts_differing: texts that part from the reference's at some token: each is one flip, and
            what follows it continues another text.
        num_tokens_differing: positions at which the tokens differ, all that follows a flip included.
        num_tokens: positions compared.
        first_differences: by prompt, where the texts part; None where they are equal.
    """

    reference: str
    num_prompts_differing: int
    num_tokens_differing: int
    num_tokens: int
    first_differences: list[int | None]


@dataclass(frozen=True)
class Result:
    """One system at one temperature.

    Args:
        tokens_per_second: median over prompts, prefill included.
        per_prompt: tokens per second of each prompt, in the workload's order.
        against: ratios to each family's plain system and to its fastest speculating one, by their names.
        rounds: None for systems that report no statistics.
        equality: None at other temperatures and for our plain decoding, the reference of all others in the end.
    """

    system: str
    family: str
    speculates: bool
    temperature: float
    tokens_per_second: float
    per_prompt: list[float]
    against: dict[str, Ratio]
    rounds: Rounds | None
    equality: Equality | None


@dataclass(frozen=True)
class Workbench:
    """The conditions that all systems shared.

    Args:
        workload_note: why these prompts and not the default ones; empty if there is nothing to say.
    """

    workload: str
    workload_sha256: str
    workload_note: str
    num_prompts: int
    num_prompts_asked: int
    num_tokens: int
    median_prompt_tokens: float


@dataclass(frozen=True)
class CostTable:
    """Forward costs as measured between the runs.

    Args:
        context_length: tokens in the cache while timing.
        target_ms: milliseconds of a target pass over m tokens, by m.
        curve: v(m) = T(m) / T(1).
        draft_step_ms: milliseconds of one draft step, by draft model.
        cost_ratio: c, by draft model.
    """

    context_length: int
    target_ms: dict[int, float]
    curve: dict[int, float]
    draft_step_ms: dict[str, float]
    cost_ratio: dict[str, float]


@dataclass(frozen=True)
class Report:
    """All of it; `complete` is False when the run was interrupted and covers the finished prompts only."""

    name: str
    complete: bool
    workbench: Workbench
    costs: CostTable
    results: list[Result]
    provenance: Provenance
    schema: int = field(default=SCHEMA)

    def as_dict(self) -> dict[str, object]:
        return asdict(self)

    def to_json(self) -> str:
        return json.dumps(self.as_dict(), indent=1) + "\n"

    def to_markdown(self) -> str:
        return as_markdown(self)

    def result(self, system: str, temperature: float) -> Result:
        """The result of a system by its name; KeyError when there is none."""
        for result in self.results:
            if (result.system, result.temperature) == (system, temperature):
                return result
        raise KeyError((system, temperature))

    def save(self, folder: str | Path) -> tuple[Path, Path]:
        """Write `<date>-<name>.json` and `.md` (`-partial` when interrupted); gives both paths."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        day = self.provenance.date.partition("T")[0]
        stem = f"{day}-{self.name}{'' if self.complete else '-partial'}"
        data, page = folder / f"{stem}.json", folder / f"{stem}.md"
        data.write_text(self.to_json(), encoding="utf-8")
        page.write_text(self.to_markdown(), encoding="utf-8")
        return data, page


Runs = Mapping[float, Sequence[Run]]
"""One system's runs by temperature, each in the order of the prompts."""


def make_results(
    systems: Sequence[System], runs: Mapping[str, Runs], costs: Mapping[str, Costs], seed: int
) -> list[Result]:
    """Everything derived from the runs.

    Args:
        runs: by system name; as many for every system and temperature.
        costs: forward costs by system name, for the systems that report statistics.
        seed: of the bootstrap.
    """
    plain = {system.family: system.name for system in systems if not system.speculates}
    results = []
    for temperature in next(iter(runs.values())):
        speeds = {name: [run.tokens_per_second for run in of[temperature]] for name, of in runs.items()}
        champions = fastest_speculators(systems, speeds)
        for system in systems:
            own = runs[system.name][temperature]
            reference = reference_of(system, plain)
            results.append(
                Result(
                    system=system.name,
                    family=system.family,
                    speculates=system.speculates,
                    temperature=temperature,
                    tokens_per_second=median(speeds[system.name]),
                    per_prompt=speeds[system.name],
                    against={
                        baseline: compare(speeds[system.name], speeds[baseline], seed)
                        for baseline in [*plain.values(), *champions.values()]
                        if baseline != system.name
                    },
                    rounds=summarise_rounds(own, costs[system.name]) if system.name in costs else None,
                    equality=count_flips(own, runs[reference][temperature], reference)
                    if temperature == 0 and reference != system.name
                    else None,
                )
            )
    return results


def reference_of(system: System, plain: Mapping[str, str]) -> str:
    """Whose text a system should write at temperature 0, given each family's plain system, ours first.

    Speculation has to keep the text of its own runtime. The runtimes are compared by their plain systems: one that
    is fast because it computes something else would agree with itself.
    """
    return plain[system.family] if system.speculates else next(iter(plain.values()))


def fastest_speculators(systems: Sequence[System], speeds: Mapping[str, Sequence[float]]) -> dict[str, str]:
    """The best that each family has, by median speed: what its users would choose after a comparison like this."""
    best: dict[str, str] = {}
    for system in (system for system in systems if system.speculates):
        rival = best.get(system.family)
        if rival is None or median(speeds[system.name]) > median(speeds[rival]):
            best[system.family] = system.name
    return best


def summarise_rounds(runs: Sequence[Run], costs: Costs) -> Rounds | None:
    """What the rounds did and what they should have cost; None for runs without statistics."""
    told = [(run, run.stats) for run in runs if run.stats is not None]
    if not told:
        return None
    total = add_up(stats for _, stats in told)
    predicted = [predicted_seconds(stats, costs) for _, stats in told]
    seconds = sum(total.seconds.values())
    return Rounds(
        acceptance_length=total.acceptance_length,
        acceptance_rate=total.acceptance_rate,
        acceptance_by_position=[
            accepted / drafted
            for accepted, drafted in zip(
                total.accepted_per_position, total.drafted_per_position, strict=False
            )
        ],
        draft_length=total.num_drafted / total.num_rounds,
        cost_ratio=costs.cost_ratio,
        predicted_tokens_per_second=median(
            [stats.num_tokens / expected for (_, stats), expected in zip(told, predicted, strict=True)]
        ),
        measured_over_predicted=median(
            [expected / run.decode_seconds for (run, _), expected in zip(told, predicted, strict=True)]
        ),
        share_of_seconds={phase: spent / seconds for phase, spent in total.seconds.items()},
    )


def count_flips(runs: Sequence[Run], reference_runs: Sequence[Run], reference: str) -> Equality:
    """Compare texts with those of the system named `reference`, prompt by prompt."""
    pairs = [(run.tokens, expected.tokens) for run, expected in zip(runs, reference_runs, strict=True)]
    parted = [first_difference(text, reference) for text, reference in pairs]
    return Equality(
        reference=reference,
        num_prompts_differing=sum(place is not None for place in parted),
        num_tokens_differing=sum(
            ours != theirs for text, reference in pairs for ours, theirs in zip(text, reference, strict=False)
        ),
        num_tokens=sum(len(reference) for _, reference in pairs),
        first_differences=parted,
    )


def make_cost_table(context_length: int, costs: Mapping[str | None, Costs]) -> CostTable:
    """Costs by draft model (None: no draft model), as a report shows them."""
    target = costs[None]
    by_model = {name: each for name, each in costs.items() if name is not None}
    return CostTable(
        context_length=context_length,
        target_ms={m: 1000 * target.target[m] for m in sorted(target.target)},
        curve=target.curve,
        draft_step_ms={name: 1000 * each.draft_step for name, each in by_model.items()},
        cost_ratio={name: each.cost_ratio for name, each in by_model.items()},
    )
