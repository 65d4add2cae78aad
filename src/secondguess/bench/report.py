"""What a benchmark says, as an object, as JSON, as Markdown and as charts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from secondguess.bench.charts import can_draw, draw_charts
from secondguess.bench.inventory import Possession
from secondguess.bench.markdown import as_markdown
from secondguess.bench.predict import Costs
from secondguess.bench.provenance import Provenance
from secondguess.bench.results import Result

SCHEMA = 4
"""Of the JSON. 2: batch sizes, tasks, intervals of tokens/s and notes; `per_prompt` became `per_batch`. 3: possessions.
4: no intervals (null) of fewer than `FEWEST_PROMPTS` prompts."""


@dataclass(frozen=True)
class Workbench:
    """The conditions that all systems shared.

    Args:
        workload_note: why these prompts and not the default ones; empty if there is nothing to say.
        num_prompts_cut: prompts that were cut from the left to fit the target's context.
        tasks: by batch size, the task of each batch in the order of `Result.per_batch`.
        notes: what else a reader has to know: who is missing where, and which prompts are not whole.
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
    """All of it; `complete` is False when the run was interrupted and covers the finished prompts only.

    Args:
        possessions: by our speculating systems, what having their drafter takes.
    """

    name: str
    complete: bool
    workbench: Workbench
    costs: CostTable
    results: list[Result]
    provenance: Provenance
    possessions: dict[str, Possession] = field(default_factory=dict)
    schema: int = field(default=SCHEMA)

    def as_dict(self) -> dict[str, object]:
        return asdict(self)

    def to_json(self) -> str:
        return json.dumps(self.as_dict(), indent=1) + "\n"

    def to_markdown(self) -> str:
        return as_markdown(self)

    def result(self, system: str, temperature: float, batch_size: int | None = None) -> Result:
        """The result of a system by its name, at the smallest batch size unless told; KeyError when there is none."""
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
        """Write `<date>-<name>.json`, `.md` and charts beside them (`-partial` when interrupted); gives all paths.

        Charts need matplotlib; without it there are none.
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
