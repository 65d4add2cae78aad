"""Comparison of two stored reports: changes beyond noise, and differences in conditions."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from secondguess.bench.markdown import show_interval, table
from secondguess.bench.stored import StoredReport, StoredResult, read_report
from secondguess.bench.summary import MIN_PROMPTS_FOR_INTERVAL, Ratio, compare, compare_apart, median

FASTER = "faster"
SLOWER = "slower"
SAME = "no difference beyond noise"
UNKNOWN = f"fewer than {MIN_PROMPTS_FOR_INTERVAL} prompts: cannot say"

NOTES = """\
Ratio: median tokens/s after over before, [95 % bootstrap interval]; beyond noise where that does not hold 1. Noise
is what differs between prompts: a machine that was busier on one of the days shows as a change, and then in systems
that nobody touched, too. Of twenty lines without a change, one will say otherwise by chance."""

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
        paired: whether prompts were resampled in pairs.
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
    paired: bool
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
        blocks = [
            f"# From {self.before} to {self.after}: {how}",
            "\n".join(f"- Warning: {warning}." for warning in self.warnings),
            NOTES,
            table(
                ["system", "temperature", "batch size", "task", "before", "after", "ratio", "verdict"],
                [_row(change) for change in self.changes],
            ),
            "\n".join(
                f"- Only in {file}: {', '.join(systems)}."
                for file, systems in ((self.before, self.only_before), (self.after, self.only_after))
                if systems
            ),
        ]
        return "\n\n".join(block for block in blocks if block) + "\n"


def compare_files(before: str | Path, after: str | Path, seed: int = 0) -> Comparison:
    """Compare two reports saved by `secondguess bench`.

    Raises:
        BadInputError: a file that is not such a report.
    """
    return compare_reports(read_report(Path(before)), read_report(Path(after)), seed)


def compare_reports(before: StoredReport, after: StoredReport, seed: int = 0) -> Comparison:
    """Compare every system, temperature, batch size and task present in both reports."""
    paired = all(before.conditions[word] == after.conditions[word] for word in PAIRING_CONDITIONS)
    changes = [
        change
        for key in before.results
        if key in after.results
        for change in _changes(key, before.results[key], after.results[key], paired, seed)
    ]
    systems = [list(dict.fromkeys(system for system, *_ in each.results)) for each in (before, after)]
    return Comparison(
        before=before.label,
        after=after.label,
        paired=paired,
        warnings=list(_warnings(before, after, bool(changes))),
        only_before=[system for system in systems[0] if system not in systems[1]],
        only_after=[system for system in systems[1] if system not in systems[0]],
        changes=changes,
    )


def classify_change(ratio: Ratio) -> str:
    """Return the verdict that the interval of a ratio supports."""
    if ratio.low is None or ratio.high is None:
        return UNKNOWN
    if ratio.low > 1:
        return FASTER
    return SLOWER if ratio.high < 1 else SAME


def _changes(
    key: tuple[str, float, int], before: StoredResult, after: StoredResult, paired: bool, seed: int
) -> Iterator[Change]:
    """Yield the change over all prompts, then the change per shared task if there are several."""
    if paired:
        # An interrupted run has only the first prompts of its workload.
        count = min(len(before.speeds), len(after.speeds))
        before, after = (StoredResult(each.speeds[:count], each.tasks[:count]) for each in (before, after))
    yield _change(key, None, before.speeds, after.speeds, paired, seed)
    shared = [task for task in dict.fromkeys(before.tasks) if task in after.tasks]
    if len(set(before.tasks) | set(after.tasks)) < 2:
        return
    for task in shared:
        ours, theirs = (
            [speed for speed, each in zip(result.speeds, result.tasks, strict=True) if each == task]
            for result in (before, after)
        )
        yield _change(key, task, ours, theirs, paired, seed)


def _change(
    key: tuple[str, float, int],
    task: str | None,
    before: Sequence[float],
    after: Sequence[float],
    paired: bool,
    seed: int,
) -> Change:
    ratio = compare(after, before, seed) if paired else compare_apart(after, before, seed)
    system, temperature, batch_size = key
    return Change(
        system=system,
        temperature=temperature,
        batch_size=batch_size,
        task=task,
        before=median(before),
        after=median(after),
        ratio=ratio.of_medians,
        low=ratio.low,
        high=ratio.high,
        paired=paired,
        num_before=len(before),
        num_after=len(after),
        verdict=classify_change(ratio),
    )


def _warnings(before: StoredReport, after: StoredReport, any_shared: bool) -> Iterator[str]:
    for word, first in before.conditions.items():
        second = after.conditions[word]
        if first != second:
            yield f"different {word}: {_difference(first, second)}"
    for report in (before, after):
        if not report.complete:
            yield f"{report.label} was interrupted and covers only part of its prompts"
    if not any_shared:
        yield "no system was measured in the same setting by both"


def _difference(first: object, second: object) -> str:
    """Format two values; of two mappings only the entries that differ."""
    if isinstance(first, dict) and isinstance(second, dict):
        keys = [key for key in {**first, **second} if first.get(key) != second.get(key)]
        return ", ".join(f"{key} {_value(first.get(key))} and {_value(second.get(key))}" for key in keys)
    return f"{_value(first)} and {_value(second)}"


def _value(value: object) -> str:
    text = "none" if value is None else str(value)
    is_hash = len(text) == 64 and all(each in "0123456789abcdef" for each in text)
    return text[:8] if is_hash else text


def _row(change: Change) -> list[str]:
    interval = show_interval(change.low, change.high)
    count = min(change.num_before, change.num_after)
    return [
        change.system,
        f"{change.temperature:g}",
        str(change.batch_size),
        "all" if change.task is None else f"{change.task} ({count})",
        f"{change.before:.1f}",
        f"{change.after:.1f}",
        f"{change.ratio:.2f}x{interval}",
        change.verdict,
    ]
