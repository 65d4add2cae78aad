"""Order of turns, seeds, interruption and refusals, with fake systems."""

from types import SimpleNamespace

import pytest
from bench_fakes import FakeBatcher, FakeSystem

from secondguess.bench.config import BenchConfig
from secondguess.bench.costs import Costs
from secondguess.bench.measurement import Batch, Measurement, Setting, make_batches, turns
from secondguess.bench.results import costs_of
from secondguess.bench.roster import all_drafters, drafters_to_run
from secondguess.bench.systems import Run
from secondguess.builtin import builtin_paths, head_path
from secondguess.drafters import parse_drafter_name
from secondguess.errors import BadInputError
from secondguess.stats import Stats


class CountingProbe:
    def __init__(self):
        self.num_samples = 0
        self.warmed_up = False

    def sample(self):
        self.num_samples += 1

    def warm_up(self):
        self.warmed_up = True


class Measured(Measurement):
    """A measurement of fake systems, with a counting probe."""

    def __init__(self, systems, num_prompts, temperatures, batch_sizes, seed):
        prompts, tasks = [[1, 2]] * num_prompts, [""] * num_prompts
        config = BenchConfig(num_tokens=4, temperatures=temperatures, batch_sizes=batch_sizes, seed=seed)
        super().__init__(prompts, tasks, config)
        self.systems, self.probe = systems, CountingProbe()

    def run(self, progress):
        return super().run(self.systems, self.probe, progress)

    def finished_runs(self, systems=None):
        return super().finished_runs(systems or self.systems)


def measurement(log, *systems, num_prompts=2, temperatures=(0.0, 1.0), batch_sizes=(1,), seed=0):
    return Measured(list(systems), num_prompts, temperatures, batch_sizes, seed)


def ignore(done, total, what):
    pass


def test_the_step_of_a_head_is_its_drafting_time_per_level_in_one_setting():
    head = SimpleNamespace(draft_model=None, has_draft_probs=True)
    probe = SimpleNamespace(costs=lambda model: Costs({1: 1.0}))
    stats = Stats(num_rounds=3, drafted_per_position=[2, 1, 1], drafting_seconds=2.0)
    runs = [Run([[1]], 1.0, stats), Run([[1]], 1.0, Stats(num_rounds=1))]
    assert costs_of(head, probe, runs, batch_size=1).draft_step == pytest.approx(0.5)
    assert costs_of(head, probe, runs, batch_size=2).draft_step == pytest.approx(1.0)
    assert costs_of(head, probe, runs[1:], batch_size=1).draft_step == 0, "nothing was drafted"


def test_systems_run_in_alternating_order():
    order = [
        [(system, temperature) for temperature, system in turns("AB", (0, 1), index)] for index in range(3)
    ]
    assert order[0] == [("A", 0), ("B", 0), ("A", 1), ("B", 1)]
    assert order[1] == order[0][::-1]
    assert order[2] == order[0]


def test_every_system_gets_every_prompt_with_the_same_seed():
    log = []
    systems = [FakeSystem("A", log), FakeSystem("B", log)]
    measured = measurement(log, *systems, seed=7, temperatures=(0.0,))
    assert measured.run(ignore)
    warm_up, counted = log[:2], log[2:]
    assert {name for name, _, _ in warm_up} == {"A", "B"}
    assert counted == [("A", 0.0, 7), ("B", 0.0, 7), ("B", 0.0, 8), ("A", 0.0, 8)]
    assert measured.probe.num_samples == 2
    assert measured.probe.warmed_up
    assert measured.finished_prompts == {0, 1}


def test_a_steady_drift_gives_equal_systems_equal_medians():
    """The machine gets slower with every run; ABBA keeps the sum of both systems' seconds equal."""
    log = []

    class Drifting(FakeSystem):
        def generate(self, *arguments):
            self.speed = 1 / (1 + 0.1 * len(self.log))
            return super().generate(*arguments)

    systems = [Drifting("A", log), Drifting("B", log)]
    measured = measurement(log, *systems, num_prompts=2, temperatures=(0.0,))
    measured.run(ignore)
    seconds = {
        name: sum(run.seconds for run in runs)
        for name, runs in measured.finished_runs()[Setting(0.0)].items()
    }
    assert seconds["A"] == pytest.approx(seconds["B"])


def test_ctrl_c_keeps_only_finished_prompts():
    log = []
    # One warm-up run and two prompts of one run each for both systems, then the third prompt is cut.
    systems = [FakeSystem("A", log, interrupt_at=7), FakeSystem("B", log, interrupt_at=7)]
    measured = measurement(log, *systems, num_prompts=3, temperatures=(0.0,))
    assert not measured.run(ignore)
    finished = measured.finished_runs()
    assert measured.finished_prompts == {0, 1}
    assert {name: len(runs) for name, runs in finished[Setting(0.0)].items()} == {"A": 2, "B": 2}


def test_ctrl_c_before_the_first_result_is_passed_on():
    log = []
    measured = measurement(log, FakeSystem("A", log, interrupt_at=1), temperatures=(0.0,))
    with pytest.raises(KeyboardInterrupt):
        measured.run(ignore)


def test_progress_counts_up_to_all_runs():
    log, told = [], []
    measured = measurement(log, FakeSystem("A", log), FakeSystem("B", log))
    measured.run(lambda done, total, what: told.append((done, total)))
    assert [done for done, _ in told] == [0, *range(8), 8]
    assert {total for _, total in told} == {8}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperatures": ()}, "temperatures"),
        ({"temperatures": (-1.0,)}, "temperatures"),
        ({"temperatures": (1.0, 1.0)}, "temperatures"),
        ({"draft_lengths": (3, 3)}, "draft_lengths"),
        ({"drafters": ("ngram", "ngram")}, "drafters"),
        ({"against": ("transformers", "transformers")}, "against"),
        ({"prompts": ()}, "prompts"),
        ({"prompts": ("gsm8k", "gsm8k")}, "prompts"),
        ({"tasks": ("qa", "qa")}, "tasks"),
        ({"controllers": ("fixed:3", "fixed:3")}, "controllers"),
        ({"batch_sizes": ()}, "batch_sizes"),
        ({"batch_sizes": (4, 4)}, "batch_sizes"),
        ({"name": ""}, "name"),
    ],
)
def test_invalid_settings_are_refused_by_name(settings, message):
    with pytest.raises(BadInputError, match=message):
        BenchConfig(**settings)


def test_the_default_drafters_depend_on_the_model():
    assert drafters_to_run(BenchConfig(), "suffix+model:builtin-draft") == (
        "suffix+model:builtin-draft",
        "suffix",
        "model:builtin-draft",
        "ngram",
    )
    assert drafters_to_run(BenchConfig(model="some/model"), "suffix") == ("suffix", "ngram")
    assert drafters_to_run(BenchConfig(drafters=("ngram",)), "suffix") == ("ngram",)
    assert drafters_to_run(BenchConfig(drafters=("auto", "ngram")), "suffix+mtp") == ("suffix+mtp", "ngram")


def test_all_selects_every_drafter_with_chains_and_trees():
    names = drafters_to_run(BenchConfig(drafters=("all",)), "suffix")
    assert {"suffix", "ngram", "model:builtin-draft"} < set(names)
    assert any(name.startswith("model:builtin-draft,tree=") for name in names)
    assert all(parse_drafter_name(name) for name in names)


@pytest.mark.parametrize(
    ("checkpoint", "expected"), [(builtin_paths().target, False), (head_path("mtp"), True)]
)
def test_modules_in_a_targets_own_checkpoint_are_found(checkpoint, expected):
    assert ("mtp" in all_drafters(str(checkpoint), "suffix")) == expected


def test_the_run_of_a_batch_is_the_median_of_its_runs():
    class Varying(FakeSystem):
        def generate(self, *arguments):
            self.speed = [8.0, 10.0, 2.0, 4.0][len(self.log)]
            return super().generate(*arguments)

    system = Varying("A", [])
    measured = measurement([], system, num_prompts=2, temperatures=(0.0,))
    for index in (0, 0, 0, 1):
        measured.run_batch([system], 1, index)
    speeds = [run.tokens_per_second for run in measured.runs_of("A", Setting(0.0))]
    assert speeds == [8.0, 4.0]
    assert len(measured.runs_of("A", Setting(0.0), range(1))) == 1


def test_a_batch_that_runs_again_has_the_reverse_order():
    log = []
    systems = [FakeSystem("A", log), FakeSystem("B", log)]
    measured = measurement(log, *systems, temperatures=(0.0,))
    for _ in range(2):
        measured.run_batch(systems, 1, 0)
    assert [name for name, *_ in log] == ["A", "B", "B", "A"]


def test_batches_are_of_one_task_and_of_exactly_their_size():
    tasks = ["a", "b", "a", "b", "a", "a", "a"]
    assert make_batches(tasks, 1) == [Batch((place,), task) for place, task in enumerate(tasks)]
    for size in (2, 3, 4):
        batches = make_batches(tasks, size)
        assert {len(batch.prompts) for batch in batches} == {size}
        assert {place for batch in batches for place in batch.prompts} == set(range(7))
        assert all(tasks[place] == batch.task for batch in batches for place in batch.prompts)
    # Five prompts of "a" fill two batches of three with one of them twice, two of "b" one batch with one of them twice.
    assert sorted(batch.prompts for batch in make_batches(tasks, 3)) == [(0, 2, 4), (1, 3, 1), (5, 6, 0)]


def test_systems_without_batches_run_single_prompts_only():
    log = []
    systems = [FakeBatcher("A", log), FakeSystem("B", log)]
    measured = measurement(log, *systems, num_prompts=4, temperatures=(0.0,), batch_sizes=(1, 2))
    assert measured.run(ignore)
    lengths = {
        setting: {name: len(runs) for name, runs in of.items()}
        for setting, of in measured.finished_runs().items()
    }
    assert lengths == {Setting(0.0, 1): {"A": 4, "B": 4}, Setting(0.0, 2): {"A": 2}}
    runs = measured.finished_runs()[Setting(0.0, 2)]["A"]
    assert {tuple(map(len, run.texts)) for run in runs} == {(4, 4)}
    assert len(measured.finished_prompts) == 4
    assert {size: len(batches) for size, batches in measured.finished_batches.items()} == {1: 4, 2: 2}
    assert measured.notes == []


def test_batch_sizes_are_mixed_over_the_run_and_each_alternates():
    log = []
    measured = measurement(
        log,
        FakeBatcher("A", log),
        FakeBatcher("B", log),
        num_prompts=4,
        temperatures=(0.0,),
        batch_sizes=(1, 4),
    )
    told = []
    measured.run(lambda done, total, what: told.append(what))
    order = [what.split(",")[0] + what[-1] for what in told[1:-1]]
    assert order == [
        "prompt 1A", "prompt 1B", "prompt 2B", "prompt 2A", "batch 1 of 4 promptsA", "batch 1 of 4 promptsB",
        "prompt 3A", "prompt 3B", "prompt 4B", "prompt 4A",
    ]  # fmt: skip


def test_prompts_that_fill_up_a_batch_are_reported():
    log = []
    measured = measurement(log, FakeBatcher("A", log), num_prompts=3, temperatures=(0.0,), batch_sizes=(2,))
    measured.run(ignore)
    assert measured.notes == [
        "batch size 2: 1 of 4 rows of the batches repeat a prompt of the same task, to fill the last batch"
    ]
    assert len(measured.finished_prompts) == 3


def test_ctrl_c_leaves_out_a_batch_size_without_finished_batches():
    log = []
    # Two warm-ups (one of them two prompts) and the first prompt, then the batch is cut.
    system = FakeBatcher("A", log, interrupt_at=5)
    measured = measurement(log, system, num_prompts=4, temperatures=(0.0,), batch_sizes=(1, 2))
    assert not measured.run(ignore)
    assert list(measured.finished_runs()) == [Setting(0.0, 1)]
    assert measured.finished_batches[2] == []


def test_a_row_of_a_batch_that_is_too_short_is_not_compared():
    class Lazy(FakeBatcher):
        def generate(self, prompts, num_tokens, temperature, seed):
            run = super().generate(prompts, num_tokens, temperature, seed)
            texts = run.texts
            return Run([texts[0][:-1], [*texts[1], 7]], run.seconds)

    measured = measurement([], Lazy("A", []), batch_sizes=(2,))
    with pytest.raises(BadInputError, match="expected 4 tokens from A to be comparable, got 3, 5"):
        measured.run(ignore)


def test_the_controller_is_reset_after_the_warm_up():
    class TrainableHead(FakeSystem):
        def reset(self):
            self.log.append("forget")

    log = []
    measured = measurement(log, TrainableHead("A", log), num_prompts=1, temperatures=(0.0,))
    measured.run(ignore)
    assert log == [("A", 0.0, 0), "forget", ("A", 0.0, 0)]
