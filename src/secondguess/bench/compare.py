"""Comparison of two stored reports: changes beyond noise, and differences in conditions."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from secondguess.bench.report import Report, Result, read_report
from secondguess.bench.summary import MIN_PROMPTS_FOR_INTERVAL, Ratio, compare
from secondguess.bench.tables import show_ratio, table

FASTER = "faster"
SLOWER = "slower"
SAME = "no difference beyond noise"
UNKNOWN = f"fewer than {MIN_PROMPTS_FOR_INTERVAL} prompts: cannot say"

NOTES = """\
Ratio: median tokens/s after over before, [95 % bootstrap interval]; beyond noise where that does not hold 1. Noise
is what differs between prompts: a machine that was busier on one of the days shows as a change, and then in systems
that nobody touched, too. Of twenty lines without a change, one will say otherwise by chance."""

CONDITIONS: dict[str, Callable[[Report], object]] = {
    "machine": lambda report: report.provenance.processor,
    "cores": lambda report: report.provenance.num_cores,
    "threads": lambda report: report.provenance.num_threads,
    "device": lambda report: report.provenance.device,
    "dtype": lambda report: report.provenance.dtype,
    "weights": lambda report: report.provenance.model_sha256,
    "runtimes": lambda report: report.provenance.runtimes,
    "libraries": lambda report: report.provenance.versions,
    "workload": lambda report: report.workbench.workload_sha256,
    "new tokens": lambda report: report.workbench.num_tokens,
    "prompts cut": lambda report: report.workbench.num_prompts_cut,
}
"""Conditions that two reports should share."""

PAIRING_CONDITIONS = ("workload", "new tokens", "prompts cut")
"""Conditions that have to be equal for prompts to be compared in pairs."""


@dataclass(frozen=True)
class Change:
    """Speed of one system in one setting, before and after.

    Args:
        task: task of the prompts; None for all prompts.
        before, after: median tokens/s.
        ratio: after over before.
        low, high: 95 % bootstrap interval of the ratio; None with too few prompts.
        num_before, num_after: number of batches (at batch size 1: prompts) behind each median.
        verdict: `faster`, `slower`, `no difference beyond noise`, or a message that there are too
            few prompts.
    """

    system: str
    temperature: float
    batch_size: int
    task: str | None
    before: float
    after: float
    ratio: float
    low: float | None
    high: float | None
    num_before: int
    num_after: int
    verdict: str


@dataclass(frozen=True)
class Comparison:
    """Changes in all results that two reports share.

    Args:
        before, after: file names.
        paired: whether prompts were resampled in pairs.
        warnings: reasons why a change may have other causes than the code.
        only_before, only_after: systems present in only one of the reports.
    """

    before: str
    after: str
    paired: bool
    warnings: list[str]
    only_before: list[str]
    only_after: list[str]
    changes: list[Change]

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"

    def to_markdown(self) -> str:
        how = (
            "the same prompts, resampled in pairs"
            if self.paired
            else "different prompts, each side resampled by itself"
        )
        only = ((self.before, self.only_before), (self.after, self.only_after))
        rows = [
            [
                change.system,
                f"{change.temperature:g}",
                str(change.batch_size),
                "all"
                if change.task is None
                else f"{change.task} ({min(change.num_before, change.num_after)})",
                f"{change.before:.1f}",
                f"{change.after:.1f}",
                show_ratio(Ratio(change.ratio, change.low, change.high, change.ratio)),
                change.verdict,
            ]
            for change in self.changes
        ]
        header = ["system", "temperature", "batch size", "task", "before", "after", "ratio", "verdict"]
        blocks = [
            f"# From {self.before} to {self.after}: {how}",
            "\n".join(f"- Warning: {warning}." for warning in self.warnings),
            NOTES,
            table(header, rows),
            "\n".join(f"- Only in {file}: {', '.join(systems)}." for file, systems in only if systems),
        ]
        return "\n\n".join(block for block in blocks if block) + "\n"


def compare_files(before: str | Path, after: str | Path, seed: int = 0) -> Comparison:
    """Compare every system, temperature, batch size and task in two reports saved by `secondguess bench`.

    Raises:
        BadInputError: a file that is not such a report.
    """
    paths = Path(before), Path(after)
    old, new = map(read_report, paths)
    different = {
        word: (first, second)
        for word, read in CONDITIONS.items()
        if (first := read(old)) != (second := read(new))
    }
    paired = different.keys().isdisjoint(PAIRING_CONDITIONS)
    later = {_key(result): result for result in new.results}
    changes = [
        change
        for result in old.results
        if _key(result) in later
        for change in _changes(old, result, new, later[_key(result)], paired, seed)
    ]
    warnings = [f"different {word}: {_difference(*values)}" for word, values in different.items()]
    warnings += [
        f"{path.name} was interrupted and covers only part of its prompts"
        for path, report in zip(paths, (old, new), strict=True)
        if not report.complete
    ]
    if not changes:
        warnings.append("no system was measured in the same setting by both")
    systems = [list(dict.fromkeys(result.system for result in report.results)) for report in (old, new)]
    return Comparison(
        before=paths[0].name,
        after=paths[1].name,
        paired=paired,
        warnings=warnings,
        only_before=[system for system in systems[0] if system not in systems[1]],
        only_after=[system for system in systems[1] if system not in systems[0]],
        changes=changes,
    )


def _changes(
    old: Report, before: Result, new: Report, after: Result, paired: bool, seed: int
) -> Iterator[Change]:
    """Yield the change over all prompts, then the change per shared task if there are several."""
    # An interrupted run has only the first prompts of its workload.
    count = min(len(before.per_batch), len(after.per_batch)) if paired else None
    ours, theirs = _by_task(old, before, count), _by_task(new, after, count)
    several = len({*ours, *theirs} - {None}) > 1
    for task in [task for task in ours if task in theirs and (task is None or several)]:
        ratio = compare(theirs[task], ours[task], seed, paired)
        yield Change(
            *_key(before),
            task=task,
            before=median(ours[task]),
            after=median(theirs[task]),
            ratio=ratio.of_medians,
            low=ratio.low,
            high=ratio.high,
            num_before=len(ours[task]),
            num_after=len(theirs[task]),
            verdict=_verdict(ratio),
        )


def _key(result: Result) -> tuple[str, float, int]:
    return result.system, result.temperature, result.batch_size


def _by_task(report: Report, result: Result, count: int | None) -> dict[str | None, list[float]]:
    """Return the speeds of the first `count` batches: all of them under None, then those of each task."""
    speeds: dict[str | None, list[float]] = {None: result.per_batch[:count]}
    for task, speed in zip(report.workbench.tasks.get(result.batch_size, []), speeds[None], strict=False):
        speeds.setdefault(task, []).append(speed)
    return speeds


def _verdict(ratio: Ratio) -> str:
    if ratio.interval is None:
        return UNKNOWN
    low, high = ratio.interval
    if low > 1:
        return FASTER
    return SLOWER if high < 1 else SAME


def _difference(first: object, second: object) -> str:
    """Format two values; of two mappings only the entries that differ."""
    if isinstance(first, dict) and isinstance(second, dict):
        keys = [key for key in {**first, **second} if first.get(key) != second.get(key)]
        return ", ".join(f"{key} {_value(first.get(key))} and {_value(second.get(key))}" for key in keys)
    return f"{_value(first)} and {_value(second)}"


def _value(value: object) -> str:
    text = "none" if value is None else str(value)
    return text[:8] if re.fullmatch("[0-9a-f]{64}", text) else text
