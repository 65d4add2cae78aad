"""Pictures of stored results."""

import dataclasses
import json
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from bench_fakes import FakeSystem, stats_of
from test_report import PROBE, TASKS, report, runs

from secondguess.bench.measurement import Setting
from secondguess.bench.plots import draw, read_result
from secondguess.bench.results import Comparison
from secondguess.errors import BadInputError

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


@pytest.fixture
def stored(tmp_path):
    """A report of three systems at two temperatures and batch sizes, one of which drafted often."""
    systems = [
        FakeSystem("secondguess plain", []),
        FakeSystem("secondguess fast $x$", [], speculates=True),
        FakeSystem("secondguess rare", [], speculates=True),
    ]
    results = [
        result
        for setting in (Setting(0.0), Setting(1.0), Setting(1.0, 2))
        for result in Comparison(
            setting,
            systems,
            {
                "secondguess plain": runs([10.1, 20.2, 30.4], stats=stats_of([(0, 0)])),
                "secondguess fast $x$": runs([40.4, 10.4, 90.6], stats=stats_of([(3, 2)] * 12)),
                "secondguess rare": runs([70.1, 70.2, 70.3], stats=stats_of([(3, 2)] * 3)),
            },
            TASKS,
            seed=0,
        ).results(PROBE)
    ]
    told = report()
    bench = dataclasses.replace(told.workbench, tasks={1: TASKS, 2: TASKS})
    path = tmp_path / "tiny.json"
    path.write_text(dataclasses.replace(told, workbench=bench, results=results).to_json())
    return path


@pytest.fixture
def matplotlib():
    return pytest.importorskip("matplotlib")


def words_of(path):
    """Return the words of an SVG, which matplotlib notes beside their outlines."""
    parser = ElementTree.XMLParser(target=ElementTree.TreeBuilder(insert_comments=True))
    nodes = ElementTree.parse(path, parser).iter()
    return [node.text.strip() for node in nodes if node.tag is ElementTree.Comment]


def test_a_report_has_pictures_of_every_setting_and_one_of_acceptance(matplotlib, stored, tmp_path):
    names = ("speed-t0", "speed-t1", "speed-t1-b2", "acceptance")
    saved = draw(stored, tmp_path / "new")
    assert saved == [tmp_path / "new" / f"tiny-{name}.{kind}" for name in names for kind in ("png", "svg")]
    speed, acceptance = words_of(saved[1]), words_of(saved[7])
    for word in ("all texts", "code", "talk", "fast $x$", "Tokens/s at temperature 0"):
        assert word in speed
    assert [speed.count(median) for median in ("20.2", "10.1", "25.3", "40.4", "50.5")] == [1, 1, 1, 2, 1]
    assert {"temperature 0", "temperature 1", "temperature 1, 2 texts at a time"} <= set(acceptance)
    assert not {"plain", "rare"} & set(acceptance)


def test_pictures_are_800_pixels_wide_and_the_same_each_time(matplotlib, stored, tmp_path):
    first, second = (draw(stored, tmp_path / name) for name in "ab")
    for path, again in zip(first, second, strict=True):
        assert path.read_bytes() == again.read_bytes()
    width = int.from_bytes(first[0].read_bytes()[16:20], "big")
    assert width == 800


def test_released_models_have_pictures_of_accuracy_and_speed(matplotlib, tmp_path):
    (path, *_) = sorted(RESULTS.glob("*-released-accuracy-*.json"))
    data = json.loads(path.read_text())
    _, svg = draw(path, tmp_path)
    words = words_of(svg)
    assert {*data["accuracy"], "code", "chat", "prose", "llama.cpp", "folder, int4"} <= set(words)
    (path, *_) = sorted(RESULTS.glob("*-released-speed-qwen-*.json"))
    _, svg = draw(path, tmp_path)
    assert {"qwen-1.5b", "file, ours", "file, llama.cpp"} <= set(words_of(svg))


def test_without_matplotlib_the_extra_is_named(stored, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(BadInputError, match=r"needs matplotlib; run `pip install secondguess\[bench\]`"):
        draw(stored, tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x", "expected JSON"),
        ("[]", "schema None"),
        ('{"schema": 1}', "schema 1"),
        ('{"table": []}', "released.py"),
    ],
)
def test_files_of_which_nothing_can_be_drawn_are_refused(tmp_path, text, words):
    path = tmp_path / "stored.json"
    path.write_text(text)
    with pytest.raises(BadInputError, match=words):
        read_result(path)
