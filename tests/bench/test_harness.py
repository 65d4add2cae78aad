"""Order of turns, seeds, interruption and refusals, with systems that cost what we say."""

import pytest
from bench_fakes import FakeSystem

from secondguess.bench.config import BenchConfig
from secondguess.bench.encoding import typical_context
from secondguess.bench.measurement import Measurement, Setting, turns
from secondguess.errors import BadInputError


class CountingProbe:
    def __init__(self):
        self.num_samples = 0
        self.warmed_up = False

    def sample(self):
        self.num_samples += 1

    def warm_up(self):
        self.warmed_up = True


def measurement(log, *systems, num_prompts=2, **settings):
    config = BenchConfig(num_tokens=4, **settings)
    return Measurement(list(systems), [[1, 2]] * num_prompts, config, CountingProbe())


def ignore(done, total, what):
    pass


def test_turns_alternate_so_that_drift_hits_all_alike():
    order = [
        [(system, temperature) for temperature, system in turns("AB", (0, 1), index)] for index in range(3)
    ]
    assert order[0] == [("A", 0), ("B", 0), ("A", 1), ("B", 1)]
    assert order[1] == order[0][::-1]
    assert order[2] == order[0]


def test_every_system_has_every_prompt_with_the_same_seed():
    log = []
    systems = [FakeSystem("A", log), FakeSystem("B", log)]
    measured = measurement(log, *systems, seed=7, temperatures=(0.0,))
    assert measured.run(ignore)
    warm_up, counted = log[:2], log[2:]
    assert {name for name, _, _ in warm_up} == {"A", "B"}
    assert counted == [("A", 0.0, 7), ("B", 0.0, 7), ("B", 0.0, 8), ("A", 0.0, 8)]
    assert measured.probe.num_samples == 2
    assert measured.probe.warmed_up
    assert measured.num_finished == 2


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
    seconds = {name: sum(run.seconds for run in runs[Setting(0.0)]) for name, runs in measured.runs.items()}
    assert seconds["A"] == pytest.approx(seconds["B"])


def test_ctrl_c_keeps_the_finished_prompts_and_no_half_ones():
    log = []
    # One warm-up run and two prompts of one run each for both systems, then the third prompt is cut.
    systems = [FakeSystem("A", log, interrupt_at=7), FakeSystem("B", log, interrupt_at=7)]
    measured = measurement(log, *systems, num_prompts=3, temperatures=(0.0,))
    assert not measured.run(ignore)
    finished = measured.finished_runs()
    assert measured.num_finished == 2
    assert [len(runs[Setting(0.0)]) for runs in finished.values()] == [2, 2]


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


def test_a_system_that_stops_early_is_not_compared():
    class Lazy(FakeSystem):
        def generate(self, *arguments):
            run = super().generate(*arguments)
            run.tokens.pop()
            return run

    measured = measurement([], Lazy("A", []))
    with pytest.raises(BadInputError, match="expected 4 tokens from A"):
        measured.run(ignore)


def test_the_context_of_the_cost_curve_is_half_way_through_a_median_row():
    prompts = [[1] * 10, [2] * 20, [3] * 90]
    assert len(typical_context(prompts, num_tokens=8)) == 20 + 4
    assert len(typical_context([[1, 2, 3]], num_tokens=100)) == 3 + 50


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_prompts": 0}, "num_prompts"),
        ({"num_tokens": 0}, "num_tokens"),
        ({"num_threads": -1}, "num_threads"),
        ({"temperatures": ()}, "temperatures"),
        ({"temperatures": (-1.0,)}, "temperatures"),
        ({"temperatures": (float("nan"),)}, "temperatures"),
        ({"temperatures": (1.0, 1.0)}, "temperatures"),
        ({"draft_lengths": (0,)}, "draft_lengths"),
        ({"draft_lengths": (3, 3)}, "draft_lengths"),
        ({"drafters": ("ngram", "ngram")}, "drafters"),
        ({"against": ("vllm",)}, "one of transformers"),
        ({"seed": -1}, "seed"),
        ({"name": "../evil"}, "name"),
        ({"name": ""}, "name"),
    ],
)
def test_absurd_settings_are_refused_by_name(settings, message):
    with pytest.raises(BadInputError, match=message):
        BenchConfig(**settings)


def test_the_drafters_follow_the_model_unless_named():
    assert BenchConfig().drafters_to_run == ("model:builtin-draft", "ngram", "suffix")
    assert BenchConfig(model="some/model").drafters_to_run == ("suffix", "ngram")
    assert BenchConfig(drafters=("ngram",)).drafters_to_run == ("ngram",)
