"""Benchmark report as an object, as JSON, as Markdown and as charts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from secondguess.bench.charts import can_draw, draw_charts
from secondguess.bench.inventory import DrafterFootprint
from secondguess.bench.markdown import as_markdown
from secondguess.bench.predict import Costs
from secondguess.bench.provenance import Provenance
from secondguess.bench.results import Result

SCHEMA = 4
"""Schema version of the JSON.

2: batch sizes, tasks, intervals of tokens/s and notes; `per_prompt` became `per_batch`.
3: possessions.
4: intervals are null for fewer than `MIN_PROMPTS_FOR_INTERVAL` prompts.
"""


@dataclass(frozen=True)
class Conditions:
    """Conditions shared by all systems.

    Args:
        workload_note: reason why the default prompts were not used; empty if there is none.
        num_prompts_cut: prompts that were truncated on the left to fit the target's context.
        tasks: by batch size, the task of each batch in the order of `Result.per_batch`.
        notes: further notes for the reader, such as systems that are missing in some settings and
            truncated prompts.
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


@dataclass(frozen=True)
class Report:
    """Complete report of a benchmark.

    Args:
        complete: False if the run was interrupted and the report covers the finished prompts only.
        possessions: memory and training time of the drafters, by name of our speculating systems.
    """

    name: str
    complete: bool
    workbench: Conditions
    costs: CostTable
    results: list[Result]
    provenance: Provenance
    possessions: dict[str, DrafterFootprint] = field(default_factory=dict)
    schema: int = field(default=SCHEMA)

    def as_dict(self) -> dict[str, object]:
        return asdict(self)

    def to_json(self) -> str:
        return json.dumps(self.as_dict(), indent=1) + "\n"

    def to_markdown(self) -> str:
        return as_markdown(self)

    def result(self, system: str, temperature: float, batch_size: int | None = None) -> Result:
        """Return the result of a system, by default at its smallest batch size.

        Raises:
            KeyError: no such result.
        """
        found = [
            result
            for result in self.results
            if (result.system, result.temperature) == (system, temperature)
            and batch_size in (None, result.batch_size)
        ]
        if not found:
            raise KeyError((system, temperature, batch_size))
        return min(found, key=lambda result: result.batch_size)

    def save(self, folder: str | Path) -> tuple[Path, ...]:
        """Write `<date>-<name>.json`, `.md` and charts (`-partial` if interrupted).

        Charts are left out if matplotlib is not installed.

        Returns:
            The paths of all files.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        day = self.provenance.date.partition("T")[0]
        stem = f"{day}-{self.name}{'' if self.complete else '-partial'}"
        data, page = folder / f"{stem}.json", folder / f"{stem}.md"
        data.write_text(self.to_json(), encoding="utf-8")
        page.write_text(self.to_markdown(), encoding="utf-8")
        charts = draw_charts(self, folder, stem) if can_draw() else []
        return data, page, *charts


def make_cost_table(context_length: int, costs: Mapping[str | None, Costs]) -> CostTable:
    """Return the cost table of a report from costs by draft model (None: no draft model)."""
    target = costs[None]
    by_model = {name: each for name, each in costs.items() if name is not None}
    return CostTable(
        context_length=context_length,
        target_ms={m: 1000 * target.target[m] for m in sorted(target.target)},
        curve=target.curve,
        draft_step_ms={name: 1000 * each.draft_step for name, each in by_model.items()},
        cost_ratio={name: each.cost_ratio for name, each in by_model.items()},
    )
