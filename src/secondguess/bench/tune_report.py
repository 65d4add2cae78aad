"""Report of a tuning: a table, a recommendation, JSON, a chart, and the configuration for other commands."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from secondguess.bench.charts import draw_tuning
from secondguess.bench.choices import (
    PLAIN,
    WORTH_IT,
    Choice,
    losing_sizes,
    one_for_all,
    recommend,
)
from secondguess.bench.tables import show, table
from secondguess.bench.tuning import Findings
from secondguess.checkpoint.weights import hash_weights
from secondguess.configuration import Configuration, LoadSettings, TuningRecord
from secondguess.workloads.provenance import Provenance, public_name

SCHEMA = 3
"""Schema version of the JSON. 3: one list of results; without memory and the time of each step."""

COLUMNS = {
    "batch size": ("batch_size", "d"),
    "choice": ("choice", "s"),
    "tokens/s": ("tokens_per_second", ".0f"),
    "x plain": ("over_plain", ".2f"),
    "worst": ("worst_over_plain", ".2f"),
    "accepted": ("acceptance_rate", ".0%"),
    "tau": ("acceptance_length", ".2f"),
    "c": ("cost_ratio", ".2f"),
    "v": ("pass_cost", ".2f"),
    "predicted": ("predicted_speedup", ".2f"),
}
"""Columns of the table: key in a row, and format."""


@dataclass(frozen=True)
class TuneReport:
    """A finished tuning.

    Args:
        best: recommended choice by batch size.
        chosen: the one choice of the configuration.
    """

    findings: Findings
    best: Mapping[int, Choice]
    chosen: Choice
    provenance: Provenance

    def to_text(self) -> str:
        """Return a table, then the recommendation in words."""
        notes = [f"Note: {note}." for note in self.findings.notes]
        return "\n".join([self.table(), "", *self.recommendation(), *notes]) + "\n"

    def to_toml(self) -> str:
        """Return the configuration, headed by the recommendation as a comment."""
        comment = [line if line.isprintable() else repr(line) for line in self.recommendation()]
        return "".join(f"# {line}\n" for line in comment) + self.configuration().to_toml()

    def draw(self) -> Any:
        """Draw measured and predicted speed-ups; matplotlib has to be installed."""
        speedups: dict[int, dict[str, tuple[float, float]]] = {size: {} for size in self.findings.speeds}
        for row in self.rows():
            if row["drafter"] != "none" and row["quantize"] is None:
                speedups[row["batch_size"]][row["choice"]] = row["over_plain"], row["predicted_speedup"]
        config, workload = self.findings.config, self.findings.workload.name
        about = f"{public_name(config.model)} on {workload}, temperature {config.temperature:g}"
        return draw_tuning(f"Speed-ups: {about}", speedups)

    def rows(self) -> list[dict[str, Any]]:
        """Return the final runs by batch size, the fastest first, then those in 8 bits.

        Passes in 8 bits are not timed, so the cost model has no values for them.
        """
        rows = []
        for size, speeds in self.findings.speeds.items():
            in_8_bits = self.findings.int8.get(size, {})
            for of, plain in ((speeds, PLAIN), (in_8_bits, Choice(quantize="int8"))):
                for choice in sorted(of, key=lambda choice: -of[choice].tokens_per_second):
                    speed, model = of[choice], None
                    if not choice.quantize:
                        model = speed.cost_model(self.findings.costs[size], size)
                    rows.append(
                        {
                            "batch_size": size,
                            "choice": str(choice),
                            **_as_dict(choice),
                            "tokens_per_second": speed.tokens_per_second,
                            "over_plain": speed.over(of[plain]),
                            "worst_over_plain": speed.worst_over(of[plain]),
                            "acceptance_rate": speed.stats.acceptance_rate,
                            "draft_length": speed.draft_length,
                            **(asdict(model) if model else {}),
                            "tokens": speed.tokens,
                            "seconds": speed.seconds,
                        }
                    )
        return rows

    def table(self) -> str:
        """Return the table of the final runs."""
        rows = [[show(row.get(key), form) for key, form in COLUMNS.values()] for row in self.rows()]
        return table(list(COLUMNS), rows)

    def recommendation(self) -> list[str]:
        """Return the configuration's choice, and the best choice of each batch size beside it."""
        lines = [f"The configuration has {self.chosen} for all batch sizes. The best for each:"]
        for size, best in self.best.items():
            speeds = self.findings.speeds[size]
            if best.speculates:
                line = f"{best}, {speeds[best].over(speeds[PLAIN]):.2f} times as fast as plain"
            else:
                line = f"plain (--drafter none), nothing is faster by more than {WORTH_IT - 1:.0%}"
            if best == self.chosen:
                line += "; the configuration has it"
            else:
                line += f"; the configuration's choice has {self.relative_speed(size):.2f} of its speed"
            lines.append(f"- batch size {size}: {line}.")
        return lines

    def relative_speed(self, batch_size: int) -> float:
        """Return the speed of the configuration's choice over that of the best for a batch size."""
        speeds = self.findings.speeds[batch_size]
        return speeds[self.chosen].over(speeds[self.best[batch_size]])

    def to_json(self) -> str:
        return json.dumps(self.as_dict(), indent=1, allow_nan=False) + "\n"

    def as_dict(self) -> dict[str, object]:
        findings, workload = self.findings, self.findings.workload
        config = findings.config.model_dump() | {
            "model": public_name(findings.config.model),
            "drafters": [public_name(name) for name in findings.config.drafters_to_compare],
            "prompts": workload.name,
        }
        return {
            "schema": SCHEMA,
            "config": config,
            "workload": {
                "name": workload.name,
                "sha256": workload.sha256,
                "num_prompts": len(workload.prompts),
            },
            "recommendation": {
                "by_batch_size": {
                    size: _as_dict(choice) | {"chosen_relative_speed": self.relative_speed(size)}
                    for size, choice in self.best.items()
                },
                "chosen": _as_dict(self.chosen),
                "words": self.recommendation(),
            },
            "results": self.rows(),
            "dropped": [
                {"batch_size": size, **_as_dict(choice), "over_plain": speedup}
                for size, dropped in findings.dropped.items()
                for choice, speedup in dropped.items()
            ],
            "pass_costs": {size: costs.curve for size, costs in findings.costs.items()},
            "notes": findings.notes,
            "provenance": asdict(self.provenance),
        }

    def configuration(self) -> Configuration:
        """Return what `--config` reads: the chosen drafter and controller, and their measurements."""
        findings, chosen = self.findings, self.chosen
        target, workload = findings.models.target, findings.workload
        smallest = min(findings.speeds)
        speed = findings.speeds[smallest][chosen]
        stats, model = speed.stats, speed.cost_model(findings.costs[smallest], smallest)
        positions = zip(stats.accepted_per_position, stats.drafted_per_position, strict=True)
        losing = losing_sizes(chosen, findings.speeds)
        return Configuration(
            LoadSettings(
                model=findings.config.model,
                drafter=chosen.drafter,
                verifier="auto",
                controller=chosen.controller if chosen.speculates else None,
                dtype=target.dtype,
                device=target.device,
            ),
            TuningRecord(
                date=self.provenance.date.partition("T")[0],
                processor=self.provenance.processor or None,
                num_threads=findings.config.num_threads,
                workload=workload.name,
                workload_sha256=workload.sha256,
                model_sha256=hash_weights(Path(target.path)),
                acceptance_rate=stats.acceptance_rate,
                acceptance_by_position=tuple(round(accepted / drafted, 3) for accepted, drafted in positions)
                or None,
                draft_length=self.best_constant_length(smallest),
                cost_ratio=round(model.cost_ratio, 4) if chosen.speculates else None,
                speedup={
                    size: round(of[chosen].over(of[PLAIN]), 3)
                    for size, of in findings.speeds.items()
                    if size not in losing
                },
            ),
        )

    def best_constant_length(self, batch_size: int) -> int:
        """Return the fastest constant draft length measured for the chosen drafter; 0 for plain decoding.

        Where none was measured, the mean draft length of the chosen controller.
        """
        if not self.chosen.speculates:
            return 0
        speeds = self.findings.speeds[batch_size]
        speedups = {choice: speed.over(speeds[PLAIN]) for choice, speed in speeds.items()}
        lengths = {
            int(choice.controller.removeprefix("fixed:")): speedup
            for choice, speedup in (self.findings.dropped.get(batch_size, {}) | speedups).items()
            if choice.drafter == self.chosen.drafter and choice.controller.startswith("fixed:")
        }
        return max(lengths, key=lengths.__getitem__, default=max(round(speeds[self.chosen].draft_length), 1))


def make_report(findings: Findings) -> TuneReport:
    """Decide what to recommend, and gather provenance."""
    config = findings.config
    return TuneReport(
        findings,
        recommend(findings.speeds),
        one_for_all(findings.speeds),
        findings.models.provenance(config.num_threads, config.seed),
    )


def _as_dict(choice: Choice) -> dict[str, object]:
    return asdict(choice) | {"drafter": public_name(choice.drafter)}
