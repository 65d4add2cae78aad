"""A tuning as pictures: what a pass over m tokens costs, which guesses are accepted, and what all of it gives.

Drawn with matplotlib, which is an extra and imported only here, when something is drawn; without pyplot, so that nothing
global is touched.
"""

from __future__ import annotations

from io import BytesIO
from typing import Any

from secondguess.bench.charts import COLOURS, DOTS_PER_INCH, MARKERS, title
from secondguess.bench.planner import PLAIN, acceptance_by_position, coverage
from secondguess.bench.systems import public_name
from secondguess.bench.tune_report import TuneReport, show_choice


def draw_charts(report: TuneReport) -> dict[str, bytes]:
    """PNG images by file name."""
    figures = {
        "tune-costs.png": draw_costs(report),
        "tune-acceptance.png": draw_acceptance(report),
        "tune-speedups.png": draw_speedups(report),
    }
    return {name: _as_png(figure) for name, figure in figures.items()}


def draw_costs(report: TuneReport) -> Any:
    """v(m): a round that scores m tokens a row, without drafting, over a plain round, per batch size."""
    costs = report.findings.costs
    assert costs is not None
    figure, (axis,) = _panels(1, width=6.4, height=4.2)
    most = 1.0
    name = next((name for name, part in report.findings.parts.items() if not part.certain), None)
    known = costs.parts[name or next(iter(costs.parts))]
    for number, (size, curve) in enumerate(known.rest.items()):
        if size not in report.findings.config.batch_sizes:
            continue
        widths = [1, *(width + 1 for width in sorted(curve))]
        values = [1.0, *(curve[width] / costs.plain[size] for width in sorted(curve))]
        most = max(most, *values)
        axis.plot(
            widths, values, marker=MARKERS[number % 8], color=COLOURS[number % 8], label=f"{size} at a time"
        )
    axis.axhline(1, color="#B8BDC4", linewidth=1, zorder=0)
    axis.set_ylim(0, 1.1 * most)
    axis.set_xlabel("tokens scored per row, m (drafted nodes + 1)")
    axis.set_ylabel("round without drafting / plain round, v(m)")
    title(figure, _words(report, "What a longer draft costs the target"))
    axis.legend(frameon=False)
    return figure


def draw_acceptance(report: TuneReport) -> Any:
    """Accepted over guessed nodes at each place of a draft, per drafter."""
    figure, (axis,) = _panels(1, width=6.4, height=4.2)
    for number, (name, part) in enumerate(report.findings.parts.items()):
        rates = acceptance_by_position(part.guesses)
        if rates:
            places = range(1, len(rates) + 1)
            label = f"{public_name(name)} (a guess at {coverage(part.guesses):.0%} of places)"
            axis.plot(places, rates, marker=MARKERS[number % 8], color=COLOURS[number % 8], label=label)
    axis.set_ylim(0, 1.02)
    axis.set_xlabel("place in the draft")
    axis.set_ylabel("accepted / guessed")
    title(figure, _words(report, "Which guesses are accepted"))
    axis.legend(frameon=False)
    return figure


def draw_speedups(report: TuneReport) -> Any:
    """Predicted and measured speed over plain decoding, one panel per batch size."""
    panels = {size: _speedups(report, size) for size in report.findings.predictions}
    most_bars = max(len(bars) for bars in panels.values())
    figure, axes = _panels(len(panels), width=6.8, height=0.8 + 0.42 * most_bars)
    farthest = max(value for bars in panels.values() for _, *both in bars for value in both if value)
    for axis, (size, bars) in zip(axes, panels.items(), strict=True):
        axis.axvline(1, color="#444444", linewidth=1, zorder=0)
        for kind, colour in ((0, COLOURS[5]), (1, COLOURS[0])):
            both = [bar[1:][kind] for bar in bars]
            # One bar alone stands where two would touch.
            places = [place + (0 if bar[2] is None else (0.4 * kind - 0.2)) for place, bar in enumerate(bars)]
            shown = [(place, value) for place, value in zip(places, both, strict=True) if value is not None]
            label = ("predicted", "measured")[kind]
            axis.barh(
                [place for place, _ in shown], [value for _, value in shown], 0.38, color=colour, label=label
            )
            for place, value in shown:
                behind = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
                axis.text(
                    value + 0.02 * farthest, place, f"{value:.2f}", va="center", fontsize=7, bbox=behind
                )
        axis.set_yticks(range(len(bars)), [bar[0] for bar in bars], fontsize=8)
        axis.invert_yaxis()
        axis.set_xlim(0, 1.12 * farthest)
        axis.set_title(f"{size} at a time", fontsize=9, loc="left")
    axes[-1].set_xlabel("speed over plain decoding")
    axes[0].legend(
        frameon=False, loc="lower right", bbox_to_anchor=(1, 1), ncols=2, fontsize=8, borderaxespad=0.1
    )
    title(figure, _words(report, "How much faster"))
    return figure


def _speedups(report: TuneReport, size: int) -> list[tuple[str, float | None, float | None]]:
    """Name, predicted and measured speed-up (None: not run) of what is worth showing, fastest first."""
    run = {each.choice: each for each in report.findings.verified if each.batch_size == size}
    predictions = report.findings.predictions[size]
    bars: list[tuple[str, float | None, float | None]] = [
        (
            show_choice(choice),
            each.predicted.over(run[PLAIN].predicted),
            each.measured.over(run[PLAIN].measured),
        )
        for choice, each in run.items()
        if choice.speculates
    ]
    bars.sort(key=lambda bar: -(bar[2] or 0))
    shown = [choice for choice in predictions if choice.quantize] if run else list(predictions)
    others = sorted(shown, key=lambda choice: -predictions[choice].tokens_per_second)[:4]
    return [
        *bars,
        *((show_choice(each), predictions[each].over(predictions[PLAIN]), None) for each in others),
    ]


def _panels(count: int, width: float, height: float) -> tuple[Any, Any]:
    """A figure with panels below each other, without frames above and beside them."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height * count), layout="constrained")
    axes = figure.subplots(count, 1, squeeze=False)[:, 0]
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=8)
    return figure, axes


def _words(report: TuneReport, what: str) -> str:
    config = report.findings.config
    model = public_name(config.model)
    return f"{what}: {model} on {report.findings.workload.name}, temperature {config.temperature:g}"


def _as_png(figure: Any) -> bytes:
    file = BytesIO()
    # Without metadata: the file says nothing about who drew it and with what.
    figure.savefig(file, format="png", dpi=DOTS_PER_INCH, metadata={"Software": None})
    return file.getvalue()
