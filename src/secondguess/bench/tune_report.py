"""Report of a tuning: a table, a recommendation in words, JSON, and the configuration for other commands."""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from secondguess.bench.choices import (
    PLAIN,
    WORTH_IT,
    Choice,
    Speed,
    losing_sizes,
    one_for_all,
    recommend,
)
from secondguess.bench.predict import Costs, predicted_seconds
from secondguess.bench.provenance import Provenance, collect_provenance
from secondguess.bench.systems import public_name
from secondguess.bench.tuning import Findings
from secondguess.checkpoint.weights import hash_weights
from secondguess.configuration import Configuration, LoadSettings, TuningRecord

SCHEMA = 2
MIB = 2**20


@dataclass(frozen=True)
class Memory:
    """Bytes.

    Args:
        weights: by model.
        cache_per_token: keys and values of one token, of all models.
        caches: by batch size, with all texts as long as the longest.
        peak_resident: largest resident size of this process.
    """

    weights: Mapping[str, int]
    cache_per_token: int
    caches: Mapping[int, int]
    peak_resident: int


@dataclass(frozen=True)
class Rounds:
    """Quantities of the cost model for one choice (Leviathan et al., arXiv 2211.17192, section 3.3).

    Args:
        acceptance_length: tau, tokens per row and target pass.
        cost_ratio: c, seconds per drafted node over those of a plain target pass.
        pass_cost: v, mean cost of a target pass over drafts of these lengths, in plain passes.
        predicted_speedup: tau / (v + c k), over plain decoding without overhead.
    """

    acceptance_length: float
    cost_ratio: float
    pass_cost: float
    predicted_speedup: float

    @classmethod
    def of(cls, speed: Speed, costs: Costs, batch_size: int) -> Rounds:
        """Derive them from the counters of a run and the measured passes."""
        stats, plain = speed.stats, costs.target[1]
        # Drafting seconds are shared by the rows of a batch.
        drafting = batch_size * stats.drafting_seconds / plain
        passes = predicted_seconds(stats, Costs(costs.target)) / plain
        return cls(
            stats.acceptance_length,
            drafting / stats.num_drafted if stats.num_drafted else 0.0,
            passes / stats.num_rounds,
            stats.num_tokens / (passes + drafting),
        )


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
    memory: Memory
    provenance: Provenance

    def to_text(self) -> str:
        """Return a table, then the recommendation in words."""
        return "\n".join([*table(self), "", *recommendation(self), "", *remarks(self)]) + "\n"

    def to_toml(self) -> str:
        """Return the configuration, headed by a comment that compares its choice with the best of each batch size."""
        comment = [line if line.isprintable() else repr(line) for line in compromise(self)]
        return "".join(f"# {line}\n" for line in comment) + self.configuration().to_toml()

    def to_json(self) -> str:
        return json.dumps(self.as_dict(), indent=1, allow_nan=False) + "\n"

    def relative_speed(self, batch_size: int) -> float:
        """Return the speed of the configuration's choice over that of the best for a batch size."""
        speeds = self.findings.speeds[batch_size]
        return speeds[self.chosen].over(speeds[self.best[batch_size]])

    def rounds(self, batch_size: int, choice: Choice) -> Rounds:
        """Return the quantities of the cost model."""
        return Rounds.of(
            self.findings.speeds[batch_size][choice], self.findings.costs[batch_size], batch_size
        )

    def as_dict(self) -> dict[str, object]:
        findings = self.findings
        config = asdict(findings.config) | {
            "model": public_name(findings.config.model),
            "drafters": [public_name(name) for name in findings.config.drafters_to_compare],
            "prompts": findings.workload.name,
        }
        return {
            "schema": SCHEMA,
            "config": config,
            "workload": {
                "name": findings.workload.name,
                "sha256": findings.workload.sha256,
                "num_prompts": findings.num_prompts,
            },
            "recommendation": {
                "by_batch_size": {
                    size: _choice(choice) | {"chosen_relative_speed": self.relative_speed(size)}
                    for size, choice in self.best.items()
                },
                "chosen": _choice(self.chosen),
                "words": recommendation(self),
            },
            "speeds": {
                size: [
                    _choice(choice)
                    | _speed(speed)
                    | {"over_plain": speed.over(speeds[PLAIN])}
                    | asdict(self.rounds(size, choice))
                    for choice, speed in speeds.items()
                ]
                for size, speeds in findings.speeds.items()
            },
            "dropped": {
                size: [_choice(choice) | {"over_plain": speedup} for choice, speedup in dropped.items()]
                for size, dropped in findings.dropped.items()
            },
            "int8": {
                size: [_choice(choice) | _speed(speed) for choice, speed in speeds.items()]
                for size, speeds in findings.int8.items()
            },
            "pass_costs": {size: costs.curve for size, costs in findings.costs.items()},
            "num_passes": findings.num_passes,
            "memory": asdict(self.memory),
            "notes": findings.notes,
            "seconds": findings.spent,
            "provenance": self.provenance.as_dict(),
        }

    def configuration(self) -> Configuration:
        """Return what `--config` reads: the chosen drafter and controller, and their measurements."""
        findings, chosen = self.findings, self.chosen
        config, target = findings.config, findings.models.target
        smallest = min(findings.speeds)
        speed = findings.speeds[smallest][chosen]
        rates = [
            round(accepted / drafted, 3)
            for accepted, drafted in zip(
                speed.stats.accepted_per_position, speed.stats.drafted_per_position, strict=True
            )
        ]
        return Configuration(
            LoadSettings(
                model=config.model,
                drafter=chosen.drafter,
                verifier="auto",
                controller=chosen.controller if chosen.speculates else None,
                dtype=target.dtype,
                device=target.device,
            ),
            TuningRecord(
                date=self.provenance.date.partition("T")[0],
                processor=self.provenance.processor or None,
                num_threads=config.num_threads,
                workload=findings.workload.name,
                workload_sha256=findings.workload.sha256,
                model_sha256=hash_weights(Path(target.path)),
                acceptance_rate=speed.stats.acceptance_rate,
                acceptance_by_position=tuple(rates) or None,
                draft_length=self.best_constant_length(smallest),
                cost_ratio=round(self.rounds(smallest, chosen).cost_ratio, 4) if chosen.speculates else None,
                speedup={
                    size: round(of[chosen].over(of[PLAIN]), 3)
                    for size, of in findings.speeds.items()
                    if size not in self.plain_sizes
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
        speedups = self.findings.dropped.get(batch_size, {}) | {
            choice: speed.over(speeds[PLAIN]) for choice, speed in speeds.items()
        }
        lengths = {
            int(choice.controller.removeprefix("fixed:")): speedup
            for choice, speedup in speedups.items()
            if choice.drafter == self.chosen.drafter and choice.controller.startswith("fixed:")
        }
        if lengths:
            return max(lengths, key=lambda length: lengths[length])
        return max(round(speeds[self.chosen].draft_length), 1)

    @property
    def plain_sizes(self) -> list[int]:
        """Batch sizes at which the configuration's choice is slower than plain decoding."""
        return losing_sizes(self.chosen, self.findings.speeds)


def make_report(findings: Findings) -> TuneReport:
    """Decide what to recommend, and gather provenance."""
    config, models = findings.config, findings.models
    loaded = {config.model: models.target, **models.draft_models}
    return TuneReport(
        findings,
        recommend(findings.speeds),
        one_for_all(findings.speeds),
        _memory(findings),
        collect_provenance(
            num_threads=config.num_threads,
            device=models.target.device,
            dtype=models.target.dtype,
            seed=config.seed,
            models={public_name(name): Path(each.path) for name, each in loaded.items()},
            runtimes={public_name(name): each.runtime_description for name, each in loaded.items()},
        ),
    )


def _memory(findings: Findings) -> Memory:
    config, models = findings.config, findings.models
    loaded = {config.model: models.target, **models.draft_models}
    needs = {public_name(name): each.checkpoint.memory() for name, each in loaded.items()}
    per_token = sum(need.cache // need.num_cached_tokens for need in needs.values())
    # Linux counts in kibibytes, macOS in bytes.
    unit = 1 if sys.platform == "darwin" else 1024
    return Memory(
        {name: need.weights for name, need in needs.items()},
        per_token,
        {size: size * findings.longest * per_token for size in config.batch_sizes},
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit,
    )


def show_choice(choice: Choice) -> str:
    """Return the name of a choice in tables.

    >>> show_choice(Choice("suffix", "fixed:3")), show_choice(Choice(quantize="int8"))
    ('suffix fixed:3', 'plain, 8 bits')
    """
    name = f"{public_name(choice.drafter)} {choice.controller}" if choice.speculates else "plain"
    return f"{name}, 8 bits" if choice.quantize else name


HEADER = ("batch", "choice", "tokens/s", "x plain", "tau", "c", "v", "x plain by tau, c, v")


def table(report: TuneReport) -> list[str]:
    """Return the final runs by batch size, the fastest first, and those in 8 bits."""
    lines = [HEADER]
    for size, speeds in report.findings.speeds.items():
        for choice, speed in sorted(speeds.items(), key=lambda each: -each[1].tokens_per_second):
            rounds = report.rounds(size, choice)
            figures = (
                rounds.acceptance_length,
                rounds.cost_ratio,
                rounds.pass_cost,
                rounds.predicted_speedup,
            )
            shown = [f"{value:.2f}" for value in figures] if choice.speculates else [""] * 4
            lines.append((*_first_cells(size, choice, speed, speeds[PLAIN]), *shown))  # type: ignore[arg-type]
        quantized = report.findings.int8.get(size, {})
        for choice, speed in quantized.items():
            plain = quantized[Choice(quantize="int8")]
            lines.append((*_first_cells(size, choice, speed, plain), "", "", "", ""))
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEADER))]
    return [
        "  ".join(
            cell.ljust(width) if column == 1 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]


def _first_cells(size: int, choice: Choice, speed: Speed, plain: Speed) -> tuple[str, str, str, str]:
    return str(size), show_choice(choice), f"{speed.tokens_per_second:.0f}", f"{speed.over(plain):.2f}"


def recommendation(report: TuneReport) -> list[str]:
    """Return advice in words."""
    lines = [_advice(report, size) for size in report.best]
    chosen = report.chosen
    if chosen.speculates:
        lines.append(f"The configuration has {show_choice(chosen)}.")
        if report.plain_sizes:
            sizes = " and ".join(map(str, report.plain_sizes))
            lines.append(
                f"It is slower than plain decoding for {sizes} at a time, as is every choice that is faster "
                f"for {min(report.best)}: use the recommendation above there, or --drafter none."
            )
    else:
        lines.append("The configuration has the drafter none: plain decoding.")
    lines += compromise(report)
    if report.findings.config.temperature == 0:
        lines.append("Verifier auto: at temperature 0 every lossless verifier accepts the same drafts.")
    else:
        lines.append("Verifier auto: the lossless verifier that accepts most; others were not measured here.")
    if report.findings.int8:
        lines.append("8 bits change the model's numbers and its text, so they are not in the configuration.")
    return lines


def compromise(report: TuneReport) -> list[str]:
    """Return how the configuration's choice compares with the best of each batch size; nothing for one size."""
    if len(report.best) == 1:
        return []
    lines = ["The configuration has one choice for all batch sizes. Compared with the best choice for each:"]
    for size, best in report.best.items():
        name = show_choice(best) if best.speculates else "plain decoding"
        compared = (
            "it is the best choice"
            if best == report.chosen
            else f"the best is {name}; the configuration's choice has {report.relative_speed(size):.2f} of its speed"
        )
        lines.append(f"- {_at(size)}: {compared}.")
    return lines


def _advice(report: TuneReport, size: int) -> str:
    best, speeds = report.best[size], report.findings.speeds[size]
    at, plain = _at(size), speeds[PLAIN]
    if not best.speculates:
        speedups = [speed.over(plain) for choice, speed in speeds.items() if choice.speculates]
        return (
            f"{at}: decode plainly (drafter none). Nothing is faster by more than {WORTH_IT - 1:.0%}: "
            f"the best drafter is {max(speedups, default=0.0):.2f} times as fast."
        )
    speed = speeds[best]
    worst, place = speed.worst_over(plain)
    unit = "prompt" if size == 1 else "batch"
    slower = " (slower than plain)" if worst < 1 else ""
    rate = speed.stats.acceptance_rate
    drafts = (
        "Nothing was drafted"
        if rate is None
        else f"{rate:.0%} of {speed.draft_length:.1f} drafted tokens a round are accepted"
    )
    return (
        f"{at}: {show_choice(best)}. {drafts}: {speed.over(plain):.2f} times plain decoding "
        f"({speed.tokens_per_second:.0f} against {plain.tokens_per_second:.0f} tokens/s), {worst:.2f} times on the "
        f"worst {unit}, number {place + 1}{slower}."
    )


def _at(size: int) -> str:
    return "One at a time" if size == 1 else f"{size} at a time"


def remarks(report: TuneReport) -> list[str]:
    """Return memory, time and notes."""
    memory = report.memory
    weights = ", ".join(f"{name} {size / MIB:.0f} MiB" for name, size in memory.weights.items())
    caches = ", ".join(f"{size / MIB:.1f} MiB at {rows}" for rows, size in memory.caches.items())
    spent = ", ".join(f"{step} {seconds:.0f} s" for step, seconds in report.findings.spent.items())
    return [
        f"Memory: weights {weights}; caches {caches}; peak resident {memory.peak_resident / MIB:.0f} MiB.",
        f"Time: {spent}; up to {report.findings.num_passes} runs of each.",
        *(f"Note: {note}" for note in report.findings.notes),
    ]


def _choice(choice: Choice) -> dict[str, object]:
    return asdict(choice) | {"drafter": public_name(choice.drafter)}


def _speed(speed: Speed) -> dict[str, object]:
    return {
        "tokens_per_second": speed.tokens_per_second,
        "tokens": speed.tokens,
        "seconds": speed.seconds,
        "acceptance_rate": speed.stats.acceptance_rate,
        "draft_length": speed.draft_length,
    }
