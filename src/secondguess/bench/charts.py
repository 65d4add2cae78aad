"""Charts: speed, acceptance by position, speed-up per task, cost of a pass, and a tuning's speed-ups.

matplotlib is an extra (`pip install secondguess[bench]`), imported only when a chart is drawn.
Figures are made without pyplot: no global state is changed, and no display is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from io import BytesIO
from itertools import takewhile
from math import nan
from textwrap import wrap
from typing import Any

from secondguess.bench.report import Report, Result
from secondguess.bench.summary import Ratio
from secondguess.bench.tables import show_count

MATPLOTLIB_HINT = "no charts without matplotlib: pip install 'secondguess[bench]' draws them"

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F", "#000000")
"""Colour-blind safe palette of Okabe and Ito, without yellow, which is hard to see on white."""
PLAIN_COLOUR = "#B8BDC4"
MOST_POSITIONS = 16
FEWEST_NODES = 20
"""Fewest drafted nodes for which a share is plotted; with fewer it is mostly noise."""
DOTS_PER_INCH = 140
CHARACTERS_PER_INCH = 10
"""Characters of a title line per inch of figure width."""
GRID = {"color": "#DDDDDD", "linewidth": 0.7}
ERROR_BARS = {"elinewidth": 1.0, "capsize": 2.0, "ecolor": "#333333"}

Panels = Mapping[tuple[float, int], list[Result]]
"""Results by temperature and batch size."""


def can_draw() -> bool:
    """Return whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def draw_charts(report: Report) -> dict[str, bytes]:
    """Return every chart that has data as a PNG image, by name."""
    figures = {
        "speed": draw_speeds(report),
        "acceptance": draw_acceptance(report),
        "tasks": draw_tasks(report),
        "costs": draw_costs(report),
    }
    return {name: to_png(figure) for name, figure in figures.items() if figure is not None}


def to_png(figure: Any) -> bytes:
    """Return a figure as an image, without metadata about the software that drew it."""
    file = BytesIO()
    figure.savefig(file, format="png", dpi=DOTS_PER_INCH, metadata={"Software": None})
    return file.getvalue()


def draw_speeds(report: Report) -> Any:
    """Draw tokens/s of every system with intervals, one panel per temperature and batch size."""
    settings = report.by_setting()
    most = max(map(len, settings.values()))
    figure, panels = _panels("Speed", report, settings, 6.4, 1.5 + 0.3 * most)
    for axis, results in panels:
        speeds = [result.tokens_per_second for result in results]
        families = list(dict.fromkeys(result.family for result in results))
        colours = [
            COLOURS[families.index(result.family) % len(COLOURS)] if result.speculates else PLAIN_COLOUR
            for result in results
        ]
        intervals = [result.interval for result in results]
        beyond = _error_lengths(speeds, intervals) if all(intervals) else None
        bars = axis.barh(
            range(len(speeds)), speeds, xerr=beyond, color=colours, height=0.7, error_kw=ERROR_BARS
        )
        axis.bar_label(bars, [f"{speed:.1f}" for speed in speeds], padding=3, fontsize=8)
        axis.margins(x=0.14)
        axis.set_yticks(range(len(speeds)), [_short(result.system) for result in results], fontsize=8)
        # The same limits in every panel, so that all bars are equally thick.
        axis.set_ylim(most - 0.4, -0.6)
        axis.set_xlabel("tokens/s, median over prompts" + (", 95 % interval" if beyond else ""))
        axis.grid(axis="x", **GRID)
    return figure


def draw_acceptance(report: Report) -> Any:
    """Draw acceptance by position, at the smallest batch size; return None without drafts."""
    settings = _fastest_with(_positions, report)
    if not settings:
        return None
    figure, panels = _panels("Acceptance by position", report, settings, 6.0, 4.2)
    colours = _colours(settings)
    for axis, results in panels:
        for result in results:
            rates = _positions(result)
            positions = range(1, len(rates) + 1)
            axis.plot(positions, rates, color=colours[result.system], marker="o", label=_short(result.system))
        axis.set_ylim(-0.03, 1.03)
        axis.set_xticks(range(1, max(len(_positions(result)) for result in results) + 1))
        axis.set_xlabel(f"position in the draft (drafted at least {FEWEST_NODES} times)")
        axis.set_ylabel("accepted / drafted")
        axis.grid(**GRID)
    _legend(figure)
    return figure


def draw_tasks(report: Report) -> Any:
    """Draw the speed-up over the family's plain decoding per task, at the smallest batch size.

    Returns:
        The figure; None if no system speculates.
    """
    settings = _fastest_with(_speedups, report)
    if not settings:
        return None
    most_tasks = max(len(results[0].by_task) for results in settings.values())
    most_bars = max(map(len, settings.values()))
    width = max(5.0, 1.0 + 0.17 * (most_bars + 1.5) * most_tasks)
    figure, panels = _panels("Speed-up per task", report, settings, width, 4.4)
    colours = _colours(settings)
    for axis, results in panels:
        tasks = list(results[0].by_task)
        width = min(0.25, 0.8 / len(results))
        for number, result in enumerate(results):
            ratios = _speedups(result)
            heights = [ratio.of_medians for ratio in ratios]
            shift = (number - (len(results) - 1) / 2) * width
            axis.bar(
                [index + shift for index in range(len(tasks))], heights, width=0.9 * width,
                yerr=_error_lengths(heights, [ratio.interval for ratio in ratios]), error_kw=ERROR_BARS,
                color=colours[result.system], label=_short(result.system),
            )  # fmt: skip
        axis.axhline(1.0, color="black", linewidth=0.8, linestyle="--")
        tilt = {"rotation": 25, "ha": "right"} if len(tasks) > 3 else {}
        axis.set_xticks(range(len(tasks)), [_short(task, 18) for task in tasks], fontsize=8, **tilt)
        axis.set_ylabel("speed-up over plain decoding")
        axis.grid(axis="y", **GRID)
    _legend(figure)
    return figure


def draw_costs(report: Report) -> Any:
    """Draw v(m), the relative cost of a pass over m tokens, beside its bounds 1 and m."""
    costs = report.costs
    widths = sorted(costs.curve)
    values = [costs.curve[m] for m in widths]
    figure, (axis,) = _make_figure(1, 1, 6.0, 4.2)
    axis.plot(widths, values, color=COLOURS[0], marker="o", label="measured v(m)")
    axis.axhline(1.0, color=COLOURS[6], linestyle=":", label="free: v(m) = 1")
    axis.plot(widths, widths, color=COLOURS[1], linestyle="--", label="one by one: v(m) = m")
    # The line v(m) = m is shown for its slope; showing all of it would flatten the measured curve.
    axis.set_ylim(0, max(2.0, 1.35 * max(values)))
    axis.set_xticks(widths)
    axis.set_xlabel("m, tokens in one target pass")
    axis.set_ylabel("v(m) = T(m) / T(1)")
    for model, ratio in costs.cost_ratio.items():
        axis.plot([], [], " ", label=f"c = {ratio:.3f} ({_short(model)})")
    axis.set_title(f"T(1) = {costs.target_ms[widths[0]]:.3g} ms, {costs.context_length} tokens cached")
    axis.grid(**GRID)
    _legend(figure)
    _set_title(figure, f"Cost of a pass\n{_conditions(report)}")
    return figure


def draw_tuning(title: str, speedups: Mapping[int, Mapping[str, tuple[float, float]]]) -> Any:
    """Draw speed-ups over plain decoding, measured and by the cost model, one panel per batch size.

    Args:
        speedups: by batch size and choice, the measured and the predicted speed-up.
    """
    most = max(map(len, speedups.values()))
    figure, axes = _make_figure(len(speedups), 1, 6.8, 1.2 + 0.42 * most)
    bars = (("measured", COLOURS[0], -0.2), ("predicted: tau / (v + c k)", COLOURS[5], 0.2))
    for axis, (size, of_choices) in zip(axes, speedups.items(), strict=True):
        for values, (label, colour, shift) in zip(zip(*of_choices.values(), strict=True), bars, strict=True):
            positions = [index + shift for index in range(len(values))]
            drawn = axis.barh(positions, values, 0.38, color=colour, label=label)
            axis.bar_label(drawn, fmt="%.2f", padding=2, fontsize=7)
        axis.axvline(1, color="#444444", linewidth=1, zorder=0)
        axis.set_yticks(range(len(of_choices)), list(map(_short, of_choices)), fontsize=8)
        axis.invert_yaxis()
        axis.margins(x=0.1)
        axis.set_title(f"batch size {size}")
    axes[-1].set_xlabel("speed-up over plain decoding")
    _legend(figure)
    _set_title(figure, title)
    return figure


def _fastest_with(values: Callable[[Result], Sequence[object]], report: Report) -> Panels:
    """Return the results that have values of the fastest systems, by setting, at the smallest batch size."""
    smallest = min(result.batch_size for result in report.results)
    able = [result for result in report.results if result.batch_size == smallest and values(result)]
    fastest_first = sorted(able, key=lambda result: -result.tokens_per_second)
    # The same systems in all panels, no more than there are colours.
    kept = list(dict.fromkeys(result.system for result in fastest_first))[: len(COLOURS)]
    panels = {
        setting: [result for result in results if result in able and result.system in kept]
        for setting, results in report.by_setting().items()
    }
    return {setting: results for setting, results in panels.items() if results}


def _positions(result: Result) -> list[float]:
    """Return acceptance at the first positions, up to the first with too few drafted nodes."""
    if result.rounds is None:
        return []
    counted = zip(result.rounds.acceptance_by_position, result.rounds.drafted_by_position, strict=True)
    return [rate for rate, _ in takewhile(lambda each: each[1] >= FEWEST_NODES, counted)][:MOST_POSITIONS]


def _speedups(result: Result) -> list[Ratio]:
    """Return the speed-ups by task of a speculating system; empty for others."""
    ratios = [each.against_plain for each in result.by_task.values()] if result.speculates else []
    return [ratio for ratio in ratios if ratio]


def _error_lengths(
    values: Sequence[float], intervals: Sequence[tuple[float, float] | None]
) -> list[list[float]]:
    """Return the lengths of error bars below and above each value; NaN draws none."""
    # A percentile interval need not contain the median, an error bar has to.
    lengths = [
        (max(0.0, value - each[0]), max(0.0, each[1] - value)) if each else (nan, nan)
        for value, each in zip(values, intervals, strict=True)
    ]
    return [[below for below, _ in lengths], [above for _, above in lengths]]


def _panels(
    title: str, report: Report, settings: Panels, width: float, height: float
) -> tuple[Any, list[tuple[Any, list[Result]]]]:
    """Make a figure with one panel per setting, at most two side by side; sizes in inches per panel."""
    figure, axes = _make_figure(len(settings), 2, width, height)
    for axis, (temperature, size) in zip(axes, settings, strict=True):
        axis.set_title(f"temperature {temperature:g}" + (f", batch size {size}" if size > 1 else ""))
    _set_title(figure, f"{title}\n{_conditions(report)}")
    return figure, list(zip(axes, settings.values(), strict=True))


def _make_figure(count: int, columns: int, width: float, height: float) -> tuple[Any, list[Any]]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(columns, count)
    rows = -(-count // columns)
    figure = Figure(figsize=(width * columns, height * rows + 0.9), layout="constrained")
    FigureCanvasAgg(figure)
    axes = [figure.add_subplot(rows, columns, number + 1) for number in range(count)]
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.set_axisbelow(True)
    return figure, axes


def _set_title(figure: Any, text: str) -> None:
    """Set the title of a figure, wrapped to its width."""
    width = int(CHARACTERS_PER_INCH * figure.get_figwidth())
    lines = [line for part in text.split("\n") for line in wrap(part, width)]
    figure.suptitle(_escape("\n".join(lines)), fontsize=9, fontweight="bold")


def _legend(figure: Any) -> None:
    """Add one legend below all panels."""
    entries = {
        label: handle
        for axis in figure.axes
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    figure.legend(
        entries.values(), entries.keys(), loc="outside lower center", ncols=2, fontsize=8, frameon=False
    )


def _colours(settings: Panels) -> dict[str, str]:
    """Return a colour for each system, the same in all panels."""
    systems = dict.fromkeys(result.system for results in settings.values() for result in results)
    return dict(zip(systems, COLOURS, strict=False))


def _conditions(report: Report) -> str:
    bench, about = report.workbench, report.provenance
    return (
        f"{show_count(bench.num_prompts, 'prompt')} of {_cut(bench.workload, 60)}, {bench.num_tokens} new tokens\n"
        f"{about.dtype} on {about.device}, {show_count(about.num_threads, 'thread')}, {_cut(about.processor, 60)}"
    )


def _short(name: str, most: int = 44) -> str:
    """Shorten and escape a name for a label."""
    return _escape(_cut(name, most))


def _cut(name: str, most: int) -> str:
    """Shorten a name by removing its middle, since system names often differ at the end."""
    return name if len(name) <= most else f"{name[: most // 2 - 1]}...{name[-(most // 2 - 2) :]}"


def _escape(text: str) -> str:
    """Escape dollar signs, between which matplotlib would render a formula."""
    return text.replace("$", r"\$")
