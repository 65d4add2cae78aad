"""Training the predictor of acceptance: the labels, the prompts, the split, and the command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from secondguess.bench.traces import NodeProbs, RecordedDraft, Trace, node_chances, record
from secondguess.controllers import make_controller
from secondguess.controllers.predictor import Predictor
from secondguess.core import Candidate, Draft, Row
from secondguess.drafters.model import ModelDrafter
from secondguess.errors import BadInputError
from secondguess.proof.fakes import TableModel, random_probs
from secondguess.sampling import SamplingParams
from secondguess.sampling.noise import KeyedNoise
from secondguess.sampling.probs import compute_target_probs
from secondguess.train.acceptance_training import (
    AcceptanceRecipe,
    examples_of,
    split,
    train_acceptance,
)
from secondguess.train.stdlib_prompts import MAX_PROMPT_CHARACTERS, standard_library_prompts
from secondguess.verifiers import make_verifier
from secondguess.workloads.loading import BUILTIN_PROMPTS

VOCAB_SIZE = 6
TARGET, DRAFTER = random_probs(VOCAB_SIZE, seed=1), random_probs(VOCAB_SIZE, seed=2)


def row_of(temperature: float, coupled: bool = False, seed: int = 0) -> Row:
    params = SamplingParams(max_tokens=60, temperature=temperature, seed=seed if coupled else None)
    return Row([1, 2], params, seed=seed, coupled=coupled)


def recorded(rows: list[Row], num_tokens: int = 8) -> list[Trace]:
    drafter = ModelDrafter(TableModel(VOCAB_SIZE, DRAFTER), "model:table", VOCAB_SIZE)
    return record(TableModel(VOCAB_SIZE, TARGET), drafter, make_verifier("auto"), rows, num_tokens, 3)


def chances_of(row: Row, tokens: list[int]) -> tuple[list[float], torch.Tensor, KeyedNoise]:
    """The chances of a chain of these tokens drawn from the drafter's laws, and the target's laws."""
    dists = torch.stack([DRAFTER((1, 2, *tokens[:place])) for place in range(len(tokens))])[None]
    logits = torch.stack([TARGET((1, 2, *tokens[:place])) for place in range(len(tokens) + 1)])[None].log()
    draft = Draft.chains([tokens], None if row.params.temperature == 0 else dists)
    target_probs = compute_target_probs(logits, [row], draft)
    noise = KeyedNoise.from_rows([row])
    return node_chances(draft, target_probs, noise)[0], target_probs[0], noise


def test_a_sampled_node_has_the_chance_of_the_rejection_rule() -> None:
    tokens: list[int] = []
    for _ in range(3):
        tokens.append(int(DRAFTER((1, 2, *tokens)).argmax()))
    chances, target_probs, _ = chances_of(row_of(1.0), tokens)
    expected = [
        min(1.0, float(target_probs[place, token] / DRAFTER((1, 2, *tokens[:place]))[token]))
        for place, token in enumerate(tokens)
    ]
    assert chances == pytest.approx(expected)
    assert 0 < min(chances) < 1


def test_at_temperature_0_a_node_is_the_most_likely_token_or_is_not() -> None:
    best = int(TARGET((1, 2)).argmax())
    tokens = [best, (int(TARGET((1, 2, best)).argmax()) + 1) % VOCAB_SIZE, 0]
    chances, target_probs, _ = chances_of(row_of(0.0), tokens)
    assert chances[:2] == [1.0, 0.0]
    # Every node counts on its own prefix, also behind a rejected one.
    assert chances[2] == float(int(target_probs[2].argmax()) == 0)


def test_a_coupled_node_wins_the_race_or_does_not() -> None:
    row = row_of(1.0, coupled=True, seed=5)
    noise = KeyedNoise.from_rows([row])
    winners: list[int] = []
    for place in range(3):
        dist = TARGET((1, 2, *winners))[None, None]
        winners.append(int(noise.race(dist, torch.tensor([[place]]))[0, 0]))
    assert chances_of(row, winners)[0] == [1.0, 1.0, 1.0]
    wrong = [winners[0], (winners[1] + 1) % VOCAB_SIZE]
    assert chances_of(row, wrong)[0] == [1.0, 0.0]


def test_nothing_drafted_has_no_chances() -> None:
    noise = KeyedNoise.from_rows([row_of(1.0)])
    assert node_chances(Draft.empty(1), torch.ones(1, 1, VOCAB_SIZE), noise) == [[]]


@pytest.mark.parametrize(("temperature", "coupled"), [(0.0, False), (1.0, True)])
def test_where_the_text_is_decided_the_chances_say_what_is_accepted(
    temperature: float, coupled: bool
) -> None:
    (trace,) = recorded([row_of(temperature, coupled)])
    assert trace.coupled is coupled
    for guess in trace.drafts[0]:
        assert len(guess.chances) == len(guess.dists) == guess.num_nodes == 3
        assert numpy.cumprod(guess.chances).sum() == guess.accepted[-1]


def test_sampled_chances_expect_what_is_accepted_on_average() -> None:
    """With `rejection`, whose law they are, over many texts."""
    rows = [row_of(1.0, seed=seed) for seed in range(40)]
    drafter = ModelDrafter(TableModel(VOCAB_SIZE, DRAFTER), "model:table", VOCAB_SIZE)
    target = TableModel(VOCAB_SIZE, TARGET)
    traces = record(target, drafter, make_verifier("rejection"), rows, 20, 2)
    drafts = [guess for trace in traces for guess in trace.drafts[0]]
    expected = [numpy.cumprod(guess.chances).sum() for guess in drafts]
    difference = numpy.array([guess.accepted[-1] for guess in drafts]) - expected
    # 800 guesses whose differences deviate by about 0.5: four standard errors.
    assert abs(difference.mean()) < 4 * difference.std() / len(drafts) ** 0.5


def guess_of(num_nodes: int, chance: float) -> RecordedDraft:
    dists = tuple(NodeProbs(0.5 + 0.1 * place, 1.0, 0.2) for place in range(num_nodes))
    return RecordedDraft(Candidate(), dists, (0,) * num_nodes, (chance,) * num_nodes)


def test_examples_hold_what_the_traces_say() -> None:
    deterministic = RecordedDraft(Candidate(deterministic=True), (), (1, 2), (1.0, 1.0))
    trace = Trace(
        "", 2, 0.5, [[guess_of(3, 0.25), guess_of(1, 0.75)], [deterministic, deterministic]], coupled=True
    )
    examples = examples_of([trace])
    assert examples.real.tolist() == [[True, True, True], [True, False, False]]
    assert examples.chances.tolist() == [[0.25, 0.25, 0.25], [0.75, 0.0, 0.0]]
    assert examples.features[0, :, 0] == pytest.approx(numpy.log([0.5, 0.6, 0.7]))
    assert examples.features[0, :, 5] == pytest.approx(numpy.log([1.0, 0.5, 0.3]))
    assert examples.features[0, 0, 6:].tolist() == [0.5, 1.0]
    with pytest.raises(BadInputError, match="drafts with distributions"):
        examples_of([Trace("", 2, 0.0, [[deterministic]])])


def test_every_fifth_prompt_is_held_out_in_every_manner() -> None:
    traces = [Trace(f"{index % 10}", 1, 0.0, []) for index in range(30)]
    training, held_out = split(traces, 10)
    assert [trace.task for trace in held_out] == ["4", "9"] * 3
    assert len(training) == 24


def test_the_prompts_come_from_the_standard_library() -> None:
    workload = standard_library_prompts(40)
    assert len(set(workload.prompts)) == 40
    assert all(0 < len(prompt) <= MAX_PROMPT_CHARACTERS for prompt in workload.prompts)
    code = [prompt for prompt in workload.prompts if prompt.startswith("def ")]
    assert len(code) >= 20
    assert all('"""' in prompt or "'''" in prompt or '"' in prompt for prompt in code)
    # The held-out fifth is a mixture, too.
    assert 2 <= sum(prompt.startswith("def ") for prompt in workload.prompts[4::5]) <= 6
    assert not set(workload.prompts) & set(BUILTIN_PROMPTS)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "some.jsonl"
    texts = ["def quicksort(items):", "class Stack:", "import ", "return [*", "print(", "self.items"]
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts), encoding="utf-8")
    return path


@pytest.fixture
def command(
    prompts: Path, tmp_path: Path, tiny_checkpoint: Path, tiny_draft_checkpoint: Path
) -> dict[str, Any]:
    return {
        "--model": tiny_checkpoint,
        "--drafter": f"model:{tiny_draft_checkpoint}",
        "--prompts": prompts,
        "--out": tmp_path / "predictor.json",
        "--max-tokens": 4,
        "--depth": 3,
    }


def words(options: dict[str, Any]) -> list[Any]:
    return [word for pair in options.items() for word in pair]


def test_the_command_writes_a_predictor_that_the_controller_takes(
    secondguess_command: Any, command: dict[str, Any], tmp_path: Path
) -> None:
    done = secondguess_command("train", "acceptance", *words(command), "--seed", 3)
    assert (done.code, done.err) == (0, "")
    assert "recording, temperature 0: 6 of 6 prompts" in done.out
    assert "recording, temperature 1, coupled: 6 of 6 prompts" in done.out
    assert "epoch 40 of 40" in done.out
    assert "held out calibration error" in done.out
    path = command["--out"]
    provenance = Predictor.read(path).provenance
    assert provenance["temperatures"] == [0.0, 1.0]
    assert (provenance["seed"], provenance["num_prompts"], provenance["depth"]) == (3, 6, 3)
    # One prompt of six is held out; 4 places of 3 nodes in 3 manners.
    assert (provenance["num_training_nodes"], provenance["num_held_out_nodes"]) == (5 * 36, 36)
    assert str(tmp_path) not in path.read_text()
    assert make_controller(f"learned:{path},length=4").name.startswith(f"learned:{path}")
    answer = secondguess_command(
        "generate", "x", "--model", command["--model"], "--drafter", command["--drafter"],
        "--controller", f"learned:{path}", "--max-tokens", 5, "--json",
    )  # fmt: skip
    assert answer.code == 0


def test_the_command_passes_its_options_on(
    secondguess_command: Any, command: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[AcceptanceRecipe] = []

    def stop(recipe: AcceptanceRecipe, report: object) -> None:
        seen.append(recipe)
        raise KeyboardInterrupt

    monkeypatch.setattr("secondguess.train.acceptance_training.train_acceptance", stop)
    more = ["--temperature", 0.5, "--temperature", 0, "--num-prompts", 9, "--reject-weight", 2]
    done = secondguess_command(
        "train", "acceptance", *words(command), *more, "--seed", 4, "--dtype", "float32"
    )
    # Ctrl-C leaves nothing behind.
    assert (done.code, done.out) == (130, "")
    assert not list(command["--out"].parent.glob("*predictor*"))
    (recipe,) = seen
    assert (recipe.temperatures, recipe.num_prompts, recipe.num_tokens) == ((0.5, 0.0), 9, 4)
    assert (recipe.seed, recipe.depth, recipe.dtype) == (4, 3, "float32")
    assert recipe.options.reject_weight == 2
    assert recipe.manners == [(0.5, False), (0.5, True), (0.0, False)]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"--out": "nowhere/predictor.json"}, "an existing folder for --out"),
        ({"--prompts": "nowhere.jsonl"}, "nowhere.jsonl"),
        ({"--drafter": "suffix"}, "a drafter with a model"),
        ({"--drafter": "model:nowhere"}, "nowhere"),
        ({"--model": "nowhere"}, "nowhere"),
        ({"--max-tokens": 0}, "tokens per prompt from 1"),
        ({"--max-tokens": 400}, "leave room for a prompt in the context of 256"),
        ({"--num-prompts": 4}, "prompts from 5"),
        ({"--depth": 65}, "from 1 to 64"),
        ({"--seed": -1}, "the seed from 0"),
        ({"--temperature": "nan"}, "temperatures from 0 to 100"),
        ({"--reject-weight": 0}, "the weight of rejections between 0.1"),
    ],
)
def test_what_the_command_refuses(
    secondguess_command: Any, command: dict[str, Any], changes: dict[str, Any], expected: str
) -> None:
    done = secondguess_command("train", "acceptance", *words(command | changes))
    assert done.code == 2
    assert expected in done.err
    assert done.err.count("\n") == 1
    assert not command["--out"].exists()


def test_a_target_without_a_drafter_is_refused(secondguess_command: Any, command: dict[str, Any]) -> None:
    del command["--drafter"]
    done = secondguess_command("train", "acceptance", *words(command))
    assert done.code == 2
    assert "--drafter model:PATH" in done.err


def test_too_few_prompts_and_equal_temperatures_are_refused(prompts: Path, command: dict[str, Any]) -> None:
    prompts.write_text('{"prompt": "x"}\n')
    recipe = AcceptanceRecipe(str(command["--model"]), command["--drafter"], str(prompts))
    with pytest.raises(BadInputError, match=r"at least 5 prompts .* got 1"):
        train_acceptance(recipe, lambda line: None)
    for temperatures in ((), (1.0, 1.0)):
        with pytest.raises(BadInputError, match="temperatures, each once"):
            AcceptanceRecipe("m", "model:d", "p", temperatures=temperatures)
