"""Charts of a report: speed, acceptance by position, cost of a pass.

matplotlib is an extra (`pip install secondguess[bench]`), imported only when a chart is drawn.
Figures are made without pyplot: no global state is changed, and no display is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from io import BytesIO
from itertools import takewhile
from textwrap import fill
from typing import Any

from secondguess.bench.report import Report, Result
from secondguess.bench.tables import show_count

MATPLOTLIB_HINT = "no charts without matplotlib: pip install 'secondguess[bench]' draws them"

MOST_SYSTEMS = 8
"""Most systems in a chart of lines, the fastest ones; more cannot be told apart."""
FEWEST_NODES = 20
"""Fewest drafted nodes for which a share is plotted; with fewer it is mostly noise."""
MOST_POSITIONS = 16
WIDTH, HEIGHT = 7.0, 4.4
"""Size of a panel in inches."""
TITLE_CHARACTERS = 64
"""Characters of a title line that fit above one panel."""
PLAIN_TEXT = {"parse_math": False}
"""Names may contain dollar signs, between which matplotlib would set a formula."""


def can_draw() -> bool:
    """Return whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def draw_charts(report: Report) -> dict[str, bytes]:
    """Return every chart that has data as a PNG image, by name."""
    figures = {
        "speed": draw_panels("Speed", report, _draw_speeds),
        "acceptance": draw_panels("Acceptance by position", report, _draw_acceptance, _positions),
        "costs": draw_costs(report),
    }
    return {name: to_png(figure) for name, figure in figures.items() if figure is not None}


def to_png(figure: Any) -> bytes:
    """Return a figure as an image, without metadata about the software that drew it."""
    file = BytesIO()
    figure.savefig(file, format="png", dpi=140, metadata={"Software": None})
    return file.getvalue()


def draw_panels(
    title: str,
    report: Report,
    draw: Callable[[Any, Sequence[Result]], None],
    values: Callable[[Result], Sequence[object]] | None = None,
) -> Any:
    """Draw one panel per temperature and batch size.

    Args:
        draw: draws the results of one setting.
        values: values of a result to draw: only the fastest systems that have some are drawn, at
            the smallest batch size. Without it, all results are drawn.

    Returns:
        The figure; None if there is nothing to draw.
    """
    panels = report.by_setting()
    if values is not None:
        smallest = min(size for _, size in panels)
        panels = {
            setting: sorted(filter(values, results), key=lambda each: -each.tokens_per_second)[:MOST_SYSTEMS]
            for setting, results in panels.items()
            if setting[1] == smallest
        }
        panels = {setting: results for setting, results in panels.items() if results}
    if not panels:
        return None
    figure, axes = _make_figure(title, report, len(panels))
    for axis, ((temperature, size), results) in zip(axes, panels.items(), strict=True):
        axis.set_title(f"temperature {temperature:g}" + (f", batch size {size}" if size > 1 else ""))
        draw(axis, results)
    return figure


def draw_costs(report: Report) -> Any:
    """Draw v(m), the relative cost of a pass over m tokens, beside its bounds 1 and m."""
    costs = report.costs
    widths = sorted(costs.curve)
    values = [costs.curve[m] for m in widths]
    figure, (axis,) = _make_figure("Cost of a pass", report, 1)
    axis.plot(widths, values, marker="o", label="measured v(m)")
    axis.axhline(1.0, linestyle=":", label="free: v(m) = 1")
    axis.plot(widths, widths, linestyle="--", label="one by one: v(m) = m")
    # The line v(m) = m is shown for its slope; showing all of it would flatten the measured curve.
    axis.set_ylim(0, max(2.0, 1.35 * max(values)))
    axis.set_xlabel("m, tokens in one target pass")
    axis.set_ylabel("v(m) = T(m) / T(1)")
    for model, ratio in costs.cost_ratio.items():
        axis.plot([], [], " ", label=f"c = {ratio:.3f} ({_short(model)})")
    axis.set_title(f"T(1) = {costs.target_ms[widths[0]]:.3g} ms, {costs.context_length} tokens cached")
    _legend(axis)
    return figure


def _draw_speeds(axis: Any, results: Sequence[Result]) -> None:
    """Draw tokens/s of every system, with intervals if all have one."""
    speeds = [result.tokens_per_second for result in results]
    errors = _error_lengths(speeds, [result.interval for result in results])
    colours = ["tab:blue" if result.speculates else "silver" for result in results]
    bars = axis.barh(range(len(speeds)), speeds, xerr=errors, color=colours)
    axis.bar_label(bars, [f"{speed:.1f}" for speed in speeds], padding=3, fontsize=8)
    axis.margins(x=0.14)
    names = [_short(result.system) for result in results]
    axis.set_yticks(range(len(names)), names, fontsize=8, **PLAIN_TEXT)
    axis.invert_yaxis()
    axis.set_xlabel("tokens/s, median over prompts" + (", 95 % interval" if errors else ""))


def _draw_acceptance(axis: Any, results: Sequence[Result]) -> None:
    """Draw acceptance by position."""
    for result in results:
        rates = _positions(result)
        axis.plot(range(1, len(rates) + 1), rates, marker="o", label=_short(result.system))
    axis.set_ylim(-0.03, 1.03)
    axis.set_xlabel(f"position in the draft (drafted at least {FEWEST_NODES} times)")
    axis.set_ylabel("accepted / drafted")
    _legend(axis)


def _positions(result: Result) -> list[float]:
    """Return acceptance at the first positions, up to the first with too few drafted nodes."""
    if result.rounds is None:
        return []
    counted = zip(result.rounds.acceptance_by_position, result.rounds.drafted_by_position, strict=True)
    return [rate for rate, _ in takewhile(lambda each: each[1] >= FEWEST_NODES, counted)][:MOST_POSITIONS]


def _error_lengths(
    values: Sequence[float], intervals: Sequence[tuple[float, float] | None]
) -> list[list[float]] | None:
    """Return the lengths of error bars below and above each value; None if an interval is missing."""
    known = [interval for interval in intervals if interval]
    if len(known) < len(values):
        return None
    # A percentile interval need not contain the median, an error bar has to.
    below = [max(0.0, value - low) for value, (low, _) in zip(values, known, strict=True)]
    above = [max(0.0, high - value) for value, (_, high) in zip(values, known, strict=True)]
    return [below, above]


def _make_figure(title: str, report: Report, num_panels: int) -> tuple[Any, list[Any]]:
    """Make a figure with one panel below the other, headed by a title and the conditions."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    bench, about = report.workbench, report.provenance
    conditions = (
        f"{show_count(bench.num_prompts, 'prompt')} of {_short(bench.workload)}, {bench.num_tokens} new tokens, "
        f"{about.dtype} on {about.device}, {show_count(about.num_threads, 'thread')}, {_short(about.processor)}"
    )
    figure = Figure(figsize=(WIDTH, HEIGHT * num_panels + 0.9), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(f"{title}\n{fill(conditions, TITLE_CHARACTERS)}", fontsize=9, **PLAIN_TEXT)
    axes = list(figure.subplots(num_panels, squeeze=False)[:, 0])
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.set_axisbelow(True)
        axis.grid(color="#DDDDDD", linewidth=0.7)
    return figure, axes


def _legend(axis: Any) -> None:
    for text in axis.legend(fontsize=7, frameon=False).get_texts():
        text.set(**PLAIN_TEXT)


def _short(name: str, most: int = 44) -> str:
    """Shorten a name by removing its middle, since system names often differ at the end."""
    return name if len(name) <= most else f"{name[: most // 2 - 1]}...{name[-(most // 2 - 2) :]}"
