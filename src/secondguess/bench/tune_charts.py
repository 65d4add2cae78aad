"""Chart of a tuning: speed-ups by choice and batch size."""

from __future__ import annotations

from io import BytesIO
from typing import Any

from secondguess.bench.charts import COLOURS, DOTS_PER_INCH, title
from secondguess.bench.choices import PLAIN
from secondguess.bench.systems import public_name
from secondguess.bench.tune_report import TuneReport, show_choice


def draw_charts(report: TuneReport) -> dict[str, bytes]:
    """Return PNG images by file name."""
    file = BytesIO()
    # Without metadata, which names the program that drew it.
    draw_speedups(report).savefig(file, format="png", dpi=DOTS_PER_INCH, metadata={"Software": None})
    return {"tune-speedups.png": file.getvalue()}


def draw_speedups(report: TuneReport) -> Any:
    """Draw measured speed-ups over plain decoding and those of the cost model, one panel per batch size."""
    from matplotlib.figure import Figure

    findings = report.findings
    num_bars = max(len(speeds) for speeds in findings.speeds.values())
    figure = Figure(figsize=(6.8, (0.8 + 0.42 * num_bars) * len(findings.speeds)), layout="constrained")
    axes = figure.subplots(len(findings.speeds), 1, squeeze=False)[:, 0]
    for axis, (size, speeds) in zip(axes, findings.speeds.items(), strict=True):
        choices = sorted(
            (choice for choice in speeds if choice.speculates),
            key=lambda choice: -speeds[choice].tokens_per_second,
        )
        measured = [speeds[choice].over(speeds[PLAIN]) for choice in choices]
        predicted = [report.rounds(size, choice).predicted_speedup for choice in choices]
        for values, label, colour, shift in (
            (predicted, "tau / (v + c k)", COLOURS[5], -0.2),
            (measured, "measured", COLOURS[0], 0.2),
        ):
            places = [place + shift for place in range(len(choices))]
            bars = axis.barh(places, values, 0.38, color=colour, label=label)
            axis.bar_label(bars, fmt="%.2f", padding=2, fontsize=7)
        axis.axvline(1, color="#444444", linewidth=1, zorder=0)
        axis.set_yticks(range(len(choices)), [show_choice(choice) for choice in choices], fontsize=8)
        axis.invert_yaxis()
        axis.margins(x=0.1)
        axis.spines[["top", "right"]].set_visible(False)
        axis.set_title(f"{size} at a time", fontsize=9, loc="left")
    axes[-1].set_xlabel("speed over plain decoding")
    axes[0].legend(frameon=False, loc="lower right", bbox_to_anchor=(1, 1), ncols=2, fontsize=8)
    config = findings.config
    title(
        figure,
        f"Speed-ups: {public_name(config.model)} on {findings.workload.name}, temperature {config.temperature:g}",
    )
    return figure
