"""Benchmark report: the data that is saved as JSON, and that Markdown is made from."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from secondguess.bench.costs import Costs
from secondguess.bench.summary import Ratio
from secondguess.workloads.provenance import Provenance

SCHEMA = 5
"""Schema version of the JSON.

2: batch sizes, tasks, intervals of tokens/s and notes; `per_prompt` became `per_batch`.
3: `possessions`, the size and the training time of each drafter.
4: intervals are null for fewer than `MIN_PROMPTS_FOR_INTERVAL` prompts.
5: without `possessions`.
"""


@dataclass(frozen=True)
class Rounds:
    """Statistics of a system's rounds over all prompts.

    Args:
        acceptance_length: tokens per target pass and row, correction or bonus included (tau).
        acceptance_rate: accepted over drafted nodes; None if nothing was drafted.
        draft_length: mean number of nodes per round.
        cost_ratio: one draft step over one target pass (c). For a draft model the step is timed in
            isolation, for heads it is the drafting time per level; 0 for lookup, which runs no model.
        predicted_tokens_per_second, measured_over_predicted: decoding speed by the cost model, and
            the measured one over it (medians over prompts, without prefill); None for batches and
            trees, whose passes differ in cost from those that were timed.
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
        reference: for a speculating system the plain decoding of its family, for another family's
            plain decoding ours.
        num_prompts_differing: texts that differ. Each counts as one flip, since everything after
            the first difference continues another prefix.
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
        tokens_per_second: median over batches of all new tokens over seconds, prefill included.
        interval: 95 % percentile-bootstrap interval of `tokens_per_second`; None with too few
            batches (see `summary.MIN_PROMPTS_FOR_INTERVAL`).
        per_batch: tokens/s of each batch (at batch size 1: each prompt), in the workload's order.
        against: ratios to each plain system and to each family's fastest speculating one, by name.
        by_task: results per task.
        rounds: None for systems that report no statistics.
        equality: None at temperatures above 0, and for our plain decoding, the reference of every
            family's plain decoding.
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


@dataclass(frozen=True)
class Conditions:
    """Conditions shared by all systems.

    Args:
        workload_note: reason why the default prompts were not used; empty if there is none.
        num_prompts_cut: prompts that were truncated on the left to fit the target's context.
        tasks: by batch size, the task of each batch in the order of `Result.per_batch`.
        notes: further notes for the reader, such as systems that are missing in some settings.
    """

    workload: str
    workload_sha256: str
    workload_note: str
    num_prompts: int
    num_prompts_asked: int
    num_tokens: int
    median_prompt_tokens: float
    num_prompts_cut: int
    tasks: dict[int, list[str]]
    notes: list[str]


@dataclass(frozen=True)
class CostTable:
    """Costs of forward passes, measured between the runs.

    Args:
        context_length: tokens in the KV cache during timing.
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

    @classmethod
    def of(cls, context_length: int, costs: Costs, draft_steps: dict[str, float]) -> CostTable:
        """Return the table of the target's costs and of the seconds of one draft step by draft model."""
        return cls(
            context_length=context_length,
            target_ms={m: 1000 * costs.target[m] for m in sorted(costs.target)},
            curve=costs.curve,
            draft_step_ms={name: 1000 * seconds for name, seconds in draft_steps.items()},
            cost_ratio={name: seconds / costs.target[1] for name, seconds in draft_steps.items()},
        )


@dataclass(frozen=True)
class Report:
    """Complete report of a benchmark.

    Args:
        complete: False if the run was interrupted and the report covers the finished prompts only.
    """

    name: str
    complete: bool
    workbench: Conditions
    costs: CostTable
    results: list[Result]
    provenance: Provenance
    schema: int = SCHEMA

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"

    def by_setting(self) -> dict[tuple[float, int], list[Result]]:
        """Return results by temperature and batch size, sorted in this order."""
        settings: dict[tuple[float, int], list[Result]] = {}
        for result in self.results:
            settings.setdefault((result.temperature, result.batch_size), []).append(result)
        return dict(sorted(settings.items()))

    def result(self, system: str, temperature: float, batch_size: int | None = None) -> Result:
        """Return the result of a system, by default at its smallest batch size.

        Raises:
            KeyError: no such result.
        """
        for (at, size), results in self.by_setting().items():
            for result in results:
                if (result.system, at) == (system, temperature) and batch_size in (None, size):
                    return result
        raise KeyError((system, temperature, batch_size))
