"""Comparison of two stored reports, and its warnings."""

import copy
import json
from pathlib import Path

import pytest
from test_report import report

from secondguess.bench.compare import FASTER, SAME, SLOWER, UNKNOWN, compare_files
from secondguess.bench.report import SCHEMA, read_report
from secondguess.bench.writing import as_markdown, save_report
from secondguess.errors import BadInputError

SPEEDS = [10.0, 12.0, 50.0, 14.0, 90.0, 16.0, 18.0, 20.0]
TASKS = ["code", "talk"] * 4


def stored(speeds=SPEEDS, tasks=TASKS, schema=SCHEMA, system="ours", **changes):
    """A saved report of one system; changes are named by their word in the report."""
    told = json.loads(report().to_json())
    about, bench = told["provenance"], told["workbench"]
    result = told["results"][0] | {"system": system, "per_batch": list(speeds)}
    told |= {"schema": schema, "results": [result]}
    bench |= {"workload_sha256": "a" * 64, "tasks": {"1": list(tasks)}}
    about["versions"] = {"torch": "2", "numpy": "2"}
    if schema == 1:
        result["per_prompt"] = result.pop("per_batch")
        for key in ("batch_size", "interval", "by_task"):
            del result[key]
        del result["rounds"]["drafted_by_position"]
        for key in ("num_prompts_cut", "tasks", "notes"):
            del bench[key]
    for word, value in changes.items():
        next(part for part in (about, bench, told) if word in part)[word] = value
    return told


@pytest.fixture
def compare(tmp_path):
    def run(before, after):
        paths = [tmp_path / name for name in ("before.json", "after.json")]
        for path, told in zip(paths, (before, after), strict=True):
            path.write_text(json.dumps(told))
        return compare_files(*paths)

    return run


def overall(comparison):
    return next(change for change in comparison.changes if change.task is None)


def test_equal_prompts_are_compared_in_pairs(compare):
    """Every prompt 5 % faster: far less than prompts differ, and yet certain."""
    comparison = compare(stored(), stored([1.05 * speed for speed in SPEEDS]))
    change = overall(comparison)
    assert comparison.paired
    assert comparison.warnings == []
    assert (change.ratio, change.low, change.high) == pytest.approx((1.05, 1.05, 1.05))
    assert (change.verdict, change.num_before, change.num_after) == (FASTER, 8, 8)
    assert overall(compare(stored(), stored([speed / 1.05 for speed in SPEEDS]))).verdict == SLOWER


def test_different_prompts_are_compared_independently_with_a_note(compare):
    comparison = compare(stored(), stored([1.05 * speed for speed in SPEEDS], workload_sha256="b" * 64))
    change = overall(comparison)
    assert not comparison.paired
    assert change.low < 1 < change.high
    assert change.verdict == SAME
    assert comparison.warnings == ["different workload: aaaaaaaa and bbbbbbbb"]
    assert "each side resampled by itself" in comparison.to_markdown()


@pytest.mark.parametrize("changes", [{"num_tokens": 16}, {"num_prompts_cut": 3}])
def test_equal_prompts_with_other_lengths_are_not_paired(compare, changes):
    assert not compare(stored(), stored(**changes)).paired


def test_equal_reports_show_no_difference(compare):
    noisy = [speed * (1.1 if place % 2 else 0.9) for place, speed in enumerate(SPEEDS)]
    assert overall(compare(stored(), stored(noisy))).verdict == SAME
    assert overall(compare(stored(), stored())).verdict == SAME


def test_few_prompts_give_no_verdict(compare):
    five = compare(stored(SPEEDS[:5], TASKS[:5]), stored([99.0] * 5, TASKS[:5]))
    assert overall(five).verdict == UNKNOWN
    assert (overall(five).low, overall(five).high) == (None, None)
    assert "[" not in five.to_markdown().split("---")[-1]
    assert overall(compare(stored(SPEEDS[:6], TASKS[:6]), stored([99.0] * 6, TASKS[:6]))).verdict == FASTER


def test_tasks_are_compared_too(compare):
    faster_talk = [
        speed * (2 if task == "talk" else 1) for speed, task in zip(SPEEDS * 2, TASKS * 2, strict=True)
    ]
    comparison = compare(stored(SPEEDS * 2, TASKS * 2), stored(faster_talk, TASKS * 2))
    told = {change.task: (change.ratio, change.verdict, change.num_after) for change in comparison.changes}
    assert told["code"] == (1.0, SAME, 8)
    assert told["talk"] == (2.0, FASTER, 8)
    assert "| talk (8) " in comparison.to_markdown()


def test_a_single_task_is_reported_once(compare):
    assert len(compare(stored(tasks=["a"] * 8), stored(tasks=["a"] * 8)).changes) == 1


def test_reports_of_the_first_schema_are_read(compare):
    old = stored(schema=1)
    for before, after in ((old, stored()), (stored(), old), (old, old)):
        comparison = compare(before, after)
        assert comparison.paired
        assert overall(comparison).verdict == SAME
        assert [change.task for change in comparison.changes] == [None]


@pytest.mark.parametrize("name", ["2026-11-21-builtin-pair", "2026-11-22-every-drafter-avx2"])
def test_the_results_in_the_repository_are_read(name):
    path = Path(__file__).parents[2] / "benchmarks" / "results" / f"{name}.json"
    comparison = compare_files(path, path)
    assert len(comparison.changes) >= len(json.loads(path.read_text())["results"]) > 20
    assert {change.verdict for change in comparison.changes} == {SAME}
    assert as_markdown(read_report(path)).startswith("# Benchmark ")


def test_an_interrupted_run_is_compared_over_its_prompts(compare):
    comparison = compare(stored(), stored(SPEEDS[:6], TASKS[:6], complete=False))
    change = overall(comparison)
    assert (change.num_before, change.num_after, change.ratio) == (6, 6, 1.0)
    assert comparison.warnings == ["after.json was interrupted and covers only part of its prompts"]


@pytest.mark.parametrize(
    ("word", "value", "warning"),
    [
        ("processor", "another", "different machine: a processor and another"),
        ("num_cores", 8, "different cores: 2 and 8"),
        ("num_threads", 2, "different threads: 1 and 2"),
        ("dtype", "bfloat16", "different dtype: float32 and bfloat16"),
        ("device", "cuda:0", "different device: cpu and cuda:0"),
        ("versions", {"torch": "3", "numpy": "2"}, "different libraries: torch 2 and 3"),
        ("model_sha256", {"tiny": "e" * 64}, "different weights: tiny ffffffff and eeeeeeee"),
        ("runtimes", {}, "different runtimes: tiny fused and none"),
    ],
)
def test_different_conditions_cause_warnings(compare, word, value, warning):
    comparison = compare(stored(), stored(**{word: value}))
    assert comparison.warnings == [warning]
    assert f"- Warning: {warning}." in comparison.to_markdown()


def test_systems_in_only_one_report_are_listed(compare):
    comparison = compare(stored(), stored(system="theirs"))
    assert (comparison.only_before, comparison.only_after, comparison.changes) == (["ours"], ["theirs"], [])
    assert "no system was measured in the same setting by both" in comparison.warnings
    assert "Only in after.json: theirs." in comparison.to_markdown()


def test_settings_are_compared_separately(compare):
    told = stored()
    other = copy.deepcopy(told["results"][0]) | {
        "temperature": 1.0,
        "per_batch": [2 * speed for speed in SPEEDS],
    }
    batch = copy.deepcopy(told["results"][0]) | {"batch_size": 2, "per_batch": [99.0] * 3}
    told["results"] += [other, batch]
    told["workbench"]["tasks"]["2"] = ["code"] * 3
    comparison = compare(told, told)
    keys = [(change.temperature, change.batch_size) for change in comparison.changes if change.task is None]
    assert keys == [(0.0, 1), (1.0, 1), (0.0, 2)]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no JSON"),
        (b"\xff\xfe", "no JSON"),
        (b"# a page", "no JSON.*give the .json file"),
        (b"[" * 100_000, "no JSON"),
        (b"[1]", "to be a dictionary"),
        (b'{"results": []}', "a value for name, got none"),
        (json.dumps(stored(schema=1) | {"schema": True}).encode(), "schema to be a valid integer, got True"),
        (
            json.dumps(stored() | {"schema": 99}).encode(),
            "less than or equal to 5, got 99; .*a newer secondguess",
        ),
        (b'{"schema": 1}', "incomplete"),
        (b'{"schema": 1, "workbench": 3}', "incomplete"),
        (json.dumps(stored(speeds=[1.0, 0.0])).encode(), "per_batch.1 to be greater than 0, got 0.0"),
        (json.dumps(stored(speeds=[])).encode(), "per_batch to have at least 1 item"),
    ],
)
def test_a_file_that_is_not_a_report_is_refused(tmp_path, content, message):
    path = tmp_path / "x.json"
    path.write_bytes(content)
    with pytest.raises(BadInputError, match=message):
        compare_files(path, path)


def test_a_missing_report_is_refused(tmp_path):
    with pytest.raises(BadInputError, match="No such file"):
        compare_files(tmp_path / "x.json", tmp_path / "x.json")


def test_a_saved_report_can_be_compared_with_itself(tmp_path):
    path, *_ = save_report(report(), tmp_path)
    assert read_report(path) == report()
    comparison = compare_files(path, path)
    assert comparison.paired
    assert comparison.warnings == []
    assert {change.system for change in comparison.changes} == {
        "ours plain",
        "ours fast",
        "theirs plain",
        "theirs fast",
    }
    assert {change.task for change in comparison.changes} == {None, "code", "talk"}
