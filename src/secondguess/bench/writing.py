"""Writing of a report as Markdown, and of all its files."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from pathlib import Path

from secondguess.bench.report import CostTable, Report, Result, Rounds, TaskResult
from secondguess.bench.summary import MIN_PROMPTS_FOR_INTERVAL
from secondguess.bench.tables import show, show_count, table
from secondguess.files import write_atomically

NOTES = """\
Method: library and drafter, with the controller if it is not the default; *plain* is without speculation. Tokens/s: median
over prompts of new tokens per wall-clock second, prefill included (of a batch: all its new tokens). Speedup: ratio of
medians, [95 % bootstrap interval over prompts], then the ratio on the worst prompt. Pass: forward pass of the target.
Predicted: decoding speed that follows from tau, c and the cost of passes v(m), without prefill; measured/predicted falls
below 1 by the time of sampling, verification and bookkeeping."""
PHASE_NAMES = {"score": "target"}
"""Names of phases in the table, where they differ from those in the JSON."""


def unused_path(path: Path, *suffixes: str) -> Path:
    """Return a path, with a number before its suffix if there is a file already, also with another of `suffixes`."""
    candidate, numbers = path, count(2)
    while any(file.exists() for file in (candidate, *map(candidate.with_suffix, suffixes))):
        candidate = path.with_stem(f"{path.stem}-{next(numbers)}")
    return candidate


def save_report(report: Report, folder: str | Path) -> list[Path]:
    """Write `<date>-<name>.json` and `.md` (`-partial` if interrupted), and return their paths.

    A number is added to the name if an earlier report has it.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    day = report.provenance.date.partition("T")[0]
    stem = f"{day}-{report.name}{'' if report.complete else '-partial'}"
    data = unused_path(folder / f"{stem}.json", ".md")
    page = data.with_suffix(".md")
    for path, text in ((data, report.to_json()), (page, as_markdown(report))):
        with write_atomically(path) as stream:
            stream.write(text.encode())
    return [data, page]


def as_markdown(report: Report) -> str:
    """Return the report as Markdown."""
    bench, about = report.workbench, report.provenance
    conditions = (
        f"{show_count(bench.num_prompts, 'prompt')} of {bench.workload} (median {bench.median_prompt_tokens:g} tokens), "
        f"at most {bench.num_tokens} new tokens each, {about.dtype} on {about.device}, "
        f"{show_count(about.num_threads, 'thread')}, "
        f"{about.processor}. All methods ran in turn in one process, in alternating order, after a warm-up."
    )
    blocks = [
        f"# Benchmark {report.name}",
        "" if report.complete else "**Interrupted: this report covers only the prompts that were finished.**",
        conditions + (f" Note: {bench.workload_note}." if bench.workload_note else ""),
        "\n".join(f"- Note: {note}." for note in bench.notes),
        NOTES,
        *(
            block
            for setting, results in report.by_setting().items()
            for block in _blocks_at(*setting, results)
        ),
        *_costs(report.costs),
        _provenance(report),
    ]
    return "\n\n".join(block for block in blocks if block) + "\n"


def _blocks_at(temperature: float, batch_size: int, results: Sequence[Result]) -> list[str]:
    """Return heading, notes and tables of one setting; empty ones do not apply."""
    units = "prompts" if batch_size == 1 else "batches"
    too_few = (
        f"No confidence intervals: they need at least {MIN_PROMPTS_FOR_INTERVAL} {units} (--num-prompts), these are "
        f"{len(results[0].per_batch)}."
    )
    by_task = (
        f"By task (number of {units}): tokens/s, speedup over plain decoding of the same library (with an interval from "
        f"{MIN_PROMPTS_FOR_INTERVAL} on), tokens per pass (tau)."
    )
    has_tasks = len(results[0].by_task) > 1  # the first table covers a single one
    texts = _text_table(results)
    return [
        f"## Temperature {temperature:g}" + (f", batch size {batch_size}" if batch_size > 1 else ""),
        "" if all(result.interval for result in results) else too_few,
        _speed_table(results),
        *([by_task, _task_table(results)] if has_tasks else []),
        _rounds_table(results),
        "Greedy texts compared with those of plain decoding:" if texts else "",
        texts,
    ]


def _speed_table(results: Sequence[Result]) -> str:
    # All baselines but our own fastest: that column would only repeat the first one.
    ours = results[0].family
    compared = {baseline for result in results for baseline in result.against}
    baselines = [
        result.system
        for result in results
        if result.system in compared and not (result.speculates and result.family == ours)
    ]
    rows = []
    for result in results:
        ratios = [result.against.get(baseline) for baseline in baselines]
        shown = [f"{ratio}, worst {ratio.worst:.2f}x" if ratio else "" for ratio in ratios]
        rows.append([result.system, f"{result.tokens_per_second:.1f}", *shown])
    return table(["method", "tokens/s", *(f"speedup over {baseline}" for baseline in baselines)], rows)


def _task_table(results: Sequence[Result]) -> str:
    def show_task(found: TaskResult) -> str:
        parts = [f"{found.tokens_per_second:.1f}"]
        if found.against_plain is not None:
            parts.append(str(found.against_plain))
            if found.acceptance_length is not None:
                parts.append(f"tau {found.acceptance_length:.2f}")
        return ", ".join(parts)

    header = ["method", *(f"{task} ({found.num_batches})" for task, found in results[0].by_task.items())]
    return table(header, [[result.system, *map(show_task, result.by_task.values())] for result in results])


def _rounds_table(results: Sequence[Result]) -> str:
    rows = [_rounds_row(result, result.rounds) for result in results if result.rounds is not None]
    return table(list(rows[0]), [list(row.values()) for row in rows]) if rows else ""


def _rounds_row(result: Result, rounds: Rounds) -> dict[str, str]:
    """Return the cells of a system by column."""
    rate = "nothing drafted" if rounds.acceptance_rate is None else f"{rounds.acceptance_rate:.1%}"
    shares = [
        f"{PHASE_NAMES.get(phase, phase)} {share:.0%}"
        for phase, share in rounds.share_of_seconds.items()
        if share >= 0.005
    ]
    return {
        "method": result.system,
        "tokens per pass (tau)": f"{rounds.acceptance_length:.2f}",
        "acceptance rate": rate if result.speculates else "",
        "by position in the draft": " ".join(f"{rate:.2f}" for rate in rounds.acceptance_by_position[:9]),
        "mean draft length": f"{rounds.draft_length:.2f}",
        "draft step / pass (c)": f"{rounds.cost_ratio:.3f}",
        "predicted tokens/s": show(rounds.predicted_tokens_per_second, ".1f"),
        "measured/predicted": show(rounds.measured_over_predicted, ".3f"),
        "share of time": ", ".join(shares),
    }


def _text_table(results: Sequence[Result]) -> str:
    rows = [
        [
            result.system,
            equality.reference,
            f"{equality.num_prompts_differing} of {len(equality.first_differences)}",
            f"{equality.num_tokens_differing} of {equality.num_tokens}",
        ]
        for result in results
        if (equality := result.equality) is not None
    ]
    header = ["method", "compared with", "texts that differ"]
    return table([*header, "tokens that differ, including all after the first difference"], rows)


def _costs(costs: CostTable) -> list[str]:
    widths = sorted(costs.target_ms)
    rows = [
        ["time T(m), ms", *(f"{costs.target_ms[m]:.2f}" for m in widths)],
        ["v(m) = T(m) / T(1)", *(f"{costs.curve[m]:.2f}" for m in widths)],
    ]
    steps = [
        f"A draft step of {model} takes {milliseconds:.2f} ms, {costs.cost_ratio[model]:.3f} of a pass over one token (c)."
        for model, milliseconds in costs.draft_step_ms.items()
    ]
    heading = f"## Time of a target pass over m tokens, with {costs.context_length} tokens in the KV cache"
    return [heading, table(["tokens m", *map(str, widths)], rows), *steps]


def _provenance(report: Report) -> str:
    about, bench = report.provenance, report.workbench
    tree = {None: "not a checkout", True: " with uncommitted changes", False: ""}[about.dirty]
    lines = [
        f"date: {about.date}",
        f"command: `{about.command}`",
        f"commit: {about.commit or ''}{tree}",
        f"python {about.python}, " + ", ".join(f"{name} {number}" for name, number in about.versions.items()),
        f"processor: {about.processor}, {about.num_cores} cores, {about.num_threads} threads",
        f"dtype {about.dtype}, device {about.device}, seed {about.seed}",
        f"workload: {bench.workload}, SHA-256 {bench.workload_sha256}",
        *(
            f"{name}: runtime {about.runtimes[name]}; weights SHA-256 {digest}"
            for name, digest in about.model_sha256.items()
        ),
    ]
    return "## Provenance\n\n" + "\n".join(f"- {line}" for line in lines)
