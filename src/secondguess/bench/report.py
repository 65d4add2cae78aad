"""Benchmark report: the data that is saved as JSON, and that Markdown is made from.

docs/benchmarks.md explains the figures. None stands for what does not apply to a system or was not measured.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from secondguess.bench.costs import Costs
from secondguess.bench.summary import Ratio
from secondguess.workloads.provenance import Provenance

SCHEMA = 5
"""Version of the JSON, raised when a name or a meaning changes."""


@dataclass(frozen=True)
class Rounds:
    """Statistics of a system's rounds over all prompts; speeds are predicted and compared without prefill."""

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
    """Comparison of a system's texts at temperature 0 with those of the system `reference`.

    Everything after a text's first difference continues another prefix, so a differing text counts as one flip.
    """

    reference: str
    num_prompts_differing: int
    num_tokens_differing: int
    num_tokens: int
    first_differences: list[int | None]


@dataclass(frozen=True)
class TaskResult:
    """One system on the batches of one task, compared with the plain decoding of its family."""

    num_batches: int
    tokens_per_second: float
    against_plain: Ratio | None
    acceptance_length: float | None


@dataclass(frozen=True)
class Result:
    """One system at one temperature and batch size.

    Speeds are all new tokens of a batch over its seconds, prefill included: `per_batch` in the workload's order, and
    their median with its interval. `against` has ratios to every plain system and every family's fastest other one.
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
    """Conditions shared by all systems; `tasks` has by batch size the task of each batch in `Result.per_batch`."""

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
    """Costs of target passes by number of tokens and of draft steps by model, with so many tokens in the KV cache."""

    context_length: int
    target_ms: dict[int, float]
    curve: dict[int, float]
    draft_step_ms: dict[str, float]
    cost_ratio: dict[str, float]

    @classmethod
    def of(cls, context_length: int, target: Costs, drafting: Mapping[str, Costs]) -> CostTable:
        """Return the table of the target's costs, and of those with each draft model."""
        return cls(
            context_length=context_length,
            target_ms={m: 1000 * target.target[m] for m in sorted(target.target)},
            curve=target.curve,
            draft_step_ms={name: 1000 * costs.draft_step for name, costs in drafting.items()},
            cost_ratio={name: costs.cost_ratio for name, costs in drafting.items()},
        )


@dataclass(frozen=True)
class Report:
    """Complete report of a benchmark; one that was interrupted is not `complete` and covers the finished prompts."""

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
        """Return the result of a system, by default at its smallest batch size; a `KeyError` if there is none."""
        for (at, size), results in self.by_setting().items():
            for result in results:
                if (result.system, at) == (system, temperature) and batch_size in (None, size):
                    return result
        raise KeyError((system, temperature, batch_size))
