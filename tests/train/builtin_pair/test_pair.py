"""The recipe of the built-in pair on a tiny corpus: training, resuming and installation."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from builtin_pair import pair as stages
from builtin_pair.__main__ import main
from builtin_pair.data import Corpus
from builtin_pair.pair import PairRecipe, install_head, install_pair, train_pair
from builtin_pair.tokenizer import load_tokenizer
from secondguess.builtin import head_path
from secondguess.checkpoint.loader import load_model
from secondguess.checkpoint.plan import Checkpoint
from secondguess.errors import BadInputError, CheckpointError
from secondguess.heads.base import TargetModel
from secondguess.heads.eagle import EagleHead, load_eagle
from secondguess.train.run_folder import Budget


@pytest.fixture(scope="module")
def finished_run(recipe: PairRecipe, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run."""
    folder = tmp_path_factory.mktemp("finished")
    train_pair(recipe, folder, lambda line: None)
    return folder


def test_a_trained_pair_is_loaded_by_transformers(finished_run: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    install_pair(finished_run, tmp_path / "box")
    for name in ("target", "drafter"):
        folder = tmp_path / "box" / name
        assert not (folder / "run").exists()
        model = AutoModelForCausalLM.from_pretrained(folder)
        assert model.dtype == torch.bfloat16
        assert model.config.vocab_size == 512
        assert model.config.eos_token_id == 0
        tokens = AutoTokenizer.from_pretrained(folder)("def size1_of(", return_tensors="pt")["input_ids"]
        assert model(tokens).logits.isfinite().all()
    card = (tmp_path / "box" / "target" / "README.md").read_text(encoding="utf-8")
    assert "bits per byte of held-out text" in card
    assert "| things | 1.0 | MIT |" in card
    figures = json.loads((tmp_path / "box" / "drafter" / "secondguess.json").read_text())["figures"]
    assert 0.0 < figures["held_out_acceptance"][0] <= 1.0


def test_a_finished_run_is_not_repeated(recipe: PairRecipe, finished_run: Path) -> None:
    weights = (finished_run / "target" / "model.safetensors").read_bytes()
    lines: list[str] = []
    train_pair(recipe, finished_run, lines.append)
    assert (finished_run / "target" / "model.safetensors").read_bytes() == weights
    assert not any("collecting" in line for line in lines)


def test_a_run_can_continue_the_target_of_an_earlier_one(
    recipe: PairRecipe, finished_run: Path, tmp_path: Path
) -> None:
    following = replace(recipe, start=finished_run / "target", target_budget=Budget(steps=1))
    store = stages.prepare_data(following, tmp_path, lambda line: None)
    stages.train_target(following, tmp_path, store, lambda line: None)
    folders = (finished_run, tmp_path)
    first, second = (load_tokenizer(folder / "tokenizer.json") for folder in folders)
    assert first.get_vocab() == second.get_vocab()
    name = "model.layers.1.mlp.up_proj.weight"
    earlier, later = (load_file(folder / "target" / "model.safetensors")[name].float() for folder in folders)
    assert (earlier - later).norm() < 0.2 * earlier.norm()


def test_a_run_is_resumed_only_with_its_options(recipe: PairRecipe, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "Return the smallest of three numbers"}')
    first = replace(recipe, forbidden_prompts=prompts)
    with pytest.raises(BadInputError, match="does not exist"):
        stages.prepare_data(replace(first, corpus=(tmp_path / "no",)), tmp_path / "run", lambda line: None)
    stages.prepare_data(first, tmp_path / "run", lambda line: None)
    more = replace(first, target_budget=Budget(steps=99))
    stages.prepare_data(more, tmp_path / "run", lambda line: None)
    with pytest.raises(BadInputError, match="its seed is"):
        stages.prepare_data(replace(first, seed=1), tmp_path / "run", lambda line: None)
    prompts.write_text('{"prompt": "Return the largest of three numbers"}')
    with pytest.raises(BadInputError, match="its exclude prompts sha256 is"):
        stages.prepare_data(first, tmp_path / "run", lambda line: None)


def test_prompts_are_first_halves_of_functions() -> None:
    corpus = Corpus(functions=["def f(x):\n    return x\n", "def g():\n    pass\n    return 1\n"])
    prompts = [json.loads(line)["prompt"] for line in stages.prompts_of(corpus).splitlines()]
    assert prompts == ["def f(x):\n", "def g():\n    pass\n"]


def test_a_corpus_is_required() -> None:
    with pytest.raises(BadInputError, match="nothing to learn from"):
        PairRecipe(include_standard_library=False)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "run", "--corpus", "nowhere", "--minutes", "1"], "nowhere"),
        (["run", "run", "--minutes", "-1"], "--minutes above 0"),
        (["run", "run", "--seed", "-1"], "--seed between 0"),
        (["run", "run", "--exclude-prompts", "nowhere"], "none at nowhere"),
    ],
)
def test_bad_input_prints_one_line_and_returns_2(
    arguments: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["builtin_pair", *arguments])
    assert main() == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert words in err
    assert err.count("\n") == 1


def test_options_reach_the_recipe_and_an_interruption_prints_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[tuple[PairRecipe, Path]] = []

    def interrupted(recipe: PairRecipe, folder: Path, report: object) -> None:
        seen.append((recipe, folder))
        raise KeyboardInterrupt

    monkeypatch.setattr("builtin_pair.__main__.train_pair", interrupted)
    options = ["--seed", "5", "--minutes", "10", "--corpus", str(tmp_path), "--start", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["builtin_pair", "run", str(tmp_path), *options])
    assert main() == 130
    assert capsys.readouterr().err.count("\n") == 1
    ((recipe, folder),) = seen
    assert folder == recipe.start == tmp_path
    assert (recipe.seed, recipe.corpus) == (5, (tmp_path,))
    assert [recipe.target_budget.minutes, recipe.drafter_budget.minutes] == [7, 3]


def test_a_missing_builtin_pair_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import secondguess.builtin as builtin

    monkeypatch.setattr(builtin, "__file__", str(tmp_path / "__init__.py"))
    with pytest.raises(CheckpointError, match="built-in pair is missing"):
        builtin.builtin_paths()


def test_the_manifest_lists_packages_and_held_out_documents(finished_run: Path) -> None:
    manifest = json.loads((finished_run / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["packages"][0]["licence"] == "MIT"
    assert manifest["held_out_documents"] > 0


def test_an_installed_head_has_no_copies_of_the_targets_weights(tmp_path: Path) -> None:
    installed = head_path("eagle")
    assert installed is not None
    target = load_model(Checkpoint.resolve("builtin", dtype="float32")).runtime
    head = EagleHead.fresh(TargetModel.from_runtime(target)).bfloat16()
    head.save(tmp_path / "out", "builtin")
    for name in ("README.md", "secondguess.json"):
        (tmp_path / "out" / name).write_bytes((installed / name).read_bytes())
    install_head(tmp_path / "out", tmp_path / "box")
    sizes = [(tmp_path / name / "model.safetensors").stat().st_size for name in ("out", "box")]
    assert sizes[0] - sizes[1] == pytest.approx(2 * 6144 * 256 * 2, abs=1000)
    again = load_eagle(tmp_path / "box", TargetModel.from_runtime(target)).bfloat16()
    assert all(torch.equal(weight, again.state_dict()[name]) for name, weight in head.state_dict().items())
