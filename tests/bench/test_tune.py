"""`secondguess tune`: recorded guesses, timed rounds on a clock of our own, the report in words, the command, and bad input."""

from __future__ import annotations

import dataclasses
import json
import tomllib
from dataclasses import replace

import pytest
import torch

from secondguess.api import load, make_row
from secondguess.bench import charts, tuning
from secondguess.bench.planner import PLAIN, Choice, Speed
from secondguess.bench.recital import recite, write_texts
from secondguess.bench.round_costs import PartCosts, Stage, fit_line, in_turns, make_cells, part_costs
from secondguess.bench.traces import record
from secondguess.bench.tune_charts import draw_acceptance, draw_charts, draw_costs, draw_speedups
from secondguess.bench.tune_config import TuneConfig
from secondguess.bench.tune_costs import Costs
from secondguess.bench.tune_findings import Budget, Verified
from secondguess.bench.tune_report import make_report, recommendation, table
from secondguess.bench.tuning import run_tune
from secondguess.core import Row
from secondguess.errors import BadInputError
from secondguess.sampling import SamplingParams
from secondguess.testing import ScriptedDrafter, TableModel, random_law
from secondguess.verifiers import make_verifier

PROMPTS = [[5, 17, 42, 99], [7, 7, 140, 7, 7, 140, 7]]


class CountingClock:
    """A second passes whenever somebody looks."""

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
            str(tiny_checkpoint),
            (model, "suffix", f"suffix+{model}"),
            str(prompts),
            num_tokens=12,
            batch_sizes=(1, 2),
            dtype="float32",
            device="cpu",
            num_threads=1,
            minutes=0.02,
            num_verified=1,
            int8=False,
        )
    )


@pytest.fixture
def rows_of(tiny_checkpoint, tiny_draft_checkpoint):
    llm = load(
        tiny_checkpoint,
        f"suffix+model:{tiny_draft_checkpoint}",
        controller="fixed:3",
        dtype="float32",
        device="cpu",
    )

    def rows(max_tokens: int, temperature: float = 0.0) -> list[Row]:
        made = []
        for number, prompt in enumerate(PROMPTS):
            params = SamplingParams(max_tokens=max_tokens, temperature=temperature)
            row = make_row(llm.target, llm.verifier, prompt, params)
            row.end_tokens, row.seed = frozenset(), number
            made.append(row)
        return made

    return llm, rows


@pytest.mark.parametrize(("part", "temperature"), [(0, 0.0), (0, 1.0), (1, 0.0)])
def test_guesses_along_a_known_text_are_those_that_the_target_would_have_judged(rows_of, part, temperature):
    llm, rows = rows_of
    texts = write_texts(llm.target.runtime, llm.verifier, rows(16, temperature))
    judged = record(llm.target.runtime, llm.drafter, llm.verifier, rows(20, temperature), 10, 4)
    recited, seconds = recite(
        llm.drafter.parts[part], rows(20, temperature), texts, 10, 4, torch.device("cpu")
    )
    # Parts are numbered only where there are several, and chances known only where laws are.
    expected = [
        [
            replace(guess, prospect=guess.prospect._replace(part=0), chances=())
            for guess in trace.guesses[part]
        ]
        for trace in judged
    ]
    assert recited == expected
    assert seconds > 0


def test_texts_that_are_too_short_to_recite_are_refused(rows_of):
    llm, rows = rows_of
    with pytest.raises(BadInputError, match="at least 5 tokens, got one of 2"):
        recite(llm.drafter.parts[0], rows(9), [[1, 2], [1, 2]], 5, 3, torch.device("cpu"))


def test_rounds_are_timed_by_length_in_turns_and_the_first_ones_are_not_noted():
    target = TableModel(8, random_law(8, seed=1))
    made = []

    def make_rows(count):
        made.append(count)
        return [
            Row([1, 2, 3], SamplingParams(max_tokens=10**6, temperature=0), seed=place)
            for place in range(count)
        ]

    stage = Stage(
        target, ScriptedDrafter(lambda row: [1] * 9), make_verifier("auto"), make_rows, CountingClock()
    )
    cells = make_cells(stage, [True], [1, 2], lengths=(0, 1, 3))
    assert in_turns(cells, 2, 3, lambda: True) == 3
    assert made == [1, 2, 2, 1, 1, 2]
    for cell in cells:
        assert {length: len(all_) for length, all_ in cell.sweep.rest.items()} == {0: 6, 1: 6, 3: 6}
    costs = part_costs(cells)
    assert set(costs.rest) == {1, 2}
    assert costs.step == {1: 0.0, 2: 0.0}, "on this clock a draft takes as long whatever its length"
    assert costs.start[1] == costs.start[2] > 0


def test_timing_stops_after_a_turn_when_there_is_no_time_for_another():
    target = TableModel(8, random_law(8, seed=1))

    def make_rows(count):
        return [Row([1, 2, 3], SamplingParams(max_tokens=10**6, temperature=0)) for _ in range(count)]

    stage = Stage(target, ScriptedDrafter(lambda row: [1] * 9), make_verifier("auto"), make_rows)
    assert in_turns(make_cells(stage, [True], [1], lengths=(0, 1)), 1, 9, lambda: False) == 1


def test_out_of_order_are_the_rows_that_another_one_has_left():
    target = TableModel(8, random_law(8, seed=1))
    sizes = []

    def make_rows(count):
        sizes.append(count)
        return [Row([1, 2, 3], SamplingParams(max_tokens=10**6, temperature=0)) for _ in range(count)]

    stage = Stage(target, ScriptedDrafter(lambda row: [1] * 9), make_verifier("auto"), make_rows)
    (cell,) = make_cells(stage, [True], [2], lengths=(0, 1), disordered=True)
    seen = []
    learn = cell.sweep.learn
    cell.sweep.learn = lambda rows, *rest: (seen.append(len(rows)), learn(rows, *rest))
    cell.run(2)
    assert sizes == [3]
    assert seen[0] == 3
    assert set(seen[1:]) == {2}


def test_a_line_is_not_moved_by_one_point_that_is_off():
    assert fit_line({1: 3.0, 2: 5.0, 3: 7.0, 4: 9.0, 6: 99.0}) == pytest.approx((1.0, 2.0))
    assert fit_line({3: 6.0}) == (0.0, 2.0)


def test_a_budget_knows_what_its_time_went_to():
    clock = CountingClock()
    budget = Budget(20, clock)
    has_time = budget.until(0.25)
    assert has_time()
    clock.now += 5
    assert not has_time()
    assert budget.book("texts") > budget.book("costs") > 0
    assert set(budget.spent) == {"texts", "costs"}


def test_every_combination_is_predicted_and_the_best_are_run(findings, tiny_draft_checkpoint):
    model = f"model:{tiny_draft_checkpoint}"
    assert set(findings.predictions) == {1, 2}
    for size, predictions in findings.predictions.items():
        assert PLAIN in predictions
        assert Choice("suffix", "fixed:3") in predictions
        assert Choice("suffix", "confidence") not in predictions
        assert {Choice(model, name) for name in ("fixed:8", "confidence", "cost")} <= set(predictions)
        run = [each.choice for each in findings.verified if each.batch_size == size]
        assert PLAIN in run
        assert len(run) >= 2
    assert [part.certain for part in findings.parts.values()] == [False, True]


def test_rounds_and_acceptance_are_predicted_exactly_at_temperature_0(findings):
    """Only seconds can be off: the replay of a constant length does what the run does."""
    for each in findings.verified:
        if each.choice.controller.startswith("fixed"):
            assert each.predicted.draft_length == pytest.approx(each.measured.draft_length)
            assert each.predicted.acceptance_rate == pytest.approx(each.measured.acceptance_rate)
            assert each.predicted.tokens == each.measured.tokens


def test_the_report_is_whole_json_without_places_of_this_machine(findings, tmp_path):
    report = make_report(findings)
    text = report.to_json()
    read = json.loads(text)
    assert str(tmp_path.parent) not in text
    assert findings.models.target.path not in text
    assert read["costs"]["plain"].keys() == {"1", "2"}
    assert read["provenance"]["model_sha256"]
    assert read["median_absolute_error"] == pytest.approx(report.median_error)


def decided(findings, speeds):
    """The findings, had the runs been so fast at batch sizes 1 and 2."""
    verified = [
        Verified(
            choice, size, Speed((100,), (100 / value,), 0.71, 5.0), Speed((100,), (100 / value,), 0.71, 5.0)
        )
        for size, of_size in speeds.items()
        for choice, value in of_size.items()
    ]
    return make_report(replace(findings, verified=verified))


def test_the_recommendation_says_what_to_expect(findings):
    choice = Choice("suffix", "fixed:5")
    report = decided(findings, {1: {PLAIN: 100, choice: 230}, 2: {PLAIN: 100, choice: 110}})
    words = " ".join(recommendation(report))
    assert "One at a time: suffix fixed:5. Text like this accepts 71% of 5.0 guesses a round" in words
    assert (
        "expect 2.30 times plain decoding (measured: 230 against 100 tokens/s), 2.30 times on the worst prompt"
        in words
    )
    assert "2 at a time: suffix fixed:5." in words
    loaded = report.configuration()
    assert (loaded.load.drafter, loaded.load.controller) == ("suffix", "fixed:5")
    assert loaded.tuned.speedup == {1: 2.3, 2: 1.1}


def test_a_choice_that_was_not_run_at_the_smallest_size_has_its_predicted_figures_there(findings):
    choice = Choice("suffix", "fixed:5")
    predicted = {PLAIN: Speed((100,), (1.0,)), choice: Speed((100,), (0.5,), 0.6, 5.0)}
    foretold = replace(
        findings, predictions={size: findings.predictions[size] | predicted for size in (1, 2)}
    )
    report = decided(foretold, {1: {PLAIN: 100}, 2: {PLAIN: 100, choice: 230}})
    assert report.chosen == choice
    assert report.configuration().tuned.acceptance_rate == 0.6
    assert report.to_text()


def test_plain_decoding_is_recommended_in_words_where_nothing_pays(findings):
    choice = Choice("suffix", "fixed:5")
    report = decided(findings, {1: {PLAIN: 100, choice: 101}, 2: {PLAIN: 100, choice: 50}})
    words = recommendation(report)
    assert words[0].startswith(
        "One at a time: decode plainly (drafter none). Nothing is faster by more than 2%"
    )
    assert "drafter none: plain decoding" in words[2]
    loaded = report.configuration()
    assert (loaded.load.drafter, loaded.load.controller, loaded.tuned.draft_length) == ("none", None, 0)


def test_a_choice_that_loses_at_some_batch_size_is_not_in_the_configuration(findings):
    short, long = Choice("suffix", "fixed:2"), Choice("suffix", "fixed:5")
    report = decided(
        findings, {1: {PLAIN: 100, short: 150, long: 230}, 2: {PLAIN: 100, short: 103, long: 80}}
    )
    assert report.chosen == short
    assert report.configuration().tuned.speedup == {1: 1.5, 2: 1.03}
    assert "It is not for" not in report.to_text()


def test_where_all_lose_the_words_and_the_configuration_say_for_which_batch_size_it_is(findings):
    choice = Choice("suffix", "fixed:5")
    report = decided(findings, {1: {PLAIN: 100, choice: 230}, 2: {PLAIN: 100, choice: 80}})
    words = recommendation(report)
    assert words[1].startswith("2 at a time: decode plainly (drafter none).")
    assert words[3].startswith("It is not for 2 at a time, where it is slower than plain decoding")
    assert "--drafter none" in words[3]
    loaded = report.configuration()
    assert (loaded.load.drafter, loaded.load.controller) == ("suffix", "fixed:5")
    assert loaded.tuned.speedup == {1: 2.3}, "what it loses at is not what it serves"


def test_what_one_choice_for_all_batch_sizes_loses_is_said(findings):
    short, long = Choice("suffix", "fixed:2"), Choice("suffix", "fixed:5")
    speeds = {1: {PLAIN: 100, short: 150, long: 230}, 2: {PLAIN: 100, short: 110, long: 80}}
    report = decided(findings, speeds)
    assert (report.chosen, report.best) == (short, {1: long, 2: short})
    words = [
        "The configuration has one choice for all batch sizes. Compared with the best choice for each:",
        "- One at a time: the best is suffix fixed:5; the configuration's choice has 0.65 of its speed.",
        "- 2 at a time: it is the best choice.",
    ]
    assert "\n".join(words) in report.to_text()
    assert report.to_toml().startswith("".join(f"# {line}\n" for line in words))
    by_size = json.loads(report.to_json())["recommendation"]["by_batch_size"]
    assert by_size["1"]["chosen_relative_speed"] == pytest.approx(150 / 230)
    assert by_size["2"]["chosen_relative_speed"] == 1.0


def test_what_it_loses_where_it_was_not_run_is_predicted(findings):
    choice = Choice("suffix", "fixed:5")
    predicted = {PLAIN: Speed((100,), (1.0,)), choice: Speed((100,), (2.0,), 0.6, 5.0)}
    foretold = replace(findings, predictions=findings.predictions | {2: findings.predictions[2] | predicted})
    report = decided(foretold, {1: {PLAIN: 100, choice: 230}, 2: {PLAIN: 50}})
    assert report.chosen == choice
    words = "- 2 at a time: the best is plain decoding; the configuration's choice has 0.50 of its speed (predicted)."
    assert words in report.to_text()


def test_the_comment_stays_a_comment_whatever_a_drafter_is_called(findings, monkeypatch):
    monkeypatch.setattr("secondguess.bench.tune_report.compromise", lambda _: ["model:a\n[b"])
    assert tomllib.loads(make_report(findings).to_toml())["schema"] == 1


def test_of_one_batch_size_nothing_is_compared(findings):
    one = replace(findings, predictions={1: findings.predictions[1]})
    assert "for all batch sizes" not in make_report(replace(one, verified=[])).to_text()


def test_a_machine_that_changed_its_pace_is_named(findings):
    choice = Choice("suffix", "fixed:5")
    quiet = decided(findings, {1: {PLAIN: 100, choice: 101}, 2: {PLAIN: 100, choice: 50}})
    assert "changed its pace" not in quiet.to_text()
    busy = [
        replace(each, measured=Speed((100,), (1.5 * each.predicted.seconds[0],)))
        for each in quiet.findings.verified
    ]
    report = make_report(replace(findings, verified=busy))
    assert "plain decoding was predicted at 1.50 times its measured speed" in report.to_text()
    assert report.median_error == pytest.approx(0.5)
    assert report.median_speedup_error == pytest.approx(0.0)


def test_the_table_has_predicted_beside_measured(findings):
    lines = table(make_report(findings))
    assert lines[0].split() == [
        "batch",
        "how",
        "predicted",
        "x",
        "plain",
        "measured",
        "x",
        "plain",
        "predicted/measured",
    ]
    assert len({len(line) for line in lines if line.split()[-1] != ""}) <= 2


def test_titles_of_charts_are_not_cut_off(findings):
    pytest.importorskip("matplotlib")
    workload = dataclasses.replace(findings.workload, name=" + ".join(["a_long_name.jsonl"] * 3))
    findings = dataclasses.replace(findings, workload=workload)
    for draw in (draw_costs, draw_acceptance, draw_speedups):
        figure = draw(make_report(findings))
        figure.canvas.draw()
        boxes = [
            text.get_window_extent() for text in (figure._suptitle, *(axis.title for axis in figure.axes))
        ]
        assert all(box.x0 >= 0 and box.x1 <= figure.bbox.x1 for box in boxes), draw


def test_charts_are_images(findings):
    pytest.importorskip("matplotlib")
    images = draw_charts(make_report(findings))
    assert sorted(images) == ["tune-acceptance.png", "tune-costs.png", "tune-speedups.png"]
    assert all(image.startswith(b"\x89PNG") for image in images.values())


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
    assert "One at a time: " in done.out
    assert "no charts without matplotlib: pip install" in done.err
    assert place.read_text().startswith("# The configuration has one choice for all batch sizes.")
    written = tomllib.loads(place.read_text())
    assert written["load"]["model"] == "builtin"
    assert written["tuned"]["num_threads"] == 1
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["tune.json"]
    followed = secondguess_command("generate", "x", "--config", place, "--max-tokens", "2", "--json")
    assert followed.code == 0, followed.err
    assert followed.records[0]["drafter"] == written["load"]["drafter"]


def test_a_tuning_that_cannot_be_saved_any_more_has_been_shown(
    secondguess_command, tmp_path, monkeypatch, findings
):
    place = tmp_path / "tuned.toml"

    def tuned_while_the_folder_became_unwritable(*_):
        place.mkdir()
        return findings

    monkeypatch.setattr(tuning, "run_tune", tuned_while_the_folder_became_unwritable)
    done = secondguess_command("tune", "builtin", "--prompts", "builtin", "--config-out", place)
    assert done.code == 2
    assert "One at a time: " in done.out
    assert done.err.startswith("secondguess: error: ")


def test_an_interruption_says_where_and_writes_nothing(
    secondguess_command, tmp_path, monkeypatch, tiny_checkpoint
):
    def interrupted(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(tuning.Tuner, "time_rounds", interrupted)
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
    assert done.err.endswith("interrupted at step 2 of 6, costs of rounds; nothing was written\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--drafter", "medusa"], "medusa, which borrows from the target"),
        (["--drafter", "guess"], "expected a drafter among"),
        (["--drafter", "none"], "plain decoding is always measured"),
        (["--drafter", "suffix", "--drafter", "suffix"], "expected different drafters"),
        (["--drafter", "model:nowhere"], "nowhere"),
        (["--num-prompts", "0"], "expected num_prompts to be from 1"),
        (["--max-tokens", "1"], "expected num_tokens to be from 2"),
        (["--max-tokens", "240"], "take other prompts or a smaller --max-tokens"),
        (["--batch-size", "0"], "expected batch_size to be from 1"),
        (["--batch-size", "2", "--batch-size", "2"], "expected different batch_sizes"),
        (["--minutes", "nan"], "expected minutes to be from"),
        (["--minutes", "-1"], "expected minutes to be from"),
        (["--verify", "-1"], "expected num_verified to be from 0"),
        (["--threads", "0"], "expected num_threads to be from 1"),
        (["--temperature", "-1"], "expected temperature to be from 0"),
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
def test_bad_input_is_one_line(secondguess_command, tiny_checkpoint, tmp_path, monkeypatch, options, message):
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


@pytest.mark.parametrize(
    "drafter",
    ["early-exit:1", "layer-skip:x", "medusa", "mtp", "eagle:x", "dspark", "suffix+eagle"],
)
def test_a_drafter_that_borrows_from_the_target_is_refused_before_anything_is_loaded(drafter):
    with pytest.raises(BadInputError, match=r"text alone for tune, got .*bench --drafters all"):
        TuneConfig("nowhere/at/all", ("suffix", drafter))


def test_a_drafter_of_another_vocabulary_is_refused(secondguess_command, tiny_checkpoint):
    done = secondguess_command(
        "tune", tiny_checkpoint, "--drafter", "model:builtin-draft", "--prompts", "builtin"
    )
    assert done.code == 2
    assert "expected a drafter that shares the target's tokenizer" in done.err


def test_joined_drafters_cost_what_joining_them_does_and_their_look_ups_are_judged_as_the_model_is():
    look_up = PartCosts({1: 0.0}, {1: 0.0}, {1: {1: 1.0, 2: 1.0}})
    model = PartCosts({1: 0.5}, {1: 0.5}, {1: {1: 3.0, 2: 3.0}})
    parts = {"suffix": look_up, "model:x": model}
    costs = Costs({1: 1.0}, parts, {1: 1.0}, parts, {"suffix+model:x": {1: 0.25}}, ("model:x",))
    assert costs.of(["suffix"]).rest(1, 1, [0]) == 1.0
    joined = costs.of(["suffix", "model:x"])
    assert joined.rest(1, 1, [0]) == joined.rest(1, 2, [1]) == 3.25
    assert joined.rest(1, 0, []) == 1.0
