"""The recipe of the built-in pair on a tiny corpus: training, resuming, evaluation, export and installation."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from builtin_pair import pair as stages
from builtin_pair.__main__ import main
from builtin_pair.distill import initial_drafter
from builtin_pair.evaluate import PairFigures, acceptance
from builtin_pair.model import Decoder, ModelShape
from builtin_pair.pair import PairRecipe, export_checkpoint, install_head, install_pair, train_pair
from builtin_pair.tokenizer import load_tokenizer
from builtin_pair.tokens import TokenStore
from secondguess.builtin import head_path
from secondguess.checkpoint.loader import load_model
from secondguess.checkpoint.plan import Checkpoint
from secondguess.errors import BadInputError, CheckpointError
from secondguess.heads.base import TargetModel
from secondguess.heads.eagle import EagleHead, load_eagle
from secondguess.train.run_folder import Budget


@pytest.fixture(scope="module")
def finished_run(recipe: PairRecipe, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PairFigures]:
    """The folder and the figures of a finished run."""
    folder = tmp_path_factory.mktemp("finished")
    return folder, train_pair(recipe, folder, lambda line: None)


def test_a_trained_pair_is_loaded_by_transformers(
    recipe: PairRecipe, finished_run: tuple[Path, PairFigures], tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run, figures = finished_run
    assert figures.target_bits_per_byte < 5.0
    assert 0.0 < figures.own_sampled.sampled <= 1.0
    install_pair(run, tmp_path / "box")
    for name in ("target", "drafter"):
        folder = tmp_path / "box" / name
        model = AutoModelForCausalLM.from_pretrained(folder)
        assert model.dtype == torch.bfloat16
        assert model.config.vocab_size == 512
        tokens = AutoTokenizer.from_pretrained(folder)("def size1_of(", return_tensors="pt")["input_ids"]
        assert model(tokens).logits.isfinite().all()
        card = (folder / "README.md").read_text(encoding="utf-8")
        assert f"{figures.target_bits_per_byte:.3f} bits per byte" in card
        assert "| things | 1.0 | MIT |" in card
    again: list[str] = []
    assert train_pair(recipe, run, again.append) == figures
    assert not any("collecting" in line for line in again)


def test_a_run_can_continue_the_target_of_an_earlier_one(
    recipe: PairRecipe, finished_run: tuple[Path, PairFigures], tmp_path: Path
) -> None:
    run, _ = finished_run
    export_checkpoint(run, "target", tmp_path / "target")
    following = replace(recipe, start=tmp_path / "target", target_budget=Budget(steps=1))
    stages.train_target(following, tmp_path / "second", lambda line: None)
    folders = (run, tmp_path / "second")
    first, second = (load_tokenizer(folder / "tokenizer.json") for folder in folders)
    assert first.get_vocab() == second.get_vocab()
    weights = [torch.load(folder / "target.pt")["weights"] for folder in folders]
    name = "model.layers.3.mlp.up_proj.weight"
    assert (weights[0][name] - weights[1][name]).norm() < 0.2 * weights[0][name].norm()


def test_a_run_is_resumed_only_with_its_options(recipe: PairRecipe, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "Return the smallest of three numbers"}')
    first = replace(recipe, forbidden_prompts=prompts)
    with pytest.raises(BadInputError, match="does not exist"):
        stages.prepare_data(replace(first, corpus=(tmp_path / "no",)), tmp_path / "run", lambda line: None)
    stages.prepare_data(first, tmp_path / "run", lambda line: None)
    stages.prepare_data(
        replace(first, target_budget=Budget(steps=99), most_threads=1), tmp_path / "run", lambda line: None
    )
    prompts.write_text('{"prompt": "Return the largest of three numbers"}')
    others = {
        "exclude prompts": first,
        "seed": replace(first, seed=1),
        "own rows": replace(first, own_rows=8),
    }
    for name, other in others.items():
        with pytest.raises(BadInputError, match=f"another {name}"):
            stages.prepare_data(other, tmp_path / "run", lambda line: None)
        prompts.write_text('{"prompt": "Return the smallest of three numbers"}')


def test_the_initial_embedding_of_a_drafter_keeps_the_targets_inner_products() -> None:
    target = Decoder(ModelShape(1, 64, 2, 1, 64, 300))
    target.initialise(0)
    drafter = initial_drafter(ModelShape(1, 32, 2, 1, 64, 300), target, 1)
    wide, narrow = target.model.embed_tokens.weight.detach(), drafter.model.embed_tokens.weight.detach()
    random = torch.randn(300, 32, generator=torch.Generator().manual_seed(2))

    def correlation(embedding: torch.Tensor) -> float:
        return float(
            torch.corrcoef(torch.stack([(wide @ wide.T).flatten(), (embedding @ embedding.T).flatten()]))[
                0, 1
            ]
        )

    assert correlation(narrow) > 0.9 > correlation(random)
    with pytest.raises(BadInputError, match="one tokenizer"):
        initial_drafter(ModelShape(1, 32, 2, 1, 64, 301), target, 1)


def test_half_of_a_mixed_batch_is_text_of_the_target(store: TokenStore) -> None:
    own = torch.full((3, 65), 7).numpy().astype("uint16")
    mixed = replace(store, own=own)
    batch = mixed.batch(0, 0, 8, 64)
    assert batch.shape == (8, 65)
    assert int((batch == 7).all(dim=1).sum()) == 4
    with pytest.raises(BadInputError, match="rows of 65"):
        mixed.batch(0, 0, 8, 65)


def test_the_acceptance_of_a_model_by_itself_is_1() -> None:
    decoder = Decoder(ModelShape(1, 32, 2, 1, 64, 300))
    decoder.initialise(0)
    same = acceptance(decoder, decoder, torch.randint(0, 300, (2, 16)), first=4)
    assert same.greedy == 1.0
    assert same.sampled == pytest.approx(1.0, abs=1e-5)
    assert same.positions == 24


def test_invalid_recipes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="share a tokenizer"):
        PairRecipe(drafter=ModelShape(1, 32, 2, 1, 64, 300))
    with pytest.raises(BadInputError, match="nothing to learn from"):
        PairRecipe(include_standard_library=False)
    with pytest.raises(BadInputError, match="own_rows between 1"):
        PairRecipe(own_rows=0)
    with pytest.raises(BadInputError, match="minutes above 0"):
        PairRecipe().scaled(0)
    with pytest.raises(CheckpointError, match="no training checkpoint"):
        export_checkpoint(tmp_path, "target", tmp_path / "out")


def test_a_scaled_recipe_keeps_the_proportions() -> None:
    recipe = PairRecipe().scaled(10)
    minutes = [
        budget.minutes for budget in (recipe.target_budget, recipe.drafter_budget, recipe.distill_budget)
    ]
    assert sum(filter(None, minutes)) == pytest.approx(10)
    assert minutes[0] == pytest.approx(10 * 127 / 184)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["export", "none", "out"], "there is no training checkpoint"),
        (["run", "run", "--corpus", "nowhere", "--minutes", "1"], "nowhere"),
        (["run", "run", "--minutes", "-1"], "minutes above 0"),
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

    def interrupted(recipe: PairRecipe, directory: Path, report: object) -> None:
        seen.append((recipe, directory))
        raise KeyboardInterrupt

    monkeypatch.setattr("builtin_pair.__main__.train_pair", interrupted)
    options = ["--seed", "5", "--minutes", "10", "--corpus", str(tmp_path), "--most-threads", "2"]
    monkeypatch.setattr(
        sys, "argv", ["builtin_pair", "run", str(tmp_path), *options, "--start", str(tmp_path)]
    )
    assert main() == 130
    assert capsys.readouterr().err.count("\n") == 1
    ((recipe, directory),) = seen
    assert directory == tmp_path
    assert (recipe.seed, recipe.corpus) == (5, (tmp_path,))
    assert (recipe.start, recipe.most_threads) == (tmp_path, 2)
    budgets = (recipe.target_budget, recipe.drafter_budget, recipe.distill_budget)
    assert sum(budget.minutes or 0 for budget in budgets) == pytest.approx(10)


def test_a_missing_builtin_pair_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import secondguess.builtin as builtin

    monkeypatch.setattr(builtin, "__file__", str(tmp_path / "__init__.py"))
    with pytest.raises(CheckpointError, match="built-in pair is missing"):
        builtin.builtin_paths()


def test_the_manifest_lists_packages_and_held_out_documents(finished_run: tuple[Path, PairFigures]) -> None:
    manifest = json.loads((finished_run[0] / "manifest.json").read_text(encoding="utf-8"))
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
