"""`secondguess train KIND`, from the command line to a working drafter."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from checkpoints import write_tokenizer
from secondguess.api import load
from secondguess.checkpoint.weight_files import hash_weights
from secondguess.cli.train import LOSSES
from secondguess.errors import BadInputError
from secondguess.heads.base import TargetModel
from secondguess.heads.dspark import DsparkHead
from secondguess.heads.files import Provenance, read_provenance
from secondguess.runtime.modules.transformers import TransformersRuntime
from secondguess.train.losses import OBJECTIVES
from secondguess.train.recipes import RECIPES, TargetInfo, make_recipe

OPTIONS = ("--max-tokens=8", "--length=40", "--steps=12", "--evaluate-steps=6", "--set", "batch_size=4")
SMALL = ("--set", "num_layers=1", "--set", "width=64")


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.txt"
    path.write_text("\n\n".join(f"def function_{number}(items):" for number in range(20)))
    return path


def test_a_trained_draft_model_has_a_card_and_drafts(
    secondguess_command, tiny_checkpoint: Path, prompts: Path, tmp_path: Path
) -> None:
    out = tmp_path / "draft"
    arguments = ["train", "draft", "--out", out, "--model", tiny_checkpoint, "--data", prompts, *OPTIONS]
    done = secondguess_command(*arguments, *SMALL, "--capture-gb", 0.1)
    assert done.code == 0, done.err
    assert "speedup" in done.out
    assert any((out / "run" / "states").glob("*.safetensors"))
    provenance = read_provenance(out)
    assert provenance is not None
    assert provenance.fingerprint == hash_weights(tiny_checkpoint)
    assert provenance.training["recipe"]["width"] == 64
    assert provenance.figures["predicted_nodes"] == 7
    accepted = provenance.figures["held_out_acceptance"][0]
    assert provenance.figures["predicted_acceptance_length"] == pytest.approx(
        sum(accepted**power for power in range(8)), abs=0.01
    )
    card = (out / "README.md").read_text()
    assert provenance.fingerprint in card
    assert str(tmp_path) not in card
    llm = load(str(tiny_checkpoint), f"model:{out}", controller="fixed:3", dtype="float32")
    plain = load(str(tiny_checkpoint), "none", dtype="float32")
    output = llm.generate("def f(items):", max_tokens=20)
    assert output.text == plain.generate("def f(items):", max_tokens=20).text
    assert output.stats.num_drafted > 0

    again = secondguess_command(*arguments, *SMALL, "--loss", "kl")
    assert again.code == 2
    assert "its loss is" in again.err
    assert secondguess_command(*arguments, *SMALL, "--steps", 14).code == 0
    log = (out / "run" / "log.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in log if "loss" in json.loads(line)] == list(range(1, 15))


@pytest.mark.parametrize("kind", [kind for kind in RECIPES if kind != "draft"])
def test_a_trained_head_drafts_and_keeps_the_text(
    secondguess_command, tiny_checkpoint: Path, prompts: Path, tmp_path: Path, kind: str
) -> None:
    arguments = ["train", kind, "--out", tmp_path, "--model", tiny_checkpoint, "--data", prompts, *OPTIONS]
    done = secondguess_command(*arguments, "--steps", 2, "--num-prompts", 8, "--dtype", "float32")
    assert done.code == 0, done.err
    texts = {}
    for drafter in (f"{kind}:{tmp_path}", "none"):
        llm = load(str(tiny_checkpoint), drafter, dtype="float32")
        draft_length = 2 if drafter != "none" else None
        output = llm.generate("def f(items):", max_tokens=20, draft_length=draft_length)
        texts[drafter] = output.text, output.stats.num_drafted > 0
    (drafted, has_drafted), (plain, _) = texts.values()
    assert drafted == plain
    assert has_drafted


@pytest.fixture
def info() -> TargetInfo:
    """A target of one layer."""
    config = LlamaConfig(vocab_size=31, hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
    runtime = TransformersRuntime(LlamaForCausalLM(config).eval())
    return TargetInfo({}, TargetModel.from_runtime(runtime), torch.ones(31, dtype=torch.long), seed=0)


@pytest.mark.parametrize(
    ("padding", "expected"), [(None, 0), (-1, 0), (0, 0), (7, 7), (30, 30), (31, 0), (151_643, 0)]
)
def test_the_mask_token_of_dspark_is_a_token_of_the_target(
    info: TargetInfo, padding: int | None, expected: int
) -> None:
    head = make_recipe("dspark").fresh(replace(info, config={"pad_token_id": padding}))
    assert isinstance(head, DsparkHead)
    assert head.config.mask_token == expected


@pytest.mark.parametrize("changes", [[], ["layer=1"]])
def test_an_early_exit_needs_two_layers(info: TargetInfo, changes: list[str]) -> None:
    with pytest.raises(BadInputError, match="the target has one layer"):
        make_recipe("early-exit", changes).fresh(info)


def test_training_raises_the_acceptance_of_a_draft_model(
    secondguess_command, tiny_checkpoint: Path, prompts: Path, tmp_path: Path
) -> None:
    reached = []
    for steps in (1, 80):
        out = tmp_path / str(steps)
        options = ["--steps", steps, "--set", "learning_rate=0.01", "--set", "warmup_steps=5"]
        command = ["train", "draft", "--out", out, "--model", tiny_checkpoint, "--data", prompts]
        assert secondguess_command(*command, *OPTIONS, *options, *SMALL).code == 0
        provenance = read_provenance(out)
        assert provenance is not None
        reached.append(provenance.figures["held_out_acceptance"][0])
    assert reached[1] > reached[0] + 0.05


@pytest.mark.parametrize(
    ("kind", "options", "reason"),
    [
        ("early-exit", ["--steps", 4], "cannot run one by one"),
        ("layer-skip", [], "fused runtime covers"),
    ],
)
def test_a_target_whose_layers_cannot_be_run_separately_is_refused_before_writing(
    secondguess_command, prompts: Path, tmp_path: Path, kind: str, options: list[object], reason: str
) -> None:
    config = GPT2Config(vocab_size=300, n_embd=32, n_layer=2, n_head=2, n_positions=256, eos_token_id=0)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    write_tokenizer(tmp_path / "gpt2")
    done = secondguess_command(
        "train", kind, "--out", tmp_path / "out", "--model", tmp_path / "gpt2", "--data", prompts,
        "--max-tokens", 8, "--length", 40, *options,
    )  # fmt: skip
    assert done.code == 2
    assert reason in done.err
    assert "such as medusa" in done.err
    assert "runtime native" not in done.err
    assert "runtime auto" not in done.err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--loss", "mse"], "loss among"),
        (["--set", "widht=3"], "option 'widht'"),
        (["--set", "width"], "key=value"),
        (["--set", "width=wide"], "whole number"),
        (["--set", "learning_rate=-1"], "learning rate"),
        (["--steps", "0"], "positive"),
        (["--as-is"], "--max-tokens"),
        (["--length", "8", "--max-tokens", "8"], "--max-tokens below --length"),
        (["--data", "nowhere.txt"], "none at nowhere.txt"),
        (["--capture-gb", "1e-9"], "--capture-gb of at least"),
        (["--temperature", "-1"], "temperature"),
    ],
)
def test_unusable_folders_are_refused_in_one_line(
    secondguess_command,
    tiny_checkpoint: Path,
    prompts: Path,
    tmp_path: Path,
    arguments: list[str],
    complaint: str,
) -> None:
    done = secondguess_command(
        "train", "draft", "--out", tmp_path / "out", "--model", tiny_checkpoint, "--data", prompts,
        *OPTIONS, *arguments,
    )  # fmt: skip
    assert done.code == 2
    assert complaint in done.err
    assert done.err.splitlines()[-1].startswith("secondguess: error:")


def files_of(folder: Path) -> dict[Path, bytes]:
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("kind", ["draft", "mtp", "layer-skip"])
def test_a_folder_with_other_files_is_left_as_it_is(
    secondguess_command, tiny_checkpoint: Path, prompts: Path, tmp_path: Path, kind: str
) -> None:
    target = shutil.copytree(tiny_checkpoint, tmp_path / "target")
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "README.md").write_text("mine")
    for out, complaint in (
        (target, "this is the target's folder"),
        (tmp_path / "project", "it has a README.md and no run/run.json"),
        (tmp_path / "a,b", "use no comma"),
        (tmp_path / "a ", "no space at the end"),
        (tmp_path / "x+model:y", "no + before"),
    ):
        before = files_of(tmp_path)
        done = secondguess_command(
            "train",
            kind,
            "--out",
            out,
            "--model",
            target,
            "--data",
            prompts,
            "--max-tokens",
            8,
            "--length",
            40,
        )
        assert done.code == 2, out
        assert complaint in done.err
        assert files_of(tmp_path) == before


@pytest.mark.parametrize("kind", ["draft", "layer-skip"])
def test_an_empty_folder_name_is_not_the_current_folder(
    secondguess_command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("secondguess.train.head_training.train_head", lambda *_: pytest.fail("trained"))
    monkeypatch.setattr("secondguess.train.skip_search.search_layers", lambda *_: pytest.fail("searched"))
    done = secondguess_command("train", kind, "--out", "")
    assert (done.code, done.out) == (2, "")
    assert "'--out': expected a folder, got ''" in done.err


def test_a_head_with_its_own_lm_head_learns_from_packed_weights_and_keeps_its_window(
    secondguess_command, tiny_checkpoint: Path, prompts: Path, tmp_path: Path
) -> None:
    changes = ("--set", "draft_vocab_size=64", "--set", "window=8")
    command = ["train", "eagle", "--out", tmp_path, "--model", tiny_checkpoint, "--data", prompts, *OPTIONS]
    assert secondguess_command(*command, "--steps", 2, "--dtype", "bfloat16", *changes).code == 0
    layer = json.loads((tmp_path / "config.json").read_text())["transformer_layer_config"]
    assert layer["sliding_window"] == 8


@pytest.mark.parametrize(
    ("cost_ratio", "advice"), [(0.5, "train for longer"), (1.2, "train a smaller drafter")]
)
def test_the_advice_after_training_can_be_followed(
    secondguess_command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cost_ratio: float, advice: str
) -> None:
    trained = Provenance("draft", "tiny", "0" * 64, figures={"speedup": 0.9, "cost_ratio": cost_ratio})
    monkeypatch.setattr("secondguess.train.head_training.train_head", lambda *_: trained)
    done = secondguess_command("train", "draft", "--out", tmp_path / "out")
    assert done.code == 0
    assert advice in done.err.splitlines()[-1]


@pytest.mark.parametrize(
    ("kind", "refused", "corrected"),
    [
        ("medusa", ("--set", "num_heads=99"), ("--set", "num_heads=2")),
        ("mtp", ("--dtype", "bfloat16"), ("--dtype", "float32")),
        ("mtp", ("--num-prompts", 1), ("--num-prompts", 8)),
        ("mtp", ("--length", 400), ("--length", 40)),
    ],
)
def test_what_is_refused_can_be_corrected_in_the_same_folder(
    secondguess_command, tiny_checkpoint: Path, prompts: Path, tmp_path: Path, kind, refused, corrected
) -> None:
    out = tmp_path / "out"
    command = [
        "train",
        kind,
        "--out",
        out,
        "--model",
        tiny_checkpoint,
        "--data",
        prompts,
        *OPTIONS,
        "--steps",
        2,
    ]
    done = secondguess_command(*command, *refused)
    assert done.code == 2
    assert not out.exists()
    assert secondguess_command(*command, *corrected).code == 0


def test_every_kind_has_a_command_and_a_recipe_with_weights(secondguess_command) -> None:
    for kind in RECIPES:
        assert secondguess_command("train", kind, "--help").code == 0
        weights = make_recipe(kind).weights(4)
        assert len(weights) == 4
        assert weights == sorted(weights, reverse=True)
        assert weights[0] == 1.0


def test_the_command_accepts_every_loss() -> None:
    assert tuple(OBJECTIVES) == LOSSES


def test_weights_are_those_of_the_papers() -> None:
    assert make_recipe("medusa").weights(3) == pytest.approx([1, 0.8, 0.64])
    assert make_recipe("dspark", ["gamma=2"]).weights(2) == pytest.approx([1, 0.6065], abs=1e-4)


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(BadInputError, match="draft, early-exit, medusa"):
        make_recipe("lookahead")
