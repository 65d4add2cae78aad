"""What a tuning says: in a table, in words, as JSON, and as the configuration that other commands read."""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

from secondguess.bench.planner import (
    PLAIN,
    WORTH_IT,
    Choice,
    Speed,
    acceptance_by_position,
    coverage,
    losing_sizes,
    one_for_all,
    recommend,
    split_drafter,
)
from secondguess.bench.provenance import Provenance, gather
from secondguess.bench.systems import public_name
from secondguess.bench.tune_costs import Costs
from secondguess.bench.tune_findings import Findings
from secondguess.configuration import Configuration, LoadSettings, Tuned
from secondguess.runtime.fingerprint import hash_weights
from secondguess.runtime.loading import memory_need

SCHEMA = 1
MIB = 2**20
BUSY = 0.15
"""Plain decoding that is predicted worse than this was disturbed."""


@dataclass(frozen=True)
class Memory:
    """Bytes.

    Args:
        weights: by model.
        cache_per_token: keys and values of one token, of all models.
        caches: by batch size, when all texts are as long as the longest.
        peak_resident: most that this process has held at once, everything included.
    """

    weights: Mapping[str, int]
    cache_per_token: int
    caches: Mapping[int, int]
    peak_resident: int


@dataclass(frozen=True)
class TuneReport:
    """A finished tuning.

    Args:
        measured: speeds by batch size, of the choices that were run; empty where none was.
        best: by batch size, what to take there.
        chosen: the one choice for the configuration.
    """

    findings: Findings
    measured: Mapping[int, Mapping[Choice, Speed]]
    best: Mapping[int, Choice]
    chosen: Choice
    memory: Memory
    provenance: Provenance

    @property
    def speeds(self) -> dict[int, Mapping[Choice, Speed]]:
        """What choices were made by: measured speeds where there are any, else predicted ones."""
        return _deciding(self.findings, self.measured)

    @property
    def median_error(self) -> float | None:
        """Median over all that was run of how far the predicted speed was off; None when nothing was run."""
        errors = [abs(verified.error) for verified in self.findings.verified]
        return median(errors) if errors else None

    @property
    def median_speedup_error(self) -> float | None:
        """The same for speeds over plain decoding's, in which a machine that was busy during the runs cancels out."""
        errors = [
            abs(each.predicted.over(plain.predicted) / each.measured.over(plain.measured) - 1)
            for plain in self.findings.verified
            if plain.choice == PLAIN
            for each in self.findings.verified
            if each.batch_size == plain.batch_size and each.choice.speculates
        ]
        return median(errors) if errors else None

    def to_text(self) -> str:
        """A table, then the recommendation in words."""
        return "\n".join([*table(self), "", *recommendation(self), "", *asides(self)]) + "\n"

    def to_toml(self) -> str:
        """The configuration, and as a comment how its one choice compares with the best for each batch size."""
        comment = [line if line.isprintable() else repr(line) for line in compromise(self)]
        return "".join(f"# {line}\n" for line in comment) + self.configuration().to_toml()

    def relative_speed(self, batch_size: int) -> float:
        """The chosen one's speed over that of the best choice for a batch size."""
        speeds = _known_everywhere(self.findings, self.speeds)[batch_size]
        return speeds[self.chosen].over(speeds[self.best[batch_size]])

    def to_json(self) -> str:
        return json.dumps(self.as_dict(), indent=1, allow_nan=False) + "\n"

    def as_dict(self) -> dict[str, object]:
        findings = self.findings
        config = asdict(findings.config) | {
            "model": public_name(findings.config.model),
            "drafters": [public_name(name) for name in findings.config.drafters_to_weigh],
            "prompts": findings.workload.name,
        }
        assert findings.costs is not None
        return {
            "schema": SCHEMA,
            "config": config,
            "workload": {
                "name": findings.workload.name,
                "sha256": findings.workload.sha256,
                "num_prompts": len(findings.traces),
                "num_tokens": [trace.num_tokens for trace in findings.traces],
            },
            "recommendation": {
                "by_batch_size": {
                    size: _choice(choice) | {"chosen_relative_speed": self.relative_speed(size)}
                    for size, choice in self.best.items()
                },
                "chosen": _choice(self.chosen),
                "words": recommendation(self),
            },
            "median_absolute_error": self.median_error,
            "median_absolute_error_of_speedups": self.median_speedup_error,
            "verified": [
                _choice(each.choice)
                | {
                    "batch_size": each.batch_size,
                    "predicted": _speed(each.predicted),
                    "measured": _speed(each.measured),
                    "error": each.error,
                }
                for each in findings.verified
            ],
            "num_passes": findings.num_passes,
            "predictions": {
                size: [_choice(choice) | _speed(speed) for choice, speed in of_size.items()]
                for size, of_size in findings.predictions.items()
            },
            "acceptance": {
                public_name(name): {
                    "by_position": acceptance_by_position(part.guesses),
                    "coverage": coverage(part.guesses),
                }
                for name, part in findings.parts.items()
            },
            "costs": _costs(findings.costs),
            "int8_costs": None if findings.int8_costs is None else _costs(findings.int8_costs),
            "memory": asdict(self.memory),
            "notes": findings.notes,
            "seconds": findings.spent,
            "provenance": self.provenance.as_dict(),
        }

    def configuration(self) -> Configuration:
        """What `--config` reads: the chosen drafter and controller, and what they were measured on."""
        config, models, chosen = self.findings.config, self.findings.models, self.chosen
        smallest = min(self.speeds)
        names = split_drafter(chosen.drafter)
        costs = self.findings.costs
        assert costs is not None
        steps = [costs.parts[name].step[1] for name in names if not self.findings.parts[name].certain]
        rates = acceptance_by_position(self.findings.parts[names[0]].guesses) if len(names) == 1 else None
        return Configuration(
            LoadSettings(
                model=config.model,
                drafter=chosen.drafter,
                verifier="auto",
                controller=chosen.controller if chosen.speculates else None,
                dtype=models.target.dtype,
                device=models.target.device,
            ),
            Tuned(
                date=self.provenance.date.partition("T")[0],
                processor=self.provenance.processor or None,
                num_threads=config.num_threads,
                workload=self.findings.workload.name,
                workload_sha256=self.findings.workload.sha256,
                model_sha256=hash_weights(Path(models.target.path)),
                acceptance_rate=self._speeds_of_chosen()[smallest][chosen].acceptance_rate,
                acceptance_by_position=None if rates is None else tuple(round(rate, 3) for rate in rates),
                draft_length=self.best_constant_length(smallest),
                cost_ratio=round(sum(steps) / costs.plain[1], 4) if steps else None,
                speedup={
                    size: round(of[chosen].over(of[PLAIN]), 3)
                    for size, of in self._speeds_of_chosen().items()
                    if size not in self.plain_sizes
                },
            ),
        )

    def best_constant_length(self, batch_size: int) -> int:
        """The constant draft length that is predicted to be best for the chosen drafter; 0 for plain decoding."""
        lengths = {
            int(choice.controller.removeprefix("fixed:")): speed.tokens_per_second
            for choice, speed in self.findings.predictions[batch_size].items()
            if choice.controller.startswith("fixed:")
            and choice.quantize is None
            and choice.drafter == self.chosen.drafter
        }
        return max(lengths, key=lambda length: lengths[length])

    @property
    def plain_sizes(self) -> list[int]:
        """The batch sizes that the configuration does not serve: its choice is slower there than plain decoding."""
        return losing_sizes(self.chosen, self._speeds_of_chosen())

    def _speeds_of_chosen(self) -> dict[int, Mapping[Choice, Speed]]:
        """Speeds by which the chosen one is known at every batch size: predicted ones where it was not run."""
        return {
            size: of if self.chosen in of else self.findings.predictions[size]
            for size, of in self.speeds.items()
        }


def make_report(findings: Findings) -> TuneReport:
    """Decide, and gather where it all comes from."""
    measured: dict[int, dict[Choice, Speed]] = {}
    for each in findings.verified:
        measured.setdefault(each.batch_size, {})[each.choice] = each.measured
    deciding = _deciding(findings, measured)
    config, models = findings.config, findings.models
    loaded = {config.model: models.target, **models.draft_models}
    return TuneReport(
        findings,
        measured,
        recommend(deciding),
        one_for_all(_known_everywhere(findings, deciding)),
        _memory(findings),
        gather(
            num_threads=config.num_threads,
            device=models.target.device,
            dtype=models.target.dtype,
            seed=config.seed,
            models={public_name(name): Path(each.path) for name, each in loaded.items()},
            runtimes={public_name(name): each.runtime_in_words for name, each in loaded.items()},
        ),
    )


def _deciding(
    findings: Findings, measured: Mapping[int, Mapping[Choice, Speed]]
) -> dict[int, Mapping[Choice, Speed]]:
    return {
        size: measured.get(size)
        or {choice: speed for choice, speed in of_size.items() if choice.quantize is None}
        for size, of_size in findings.predictions.items()
    }


def _known_everywhere(
    findings: Findings, deciding: Mapping[int, Mapping[Choice, Speed]]
) -> dict[int, Mapping[Choice, Speed]]:
    """What decides, and for what was run at another batch size the prediction, scaled to how fast plain decoding was."""
    known: dict[int, Mapping[Choice, Speed]] = {}
    run = {choice for of in deciding.values() for choice in of}
    for size, of in deciding.items():
        predicted = findings.predictions[size]
        pace = of[PLAIN].tokens_per_second / predicted[PLAIN].tokens_per_second
        known[size] = dict(of) | {
            choice: replace(speed, seconds=tuple(seconds / pace for seconds in speed.seconds))
            for choice, speed in predicted.items()
            if choice in run and choice not in of
        }
    return known


def _memory(findings: Findings) -> Memory:
    config, models = findings.config, findings.models
    dtype, device = models.target.dtype, models.target.device
    needs = {public_name(config.model): memory_need(config.model, dtype=dtype, device=device)}
    for name in models.draft_models:
        needs[public_name(name)] = memory_need(name, dtype=dtype, device=device, drafts=True)
    per_token = sum(need.cache // need.num_cached_tokens for need in needs.values())
    longest = max(trace.num_prompt + trace.num_tokens for trace in findings.traces)
    # Linux counts in kibibytes, macOS in bytes.
    unit = 1 if sys.platform == "darwin" else 1024
    return Memory(
        {name: need.weights for name, need in needs.items()},
        per_token,
        {size: size * longest * per_token for size in config.batch_sizes},
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit,
    )


def show_choice(choice: Choice) -> str:
    """How a table calls a choice.

    >>> show_choice(Choice("suffix", "fixed:3")), show_choice(Choice(quantize="int8"))
    ('suffix fixed:3', 'plain, 8 bits')
    """
    name = f"{public_name(choice.drafter)} {choice.controller}" if choice.speculates else "plain"
    return f"{name}, 8 bits" if choice.quantize else name


def table(report: TuneReport) -> list[str]:
    """What was run, and what 8 bits are predicted to give, by batch size."""
    lines = [["batch", "how", "predicted", "x plain", "measured", "x plain", "predicted/measured"]]
    for size, of_size in report.findings.predictions.items():
        run = [each for each in report.findings.verified if each.batch_size == size]
        plain = next((each for each in run if each.choice == PLAIN), None)
        for each in sorted(run, key=lambda each: -each.measured.tokens_per_second):
            assert plain is not None
            lines.append(
                [
                    str(size),
                    show_choice(each.choice),
                    f"{each.predicted.tokens_per_second:.0f}",
                    f"{each.predicted.over(plain.predicted):.2f}",
                    f"{each.measured.tokens_per_second:.0f}",
                    f"{each.measured.over(plain.measured):.2f}",
                    f"{1 + each.error:.2f}",
                ]
            )
        others = [choice for choice in of_size if choice.quantize or (not run and choice in _shown(of_size))]
        for choice in sorted(others, key=lambda choice: -of_size[choice].tokens_per_second):
            speed = of_size[choice]
            ratio = f"{speed.over(of_size[PLAIN]):.2f}"
            lines.append(
                [str(size), show_choice(choice), f"{speed.tokens_per_second:.0f}", ratio, "", "", ""]
            )
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return [
        "  ".join(
            cell.ljust(width) if column == 1 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]


def _shown(speeds: Mapping[Choice, Speed]) -> list[Choice]:
    """Plain decoding and the best four."""
    unrounded = [choice for choice in speeds if choice.speculates and choice.quantize is None]
    return [PLAIN, *sorted(unrounded, key=lambda choice: -speeds[choice].tokens_per_second)[:4]]


def recommendation(report: TuneReport) -> list[str]:
    """What to do, in plain words."""
    lines = [_advice(report, size) for size in report.best]
    chosen = report.chosen
    if chosen.speculates:
        lines.append(f"The configuration has {show_choice(chosen)}.")
        if report.plain_sizes:
            sizes = " and ".join(map(str, report.plain_sizes))
            lines.append(
                f"It is not for {sizes} at a time, where it is slower than plain decoding, as is all that pays "
                f"{_at(min(report.best)).lower()}: there take what is said above, or --drafter none."
            )
    else:
        lines.append("The configuration has the drafter none: plain decoding.")
    lines += compromise(report)
    if report.findings.config.temperature == 0:
        lines.append("Verifier auto: at temperature 0 every lossless verifier accepts the same guesses.")
    else:
        lines.append(
            "Verifier auto: it takes the lossless rule that accepts most; others were not measured here."
        )
    return [*lines, *_about_int8(report)]


def compromise(report: TuneReport) -> list[str]:
    """How the configuration's one choice compares with the best for each batch size; nothing where there is one size."""
    if len(report.best) == 1:
        return []
    lines = ["The configuration has one choice for all batch sizes. Compared with the best choice for each:"]
    for size, best in report.best.items():
        how = "" if report.chosen in report.measured.get(size, {}) else " (predicted)"
        name = show_choice(best) if best.speculates else "plain decoding"
        compared = (
            "it is the best choice"
            if best == report.chosen
            else f"the best is {name}; the configuration's choice has {report.relative_speed(size):.2f} of its speed{how}"
        )
        lines.append(f"- {_at(size)}: {compared}.")
    return lines


def _advice(report: TuneReport, size: int) -> str:
    best, speeds = report.best[size], report.speeds[size]
    at = _at(size)
    how = "measured" if size in report.measured else "predicted"
    if not best.speculates:
        rivals = [choice for choice in speeds if choice.speculates]
        nearest = max((speeds[choice].over(speeds[PLAIN]) for choice in rivals), default=0.0)
        return (
            f"{at}: decode plainly (drafter none). Nothing is faster by more than {WORTH_IT - 1:.0%}: "
            f"the best drafter is {nearest:.2f} times as fast ({how})."
        )
    speed, plain = speeds[best], speeds[PLAIN]
    worst, place = speed.worst_over(plain)
    unit = "prompt" if size == 1 else "batch"
    slower = " (slower than plain)" if worst < 1 else ""
    rate = speed.acceptance_rate
    drafts = (
        "Nothing was drafted"
        if rate is None
        else f"Text like this accepts {rate:.0%} of {speed.draft_length:.1f} guesses a round"
    )
    return (
        f"{at}: {show_choice(best)}. {drafts}: "
        f"expect {speed.over(plain):.2f} times plain decoding ({how}: {speed.tokens_per_second:.0f} against "
        f"{plain.tokens_per_second:.0f} tokens/s), {worst:.2f} times on the worst {unit}, number {place + 1}{slower}."
    )


def _at(size: int) -> str:
    return "One at a time" if size == 1 else f"{size} at a time"


def _about_int8(report: TuneReport) -> list[str]:
    gains = []
    for size, of_size in report.findings.predictions.items():
        rounded = [speed.tokens_per_second for choice, speed in of_size.items() if choice.quantize]
        others = [speed.tokens_per_second for choice, speed in of_size.items() if not choice.quantize]
        if rounded:
            gains.append(f"{max(rounded) / max(others):.2f} times at {size}")
    if not gains:
        return []
    return [
        f"With quantize int8 the best is predicted to be faster by these factors: {', '.join(gains)} at a time (not run). "
        "It changes the model's numbers, so it is not in the configuration."
    ]


def asides(report: TuneReport) -> list[str]:
    """Memory, how good the predictions were, and what else to know."""
    memory = report.memory
    weights = ", ".join(f"{name} {size / MIB:.0f} MiB" for name, size in memory.weights.items())
    caches = ", ".join(f"{size / MIB:.1f} MiB at {rows}" for rows, size in memory.caches.items())
    lines = [
        f"Memory: weights {weights}; caches {caches}; peak resident {memory.peak_resident / MIB:.0f} MiB."
    ]
    if report.median_error is not None:
        lines.append(
            f"Predicted tokens/s were off by {report.median_error:.1%}, speed-ups by {report.median_speedup_error:.1%} "
            f"(medians over what was run, {report.findings.num_passes} passes)."
        )
        lines += _about_load(report)
    spent = ", ".join(f"{what} {seconds:.0f} s" for what, seconds in report.findings.spent.items())
    return [*lines, f"Time: {spent}.", *(f"Note: {note}" for note in report.findings.notes)]


def _about_load(report: TuneReport) -> list[str]:
    """Plain decoding knows no model that could be wrong: where it was slower than its own rounds, the machine was."""
    plain = [each.error for each in report.findings.verified if each.choice == PLAIN]
    worst = max(plain, key=abs)
    if abs(worst) <= BUSY:
        return []
    return [
        f"Note: the machine changed its pace: plain decoding was predicted at {1 + worst:.2f} times its measured speed. "
        "Trust the ratios more than the speeds, and tune on a quiet machine"
    ]


def _choice(choice: Choice) -> dict[str, object]:
    return asdict(choice) | {"drafter": public_name(choice.drafter)}


def _speed(speed: Speed) -> dict[str, object]:
    return {"tokens_per_second": speed.tokens_per_second} | asdict(speed)


def _costs(costs: Costs) -> dict[str, object]:
    def told(by_drafter: Mapping[str, object]) -> dict[str, object]:
        return {public_name(name): value for name, value in by_drafter.items()}

    values = asdict(costs)
    values |= {key: told(values[key]) for key in ("parts", "disordered_parts", "joining")}
    return values | {"models": [public_name(name) for name in costs.models]}
