"""`secondguess tune`: successive halving, final runs, report, command and bad input."""

from __future__ import annotations

import json
import tomllib
from dataclasses import replace

import pytest

from secondguess.bench import charts, tuning
from secondguess.bench.choices import PLAIN, Choice, CostModel, Speed
from secondguess.bench.config import TuneConfig
from secondguess.bench.costs import Costs
from secondguess.bench.systems import Run
from secondguess.bench.tune_report import make_report
from secondguess.bench.tuning import Budget, Findings, Tuner, run_tune
from secondguess.checkpoint.checkpoint import Checkpoint
from secondguess.stats import Stats


class CountingClock:
    """A clock that advances by a second per call."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


@pytest.fixture(scope="module")
def findings(tiny_checkpoint, tiny_draft_checkpoint, tmp_path_factory):
    """A tuning of tiny models with a drafter of each sort."""
    prompts = tmp_path_factory.mktemp("prompts") / "two.jsonl"
    prompts.write_text('{"prompt": "def quicksort(items):"}\n{"prompt": "class Stack:\\n    def"}\n')
    model = f"model:{tiny_draft_checkpoint}"
    return run_tune(
        TuneConfig(
            model=str(tiny_checkpoint),
            drafters=(model, "suffix", "early-exit:1", f"suffix+{model}"),
            prompts=str(prompts),
            num_tokens=12,
            batch_sizes=(1, 2),
            dtype="float32",
            device="cpu",
            num_threads=1,
            minutes=0.02,
            num_verified=1,
        )
    )


def test_a_budget_is_shared_between_steps():
    clock = CountingClock()
    budget = Budget(20, clock)
    has_time = budget.until(0.25)
    assert has_time()
    clock.now += 5
    assert not has_time()
    assert 0 < budget.left < 15


class Race:
    """Trials whose choices have given speeds."""

    def __init__(self, speeds: dict[Choice, float], num_batches: int) -> None:
        self.batches = [[[1]]] * num_batches
        self.num_runs = dict.fromkeys(speeds, 0)
        self._speeds = speeds

    def run(self, choices, numbers):
        for choice in choices:
            self.num_runs[choice] += len(numbers)

    def speeds(self, choices, num_batches):
        return {
            choice: Speed.of_runs([[Run([1] * 10, 10 / self._speeds[choice])]] * num_batches)
            for choice in choices
        }


def halve(race: Race, keep: int, seconds: float = 1e6) -> tuple[list[Choice], Findings]:
    tuner = object.__new__(Tuner)
    tuner._trials, tuner._budget = {1: race}, Budget(seconds, CountingClock())
    tuner.findings = Findings(None, None, None)
    found = tuner._halve(1, [choice for choice in race.num_runs if choice.speculates], keep, 1.0)
    return found, tuner.findings


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_the_slower_half_is_dropped_and_the_rest_runs_on_twice_as_many_batches(keep):
    speeds = {PLAIN: 100.0} | {Choice("model:x", f"fixed:{k}"): 100.0 + k for k in range(1, 9)}
    race = Race(speeds, 100)
    found, findings = halve(race, keep)
    assert found == [Choice("model:x", f"fixed:{k}") for k in (8, 7, 6)[:keep]]
    assert race.num_runs[Choice("model:x", "fixed:4")] == 1
    assert race.num_runs[Choice("model:x", "fixed:6")] == 1 + 2
    assert race.num_runs[Choice("model:x", "fixed:8")] == 1 + 2 + (4 if keep == 1 else 0)
    assert findings.dropped[1][Choice("model:x", "fixed:2")] == pytest.approx(1.02)
    assert set(findings.dropped[1]) == set(speeds) - {PLAIN, *found}


def test_halving_ends_when_batches_or_time_run_out():
    speeds = {PLAIN: 100.0} | {Choice("model:x", f"fixed:{k}"): 100.0 + k for k in range(1, 9)}
    race = Race(speeds, 2)
    found, findings = halve(race, 1)
    assert found == [Choice("model:x", "fixed:8")]
    assert max(race.num_runs.values()) == 2
    assert len(findings.dropped[1]) == 7
    hurried = Race(speeds, 100)
    assert halve(hurried, 1, seconds=0.0)[0] == found
    assert max(hurried.num_runs.values()) == 1


def test_every_drafter_runs_and_the_best_run_at_every_batch_size(findings, tiny_draft_checkpoint):
    assert set(findings.speeds) == {1, 2}
    model = f"model:{tiny_draft_checkpoint}"
    for size, speeds in findings.speeds.items():
        assert PLAIN in speeds
        assert Choice("suffix", "cost") in speeds, "the default"
        assert len(speeds) >= 3
        assert speeds.keys() == findings.speeds[1].keys()
        drafters = {choice.drafter for choice in (*speeds, *findings.dropped[size])}
        assert drafters == {"none", model, "suffix", "early-exit:1", f"suffix+{model}"}
        controllers = {choice.controller for choice in (*speeds, *findings.dropped[size])}
        assert {"fixed:8", "cost"} <= controllers
        assert Choice("suffix", "confidence") not in {*speeds, *findings.dropped[size]}
        assert not speeds.keys() & findings.dropped[size].keys()
        assert findings.costs[size].target[1] > 0


def test_the_cost_model_is_beside_the_measured_speed():
    stats = Stats(
        num_rounds=10,
        num_tokens=20,
        num_drafted=20,
        num_accepted=10,
        drafted_per_position=[10, 10],
        drafting_seconds=2.0,
    )
    speed, costs = Speed((20,), (30.0,), stats), Costs({1: 1.0, 3: 1.5})
    assert speed.cost_model(costs, 1) == CostModel(2.0, pytest.approx(0.1), 1.5, pytest.approx(20 / 17))
    # Of two rows whose rounds take as long, drafting seconds are shared.
    assert speed.cost_model(costs, 2) == CostModel(2.0, pytest.approx(0.2), 1.5, pytest.approx(20 / 19))
    plain = Speed((9,), (9.0,), Stats(num_rounds=9, num_tokens=9))
    assert plain.cost_model(Costs({1: 1.0}), 1) == CostModel(1.0, 0.0, 1.0, 1.0)


def test_the_json_report_is_complete_without_absolute_paths(findings, tmp_path):
    report = make_report(findings)
    text = report.to_json()
    read = json.loads(text)
    assert str(tmp_path.parent) not in text
    assert findings.models.target.path not in text
    assert {row["batch_size"] for row in read["results"]} == {1, 2}
    assert read["pass_costs"].keys() == {"1", "2"}
    assert read["provenance"]["model_sha256"]
    plain = next(row for row in read["results"] if row["choice"] == "plain")
    assert (plain["over_plain"], plain["acceptance_length"]) == (1.0, 1.0)


def test_int8_runs_if_there_is_time_and_is_not_written_to_the_configuration(findings):
    if not findings.int8:
        assert any("8 bits were not run" in note for note in findings.notes)
    quantized = {Choice(quantize="int8"): speed_of(80), Choice("suffix", "cost", "int8"): speed_of(160)}
    report = make_report(replace(findings, int8={1: quantized}))
    lines = [line.split("|") for line in report.table().splitlines() if "8 bits" in line]
    assert [(line[2].strip(), line[4].strip()) for line in lines] == [
        ("suffix cost, 8 bits", "2.00"),
        ("plain, 8 bits", "1.00"),
    ]
    assert "quantize" not in report.to_toml()


def speed_of(value: float) -> Speed:
    stats = Stats(num_rounds=100, num_tokens=455, num_drafted=500, num_accepted=355)
    return Speed((100,), (100 / value,), stats)


def decided(findings, speeds):
    """The report, had the final runs been so fast at batch sizes 1 and 2."""
    measured = {
        size: {choice: speed_of(value) for choice, value in of_size.items()}
        for size, of_size in speeds.items()
    }
    return make_report(replace(findings, speeds=measured, dropped={}, int8={}))


def test_the_table_and_the_recommendation_state_speeds(findings):
    choice = Choice("suffix", "fixed:5")
    report = decided(findings, {1: {PLAIN: 100, choice: 230}, 2: {PLAIN: 100, choice: 110}})
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in report.table().splitlines()]
    assert cells[2][:7] == ["1", "suffix fixed:5", "230", "2.30", "2.30", "71%", "4.55"]
    assert cells[3][:5] == ["1", "plain", "100", "1.00", "1.00"]
    assert report.recommendation() == [
        "The configuration has suffix fixed:5 for all batch sizes. The best for each:",
        "- batch size 1: suffix fixed:5, 2.30 times as fast as plain; the configuration has it.",
        "- batch size 2: suffix fixed:5, 1.10 times as fast as plain; the configuration has it.",
    ]
    loaded = report.configuration()
    assert (loaded.load.drafter, loaded.load.controller) == ("suffix", "fixed:5")
    assert loaded.tuned.speedup == {1: 2.3, 2: 1.1}


def test_plain_decoding_is_recommended_where_nothing_pays(findings):
    choice = Choice("suffix", "fixed:5")
    report = decided(findings, {1: {PLAIN: 100, choice: 101}, 2: {PLAIN: 100, choice: 50}})
    assert report.recommendation()[1] == (
        "- batch size 1: plain (--drafter none), nothing is faster by more than 2%; the configuration has it."
    )
    loaded = report.configuration()
    assert (loaded.load.drafter, loaded.load.controller, loaded.tuned.draft_length) == ("none", None, 0)


def test_the_configuration_names_its_batch_size_if_others_are_slower(findings):
    choice = Choice("suffix", "fixed:5")
    report = decided(findings, {1: {PLAIN: 100, choice: 230}, 2: {PLAIN: 100, choice: 80}})
    assert report.recommendation()[2] == (
        "- batch size 2: plain (--drafter none), nothing is faster by more than 2%; "
        "the configuration's choice has 0.80 of its speed."
    )
    loaded = report.configuration()
    assert (loaded.load.drafter, loaded.load.controller) == ("suffix", "fixed:5")
    assert loaded.tuned.speedup == {1: 2.3}, "the sizes at which it loses are left out"


def test_the_loss_of_one_choice_for_all_batch_sizes_is_reported(findings):
    short, long = Choice("suffix", "fixed:2"), Choice("suffix", "fixed:5")
    speeds = {1: {PLAIN: 100, short: 150, long: 230}, 2: {PLAIN: 100, short: 110, long: 80}}
    report = decided(findings, speeds)
    assert (report.chosen, report.best) == (short, {1: long, 2: short})
    words = [
        "The configuration has suffix fixed:2 for all batch sizes. The best for each:",
        "- batch size 1: suffix fixed:5, 2.30 times as fast as plain; the configuration's choice has 0.65 of its speed.",
        "- batch size 2: suffix fixed:2, 1.10 times as fast as plain; the configuration has it.",
    ]
    assert "\n".join(words) in report.to_text()
    assert report.to_toml().startswith("".join(f"# {line}\n" for line in words))
    assert report.configuration().tuned.speedup == {1: 1.5, 2: 1.1}
    by_size = json.loads(report.to_json())["recommendation"]["by_batch_size"]
    assert by_size["1"]["chosen_relative_speed"] == pytest.approx(150 / 230)
    assert by_size["2"]["chosen_relative_speed"] == 1.0


def test_line_breaks_in_a_drafters_name_stay_inside_the_comment(findings, monkeypatch):
    monkeypatch.setattr("secondguess.bench.tune_report.TuneReport.recommendation", lambda _: ["model:a\n[b"])
    assert tomllib.loads(make_report(findings).to_toml())["schema"] == 1


def test_a_dropped_best_constant_length_is_still_reported(findings):
    adaptive = Choice("suffix", "cost")
    report = decided(findings, {1: {PLAIN: 100, adaptive: 200}})
    assert report.best_constant_length(1) == 5, "the mean draft length"
    dropped = {
        Choice("suffix", "fixed:2"): 1.5,
        Choice("suffix", "fixed:3"): 1.7,
        Choice("ngram", "fixed:1"): 3.0,
    }
    report = replace(report, findings=replace(report.findings, dropped={1: dropped}))
    assert report.configuration().tuned.draft_length == 3


def test_the_chart_contains_its_whole_title(findings):
    pytest.importorskip("matplotlib")
    workload = replace(findings.workload, name=" + ".join(["a_long_name.jsonl"] * 3))
    report = make_report(replace(findings, workload=workload))
    figure = report.draw()
    figure.canvas.draw()
    boxes = [text.get_window_extent() for text in (figure._suptitle, *(axis.title for axis in figure.axes))]
    assert all(box.x0 >= 0 and box.x1 <= figure.bbox.x1 for box in boxes)
    assert charts.to_png(figure).startswith(b"\x89PNG")


def test_the_built_in_pair_is_tuned_from_the_command_line(secondguess_command, tmp_path, monkeypatch):
    monkeypatch.setattr(charts, "can_draw", lambda: False)
    place = tmp_path / "tuned.toml"
    done = secondguess_command(
        *("tune", "builtin", "--prompts", "builtin", "--drafter", "model:builtin-draft", "--device", "cpu"),
        *("--num-prompts", 2, "--max-tokens", 12, "--batch-size", 2, "--batch-size", 1, "--minutes", 0.02),
        *("--verify", 1, "--no-int8", "--threads", 1),
        *("--output", tmp_path / "out", "--config-out", place),
    )
    assert done.code == 0, done.err
    assert "- batch size 1: " in done.out
    assert "no charts without matplotlib: pip install" in done.err
    assert place.read_text().startswith("# The configuration has ")
    written = tomllib.loads(place.read_text())
    assert written["load"]["model"] == "builtin"
    assert written["tuned"]["num_threads"] == 1
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["tune.json"]
    followed = secondguess_command("generate", "x", "--config", place, "--max-tokens", "2", "--json")
    assert followed.code == 0, followed.err
    # The fastest drafter differs from machine to machine, and a result names it with its default options.
    chosen = written["load"]["drafter"]
    named = secondguess_command("generate", "x", "--drafter", chosen, "--max-tokens", "2", "--json")
    assert followed.records[0]["drafter"] == named.records[0]["drafter"]


def test_a_result_that_cannot_be_saved_is_still_printed(secondguess_command, tmp_path, monkeypatch, findings):
    place = tmp_path / "tuned.toml"

    def tuned_while_the_folder_became_unwritable(*_):
        place.mkdir()
        return findings

    monkeypatch.setattr(tuning, "run_tune", tuned_while_the_folder_became_unwritable)
    done = secondguess_command("tune", "builtin", "--prompts", "builtin", "--config-out", place)
    assert done.code == 2
    assert "- batch size 1: " in done.out
    assert done.err.startswith("secondguess: error: ")


def test_an_interruption_reports_the_step_and_writes_nothing(
    secondguess_command, tmp_path, monkeypatch, tiny_checkpoint
):
    def interrupted(self):
        raise KeyboardInterrupt

    monkeypatch.setitem(tuning.Tuner.STEPS, "controllers", interrupted)
    done = secondguess_command(
        *("tune", tiny_checkpoint, "--drafter", "suffix", "--prompts", "builtin", "--num-prompts", "1"),
        *(
            "--max-tokens",
            "4",
            "--threads",
            "1",
            "--output",
            tmp_path / "out",
            "--config-out",
            tmp_path / "c.toml",
        ),
    )
    assert done.code == 130
    assert done.err.endswith("interrupted at step 2 of 5, controllers; nothing was written\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--drafter", "guess"], "expected a drafter among"),
        (["--drafter", "none"], "plain decoding is always measured"),
        (["--drafter", "suffix", "--drafter", "suffix"], "expected drafters to have different values"),
        (["--drafter", "model:nowhere"], "nowhere"),
        (["--num-prompts", "0"], "expected num_prompts to be greater than or equal to 1, got 0"),
        (["--max-tokens", "1"], "expected num_tokens to be greater than or equal to 2, got 1"),
        (["--max-tokens", "256"], "take other prompts or fewer tokens"),
        (["--batch-size", "0"], "expected batch_sizes.0 to be greater than or equal to 1, got 0"),
        (
            ["--batch-size", "2", "--batch-size", "2"],
            "expected batch_sizes to have different values, got (2, 2)",
        ),
        (["--minutes", "nan"], "expected minutes to be a finite number"),
        (["--minutes", "-1"], "expected minutes to be greater than or equal to 0.01"),
        (["--verify", "-1"], "expected num_verified to be greater than or equal to 0"),
        (["--threads", "0"], "expected num_threads to be greater than or equal to 1"),
        (["--temperature", "-1"], "expected temperature to be greater than or equal to 0"),
        (["--dtype", "int3"], "expected dtype"),
        (["--output", "a-file"], "expected a folder for --output, got the file a-file"),
        (["--output", "a-file/x"], "expected a folder for --output that can be written to, got a-file/x"),
        (["--config-out", "a-folder"], "expected a file for --config-out, got the folder a-folder"),
        (["--config-out", "nowhere/c.toml"], "in a folder that exists"),
        (["--prompts", "empty.jsonl"], "empty"),
        (["--prompts", "binary.jsonl"], "binary.jsonl"),
        (["--prompts", "missing.jsonl"], "missing.jsonl"),
    ],
)
def test_bad_input_prints_one_line(
    secondguess_command, tiny_checkpoint, tmp_path, monkeypatch, options, message
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a-file").write_text("")
    (tmp_path / "a-folder").mkdir()
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe\x00\x01")
    done = secondguess_command("tune", tiny_checkpoint, "--prompts", "builtin", "--device", "cpu", *options)
    assert done.code == 2, done.out
    assert message in done.err
    assert len(done.err.splitlines()) == 1
    assert not (tmp_path / "secondguess.toml").exists()


def test_a_drafter_of_another_vocabulary_is_refused(secondguess_command, tiny_checkpoint):
    done = secondguess_command(
        "tune", tiny_checkpoint, "--drafter", "model:builtin-draft", "--prompts", "builtin"
    )
    assert done.code == 2
    assert "expected a drafter that shares the target's tokenizer" in done.err


def test_drafters_are_checked_before_the_target_is_loaded(secondguess_command, tiny_checkpoint, monkeypatch):
    monkeypatch.setattr(Checkpoint, "read_module", lambda _: pytest.fail("weights were read"))
    for drafter, words in (("medusa:nowhere", "nowhere"), ("early-exit:2", "layers 0 to 1")):
        done = secondguess_command(
            "tune", tiny_checkpoint, "--drafter", drafter, "--prompts", "builtin", "--device", "cpu"
        )
        assert done.code == 2
        assert words in done.err
