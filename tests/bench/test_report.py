"""Reports of runs with known numbers."""

import dataclasses
import errno
import json
import os
import re
from types import SimpleNamespace

import pytest
from bench_fakes import FakeSystem, stats_of

from secondguess.bench.costs import Costs
from secondguess.bench.measurement import Setting
from secondguess.bench.report import Conditions, CostTable, Report
from secondguess.bench.results import Comparison, compare_texts, summarise_rounds
from secondguess.bench.systems import Run
from secondguess.bench.writing import as_markdown, save_report
from secondguess.workloads.provenance import Provenance

TASKS = ["code", "talk", "talk"]
COSTS = Costs({1: 0.1, 4: 0.13}, draft_step=0.01)
PROBE = SimpleNamespace(costs=lambda model: COSTS)


def runs(speeds, tokens=(1, 2, 3, 4), stats=None):
    return [Run([list(tokens)], len(tokens) / speed, stats) for speed in speeds]


def systems():
    log = []
    return [
        FakeSystem("ours plain", log),
        FakeSystem("ours fast", log, speculates=True),
        FakeSystem("theirs plain", log, family="theirs"),
        FakeSystem("theirs fast", log, family="theirs", speculates=True),
    ]


def results(temperature=0.0):
    by_system = {
        "ours plain": runs([10.0, 20.0, 30.0], stats=stats_of([(0, 0)] * 4)),
        "ours fast": runs([40.0, 10.0, 90.0], tokens=(1, 2, 9, 9), stats=stats_of([(3, 3)])),
        "theirs plain": runs([5.0, 10.0, 20.0], tokens=(1, 2, 3, 5)),
        "theirs fast": runs([20.0, 20.0, 20.0], tokens=(1, 2, 3, 5)),
    }
    return Comparison(Setting(temperature), systems(), by_system, TASKS, seed=0).results(PROBE)


def report(complete=True, note=""):
    return Report(
        name="tiny",
        complete=complete,
        workbench=Conditions("prompts.jsonl", "abc", note, 3, 4, 4, 17.0, 0, {1: TASKS}, []),
        costs=CostTable.of(20, COSTS, {"draft": COSTS}),
        results=results(),
        provenance=Provenance(
            date="2026-01-02T03:04:05+00:00",
            command="secondguess bench",
            commit="0" * 40,
            dirty=True,
            python="3.11",
            versions={"torch": "2"},
            processor="a processor",
            num_cores=2,
            num_threads=1,
            device="cpu",
            dtype="float32",
            seed=0,
            model_sha256={"tiny": "f" * 64},
            runtimes={"tiny": "fused"},
        ),
    )


def page_of(told):
    """The page, with tables that are as narrow as they can be."""
    return re.sub(" +", " ", as_markdown(told))


def test_speeds_are_medians_and_ratios_are_against_each_plain_system():
    plain, fast, *_ = results()
    assert (plain.tokens_per_second, fast.tokens_per_second) == (20.0, 40.0)
    assert set(fast.against) == {"ours plain", "theirs plain", "theirs fast"}
    assert fast.against["ours plain"].of_medians == pytest.approx(2.0)
    assert fast.against["ours plain"].worst == pytest.approx(0.5)
    assert set(plain.against) == {"theirs plain", "ours fast", "theirs fast"}


def test_rounds_are_summed_over_prompts():
    summary = summarise_rounds(
        [Run([[1] * 4], 1.0, stats_of([(3, 3)])), Run([[1] * 3], 1.0, stats_of([(3, 0), (1, 1)]))], COSTS
    )
    assert summary.acceptance_length == pytest.approx(7 / 3)
    assert summary.acceptance_rate == pytest.approx(4 / 7)
    assert summary.acceptance_by_position == pytest.approx([2 / 3, 1 / 2, 1 / 2])
    assert summary.draft_length == pytest.approx(7 / 3)
    assert summary.cost_ratio == pytest.approx(0.1)
    assert sum(summary.share_of_seconds.values()) == pytest.approx(1.0)


def test_a_system_that_drafted_nothing_has_no_acceptance():
    timed = {name: runs([4.0], stats=stats_of([(0, 0)] * 4)) for name in ("ours plain", "ours fast")}
    told = Comparison(Setting(0.0), systems(), timed, ["x"], seed=0).results(PROBE)
    shown = dataclasses.replace(report(), results=told)
    assert json.loads(shown.to_json())["results"][1]["rounds"]["acceptance_rate"] is None
    assert "| ours fast | 1.00 | nothing drafted |" in page_of(shown)


def test_predicted_speed_leaves_prefill_out_of_both_sides():
    """A round of three nodes costs 0.13 + 3 * 0.01 = 0.16 s; it took 0.2 s after 0.8 s of prefill."""
    summary = summarise_rounds([Run([[1] * 4], 1.0, stats_of([(3, 3)], prefill=0.8))], COSTS)
    assert summary.predicted_tokens_per_second == pytest.approx(4 / 0.16)
    assert summary.measured_over_predicted == pytest.approx(0.16 / 0.2)


def test_systems_without_statistics_have_no_round_figures():
    assert summarise_rounds(runs([1.0]), COSTS) is None
    assert [result.rounds is None for result in results()] == [False, False, True, True]


def test_flips_are_counted_against_plain_decoding_of_the_same_family():
    plain, fast, _, theirs = results()
    assert plain.equality is None
    assert fast.equality.num_prompts_differing == 3
    assert fast.equality.num_tokens_differing == 6
    assert fast.equality.num_tokens == 12
    assert fast.equality.first_differences == [2, 2, 2]
    assert theirs.equality.num_prompts_differing == 0
    assert [fast.equality.reference, theirs.equality.reference] == ["ours plain", "theirs plain"]
    assert all(result.equality is None for result in results(temperature=1.0))


def test_a_runtime_with_another_text_is_detected_in_its_plain_decoding():
    """All systems of a family may agree on a wrong text."""
    crossed = results()[2].equality
    assert crossed.reference == "ours plain"
    assert crossed.first_differences == [3, 3, 3]
    assert (crossed.num_prompts_differing, crossed.num_tokens_differing) == (3, 3)


def test_rows_of_a_batch_are_compared_one_by_one():
    texts, reference = [[1, 2], [3, 4]], [[1, 2], [3, 9]]
    equality = compare_texts([Run(texts, 1.0)], [Run(reference, 1.0)], "plain")
    assert equality.first_differences == [None, 1]
    assert (equality.num_prompts_differing, equality.num_tokens_differing, equality.num_tokens) == (1, 1, 4)


def test_tasks_have_their_own_medians_and_ratios_to_plain():
    plain, fast, _, theirs = (result.by_task for result in results())
    assert {task: each.num_batches for task, each in fast.items()} == {"code": 1, "talk": 2}
    assert {task: each.tokens_per_second for task, each in fast.items()} == {"code": 40.0, "talk": 50.0}
    assert fast["talk"].against_plain.of_medians == pytest.approx(50 / 25)
    assert theirs["talk"].against_plain.of_medians == pytest.approx(20 / 15)
    assert plain["talk"].against_plain is None
    assert (fast["code"].acceptance_length, theirs["code"].acceptance_length) == (4.0, None)


def test_a_task_with_few_prompts_has_no_interval():
    page = page_of(report())
    assert "| method | code (1) | talk (2) |" in page
    assert "| ours fast | 40.0, 4.00x, tau 4.00 | 50.0, 2.00x, tau 4.00 |" in page


def results_over(num_prompts, batch_size=1):
    """Two systems over `num_prompts` prompts of one task."""
    by_system = {
        name: runs([speed + place for place in range(num_prompts)])
        for name, speed in (("ours plain", 10.0), ("ours fast", 20.0))
    }
    tasks = ["same"] * num_prompts
    return Comparison(Setting(0.0, batch_size), systems(), by_system, tasks, seed=0).results(PROBE)


@pytest.mark.parametrize(("batch_size", "units"), [(1, "prompts"), (4, "batches")])
def test_an_interval_needs_enough_prompts(batch_size, units):
    """Of five, not even the whole range of the values is a 95 % interval of their median."""
    few, enough = (dataclasses.replace(report(), results=results_over(count, batch_size)) for count in (5, 6))
    words = f"No confidence intervals: they need at least 6 {units} (--num-prompts), these are 5."
    assert words in page_of(few)
    assert "| ours fast | 22.0 | 1.83x, worst 1.71x |" in page_of(few)
    told = json.loads(few.to_json())["results"][1]
    assert told["interval"] is None
    assert (told["against"]["ours plain"]["low"], told["against"]["ours plain"]["high"]) == (None, None)
    assert "No confidence" not in page_of(enough)
    assert "| ours fast | 22.5 | 1.80x [1." in page_of(enough)
    low, high = json.loads(enough.to_json())["results"][1]["interval"]
    assert low < 22.5 < high


def test_a_single_task_has_no_table():
    timed = {"ours plain": runs([1.0] * 3)}
    told = Comparison(Setting(0.0), systems(), timed, ["same"] * 3, seed=0).results(PROBE)
    assert "By task" not in page_of(dataclasses.replace(report(), results=told))


def test_ratios_are_computed_within_one_setting():
    """At batch size 2 no system of the other family runs."""
    log = []
    rivals = [FakeSystem("ours", log), FakeSystem("theirs", log, family="theirs")]
    by_size = {1: {"ours": runs([4.0]), "theirs": runs([2.0])}, 2: {"ours": runs([6.0])}}
    told = [
        result
        for size, timed in by_size.items()
        for result in Comparison(Setting(0.0, size), rivals, timed, ["x"], seed=0).results(PROBE)
    ]
    assert [(each.system, each.batch_size, set(each.against)) for each in told] == [
        ("ours", 1, {"theirs"}), ("theirs", 1, {"ours"}), ("ours", 2, set()),
    ]  # fmt: skip


def test_speeds_of_batches_are_not_predicted():
    summary = summarise_rounds([Run([[1] * 4], 1.0, stats_of([(3, 3)]))], COSTS, batch_size=2)
    assert (summary.predicted_tokens_per_second, summary.measured_over_predicted) == (None, None)
    assert summary.acceptance_length == 4.0


def test_special_characters_in_names_do_not_break_tables():
    told = report()
    named = [dataclasses.replace(result, system="a | b\nc") for result in told.results]
    page = page_of(dataclasses.replace(told, results=named))
    assert "| a \\| b c |" in page


def test_the_default_result_is_that_of_the_smallest_batch():
    told = report()
    larger = [dataclasses.replace(result, batch_size=8) for result in told.results]
    both = dataclasses.replace(told, results=[*larger, *told.results])
    assert both.result("ours fast", 0.0).batch_size == 1
    assert both.result("ours fast", 0.0, 8).batch_size == 8
    for absent in (("ours fast", 0.0, 2), ("ours fast", 0.5), ("nobody", 0.0)):
        with pytest.raises(KeyError):
            both.result(*absent)


def test_a_family_is_represented_by_its_fastest_speculative_system():
    log = []
    rivals = [
        FakeSystem("plain", log),
        FakeSystem("slow", log, speculates=True),
        FakeSystem("fast", log, speculates=True),
        FakeSystem("lone", log, family="theirs"),
    ]
    # The mean of `slow` is larger; its median is not.
    speeds = {"plain": [9.0] * 3, "slow": [1.0, 2.0, 90.0], "fast": [3.0, 3.0, 3.0], "lone": [1.0] * 3}
    timed = {name: runs(own) for name, own in speeds.items()}
    compared = Comparison(Setting(0.0), rivals, timed, ["x"] * 3, seed=0)
    assert compared.fastest_speculators() == {"secondguess": "fast"}


def test_the_json_has_stable_names(tmp_path):
    data, page = save_report(report(), tmp_path / "results")
    assert (data.name, page.name) == ("2026-01-02-tiny.json", "2026-01-02-tiny.md")
    told = json.loads(data.read_text())
    assert told["schema"] == 5
    assert set(told) == {
        "schema", "name", "complete", "workbench", "costs", "results", "provenance",
    }  # fmt: skip
    assert set(told["results"][1]) == {
        "system", "family", "speculates", "temperature", "batch_size", "tokens_per_second", "interval", "per_batch",
        "against", "by_task", "rounds", "equality",
    }  # fmt: skip
    assert told["costs"]["curve"]["4"] == pytest.approx(1.3)
    assert told["costs"]["cost_ratio"]["draft"] == pytest.approx(0.1)
    assert told["results"][1]["against"]["ours plain"]["of_medians"] == pytest.approx(2.0)


def test_an_interrupted_run_is_marked_as_partial(tmp_path):
    data, page = save_report(report(complete=False), tmp_path)
    assert data.name.endswith("-partial.json")
    assert json.loads(data.read_text())["complete"] is False
    assert "Interrupted" in page.read_text()
    assert "Interrupted" not in page_of(report())


def test_a_full_disk_leaves_no_half_report(tmp_path, monkeypatch):
    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*tiny\.json'"):
        save_report(report(), tmp_path)
    assert not any(tmp_path.iterdir())


def test_an_earlier_report_is_kept(tmp_path):
    first, *_ = save_report(report(), tmp_path)
    before = first.read_text()
    names = [[path.name for path in save_report(report(), tmp_path)] for _ in range(2)]
    assert names == [[f"2026-01-02-tiny-{number}{end}" for end in (".json", ".md")] for number in (2, 3)]
    assert first.read_text() == before


def test_the_page_shows_ratios_flips_costs_and_provenance():
    page = page_of(report())
    assert "| ours fast | 40.0 | 2.00x, worst 0.50x |" in page
    assert "| ours fast | ours plain | 3 of 3 | 6 of 12 |" in page
    assert "| theirs plain | ours plain | 3 of 3 | 3 of 12 |" in page
    assert (
        "| method | tokens/s | speedup over ours plain | speedup over theirs plain | speedup over theirs fast |"
        in page
    )
    assert "| v(m) = T(m) / T(1) | 1.00 | 1.30 |" in page
    assert "with uncommitted changes" in page
    assert "| ours fast | 4.00 | 100.0% | 1.00 1.00 1.00 | 3.00 | 0.100 |" in page


def test_a_note_on_the_prompts_is_on_the_page_and_in_the_data():
    noted = report(note="other prompts")
    assert "Note: other prompts." in page_of(noted)
    assert json.loads(noted.to_json())["workbench"]["workload_note"] == "other prompts"
    assert "Note:" not in page_of(report())
    more = dataclasses.replace(
        noted, workbench=dataclasses.replace(noted.workbench, notes=["who is missing"])
    )
    assert "- Note: who is missing.\n" in page_of(more)
