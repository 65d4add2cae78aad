"""A report as a page for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from secondguess.bench.summary import Ratio

if TYPE_CHECKING:
    from secondguess.bench.report import CostTable, Report, Result, Workbench

NOTES = """\
Tokens/s: median over prompts of new tokens over wall-clock seconds, prefill included. Ratios: median over
median, [95 % bootstrap interval over prompts], then the worst prompt; against the other family's plain
decoding and against its fastest speculative setting. tau: tokens per target pass. c: one draft step over one
target pass. Predicted: decoding speed that tau, c and v(m) allow; measured/predicted leaves our overhead
out of 1 (both without prefill)."""


def as_markdown(report: Report) -> str:
    """The whole page."""
    temperatures = sorted({result.temperature for result in report.results})
    blocks = [
        f"# Benchmark {report.name}",
        *([] if report.complete else ["**Interrupted: only the prompts that were finished are in here.**"]),
        _conditions(report),
        NOTES,
        *(_at_temperature(report, temperature) for temperature in temperatures),
        _costs(report.costs),
        _provenance(report),
    ]
    return "\n\n".join(blocks) + "\n"


def _conditions(report: Report) -> str:
    bench: Workbench = report.workbench
    about = report.provenance
    return (
        f"{bench.num_prompts} prompts of {bench.workload} (median {bench.median_prompt_tokens:g} tokens), "
        f"{bench.num_tokens} new tokens each, {about.dtype} on {about.device}, {about.num_threads} threads, "
        f"{about.processor}. Systems ran in turn within one process, in alternating order, after warm-up."
        + (f" Note: {bench.workload_note}." if bench.workload_note else "")
    )


def _at_temperature(report: Report, temperature: float) -> str:
    results = [result for result in report.results if result.temperature == temperature]
    parts = [
        f"## Temperature {temperature:g}",
        _speed_table(results),
        _rounds_table(results),
    ]
    if any(result.equality for result in results):
        parts += [
            "Texts compared, speculation with its own plain decoding and plain decodings with each other:",
            _equality_table(results),
        ]
    return "\n\n".join(part for part in parts if part)


def _speed_table(results: Sequence[Result]) -> str:
    # Whom everybody was compared with, but for our own best: that column would only repeat the first.
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
                f"{rounds.acceptance_rate:.1%}" if result.speculates else "",
                by_position,
                f"{rounds.draft_length:.2f}",
                f"{rounds.cost_ratio:.3f}",
                f"{rounds.predicted_tokens_per_second:.1f}",
                f"{rounds.measured_over_predicted:.3f}",
                shares,
            ]
        )
    header = ["system", "tau", "accepted", "by position", "draft length", "c"]
    return table([*header, "predicted tokens/s", "measured/predicted", "time"], rows)


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
    header = ["system", "compared with", "texts that part (flips)"]
    return table([*header, "tokens that differ, all after a flip included"], rows)


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


def show_ratio(ratio: Ratio | None) -> str:
    if ratio is None:
        return ""
    return f"{ratio.of_medians:.2f}x [{ratio.low:.2f}, {ratio.high:.2f}], worst {ratio.worst:.2f}x"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) if rows else ""
