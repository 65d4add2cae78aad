"""`secondguess tune`: successive halving, final runs, report, command and bad input."""

from __future__ import annotations

import json
import os
import tomllib
from dataclasses import replace
from itertools import count
from types import SimpleNamespace

import pytest

from secondguess.bench import tuning
from secondguess.bench.config import TuneConfig
from secondguess.bench.recommendation import PLAIN, recommend
from secondguess.bench.systems import Run
from secondguess.bench.tuning import Budget, Tuner, Tuning, run_tune
from secondguess.bench.writing import as_markdown

steps: list[tuple[int, int, str]] = []
"""Progress of the tuning of `tuned`."""


@pytest.fixture(scope="module")
def tuned(tiny_checkpoint, tiny_draft_checkpoint, tmp_path_factory):
    """A tuning of tiny models with a drafter of each sort."""
    prompts = tmp_path_factory.mktemp("prompts") / "two.jsonl"
    prompts.write_text('{"prompt": "def quicksort(items):"}\n{"prompt": "class Stack:\\n    def"}\n')
    model = f"model:{tiny_draft_checkpoint}"
    steps.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuning, "FIXED_LENGTHS", (1, 8))
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
            ),
            lambda done, total, step: steps.append((done, total, step)),
        )


def test_a_budget_is_shared_between_steps():
    clock = count(1.0).__next__  # a second per call
    budget = Budget(20, clock)
    has_time = budget.until(0.25)
    assert has_time()
    for _ in range(5):
        clock()
    assert not has_time()


class Race:
    """A measurement of systems with given speeds, and a tuner that reads it."""

    def __init__(self, num_batches: int, seconds: float = 1e6) -> None:
        self.speeds = {"none": 100.0} | {str(k): 100.0 + k for k in range(1, 9)}
        self.batches = {1: range(num_batches)}
        self.num_runs = dict.fromkeys(self.speeds, 0)
        self.tuner = object.__new__(Tuner)
        self.tuner.__dict__.update(
            _config=SimpleNamespace(batch_sizes=(1,), temperature=0.0), measurement=self, dropped={1: {}},
            _budget=Budget(seconds, count(1.0).__next__), _system=lambda *_: SimpleNamespace(name=PLAIN),
            show_run=lambda what: None,
        )  # fmt: skip
        self.speeds[PLAIN] = self.speeds.pop("none")
        self.num_runs[PLAIN] = self.num_runs.pop("none")

    def run_batch(self, systems, size, index, report):
        for system in systems:
            self.num_runs[system.name] += 1

    def runs_of(self, name, setting, indices):
        return [Run([[1] * 10], 10 / self.speeds[name])] * len(indices)

    def halve(self, keep):
        systems = [SimpleNamespace(name=name) for name in self.speeds if name != PLAIN]
        return [system.name for system in self.tuner.halve(1, systems, keep, 1.0)]


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_the_slower_half_is_dropped_and_the_rest_runs_on_twice_as_many_batches(keep):
    race = Race(100)
    assert race.halve(keep) == ["8", "7", "6"][:keep]
    assert race.num_runs["4"] == 1
    assert race.num_runs["6"] == 1 + 2
    assert race.num_runs["8"] == 1 + 2 + (4 if keep == 1 else 0)
    assert race.tuner.dropped[1]["2"] == pytest.approx(1.02)
    assert set(race.tuner.dropped[1]) == set("12345678"[: 8 - keep])


def test_halving_ends_when_batches_or_time_run_out():
    race = Race(2)
    assert race.halve(1) == ["8"]
    assert max(race.num_runs.values()) == 2
    assert len(race.tuner.dropped[1]) == 7
    hurried = Race(100, seconds=0.0)
    assert hurried.halve(1) == ["8"]
    assert max(hurried.num_runs.values()) == 1


def test_every_drafter_runs_and_the_best_run_at_every_batch_size(tuned, tiny_draft_checkpoint):
    model = f"model:{tiny_draft_checkpoint}"
    assert set(tuned.speedups) == {1, 2}
    for size, speedups in tuned.speedups.items():
        assert speedups[PLAIN] == 1.0
        assert "secondguess suffix cost" in speedups, "the default"
        assert len(speedups) >= 3
        assert speedups.keys() == tuned.speedups[1].keys()
        run = [tuned.drafters[name] for name in (*speedups, *tuned.dropped[size])]
        assert {drafter for drafter, _ in run} == {"none", model, "suffix", "early-exit:1", f"suffix+{model}"}
        assert {"fixed:8", "cost"} <= {controller for _, controller in run}
        assert ("suffix", "confidence") not in run
        assert not speedups.keys() & tuned.dropped[size].keys()


@pytest.mark.usefixtures("tuned")
def test_progress_names_every_run():
    for number, name in enumerate(Tuner.STEPS, start=1):
        runs = [step for done, total, step in steps if (done, total) == (number, 4)]
        assert runs[0] == name
        assert any(run.startswith(f"{name}: prompt 1, temperature 0: {PLAIN}") for run in runs[1:])


def test_the_report_is_one_of_bench_with_the_recommendation_in_its_notes(tuned, tmp_path):
    page, data = as_markdown(tuned.report), tuned.report.to_json()
    assert page.startswith("# Benchmark tune")
    recommendation = recommend(tuned.speedups)[0].removesuffix(":")  # plain decoding may be the fastest here
    assert f"- Note: {recommendation}." in page.splitlines()
    assert (
        "Note: not in the final runs at batch size 1, because others were faster on the first prompts (speed on those, "
        "relative to plain decoding on those): " in page
    )
    for text in (page, data):
        assert str(tmp_path.parent) not in text
    assert {result["batch_size"] for result in json.loads(data)["results"]} == {1, 2}


def with_speedups(tuned: Tuning, speedups: dict[str, float]) -> Tuning:
    """The same, had these systems of the suffix drafter been so fast at batch sizes 1 and 2."""
    first = tuned.report.results[0]
    results = []
    for size in (1, 2):
        plain = replace(first, system=PLAIN, batch_size=size, speculates=False, against={})
        results.append(plain)
        for name, speedup in speedups.items():
            ratio = replace(next(iter(tuned.report.results[1].against.values())), of_medians=speedup)
            results.append(replace(plain, system=name, speculates=True, against={PLAIN: ratio}))
    drafters = {name: ("suffix", name.split()[-1]) for name in speedups} | {PLAIN: ("none", None)}
    return replace(tuned, report=replace(tuned.report, results=results), dropped={}, drafters=drafters)


def test_the_configuration_has_the_choice_and_its_measurements(tuned):
    found = with_speedups(tuned, {"suffix fixed:5": 2.3, "suffix cost": 2.0})
    loaded = found.configuration()
    assert (loaded.load.drafter, loaded.load.controller) == ("suffix", "fixed:5")
    assert (loaded.tuned.speedup, loaded.tuned.draft_length) == ({1: 2.3, 2: 2.3}, 5)
    assert loaded.tuned.num_threads == 1
    assert found.to_toml().startswith("# Configuration: drafter suffix, controller fixed:5.")


def test_plain_decoding_is_configured_where_nothing_pays(tuned):
    loaded = with_speedups(tuned, {"suffix fixed:5": 1.01}).configuration()
    assert (loaded.load.drafter, loaded.load.controller, loaded.tuned.draft_length) == ("none", None, 0)


def test_a_dropped_best_constant_length_is_still_reported(tuned):
    adaptive = with_speedups(tuned, {"suffix cost": 2.0})
    assert adaptive.configuration().tuned.draft_length == 1, "the mean draft length"
    lengths = {"suffix fixed:2": 1.5, "suffix fixed:3": 1.7, "ngram fixed:1": 3.0}
    drafters = adaptive.drafters | {name: tuple(name.split()) for name in lengths}
    dropped = replace(adaptive, dropped={1: lengths}, drafters=drafters)
    assert dropped.configuration().tuned.draft_length == 3


def test_the_draft_length_is_that_of_the_chosen_constant_controller(tuned):
    """Although another one, which was dropped after a few prompts, was faster on these."""
    chosen = with_speedups(tuned, {"suffix fixed:5": 1.5, "suffix cost": 1.4})
    drafters = chosen.drafters | {"suffix fixed:8": ("suffix", "fixed:8")}
    found = replace(chosen, dropped={1: {"suffix fixed:8": 1.62}}, drafters=drafters).configuration()
    assert (found.load.controller, found.tuned.draft_length) == ("fixed:5", 5)


def test_constant_lengths_of_the_final_runs_take_precedence(tuned):
    chosen = with_speedups(tuned, {"suffix fixed:5": 1.5, "suffix cost": 1.6})
    drafters = chosen.drafters | {"suffix fixed:8": ("suffix", "fixed:8")}
    found = replace(chosen, dropped={1: {"suffix fixed:8": 1.62}}, drafters=drafters).configuration()
    assert (found.load.controller, found.tuned.draft_length) == ("cost", 5)


def test_line_breaks_in_a_drafters_name_stay_inside_the_comment(tuned, monkeypatch):
    monkeypatch.setattr(tuning, "recommend", lambda _: ["model:a\n[b"])
    assert tomllib.loads(tuned.to_toml())["schema"] == 1


def test_the_built_in_pair_is_tuned_from_the_command_line(secondguess_command, tmp_path, monkeypatch):
    monkeypatch.setattr(tuning, "FIXED_LENGTHS", (3,))
    place = tmp_path / "tuned.toml"
    done = secondguess_command(
        *("tune", "builtin", "--prompts", "builtin", "--drafter", "model:builtin-draft", "--device", "cpu"),
        *("--num-prompts", 2, "--max-tokens", 12, "--batch-size", 2, "--batch-size", 1, "--minutes", 0.02),
        *("--threads", 1),
        *("--output", tmp_path / "out", "--config-out", place),
    )
    assert done.code == 0, done.err
    assert "- batch size 1: " in done.err
    # Beside other work, plain decoding may be the fastest.
    assert place.read_text().startswith(("# Configuration: drafter ", "# Configuration: plain decoding "))
    written = tomllib.loads(place.read_text())
    assert written["load"]["model"] == "builtin"
    assert written["tuned"]["num_threads"] == 1
    day = written["tuned"]["date"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        f"{day}-tune.{suffix}" for suffix in ("json", "md")
    ]
    followed = secondguess_command("generate", "x", "--config", place, "--max-tokens", "2", "--json")
    assert followed.code == 0, followed.err
    # The fastest drafter differs from machine to machine, and a result names it with its default options.
    chosen = written["load"]["drafter"]
    named = secondguess_command("generate", "x", "--drafter", chosen, "--max-tokens", "2", "--json")
    assert followed.records[0]["drafter"] == named.records[0]["drafter"]


def test_a_result_that_cannot_be_saved_is_still_printed(secondguess_command, tmp_path, monkeypatch, tuned):
    place = tmp_path / "folder" / "tuned.toml"
    place.parent.mkdir()

    def tuned_while_the_folder_was_removed(*_):
        place.parent.rmdir()
        return tuned

    monkeypatch.setattr(tuning, "run_tune", tuned_while_the_folder_was_removed)
    done = secondguess_command("tune", "builtin", "--prompts", "builtin", "--config-out", place)
    assert done.code == 2
    assert "batch size 1: " in done.out
    assert done.err.startswith("secondguess: error: ")


def test_an_earlier_configuration_is_kept(secondguess_command, tmp_path, monkeypatch, tuned):
    """One that --config-out names is replaced."""
    monkeypatch.chdir(tmp_path)
    place, named = tmp_path / "secondguess.toml", tmp_path / "named.toml"
    for each in (place, named):
        each.write_text("mine")
    monkeypatch.setattr(tuning, "run_tune", lambda *_: tuned)
    done = secondguess_command("tune", "builtin", "--prompts", "builtin")
    assert "saved secondguess-2.toml" in done.out + done.err
    assert place.read_text() == "mine"
    secondguess_command("tune", "builtin", "--prompts", "builtin", "--config-out", named)
    assert (tmp_path / "secondguess-2.toml").read_text() == named.read_text() == tuned.to_toml()
    linked = tmp_path / "linked.toml"
    linked.symlink_to(place)
    secondguess_command("tune", "builtin", "--prompts", "builtin", "--config-out", linked)
    assert linked.is_symlink()
    assert place.read_text() == tuned.to_toml()


def test_a_closed_pipe_loses_no_result(secondguess_command, tmp_path, monkeypatch, tuned):
    monkeypatch.setattr(tuning, "run_tune", lambda *_: tuned)
    for output in ((), ("--output", tmp_path / "out")):
        place = tmp_path / "tuned.toml"
        reader, writer = os.pipe()
        os.close(reader)
        with monkeypatch.context() as patch, os.fdopen(writer, "w") as closed:
            patch.setattr("sys.stdout", closed)
            done = secondguess_command(
                "tune", "builtin", "--prompts", "builtin", "--config-out", place, *output
            )
        assert done.code == 141
        assert place.read_text() == tuned.to_toml()
        place.unlink()
    assert len(list((tmp_path / "out").iterdir())) == 2


def test_an_interruption_reports_the_step_and_writes_nothing(
    secondguess_command, tmp_path, monkeypatch, tiny_checkpoint
):
    def interrupted(self):
        raise KeyboardInterrupt

    monkeypatch.setitem(tuning.Tuner.STEPS, "comparing controllers", interrupted)
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
    assert done.err.endswith("interrupted at step 2 of 4, comparing controllers; nothing was written\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--drafter", "guess"], "expected a drafter among"),
        (["--drafter", "none"], "plain decoding is always measured"),
        (["--drafter", "suffix", "--drafter", "suffix"], "expected --drafter to have different values"),
        (["--drafter", "model:nowhere"], "nowhere"),
        (["--num-prompts", "0"], "expected --num-prompts to be greater than or equal to 1, got 0"),
        (["--max-tokens", "1"], "expected --max-tokens to be greater than or equal to 2, got 1"),
        (["--max-tokens", "256"], "lower --max-tokens"),
        (["--batch-size", "0"], "expected --batch-size to be greater than or equal to 1, got 0"),
        (
            ["--batch-size", "2", "--batch-size", "2"],
            "expected --batch-size to have different values, got (2, 2)",
        ),
        (["--minutes", "nan"], "expected --minutes to be a finite number"),
        (["--minutes", "-1"], "expected --minutes to be greater than or equal to 0.01"),
        (["--threads", "0"], "expected --threads to be greater than or equal to 1"),
        (["--temperature", "-1"], "expected --temperature to be greater than or equal to 0"),
        (["--dtype", "int3"], "expected dtype"),
        (["--output", "a-file"], "expected a folder for --output, got the file a-file"),
        (["--output", "a-file/x"], "expected a folder for --output that can be written to, got a-file/x"),
        (["--config-out", "a-folder"], "expected a file for --config-out, got the folder a-folder"),
        (
            ["--config-out", "a-pipe"],
            "expected a file for --config-out, got a-pipe, which is a pipe or a device",
        ),
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
    os.mkfifo(tmp_path / "a-pipe")
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe\x00\x01")
    done = secondguess_command("tune", tiny_checkpoint, "--prompts", "builtin", "--device", "cpu", *options)
    assert done.code == 2, done.out
    assert message in done.err
    assert len(done.err.splitlines()) == 1
    assert not (tmp_path / "secondguess.toml").exists()


def test_drafters_are_checked_before_the_target_is_loaded(secondguess_command, tiny_checkpoint, monkeypatch):
    monkeypatch.setattr("secondguess.checkpoint.loader.module_of", lambda _: pytest.fail("weights were read"))
    for drafter, words in (("medusa:nowhere", "nowhere"), ("early-exit:2", "layers 0 to 1")):
        done = secondguess_command(
            "tune", tiny_checkpoint, "--drafter", drafter, "--prompts", "builtin", "--device", "cpu"
        )
        assert done.code == 2
        assert words in done.err
