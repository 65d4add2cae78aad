"""Rendering of a report as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from secondguess.bench.summary import MIN_PROMPTS_FOR_INTERVAL, Ratio

if TYPE_CHECKING:
    from secondguess.bench.report import Conditions, CostTable, Report
    from secondguess.bench.results import Result, TaskResult

NOTES = """\
Tokens/s: median over prompts of new tokens over wall-clock seconds, prefill included (of a batch: all its
new tokens). Ratios: median over
median, [95 % bootstrap interval over prompts], then the worst prompt; against the other family's plain
decoding and against its fastest speculative setting. tau: tokens per target pass and row. c: one draft step
over one target pass. Predicted: decoding speed that tau, c and v(m) allow; measured/predicted leaves our overhead
out of 1 (both without prefill)."""


def as_markdown(report: Report) -> str:
    """Return the report as Markdown."""
    settings = sorted({(result.temperature, result.batch_size) for result in report.results})
    blocks = [
        f"# Benchmark {report.name}",
        *([] if report.complete else ["**Interrupted: only the prompts that were finished are in here.**"]),
        _conditions(report),
        *([_notes(report.workbench)] if report.workbench.notes else []),
        NOTES,
        *(_at_setting(report, temperature, batch_size) for temperature, batch_size in settings),
        *([_footprints(report)] if report.possessions else []),
        _costs(report.costs),
        _provenance(report),
    ]
    return "\n\n".join(blocks) + "\n"


def _conditions(report: Report) -> str:
    bench: Conditions = report.workbench
    about = report.provenance
    return (
        f"{bench.num_prompts} prompts of {bench.workload} (median {bench.median_prompt_tokens:g} tokens), "
        f"{bench.num_tokens} new tokens each, {about.dtype} on {about.device}, {show_count(about.num_threads, 'thread')}, "
        f"{about.processor}. Systems ran in turn within one process, in alternating order, after warm-up."
        + (f" Note: {bench.workload_note}." if bench.workload_note else "")
    )


def _notes(bench: Conditions) -> str:
    return "\n".join(f"- Note: {note}." for note in bench.notes)


def _at_setting(report: Report, temperature: float, batch_size: int) -> str:
    results = [
        result
        for result in report.results
        if (result.temperature, result.batch_size) == (temperature, batch_size)
    ]
    batched = f", batch size {batch_size}" if batch_size > 1 else ""
    parts = [
        f"## Temperature {temperature:g}{batched}",
        _note_on_intervals(results),
        _speed_table(results),
        _task_table(results),
        _rounds_table(results),
    ]
    if any(result.equality for result in results):
        parts += [
            "Texts compared, speculation with its own plain decoding and plain decodings with each other:",
            _equality_table(results),
        ]
    return "\n\n".join(part for part in parts if part)


def _note_on_intervals(results: Sequence[Result]) -> str:
    """Return a note if there are too few batches for intervals, else an empty string."""
    if all(result.interval for result in results):
        return ""
    units = "prompts" if results[0].batch_size == 1 else "batches"
    return (
        f"Too few {units} for an interval: {len(results[0].per_batch)}; "
        f"it takes at least {MIN_PROMPTS_FOR_INTERVAL} (--num-prompts)."
    )


def _task_table(results: Sequence[Result]) -> str:
    """Return the table by task; empty if there is only one task, which the table above covers."""
    tasks = results[0].by_task
    if len(tasks) < 2:
        return ""
    rows = []
    for result in results:
        cells = [_show_task(each) for each in result.by_task.values()]
        rows.append([result.system, *cells])
    header = ["system", *(f"{task} ({each.num_batches})" for task, each in tasks.items())]
    words = (
        "By task (how many): tokens/s, against the same family's plain decoding "
        f"(with an interval from {MIN_PROMPTS_FOR_INTERVAL} on), tau."
    )
    return f"{words}\n\n{table(header, rows)}"


def _show_task(each: TaskResult) -> str:
    ratio = each.against_plain
    parts = [
        f"{each.tokens_per_second:.1f}",
        show_ratio(ratio, with_worst=False),
        "" if ratio is None or each.acceptance_length is None else f"tau {each.acceptance_length:.2f}",
    ]
    return ", ".join(part for part in parts if part)


def _speed_table(results: Sequence[Result]) -> str:
    # All baselines but our own fastest: that column would only repeat the first one.
    ours = results[0].family
    compared = {baseline for result in results for baseline in result.against}
    baselines = [
        result.system
        for result in results
        if result.system in compared and not (result.speculates and result.family == ours)
    ]
    rows = [
        [result.system, f"{result.tokens_per_second:.1f}"]
        + [show_ratio(result.against.get(baseline)) for baseline in baselines]
        for result in results
    ]
    return table(["system", "tokens/s", *(f"against {baseline}" for baseline in baselines)], rows)


def _rounds_table(results: Sequence[Result]) -> str:
    rows = []
    for result in results:
        if (rounds := result.rounds) is None:
            continue
        by_position = " ".join(f"{rate:.2f}" for rate in rounds.acceptance_by_position[:9])
        shares = ", ".join(
            f"{phase} {share:.0%}" for phase, share in rounds.share_of_seconds.items() if share >= 0.005
        )
        rows.append(
            [
                result.system,
                f"{rounds.acceptance_length:.2f}",
                _show_acceptance(rounds.acceptance_rate) if result.speculates else "",
                by_position,
                f"{rounds.draft_length:.2f}",
                f"{rounds.cost_ratio:.3f}",
                show(rounds.predicted_tokens_per_second, ".1f"),
                show(rounds.measured_over_predicted, ".3f"),
                shares,
            ]
        )
    header = ["system", "tau", "accepted", "by position", "draft length", "c"]
    return table([*header, "predicted tokens/s", "measured/predicted", "time"], rows)


def _show_acceptance(rate: float | None) -> str:
    return "nothing drafted" if rate is None else f"{rate:.1%}"


def _equality_table(results: Sequence[Result]) -> str:
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
    header = ["system", "compared with", "texts that differ"]
    return table([*header, "tokens that differ, including all after the first difference"], rows)


def _footprints(report: Report) -> str:
    """Return the table of weights and training time per drafter."""
    rows = [
        [
            system,
            f"{each.num_bytes / 1e6:.1f} MB",
            "" if each.training_minutes is None else f"{each.training_minutes:.0f} min",
        ]
        for system, each in report.possessions.items()
    ]
    return "## Memory and training time\n\n" + table(
        ["system", "weights beside the target's", "training"], rows
    )


def _costs(costs: CostTable) -> str:
    widths = sorted(costs.target_ms)
    rows = [
        ["T(m), ms", *(f"{costs.target_ms[m]:.2f}" for m in widths)],
        ["v(m)", *(f"{costs.curve[m]:.2f}" for m in widths)],
    ]
    steps = [
        f"{model}: {milliseconds:.2f} ms a draft step, c = {costs.cost_ratio[model]:.3f}."
        for model, milliseconds in costs.draft_step_ms.items()
    ]
    heading = f"## Cost of a pass over m tokens, {costs.context_length} cached"
    return "\n\n".join([heading, table(["m", *map(str, widths)], rows), *steps])


def _provenance(report: Report) -> str:
    about = report.provenance
    tree = {None: "not a checkout", True: " with uncommitted changes", False: ""}[about.dirty]
    lines = [
        f"- date: {about.date}",
        f"- command: `{about.command}`",
        f"- commit: {about.commit or ''}{tree}",
        f"- python {about.python}, "
        + ", ".join(f"{name} {number}" for name, number in about.versions.items()),
        f"- processor: {about.processor}, {about.num_cores} cores, {about.num_threads} threads",
        f"- dtype {about.dtype}, device {about.device}, seed {about.seed}",
        f"- workload: {report.workbench.workload}, SHA-256 {report.workbench.workload_sha256}",
        *(
            f"- {name}: runtime {about.runtimes[name]}; weights SHA-256 {digest}"
            for name, digest in about.model_sha256.items()
        ),
    ]
    return "## Provenance\n\n" + "\n".join(lines)


def show(value: float | None, form: str) -> str:
    """Format a number; None gives an empty string."""
    return "" if value is None else format(value, form)


def show_ratio(ratio: Ratio | None, with_worst: bool = True) -> str:
    if ratio is None:
        return ""
    interval = show_interval(ratio.low, ratio.high)
    return f"{ratio.of_medians:.2f}x{interval}" + (f", worst {ratio.worst:.2f}x" if with_worst else "")


def show_interval(low: float | None, high: float | None) -> str:
    """Format an interval as a suffix of its ratio; empty if there are too few prompts."""
    return "" if low is None or high is None else f" [{low:.2f}, {high:.2f}]"


def show_count(number: int, noun: str) -> str:
    """Return a number with its noun, in the plural unless the number is 1.
    >>> show_count(1, "thread"), show_count(2, "thread")
    ('1 thread', '2 threads')
    """
    return f"{number} {noun}{'' if number == 1 else 's'}"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines) if rows else ""


def _cell(text: str) -> str:
    """Escape a cell, since names from files or the command line may contain `|` or line breaks."""
    return " ".join(text.replace("|", "\\|").split())
