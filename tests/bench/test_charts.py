"""Charts of a benchmark report, also without matplotlib."""

import dataclasses

import pytest

from secondguess.bench import charts
from secondguess.bench.charts import draw_costs, draw_panels
from secondguess.bench.writing import save_report

pytest.importorskip("matplotlib")

from test_report import report


def draw_speeds(told):
    return draw_panels("Speed", told, charts._draw_speeds)


def draw_acceptance(told):
    return draw_panels("Acceptance", told, charts._draw_acceptance, charts._positions)


PNG = b"\x89PNG\r\n\x1a\n"


def with_results(told, **changes):
    return dataclasses.replace(
        told, results=[dataclasses.replace(result, **changes) for result in told.results]
    )


def often_drafted(told):
    """As `told`, with enough nodes at every position."""
    results = []
    for result in told.results:
        rounds = result.rounds and dataclasses.replace(
            result.rounds, drafted_by_position=[100] * len(result.rounds.acceptance_by_position)
        )
        results.append(dataclasses.replace(result, rounds=rounds))
    return dataclasses.replace(told, results=results)


def labels(axis):
    return [label.get_text() for label in axis.get_yticklabels()]


def test_charts_are_saved_beside_the_report(tmp_path):
    saved = save_report(often_drafted(report()), tmp_path)
    assert [path.name for path in saved] == [
        "2026-01-02-tiny.json", "2026-01-02-tiny.md", "2026-01-02-tiny-speed.png",
        "2026-01-02-tiny-acceptance.png", "2026-01-02-tiny-costs.png",
    ]  # fmt: skip
    assert all(path.read_bytes().startswith(PNG) for path in saved[2:])


def test_without_matplotlib_the_report_is_saved_without_charts(tmp_path, monkeypatch):
    monkeypatch.setattr(charts, "find_spec", lambda name: None)
    assert not charts.can_draw()
    assert [path.suffix for path in save_report(report(), tmp_path)] == [".json", ".md"]


def test_speeds_are_bars_with_their_intervals():
    told = with_results(report(), interval=(1.0, 99.0))
    (axis,) = draw_speeds(told).axes
    assert axis.get_xlabel().endswith("95 % interval")
    assert labels(axis) == [result.system for result in told.results]
    assert [bar.get_width() for bar in axis.patches] == [result.tokens_per_second for result in told.results]
    (lines,) = (each for each in axis.collections if len(each.get_segments()) == 4)
    ends = [sorted(point[0] for point in segment) for segment in lines.get_segments()]
    assert ends == [pytest.approx(sorted(result.interval)) for result in told.results]
    assert axis.get_title() == "temperature 0"


def test_speeds_of_too_few_prompts_are_bars_without_intervals():
    (axis,) = draw_speeds(report()).axes
    assert len(axis.patches) == 4
    assert not axis.collections
    assert "interval" not in axis.get_xlabel()


def test_every_temperature_and_batch_size_has_a_panel_of_speeds():
    told = report()
    more = [
        dataclasses.replace(result, temperature=temperature, batch_size=size)
        for temperature, size in ((1.0, 1), (0.0, 8))
        for result in told.results
    ]
    figure = draw_speeds(dataclasses.replace(told, results=told.results + more))
    assert [axis.get_title() for axis in figure.axes] == [
        "temperature 0", "temperature 0, batch size 8", "temperature 1",
    ]  # fmt: skip


def test_acceptance_is_a_line_over_positions_that_were_drafted_often_enough():
    (axis,) = draw_acceptance(often_drafted(report())).axes
    (line,) = axis.lines
    assert (list(line.get_xdata()), list(line.get_ydata())) == ([1, 2, 3], [1.0, 1.0, 1.0])
    # The three nodes that were drafted are too few to show.
    assert draw_acceptance(report()) is None


def test_only_the_fastest_systems_are_drawn_in_different_colours():
    told = often_drafted(report())
    many = [
        dataclasses.replace(told.results[1], system=f"system {number}", tokens_per_second=10.0 + number)
        for number in range(12)
    ]
    (axis,) = draw_acceptance(dataclasses.replace(told, results=many)).axes
    lines = {line.get_label(): line.get_color() for line in axis.lines}
    assert set(lines) == {f"system {number}" for number in range(4, 12)}
    assert len(set(lines.values())) == 8


def test_the_cost_curve_is_drawn_as_measured():
    axis, *_ = draw_costs(report()).axes
    curve = axis.lines[0]
    assert list(curve.get_xdata()) == [1, 4]
    assert list(curve.get_ydata()) == pytest.approx([1.0, 1.3])


def test_names_with_special_characters_are_shown_unchanged(tmp_path):
    told = with_results(
        often_drafted(report()),
        system="a $x^{$ name that is so long that no label has any room for all of it",
    )
    saved = save_report(told, tmp_path)
    assert len(saved) >= 4
    (axis,) = draw_speeds(told).axes
    assert max(len(label) for label in labels(axis)) <= 46


def test_long_titles_are_wrapped():
    told = report()
    told = dataclasses.replace(
        told,
        workbench=dataclasses.replace(told.workbench, workload=" + ".join(["a_$long$_name.jsonl"] * 3)),
        provenance=dataclasses.replace(
            told.provenance, processor="A Very Long Name of a Processor @ 2.70GHz " * 2
        ),
    )
    for draw in (draw_speeds, draw_costs):
        figure = draw(told)
        figure.canvas.draw()
        box = figure._suptitle.get_window_extent()
        assert box.x0 >= 0, draw
        assert box.x1 <= figure.bbox.x1, draw
