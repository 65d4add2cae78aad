"""Training of the acceptance predictor: labels, features, prompts, split and command."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from builtin_pair.acceptance import (
    AcceptanceRecipe,
    DraftRecorder,
    acceptance_probs,
    record,
    train_acceptance,
)
from secondguess.controllers import make_controller
from secondguess.controllers.predictor import FEATURES, Predictor
from secondguess.core import Draft, Row, Verdict
from secondguess.decode import Components, decode
from secondguess.drafters.model import ModelDrafter
from secondguess.errors import BadInputError
from secondguess.proof.fakes import TableModel, random_probs
from secondguess.sampling import SamplingParams
from secondguess.sampling.noise import KeyedNoise, Noise
from secondguess.sampling.probs import compute_target_probs
from secondguess.train import stdlib_prompts
from secondguess.train.stdlib_prompts import MAX_PROMPT_CHARACTERS, standard_library_prompts
from secondguess.verifiers import make_verifier
from secondguess.workloads.loading import BUILTIN_PROMPTS

VOCAB_SIZE = 6
TARGET, DRAFTER = random_probs(VOCAB_SIZE, seed=1), random_probs(VOCAB_SIZE, seed=2)


def row_of(temperature: float, coupled: bool = False, seed: int = 0) -> Row:
    params = SamplingParams(max_tokens=60, temperature=temperature, seed=seed if coupled else None)
    return Row([1, 2], params, seed=seed, coupled=coupled)


def drafter() -> ModelDrafter:
    return ModelDrafter(TableModel(VOCAB_SIZE, DRAFTER), "model:table", VOCAB_SIZE)


def acceptance_probs_of(row: Row, tokens: list[int]) -> tuple[list[float], torch.Tensor]:
    """Acceptance probabilities of a chain of these tokens drawn from the drafter, and the target's distributions."""
    dists = torch.stack([DRAFTER((1, 2, *tokens[:place])) for place in range(len(tokens))])[None]
    logits = torch.stack([TARGET((1, 2, *tokens[:place])) for place in range(len(tokens) + 1)])[None].log()
    draft = Draft.chains([tokens], None if row.params.temperature == 0 else dists)
    target_probs = compute_target_probs(logits, [row], draft)
    noise = KeyedNoise.from_rows([row])
    chosen = noise.race(target_probs, torch.arange(len(tokens) + 1)[None])
    return acceptance_probs(draft, target_probs, chosen, noise)[0], target_probs[0]


def test_a_sampled_node_has_the_chance_of_the_rejection_rule() -> None:
    tokens: list[int] = []
    for _ in range(3):
        tokens.append(int(DRAFTER((1, 2, *tokens)).argmax()))
    acceptance_probs, target_probs = acceptance_probs_of(row_of(1.0), tokens)
    expected = [
        min(1.0, float(target_probs[place, token] / DRAFTER((1, 2, *tokens[:place]))[token]))
        for place, token in enumerate(tokens)
    ]
    assert acceptance_probs == pytest.approx(expected)
    assert 0 < min(acceptance_probs) < 1


def test_at_temperature_0_labels_are_0_or_1() -> None:
    best = int(TARGET((1, 2)).argmax())
    tokens = [best, (int(TARGET((1, 2, best)).argmax()) + 1) % VOCAB_SIZE, 0]
    acceptance_probs, target_probs = acceptance_probs_of(row_of(0.0), tokens)
    assert acceptance_probs[:2] == [1.0, 0.0]
    # Every node counts on its own prefix, also after a rejected one.
    assert acceptance_probs[2] == float(int(target_probs[2].argmax()) == 0)


def test_labels_of_coupled_nodes_are_0_or_1() -> None:
    row = row_of(1.0, coupled=True, seed=5)
    noise = KeyedNoise.from_rows([row])
    winners: list[int] = []
    for place in range(3):
        dist = TARGET((1, 2, *winners))[None, None]
        winners.append(int(noise.race(dist, torch.tensor([[place]]))[0, 0]))
    assert acceptance_probs_of(row, winners)[0] == [1.0, 1.0, 1.0]
    wrong = [winners[0], (winners[1] + 1) % VOCAB_SIZE]
    assert acceptance_probs_of(row, wrong)[0] == [1.0, 0.0]


@pytest.mark.parametrize(("temperature", "coupled"), [(0.0, False), (1.0, True)])
def test_labels_of_determined_text_count_the_accepted_nodes(temperature: float, coupled: bool) -> None:
    row, again = (row_of(temperature, coupled, seed=3) for _ in range(2))
    (drafts,) = record(TableModel(VOCAB_SIZE, TARGET), drafter(), [row], 20, 3)
    assert all(len(features) == len(acceptance_probs) == 3 for features, acceptance_probs in drafts)
    target, controller = TableModel(VOCAB_SIZE, TARGET), make_controller("fixed:3")
    accepted, position = {}, 0
    for (commit,) in decode(Components(target, drafter(), make_verifier("auto"), controller), [again]):
        accepted[position] = commit.num_accepted
        position += len(commit.tokens)
    assert row.tokens == again.tokens[: len(row.tokens)]
    labels = {position: numpy.cumprod(drafts[position][1]).sum() for position in accepted if position < 20}
    assert labels == {position: accepted[position] for position in labels}
    assert len(set(labels.values())) > 1


class CountingRecorder(DraftRecorder):
    """Recorder that counts the nodes, out of two, that the rule `rejection` accepts."""

    def __init__(self, num_rows: int) -> None:
        super().__init__(2, num_rows)
        self.accepted: list[int] = []

    def verify(self, draft: Draft, target_probs: torch.Tensor, noise: Noise) -> Verdict:
        lengths = make_verifier("rejection").verify(draft, target_probs, noise).lengths
        self.accepted += [min(length, 2) for length in lengths]
        return super().verify(draft, target_probs, noise)


def test_labels_of_sampled_text_are_the_mean_acceptance() -> None:
    rows = [row_of(1.0, seed=seed) for seed in range(40)]
    recorder = CountingRecorder(len(rows))
    components = Components(TableModel(VOCAB_SIZE, TARGET), drafter(), recorder, recorder)
    for _ in islice(decode(components, rows), 20):
        pass
    by_round = [
        acceptance_probs for drafts in zip(*recorder.drafts, strict=True) for _, acceptance_probs in drafts
    ]
    difference = recorder.accepted - numpy.cumprod(by_round, 1).sum(1)
    assert len(difference) == 800
    # The differences deviate by about 0.5: four standard errors.
    assert abs(difference.mean()) < 4 * difference.std() / 800**0.5


def test_recorded_features_are_those_of_the_draft_distributions() -> None:
    (((features, _), *_),) = record(
        TableModel(VOCAB_SIZE, TARGET), drafter(), [row_of(0.5, coupled=True)], 1, 3
    )
    first, second, _ = (dict(zip(FEATURES, line, strict=True)) for line in features)
    confidence = math.log(DRAFTER((1, 2)).max())
    assert first["log_confidence"] == second["log_survival"] == pytest.approx(confidence)
    assert (first["temperature"], first["coupled"]) == (0.5, 1.0)


def test_drafts_cut_by_the_context_of_the_draft_model_are_left_out() -> None:
    short = ModelDrafter(TableModel(VOCAB_SIZE, DRAFTER, context_length=8), "model:table", VOCAB_SIZE)
    rows = [row_of(0.0)]
    (drafts,) = record(TableModel(VOCAB_SIZE, TARGET), short, rows, 10, 3)
    assert rows[0].num_output == 10
    # Rounds begin with 2, 3, ... tokens; four nodes have room after at most 5.
    assert len(drafts) == 4


def test_the_prompts_come_from_the_standard_library(monkeypatch: pytest.MonkeyPatch) -> None:
    sources = stdlib_prompts._sources
    # A quarter of the library: parsing all of it takes seconds.
    monkeypatch.setattr(stdlib_prompts, "_sources", lambda library: islice(sources(library), 0, None, 4))
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
def recipe(tmp_path: Path, tiny_checkpoint: Path, tiny_draft_checkpoint: Path) -> AcceptanceRecipe:
    """A few positions of six prompts on the tiny pair."""
    path = tmp_path / "some.jsonl"
    texts = ["def quicksort(items):", "class Stack:", "import ", "return [*", "print(", "self.items"]
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts), encoding="utf-8")
    drafter = f"model:{tiny_draft_checkpoint}"
    return AcceptanceRecipe(str(tiny_checkpoint), drafter, str(path), num_tokens=4, depth=3, seed=3)


def test_a_predictor_is_trained_for_the_controller(
    secondguess_command: Any, recipe: AcceptanceRecipe, tmp_path: Path
) -> None:
    lines: list[str] = []
    path = tmp_path / "predictor.json"
    path.write_text(train_acceptance(recipe, lines.append).to_json())
    assert "recording, temperature 0: 6 of 6 prompts" in lines
    assert "recording, temperature 1, coupled: 6 of 6 prompts" in lines
    provenance = Predictor.read(path).provenance
    assert provenance["temperatures"] == [0.0, 1.0]
    assert (provenance["seed"], provenance["num_prompts"], provenance["depth"]) == (3, 6, 3)
    # One prompt of six is held out; 4 positions of 3 nodes under 3 conditions.
    assert (provenance["num_training_nodes"], provenance["num_held_out_nodes"]) == (5 * 36, 36)
    assert str(tmp_path) not in path.read_text()
    answer = secondguess_command(
        "generate", "x", "--model", recipe.model, "--drafter", recipe.drafter,
        "--controller", f"learned:{path}", "--max-tokens", 5, "--json",
    )  # fmt: skip
    assert answer.code == 0


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"prompts": "nowhere.jsonl"}, "nowhere.jsonl"),
        ({"drafter": "suffix"}, "a drafter with a model"),
        ({"num_tokens": 400}, "leave room for a prompt in the context of 256"),
    ],
)
def test_invalid_settings_are_refused(
    recipe: AcceptanceRecipe, changes: dict[str, Any], expected: str
) -> None:
    with pytest.raises(BadInputError, match=expected):
        train_acceptance(replace(recipe, **changes), lambda line: None)


def test_a_drafter_of_trees_and_too_few_prompts_are_refused(recipe: AcceptanceRecipe) -> None:
    with pytest.raises(BadInputError, match="expected a drafter of chains"):
        train_acceptance(replace(recipe, drafter=f"{recipe.drafter},tree=2x2"), lambda line: None)
    Path(recipe.prompts).write_text('{"prompt": "x"}\n')
    with pytest.raises(BadInputError, match=r"at least 5 prompts .* got 1"):
        train_acceptance(recipe, lambda line: None)
