"""Pictures of stored results: tokens/s by drafter and text, acceptance by position, divergence by encoding.

They are drawn from the JSON of `secondguess bench` and of `benchmarks/released.py` (accuracy and speed).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

from secondguess.bench.report import SCHEMA
from secondguess.errors import BadInputError
from secondguess.files import write_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH, DPI = 8.0, 100
"""Inches, and pixels per inch."""
STYLE = {
    "font.size": 9,
    "ytick.labelsize": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": "0.9",
    "text.parse_math": False,
    "svg.hashsalt": "secondguess",
}
PLAIN, OURS, PEER = "0.6", "tab:blue", "tab:orange"
MAX_POSITIONS, MIN_DRAFTED = 12, 10
"""Positions of a draft that are drawn: so many, and only those that were drafted often enough for a rate."""


@dataclass(frozen=True)
class Bar:
    """Bar with a median, and the single values or the range that it stands for."""

    label: str
    value: float
    dots: Sequence[float]
    color: str


def draw(path: Path, folder: Path) -> list[Path]:
    """Draw the pictures of a stored result into a folder, as PNG and as SVG, and return their paths.

    Raises:
        BadInputError: matplotlib is missing, or nothing of the file can be drawn.
    """
    data = read_result(path)
    try:
        from matplotlib import rc_context
    except ImportError as error:
        raise BadInputError("drawing needs matplotlib; run `pip install secondguess[bench]`") from error
    folder.mkdir(parents=True, exist_ok=True)
    saved = []
    with rc_context(STYLE):
        for name, figure in _figures(data):
            for kind, metadata in (("png", {}), ("svg", {"Date": None})):
                saved.append(folder / f"{path.stem}-{name}.{kind}")
                with write_atomically(saved[-1]) as stream:
                    figure.savefig(stream, format=kind, metadata=metadata)
    return saved


def read_result(path: Path) -> dict[str, Any]:
    """Return a stored result of which something can be drawn."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise BadInputError(f"expected JSON in {path}, got another file: {error}") from error
    found = data.get("schema") if isinstance(data, dict) else None
    if found == SCHEMA or (isinstance(data, dict) and {"accuracy", "speed"} & data.keys()):
        return dict(data)
    raise BadInputError(
        f"expected a report of `secondguess bench` (schema {SCHEMA}), or accuracy or speed of benchmarks/released.py, "
        f"got {path} (schema {found}); run the benchmark again"
    )


def _figures(data: dict[str, Any]) -> Iterator[tuple[str, Figure]]:
    """Yield the figures of a result with their names."""
    if data.get("schema") == SCHEMA:
        settings = _by_setting(data["results"])
        for (temperature, size), results in settings.items():
            yield f"speed{_setting_name(temperature, size, '-t{:g}', '-b{}')}", _speed(data, results)
        drafting = {setting: _drafting(results) for setting, results in settings.items()}
        if any(drafting.values()):
            yield "acceptance", _acceptance(data, {key: found for key, found in drafting.items() if found})
    if "speed" in data:
        yield "speed", _released_speed(data)
    if "accuracy" in data:
        yield "accuracy", _accuracy(data)


def _by_setting(results: Sequence[dict[str, Any]]) -> dict[tuple[float, int], list[dict[str, Any]]]:
    settings: dict[tuple[float, int], list[dict[str, Any]]] = {}
    for result in results:
        settings.setdefault((result["temperature"], result["batch_size"]), []).append(result)
    return dict(sorted(settings.items()))


def _setting_name(temperature: float, batch_size: int, first: str, second: str) -> str:
    return first.format(temperature) + (second.format(batch_size) if batch_size > 1 else "")


def _drafting(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the results of systems that drafted often enough."""
    return [
        found
        for found in results
        if found["rounds"] and max(found["rounds"]["drafted_by_position"], default=0) >= MIN_DRAFTED
    ]


def _conditions(data: dict[str, Any], *words: str) -> str:
    """Return the second line of a title: what was run, on which processor and commit."""
    about = data["provenance"]
    changes = " with changes" if about["dirty"] else ""
    commit = f"commit {about['commit'][:8]}{changes}" if about["commit"] else ""
    return ", ".join(word for word in (*words, data.get("gpu") or about["processor"], commit) if word)


def _panels(
    title: str, conditions: str, names: Sequence[str], *, columns: int, height: float, **shared: bool
) -> list[Axes]:
    """Return one panel per name in a figure with a title, each `height` inches high."""
    from matplotlib.figure import Figure

    columns = min(columns, len(names))
    rows = -(-len(names) // columns)
    figure = Figure(figsize=(WIDTH, rows * height + 0.7), dpi=DPI, layout="constrained")
    figure.suptitle(f"{title}\n{fill(conditions, 110)}", fontsize=10)
    grid = figure.subplots(rows, columns, squeeze=False, **shared).flatten().tolist()
    for axes in grid[len(names) :]:
        axes.remove()
    for axes, name in zip(grid, names, strict=False):
        axes.set_title(name, fontsize=9)
        axes.grid(True)
        axes.tick_params(labelbottom=True)
    return list(grid[: len(names)])


def _bars(axes: Axes, bars: Sequence[Bar]) -> None:
    """Draw bars from the top down, with their medians on the right."""
    places = range(len(bars))
    axes.barh(places, [bar.value for bar in bars], color=[bar.color for bar in bars], height=0.7)
    for place, bar in zip(places, bars, strict=True):
        axes.plot(bar.dots, [place] * len(bar.dots), ".", color="black", alpha=0.4, markersize=4)
        value = f" {bar.value:.0f}" if bar.value >= 100 else f" {bar.value:.3g}"
        axes.text(1, place, value, transform=axes.get_yaxis_transform(), va="center")
    axes.set_yticks(places, [fill(bar.label, 32) for bar in bars])
    axes.set_ylim(len(bars) - 0.5, -0.5)
    axes.set_xlim(0, 1.03 * max(max(bar.value, *bar.dots) for bar in bars))
    axes.grid(False, axis="y")


def _label(result: dict[str, Any]) -> str:
    """Return the name of a system; ours without the name of the library."""
    return str(result["system"]).removeprefix("secondguess ")


def _speed(data: dict[str, Any], results: Sequence[dict[str, Any]]) -> Figure:
    """Draw tokens/s in one setting: of all texts, then of each task if there are several."""
    (temperature, size), bench = (results[0]["temperature"], results[0]["batch_size"]), data["workbench"]
    tasks = bench["tasks"][str(size)]
    kinds = dict.fromkeys(tasks)
    panels = ["all texts", *kinds] if len(kinds) > 1 else [tasks[0]]
    title = _setting_name(temperature, size, "Tokens/s at temperature {:g}", ", {} texts at a time")
    words = (
        f"{bench['num_prompts']} prompts, {bench['num_tokens']} new tokens",
        f"dots: {'batches' if size > 1 else 'single texts'}",
    )
    grid = _panels(
        title, _conditions(data, *words), panels, columns=3, height=0.3 + 0.29 * len(results), sharey=True
    )
    for axes, panel in zip(grid, panels, strict=True):
        bars = []
        for result in results:
            task = result["by_task"].get(panel)
            color = PLAIN if not result["speculates"] else OURS if result["family"] == "secondguess" else PEER
            dots = [
                speed
                for speed, its in zip(result["per_batch"], tasks, strict=True)
                if not task or its == panel
            ]
            bars.append(Bar(_label(result), (task or result)["tokens_per_second"], dots, color))
        _bars(axes, bars)
    return _figure_of(grid)


def _acceptance(data: dict[str, Any], settings: dict[tuple[float, int], list[dict[str, Any]]]) -> Figure:
    """Draw the share of drafted tokens that were accepted by position, one panel per setting."""
    names = [_setting_name(*setting, "temperature {:g}", ", {} texts at a time") for setting in settings]
    title = "Accepted share of the tokens drafted at a position"
    conditions = _conditions(data, f"positions drafted at least {MIN_DRAFTED} times")
    grid = _panels(title, conditions, names, columns=2, height=3.2, sharey=True)
    systems = dict.fromkeys(_label(result) for results in settings.values() for result in results)
    styles = dict(zip(systems, product("-:", [f"C{number}" for number in range(10)]), strict=False))
    for axes, results in zip(grid, settings.values(), strict=True):
        for result in results:
            rounds, (line, color) = result["rounds"], styles[_label(result)]
            counts = zip(
                rounds["acceptance_by_position"][:MAX_POSITIONS], rounds["drafted_by_position"], strict=False
            )
            rates = [rate for rate, count in counts if count >= MIN_DRAFTED]
            axes.plot(range(1, len(rates) + 1), rates, f".{line}", color=color, label=_label(result))
        axes.set(xlabel="position in the draft", ylim=(0, 1.02))
        axes.xaxis.get_major_locator().set_params(integer=True)
    _legend(grid, len(systems))
    return _figure_of(grid)


def _released_speed(data: dict[str, Any]) -> Figure:
    """Draw tokens/s of released models with the slowest and the fastest text, one panel per model."""
    models = {name: [*_released_bars(forms)] for name, forms in data["speed"].items()}
    conditions = _conditions(data, "medians of texts at temperature 0", "dots: slowest and fastest")
    height = 0.4 + 0.29 * max(map(len, models.values()))
    grid = _panels("Tokens/s of released models", conditions, list(models), columns=2, height=height)
    for axes, bars in zip(grid, models.values(), strict=True):
        _bars(axes, bars)
    return _figure_of(grid)


def _released_bars(forms: dict[str, Any]) -> Iterator[Bar]:
    """Yield the bars of a model, of plain decoding."""
    colors = {"ours": PLAIN, "llama.cpp": PEER}
    for form, system in product(forms, colors):
        if system in forms[form]:
            speeds = forms[form][system]["plain tokens/s"]
            dots = [speeds["least"], speeds["largest"]]
            yield Bar(f"{form}, {system}", speeds["median"], dots, colors[system])


def _accuracy(data: dict[str, Any]) -> Figure:
    """Draw the KL divergence from float32 by encoding and kind of text, one panel per model."""
    models = data["accuracy"]
    rows = max(map(len, models.values()))
    title = "KL divergence from float32 of the same weights, nats per token"
    grid = _panels(title, _conditions(data), list(models), columns=2, height=0.5 + 0.25 * rows, sharex=True)
    for axes, encodings in zip(grid, models.values(), strict=True):
        kinds = dict.fromkeys(kind for texts in encodings.values() for kind in texts)
        for kind in kinds:
            values = [texts[kind]["kl"] for texts in encodings.values()]
            axes.plot(values, range(len(values)), "o", alpha=0.7, label=kind)
        axes.set_yticks(range(len(encodings)), [", ".join(name.split(", ")[:2]) for name in encodings])
        axes.set(xscale="log", ylim=(len(encodings) - 0.5, -0.5))
        axes.xaxis.set_major_formatter("{x:g}")
    _legend(grid, 3)
    return _figure_of(grid)


def _legend(grid: Sequence[Axes], columns: int) -> None:
    """Put one legend for all panels below them."""
    labels = {
        name: line for axes in grid for line, name in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    wide = max(map(len, labels)) > 24
    _figure_of(grid).legend(
        list(labels.values()), list(labels), loc="outside lower center", ncols=min(columns, 2 if wide else 4)
    )


def _figure_of(grid: Sequence[Axes]) -> Figure:
    figure: Figure = grid[0].figure
    return figure
