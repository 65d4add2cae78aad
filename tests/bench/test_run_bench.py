"""The whole benchmark on tiny random checkpoints, against Transformers."""

import json
import re
import shutil

import pytest
import torch

from secondguess.api import load
from secondguess.bench.config import BenchConfig
from secondguess.bench.harness import run_bench
from secondguess.bench.peers import TransformersModel, TransformersSystem, transformers_systems
from secondguess.bench.roster import make_systems
from secondguess.bench.systems import Models, SecondguessSystem
from secondguess.bench.writing import as_markdown, save_report
from secondguess.errors import BadInputError, CheckpointError, OutOfMemoryError
from secondguess.workloads.loading import DATA_VARIABLE

PROMPT = [5, 17, 42, 99, 7, 7, 140]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def stock(tiny_checkpoint):
    return TransformersModel(tiny_checkpoint, torch.float32, CPU)


@pytest.fixture(scope="module")
def assistant(tiny_draft_checkpoint):
    return TransformersModel(tiny_draft_checkpoint, torch.float32, CPU)


@pytest.fixture(scope="module")
def report(tiny_checkpoint, tiny_draft_checkpoint, tmp_path_factory):
    prompts = tmp_path_factory.mktemp("prompts") / "two.jsonl"
    prompts.write_text('{"prompt": "def quicksort(items):"}\n{"prompt": "class Stack:\\n    def"}\n')
    config = BenchConfig(
        model=str(tiny_checkpoint),
        drafters=(f"model:{tiny_draft_checkpoint}", "ngram"),
        against=("transformers",),
        prompts=(str(prompts),),
        num_tokens=10,
        draft_lengths=(2,),
        dtype="float32",
        num_threads=1,
        name="tiny",
    )
    return run_bench(config)


def test_every_system_runs_at_every_temperature(report, tiny_draft_checkpoint):
    ours = f"secondguess model:{tiny_draft_checkpoint.name}"
    assert [result.system for result in report.results if result.temperature == 1.0] == [
        "secondguess plain",
        ours,
        f"{ours} fixed:2",
        "secondguess ngram",
        "transformers plain",
        "transformers assisted 2",
        "transformers assisted",
        "transformers prompt lookup",
    ]
    assert len(report.results) == 16
    assert report.complete
    assert report.workbench.num_prompts == 2


def test_greedy_texts_are_equal_in_full_precision(report):
    compared = [result.equality for result in report.results if result.equality is not None]
    assert len(compared) == 7
    assert all(equality.num_tokens == 20 for equality in compared)
    assert [equality.num_prompts_differing for equality in compared] == [0] * 7
    assert report.result("transformers plain", 0.0).equality.reference == "secondguess plain"


def test_a_constant_draft_length_is_kept_and_costs_are_measured(report, tiny_draft_checkpoint):
    fixed = report.result(f"secondguess model:{tiny_draft_checkpoint.name} fixed:2", 0.0).rounds
    # The last rounds have less room than two nodes.
    assert 1.0 < fixed.draft_length <= 2.0
    assert 0 < fixed.cost_ratio < 1
    assert fixed.predicted_tokens_per_second > 0
    assert report.result("secondguess ngram", 0.0).rounds.cost_ratio == 0
    assert report.result("secondguess plain", 0.0).rounds.acceptance_length == 1.0
    assert list(report.costs.target_ms) == list(range(1, 10))


def test_saved_results_contain_no_absolute_paths(report, tmp_path):
    for path in save_report(report, tmp_path):
        content = path.read_bytes()
        assert b"/tmp" not in content
        assert str(tmp_path).encode() not in content
    told = json.loads(report.to_json())
    assert told["provenance"]["dtype"] == "float32"
    assert all(len(digest) == 64 for digest in told["provenance"]["model_sha256"].values())
    assert len(told["provenance"]["model_sha256"]) == 2


def test_the_number_of_threads_is_restored(report):
    before = torch.get_num_threads()
    with pytest.raises(CheckpointError):
        run_bench(BenchConfig(model="no/such/model", prompts=("builtin",), num_threads=before + 1))
    assert torch.get_num_threads() == before


def test_defaults_are_those_of_other_commands_and_are_recorded(tiny_checkpoint):
    config = BenchConfig(
        model=str(tiny_checkpoint), prompts=("builtin",), num_prompts=1, num_tokens=2, drafters=()
    )
    assert (config.dtype, config.device, config.num_threads) == ("auto", "auto", None)
    about = run_bench(config).provenance
    target = load(str(tiny_checkpoint), "none").target
    assert (about.dtype, about.device) == (target.dtype, target.device)
    assert about.num_threads == torch.get_num_threads()


def test_prompts_that_do_not_fit_are_refused(tiny_checkpoint):
    config = BenchConfig(
        model=str(tiny_checkpoint), prompts=("builtin",), num_tokens=255, dtype="float32", drafters=()
    )
    with pytest.raises(BadInputError, match="take other prompts or fewer tokens"):
        run_bench(config)


def test_a_batch_that_does_not_fit_into_memory_is_refused(tiny_checkpoint, monkeypatch):
    monkeypatch.setattr("secondguess.checkpoint.memory.available_memory", lambda _: 3 * 10**7)
    config = BenchConfig(
        model=str(tiny_checkpoint),
        prompts=("builtin",),
        num_prompts=1,
        num_tokens=2,
        temperatures=(0.0,),
        dtype="float32",
        drafters=(),
        batch_sizes=(1, 1024),
    )
    with pytest.raises(OutOfMemoryError, match=r"1,024 rows .* smaller --batch-size"):
        run_bench(config)


def test_end_tokens_do_not_end_a_text(models, stock, tiny_checkpoint, tmp_path):
    """The end token is set to one that greedy decoding writes early."""
    (usual,) = TransformersSystem(stock).generate([PROMPT], 8, 0.0, seed=0).texts
    ending = tmp_path / "ending"
    shutil.copytree(tiny_checkpoint, ending)
    for name in ("config.json", "generation_config.json"):
        settings = json.loads((ending / name).read_text()) | {"eos_token_id": usual[1]}
        (ending / name).write_text(json.dumps(settings))
    ended = Models(str(ending), "float32", "cpu")
    assert usual[1] in ended.target.end_tokens
    assert SecondguessSystem(ended, "none").generate([PROMPT], 8, 0.0, seed=0).texts == [usual]
    for system in transformers_systems(TransformersModel(ending, torch.float32, CPU), {}, ()):
        assert system.generate([PROMPT], 8, 0.0, seed=0).texts == [usual]


def test_the_assistant_drafts_as_many_tokens_as_the_system_is_named_for(stock, assistant):
    """Counted in forwards: what the assistant really ran between two passes of the target."""
    drafted = []

    def start_round(*_):
        drafted.append(0)

    def count_step(*_):
        drafted[-1] += 1

    def run(draft_length):
        drafted[:] = [0]
        system = TransformersSystem(stock, assistant=assistant, draft_length=draft_length)
        system.generate([PROMPT], 24, 0.0, seed=0)
        return drafted[:5]

    handles = [
        stock.module.register_forward_hook(start_round),
        assistant.module.register_forward_hook(count_step),
    ]
    try:
        # The systems share an assistant, so each must bring its own settings along, whatever ran before. The untrained
        # drafter is unsure: by default it stops after one token.
        counts = {length: run(length) for length in (3, 8, None)}
        assert run(3) == counts[3]
    finally:
        for handle in handles:
            handle.remove()
    assert counts == {3: [3] * 5, 8: [8] * 5, None: [1] * 5}


def test_every_draft_model_is_an_assistant_of_the_peers(models, tiny_checkpoint, tiny_draft_checkpoint):
    both = (f"model:{tiny_draft_checkpoint}", f"model:{tiny_checkpoint}")
    config = BenchConfig(drafters=both, against=("transformers",), draft_lengths=(3,), dtype="float32")
    systems, _ = make_systems(config, models)
    assert [(system.name, system.draft_model) for system in systems if system.family == "transformers"] == [
        ("transformers plain", None),
        (f"transformers assisted {tiny_draft_checkpoint.name} 3", str(tiny_draft_checkpoint)),
        (f"transformers assisted {tiny_draft_checkpoint.name}", str(tiny_draft_checkpoint)),
        (f"transformers assisted {tiny_checkpoint.name} 3", str(tiny_checkpoint)),
        (f"transformers assisted {tiny_checkpoint.name}", str(tiny_checkpoint)),
        ("transformers prompt lookup", None),
    ]
    sizes = {
        system.draft_model: system._assistant.module.num_parameters()
        for system in systems
        if system.family == "transformers" and system.draft_model
    }
    assert sizes[str(tiny_draft_checkpoint)] < sizes[str(tiny_checkpoint)]


def test_the_replacement_of_missing_humaneval_prompts_is_reported(tiny_checkpoint, monkeypatch):
    monkeypatch.delenv(DATA_VARIABLE, raising=False)
    told = []
    config = BenchConfig(
        model=str(tiny_checkpoint), drafters=(), num_prompts=1, num_tokens=2, dtype="float32", num_threads=1
    )
    report = run_bench(config, lambda done, total, what: told.append(what))
    assert "no humaneval.jsonl" in told[0]
    assert (report.workbench.workload, report.workbench.workload_note) == ("builtin", told[0])


def test_seeds_make_sampled_runs_repeatable(models, stock):
    for system in (SecondguessSystem(models, "ngram"), TransformersSystem(stock)):
        first, again, other = (system.generate([PROMPT], 12, 1.0, seed).texts for seed in (1, 1, 2))
        assert first == again
        assert first != other


def test_the_global_generator_is_not_used(stock):
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    TransformersSystem(stock).generate([PROMPT], 4, 1.0, seed=9)
    assert torch.equal(torch.rand(1), expected)


def test_sampled_runs_use_the_verifier_of_requests_without_a_seed(models, tiny_draft_checkpoint):
    """Coupled verification would make the text that of plain decoding with the same seed."""
    drafted = SecondguessSystem(models, f"model:{tiny_draft_checkpoint}", "fixed:4")
    texts = [
        (
            drafted.generate([PROMPT], 12, 1.0, seed).texts,
            SecondguessSystem(models, "none").generate([PROMPT], 12, 1.0, seed).texts,
        )
        for seed in range(3)
    ]
    assert any(ours != plain for ours, plain in texts)


def test_rows_of_a_batch_generate_the_same_text_as_alone(models, tiny_draft_checkpoint):
    prompts = [PROMPT, PROMPT[::-1], PROMPT[:3]]
    for drafter in ("none", "ngram", f"model:{tiny_draft_checkpoint}"):
        system = SecondguessSystem(models, drafter)
        batch = system.generate(prompts, 9, 0.0, seed=0)
        alone = [system.generate([prompt], 9, 0.0, seed=0).texts[0] for prompt in prompts]
        assert batch.texts == alone
        assert (batch.num_tokens, [len(text) for text in batch.texts]) == (27, [9, 9, 9])
        assert batch.stats.num_tokens == 27
        # Rows share the time of a round: it counts once.
        assert sum(batch.stats.seconds.values()) <= batch.seconds


def test_rows_that_draft_together_share_the_time_of_drafting(models, tiny_draft_checkpoint):
    system = SecondguessSystem(models, f"model:{tiny_draft_checkpoint}", "fixed:2")
    stats = system.generate([PROMPT, PROMPT[::-1], PROMPT[:3]], 9, 0.0, seed=0).stats
    assert 0 < stats.drafting_seconds <= stats.seconds["draft"]


def test_rows_with_one_prompt_are_sampled_independently(models):
    first, second = SecondguessSystem(models, "none").generate([PROMPT, PROMPT], 12, 1.0, seed=0).texts
    assert first != second


def test_a_run_uses_the_controller_of_its_condition(models):
    system = SecondguessSystem(models, "ngram", "fixed:2")
    seen = []
    controllers = {key: system.controller(*key) for key in ((0.0, 1), (0.0, 2), (1.0, 1))}
    for key, controller in controllers.items():
        controller.learn = lambda *_, key=key: seen.append(key)
    system.generate([PROMPT], 4, 0.0, seed=0)
    system.generate([PROMPT, PROMPT], 4, 0.0, seed=0)
    system.generate([PROMPT], 4, 1.0, seed=0)
    assert list(dict.fromkeys(seen)) == [(0.0, 1), (0.0, 2), (1.0, 1)]
    assert system.controller(0.0, 1) is controllers[0.0, 1]
    system.reset()
    assert system.controller(0.0, 1) is not controllers[0.0, 1]


def test_plain_decoding_alone_can_be_measured(models):
    for drafters in (("none",), ("none", "ngram")):
        systems, _ = make_systems(BenchConfig(drafters=drafters), models)
        assert [system.name for system in systems] == ["secondguess plain", "secondguess ngram"][
            : len(drafters)
        ]


def test_named_controllers_run_with_every_drafter_that_uses_them(models, tiny_draft_checkpoint):
    drafter = f"model:{tiny_draft_checkpoint}"
    config = BenchConfig(
        drafters=(drafter, "ngram"),
        controllers=("confidence:4", "fixed:3"),
        draft_lengths=(3,),
        dtype="float32",
    )
    systems, notes = make_systems(config, models)
    ours = f"secondguess model:{tiny_draft_checkpoint.name}"
    assert [system.name for system in systems] == [
        "secondguess plain", ours, f"{ours} fixed:3", f"{ours} confidence:4", "secondguess ngram",
        "secondguess ngram fixed:3",
    ]  # fmt: skip
    assert notes == ["ngram is not run with confidence:4, which does not work with it"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"controllers": ("confidence:4",)}, "the controller 'confidence:4' works with, got ngram"),
        ({"controllers": ("guess:4",)}, "guess"),
        ({"controllers": ("fixed:4",), "drafters": ()}, "got none at all"),
        ({"draft_lengths": (65,)}, "between 0 and 64"),
    ],
)
def test_a_controller_that_no_drafter_uses_is_refused(models, settings, message):
    with pytest.raises(BadInputError, match=message):
        make_systems(BenchConfig(**{"drafters": ("ngram",), "dtype": "float32", **settings}), models)


@pytest.fixture(scope="module")
def batched(tiny_checkpoint, tmp_path_factory):
    """Two tasks at two batch sizes, with a prompt that does not fit."""
    path = tmp_path_factory.mktemp("tasks") / "tasks.jsonl"
    texts = [("sums", "1 + 1 ="), ("sums", "2 + 2 = " * 200), ("sums", "3 + 3 ="), ("songs", "la la")]
    path.write_text("".join(json.dumps({"prompt": text, "task": task}) + "\n" for task, text in texts))
    return run_bench(
        BenchConfig(
            model=str(tiny_checkpoint), drafters=("ngram",), against=("transformers",), prompts=(str(path),),
            num_tokens=6, temperatures=(0.0,), batch_sizes=(1, 2), dtype="float32", num_threads=1,
        )
    )  # fmt: skip


def test_every_batch_size_has_a_table_and_peers_run_at_size_1(batched):
    assert [(result.system, result.batch_size) for result in batched.results] == [
        ("secondguess plain", 1), ("secondguess ngram", 1), ("transformers plain", 1),
        ("transformers prompt lookup", 1), ("secondguess plain", 2), ("secondguess ngram", 2),
    ]  # fmt: skip
    page = as_markdown(batched)
    assert "## Temperature 0\n" in page
    assert "## Temperature 0, batch size 2\n" in page
    assert "transformers: at batch size 1 only" in page
    pair = batched.result("secondguess ngram", 0.0, 2)
    assert pair.equality.first_differences == [None] * 6
    assert pair.rounds.predicted_tokens_per_second is None
    assert pair.rounds.acceptance_length >= 1


def test_results_are_reported_by_task(batched):
    assert batched.workbench.tasks == {1: ["sums", "sums", "songs", "sums"], 2: ["sums", "songs", "sums"]}
    plain, ngram = (batched.result(f"secondguess {name}", 0.0).by_task for name in ("plain", "ngram"))
    assert {task: each.num_batches for task, each in ngram.items()} == {"sums": 3, "songs": 1}
    assert plain["sums"].against_plain is None
    assert ngram["sums"].against_plain.of_medians > 0
    assert ngram["songs"].acceptance_length >= 1
    assert re.search(r"\| method +\| sums \(3\) +\| songs \(1\) +\|", as_markdown(batched))


def test_a_truncated_prompt_is_reported(batched):
    assert batched.workbench.num_prompts_cut == 1
    assert "1 of 4 prompts were cut from the left to the 250 tokens" in as_markdown(batched)
