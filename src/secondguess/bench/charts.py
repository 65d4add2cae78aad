"""Charts of a report: speed, acceptance by position, speed-up per task, and cost of a pass.

matplotlib is an extra (`pip install secondguess[bench]`), imported only when a chart is drawn.
Figures are made without pyplot: no global state is changed, and no display is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from itertools import takewhile
from math import nan
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from secondguess.bench.markdown import show_count

if TYPE_CHECKING:
    from secondguess.bench.report import Report
    from secondguess.bench.results import Result

MATPLOTLIB_HINT = "no charts without matplotlib: pip install 'secondguess[bench]' draws them"

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F", "#000000")
"""Colour-blind safe palette of Okabe and Ito, without yellow, which is hard to see on white."""
PLAIN_COLOUR = "#B8BDC4"
MARKERS = "osD^vPX*"
MOST_LINES = 8
MOST_POSITIONS = 16
MOST_BARS = 6
WIDEST_BAR = 0.25
FEWEST_NODES = 20
"""Fewest drafted nodes for which a share is plotted; with fewer it is mostly noise."""
DOTS_PER_INCH = 140
CHARACTERS_PER_INCH = 10
"""Characters of a title line per inch of figure width."""


def can_draw() -> bool:
    """Return whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def draw_charts(report: Report, folder: Path, stem: str) -> list[Path]:
    """Write every chart that has data as `<stem>-<chart>.png`; return the paths."""
    figures = {
        "speed": draw_speeds(report),
        "acceptance": draw_acceptance(report),
        "tasks": draw_tasks(report),
        "costs": draw_costs(report),
    }
    paths = []
    for chart, figure in figures.items():
        if figure is None:
            continue
        path = folder / f"{stem}-{chart}.png"
        # No metadata about the software that drew the file.
        figure.savefig(path, dpi=DOTS_PER_INCH, metadata={"Software": None})
        paths.append(path)
    return paths


def draw_speeds(report: Report) -> Any:
    """Draw tokens/s of every system with intervals, one panel per temperature and batch size."""
    panels = by_setting(report)
    most = max(len(results) for results in panels.values())
    figure, axes = _panels(len(panels), height=1.5 + 0.3 * most, width=6.4)
    for axis, ((temperature, batch_size), results) in zip(axes, panels.items(), strict=True):
        places = range(len(results))
        speeds = [result.tokens_per_second for result in results]
        # A percentile interval need not contain the median, an error bar has to.
        intervals = [result.interval or (result.tokens_per_second,) * 2 for result in results]
        beside = [
            [max(0.0, speed - low) for speed, (low, _) in zip(speeds, intervals, strict=True)],
            [max(0.0, high - speed) for speed, (_, high) in zip(speeds, intervals, strict=True)],
        ]
        families = list(dict.fromkeys(result.family for result in results))
        colours = [
            COLOURS[families.index(result.family) % len(COLOURS)] if result.speculates else PLAIN_COLOUR
            for result in results
        ]
        told = all(result.interval for result in results)
        axis.barh(places, speeds, xerr=beside if told else None, color=colours, height=0.7, error_kw=_thin())
        farthest = max(max(speed, high) for speed, (_, high) in zip(speeds, intervals, strict=True))
        for place, speed, (_, high) in zip(places, speeds, intervals, strict=True):
            end = max(speed, high) + 0.015 * farthest
            axis.text(end, place, f"{speed:.0f}" if speed >= 10 else f"{speed:.1f}", va="center", fontsize=8)
        axis.set_xlim(0, farthest * 1.14)
        axis.set_yticks(places, [_short(result.system) for result in results], fontsize=8)
        # The same limits in every panel, so that all bars are equally thick.
        axis.set_ylim(most - 0.4, -0.6)
        axis.set_xlabel("tokens/s, median over prompts" + (", 95 % interval" if told else ""))
        axis.set_title(_setting(temperature, batch_size))
        axis.grid(axis="x", **_faint())
    title(figure, f"Speed\n{_what(report)}")
    return figure


def draw_acceptance(report: Report) -> Any:
    """Draw acceptance by position, at the smallest batch size; return None without drafts."""
    panels = {
        setting: [result for result in results if _positions(result)]
        for setting, results in _at_smallest_batch(report).items()
    }
    panels = {setting: fastest(results, MOST_LINES) for setting, results in panels.items() if results}
    if not panels:
        return None
    figure, axes = _panels(len(panels), height=4.2, width=6.0)
    colours = _colours([result.system for results in panels.values() for result in results])
    for axis, ((temperature, batch_size), results) in zip(axes, panels.items(), strict=True):
        for result in results:
            rates = _positions(result)
            number = list(colours).index(result.system)
            axis.plot(
                range(1, len(rates) + 1), rates, color=colours[result.system], linewidth=1.4,
                marker=MARKERS[number % len(MARKERS)], markersize=4.5, label=_short(result.system),
            )  # fmt: skip
        longest = max(len(_positions(result)) for result in results)
        axis.set_ylim(-0.03, 1.03)
        axis.set_xlim(0.7, longest + 0.3)
        axis.set_xticks(range(1, longest + 1))
        axis.set_xlabel(f"position in the draft (drafted at least {FEWEST_NODES} times)")
        axis.set_ylabel("accepted / drafted")
        axis.set_title(_setting(temperature, batch_size))
        axis.grid(**_faint())
    _legend(figure, axes)
    title(figure, f"Acceptance by position\n{_what(report)}")
    return figure


def draw_tasks(report: Report) -> Any:
    """Draw the speed-up over the family's plain decoding per task, at the smallest batch size.

    Returns:
        The figure; None if no system speculates.
    """
    panels = {
        setting: [
            result
            for result in results
            if result.speculates and any(each.against_plain for each in result.by_task.values())
        ]
        for setting, results in _at_smallest_batch(report).items()
    }
    panels = {setting: fastest(results, MOST_BARS) for setting, results in panels.items() if results}
    if not panels:
        return None
    most_tasks = max(len(results[0].by_task) for results in panels.values())
    most_bars = max(len(results) for results in panels.values())
    figure, axes = _panels(
        len(panels), height=4.4, width=max(5.0, 1.0 + 0.17 * (most_bars + 1.5) * most_tasks)
    )
    colours = _colours([result.system for results in panels.values() for result in results])
    for other in axes[1:]:
        other.sharey(axes[0])
    for axis, ((temperature, batch_size), results) in zip(axes, panels.items(), strict=True):
        tasks = list(results[0].by_task)
        width = min(WIDEST_BAR, 0.8 / len(results))
        for number, result in enumerate(results):
            ratios = [result.by_task[task].against_plain for task in tasks]
            middles = [each.of_medians if each else 0.0 for each in ratios]
            beside = [
                [
                    nan if each is None or each.low is None else max(0.0, each.of_medians - each.low)
                    for each in ratios
                ],
                [
                    nan if each is None or each.high is None else max(0.0, each.high - each.of_medians)
                    for each in ratios
                ],
            ]
            places = [place + (number - (len(results) - 1) / 2) * width for place in range(len(tasks))]
            axis.bar(
                places, middles, width=0.9 * width, yerr=beside, error_kw=_thin(),
                color=colours[result.system], label=_short(result.system),
            )  # fmt: skip
        axis.axhline(1.0, color="black", linewidth=0.8, linestyle="--")
        axis.set_xlim(-0.6, len(tasks) - 0.4)
        tilt = {"rotation": 25, "ha": "right"} if len(tasks) > 3 else {}
        axis.set_xticks(range(len(tasks)), [_short(task, 18) for task in tasks], fontsize=8, **tilt)
        axis.set_ylabel("speed-up over plain decoding")
        axis.set_title(_setting(temperature, batch_size))
        axis.grid(axis="y", **_faint())
    _legend(figure, axes)
    title(figure, f"Speed-up per task\n{_what(report)}")
    return figure


def draw_costs(report: Report) -> Any:
    """Draw v(m), the relative cost of a pass over m tokens, beside its bounds 1 and m."""
    curve = {int(m): value for m, value in report.costs.curve.items()}
    figure, (axis,) = _panels(1, height=4.2, width=6.0)
    widths = sorted(curve)
    values = [curve[m] for m in widths]
    axis.plot(
        widths, values, color=COLOURS[0], marker="o", markersize=4.5, linewidth=1.6, label="measured v(m)"
    )
    axis.axhline(1.0, color=COLOURS[6], linewidth=1.0, linestyle=":", label="free: v(m) = 1")
    axis.plot(widths, widths, color=COLOURS[1], linewidth=1.0, linestyle="--", label="one by one: v(m) = m")
    # The line v(m) = m is shown for its slope; showing all of it would flatten the measured curve.
    axis.set_ylim(0, max(2.0, 1.35 * max(values)))
    axis.set_xticks(widths)
    axis.set_xlabel("m, tokens in one target pass")
    axis.set_ylabel("v(m) = T(m) / T(1)")
    for model, ratio in report.costs.cost_ratio.items():
        axis.plot([], [], " ", label=f"c = {ratio:.3f} ({_short(model)})")
    axis.grid(**_faint())
    milliseconds = report.costs.target_ms[min(report.costs.target_ms)]
    axis.set_title(f"T(1) = {milliseconds:.3g} ms, {report.costs.context_length} tokens cached")
    _legend(figure, [axis])
    about = report.provenance
    title(
        figure, f"Cost of a pass: {about.dtype} on {about.device}, {show_count(about.num_threads, 'thread')}"
    )
    return figure


def by_setting(report: Report) -> dict[tuple[float, int], list[Result]]:
    """Return results by temperature and batch size, sorted in this order."""
    settings = sorted({(result.temperature, result.batch_size) for result in report.results})
    return {
        setting: [each for each in report.results if (each.temperature, each.batch_size) == setting]
        for setting in settings
    }


def fastest(results: Sequence[Result], most: int) -> list[Result]:
    """Return the fastest results, at most `most`, in the order of the report."""
    kept = sorted(results, key=lambda result: -result.tokens_per_second)[:most]
    return [result for result in results if result in kept]


def _at_smallest_batch(report: Report) -> dict[tuple[float, int], list[Result]]:
    smallest = min(result.batch_size for result in report.results)
    return {setting: results for setting, results in by_setting(report).items() if setting[1] == smallest}


def _positions(result: Result) -> list[float]:
    """Return acceptance at the first positions, up to the first with too few drafted nodes."""
    if result.rounds is None:
        return []
    counted = zip(result.rounds.acceptance_by_position, result.rounds.drafted_by_position, strict=True)
    told = takewhile(lambda each: each[1] >= FEWEST_NODES, counted)
    return [rate for rate, _ in told][:MOST_POSITIONS]


def _panels(count: int, height: float, width: float) -> tuple[Any, list[Any]]:
    """Make a figure with `count` panels, at most two side by side; sizes in inches per panel."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(2, count)
    rows = -(-count // columns)
    figure = Figure(figsize=(width * columns, height * rows + 0.9), layout="constrained")
    FigureCanvasAgg(figure)
    axes = [figure.add_subplot(rows, columns, number + 1) for number in range(count)]
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.set_axisbelow(True)
        axis.tick_params(labelsize=8)
        axis.title.set_fontsize(10)
        axis.xaxis.label.set_fontsize(9)
        axis.yaxis.label.set_fontsize(9)
    return figure, axes


def title(figure: Any, text: str) -> None:
    """Set the title of a figure, wrapped to its width."""
    width = int(CHARACTERS_PER_INCH * figure.get_figwidth())
    lines = [line for part in text.split("\n") for line in wrap(part, width)]
    figure.suptitle(_plain("\n".join(lines)), fontsize=9, fontweight="bold")


def _legend(figure: Any, axes: Sequence[Any]) -> None:
    """Add one legend below all panels."""
    entries = {
        label: handle
        for axis in axes
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    columns = min(len(entries), 2 if len(axes) == 1 else 4)
    figure.legend(
        entries.values(), entries.keys(), loc="outside lower center", ncols=columns, fontsize=8, frameon=False
    )


def _colours(systems: Sequence[str]) -> dict[str, str]:
    return {system: COLOURS[number % len(COLOURS)] for number, system in enumerate(dict.fromkeys(systems))}


def _setting(temperature: float, batch_size: int) -> str:
    return f"temperature {temperature:g}" + (f", batch size {batch_size}" if batch_size > 1 else "")


def _what(report: Report) -> str:
    bench, about = report.workbench, report.provenance
    return (
        f"{show_count(bench.num_prompts, 'prompt')} of {_cut(bench.workload, 60)}, {bench.num_tokens} new tokens\n"
        f"{about.dtype} on {about.device}, {show_count(about.num_threads, 'thread')}, {_cut(about.processor, 60)}"
    )


def _short(name: str, most: int = 44) -> str:
    """Shorten and escape a name for a label."""
    return _plain(_cut(name, most))


def _cut(name: str, most: int) -> str:
    """Shorten a name by removing its middle, since system names often differ at the end."""
    return name if len(name) <= most else f"{name[: most // 2 - 1]}...{name[-(most // 2 - 2) :]}"


def _plain(text: str) -> str:
    """Escape dollar signs, between which matplotlib would render a formula."""
    return text.replace("$", r"\$")


def _faint() -> dict[str, Any]:
    return {"color": "#DDDDDD", "linewidth": 0.7}


def _thin() -> dict[str, Any]:
    return {"elinewidth": 1.0, "capsize": 2.0, "ecolor": "#333333"}
