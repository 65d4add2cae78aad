"""Trained drafters that are found for a target without a path."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
from head_formats import edit
from safetensors.torch import load_file, save_file

from checkpoints import write_llama
from secondguess import load
from secondguess.checkpoint.loader import load_model
from secondguess.checkpoint.plan import Checkpoint
from secondguess.checkpoint.resolve import cached_folders
from secondguess.errors import MismatchWarning
from secondguess.heads.base import TargetModel
from secondguess.heads.discovery import FoundDrafter
from secondguess.heads.eagle import EagleHead
from secondguess.pairing import default_drafter, find_drafters


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return write_llama(tmp_path / "models" / "target", seed=1, num_hidden_layers=3)


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("secondguess.heads.discovery.MAX_FOLDERS", 500)
    monkeypatch.setattr("secondguess.heads.discovery.cached_folders", cached_folders)
    return tmp_path / "hub"


def write_eagle(folder: Path, target: Path, named: str = "") -> Path:
    """Write an untrained EAGLE-3 head for a target, whose configuration names the target in `named`."""
    runtime = load_model(Checkpoint.resolve(str(target), dtype="float32")).runtime
    EagleHead.fresh(TargetModel.from_runtime(runtime)).save(folder, str(target))
    config = json.loads((folder / "config.json").read_text())
    config["speculators_config"]["verifier"]["name_or_path"] = named
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def found_for(target: Path) -> list[FoundDrafter]:
    return find_drafters(Checkpoint.resolve(str(target)))


def found_for_module(target: Path) -> list[FoundDrafter]:
    """Return the drafters for a target in float32, which is not copied."""
    return find_drafters(Checkpoint.resolve(str(target), dtype="float32"))


def test_a_drafter_beside_the_target_drafts_by_default(target: Path) -> None:
    head = write_eagle(target.parent / "head", target)
    for name in (None, "auto"):
        llm = load(str(target), name, dtype="float32")
        assert llm.drafter.name == f"suffix+eagle:{head}"
    output = llm.generate("abc", max_tokens=20, draft_with="eagle", draft_length=2)
    plain = load(str(target), "none", dtype="float32").generate("abc", max_tokens=20)
    assert output.text == plain.text
    assert output.stats.num_drafted > 0


def test_a_drafter_in_the_cache_is_found_by_the_name_of_its_target(target: Path, empty_cache: Path) -> None:
    head = write_eagle(empty_cache / "models--maker--head" / "snapshots" / "1a", target, "org/Target")
    (found,) = found_for(target)
    assert (found.name, found.names_target, found.obstacle) == (f"eagle:{head}", True, "")
    assert found.num_bytes > 0
    copytree(head, target.parent / "nameless")
    edit(target.parent / "nameless", speculators_config=None)
    assert [drafter.names_target for drafter in found_for(target)] == [True, False]


def test_a_name_of_the_cache_stands_for_its_folder(
    target: Path, empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = write_eagle(empty_cache / "models--maker--head" / "snapshots" / "1a", target)
    monkeypatch.setattr("secondguess.heads.folders.find_in_cache", lambda name: head / "config.json")
    assert load(str(target), "eagle:maker/head", dtype="float32").generate("ab", max_tokens=3).text


@pytest.mark.parametrize(
    ("change", "obstacle"),
    [
        ({"speculators_config": {"verifier": {"name_or_path": "org/other"}}}, "it was trained for org/other"),
        ({"target_hidden_size": 48}, "it is for a target with a width of 48, not 32"),
        (
            {"transformer_layer_config": {"hidden_size": 32, "vocab_size": 31}},
            "it is for a target with a vocabulary of 31, not 300",
        ),
        ({"num_target_layers": 9}, "it is for a target with a number of layers of 9, not 3"),
    ],
)
def test_a_drafter_of_another_target_is_listed_and_not_used(
    target: Path, change: dict[str, object], obstacle: str
) -> None:
    edit(write_eagle(target.parent / "head", target), **change)
    assert [drafter.obstacle for drafter in found_for(target)] == [obstacle]
    assert "eagle" not in default_drafter(str(target), Checkpoint.resolve(str(target)))


def test_inspect_lists_what_was_found(target: Path, secondguess_command: Any) -> None:
    head = write_eagle(target.parent / "head", target, "org/target")
    copytree(head, target.parent / "other")
    edit(target.parent / "other", num_target_layers=9)
    done = secondguess_command("inspect", str(target), "--dtype", "float32", "--drafter", "auto")
    assert f"eagle:{head}, 0.1 MiB: trained for this target, fits\n" in done.out
    assert (
        f"eagle:{target.parent / 'other'}, 0.1 MiB: trained for this target, does not fit: it is for"
        in done.out
    )
    (record,) = secondguess_command("inspect", str(target), "--dtype", "float32", "--json").records
    assert [drafter["name"] for drafter in record["found"]] == [
        f"eagle:{head}",
        f"eagle:{target.parent / 'other'}",
    ]
    assert record["drafter"]["name"] == f"suffix+eagle:{head}"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("config.json", '{"num_hidden_layers": null}'),
        ("config.json", '{"speculators_model_type": "dspark"}'),
        ("config.json", '{"speculators_model_type": "eagle3", "transformer_layer_config": 3}'),
        ("config.json", "[" * 100_000),
        ("secondguess.json", '{"kind": [], "target": 3, "fingerprint": ""}'),
    ],
)
def test_a_folder_with_other_contents_does_not_matter(target: Path, name: str, text: str) -> None:
    head = write_eagle(target.parent / "head", target)
    copytree(head, target.parent / "odd")
    (target.parent / "odd" / name).write_text(text)
    (target.parent / "nowhere").symlink_to(target.parent / "absent")
    assert found_for(target)[0].name == f"eagle:{head}"


def test_the_main_revision_of_a_cached_model_is_used(target: Path, empty_cache: Path) -> None:
    repository = empty_cache / "models--maker--head"
    head = write_eagle(repository / "snapshots" / "1a", target, "org/target")
    (repository / "snapshots" / "2b").mkdir()
    (repository / "snapshots" / ".DS_Store").touch()
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("1a")
    assert [found.folder for found in found_for(target)] == [head]


def test_the_next_drafter_is_used_if_the_first_cannot_be_loaded(target: Path) -> None:
    good = write_eagle(target.parent / "good", target)
    bad = write_eagle(target.parent / "bad", target, "org/target")
    content = load_file(bad / "model.safetensors")
    del content["fc.weight"]
    save_file(content, bad / "model.safetensors")
    with pytest.warns(MismatchWarning, match="is left out"):
        assert load(str(target), dtype="float32").drafter.name == f"suffix+eagle:{good}"


def test_a_path_that_is_parsed_otherwise_is_no_default(target: Path) -> None:
    head = write_eagle(target.parent / "head", target)
    for name in ("head+ngram", "head,tree=2"):
        copytree(head, target.parent / name)
    found = found_for(target)
    assert [drafter.folder.name for drafter in found if not drafter.obstacle] == ["head"]
    assert len(found) == 3


def test_a_drafter_for_which_memory_is_short_is_left_out(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_eagle(target.parent / "head", target)
    plan = Checkpoint.resolve(str(target))
    monkeypatch.setattr(
        "secondguess.heads.discovery.available_memory", lambda device: plan.memory().total + 100
    )
    (found,) = find_drafters(plan)
    assert "MiB of memory" in found.obstacle
    edit(target.parent / "head", speculators_config={"verifier": {"name_or_path": "org/target"}})
    with pytest.warns(MismatchWarning, match="MiB of memory"):
        load(str(target))


def test_a_broken_drafter_is_left_out_with_a_warning(target: Path) -> None:
    weights = write_eagle(target.parent / "head", target) / "model.safetensors"
    content = load_file(weights)
    save_file({name: tensor for name, tensor in content.items() if name != "fc.weight"}, weights)
    with pytest.warns(MismatchWarning, match="found for this target, is left out"):
        llm = load(str(target), dtype="float32")
    assert "eagle" not in llm.drafter.name
    weights.write_bytes(weights.read_bytes()[:1000])
    (found,) = found_for(target)
    assert "expected whole safetensors weights" in found.obstacle


@pytest.fixture
def large(tmp_path: Path) -> Path:
    return write_llama(tmp_path / "models" / "large", seed=1, intermediate_size=512, num_hidden_layers=8)


def write_small(target: Path, name: str = "small", **changes: Any) -> Path:
    """Write a model of less than an eighth of the bytes of `large` beside it."""
    return write_llama(target.parent / name, seed=2, hidden_size=16, intermediate_size=32, **changes)


def test_a_small_model_beside_a_target_that_is_not_copied_drafts_by_default(large: Path) -> None:
    small = write_small(large)
    llm = load(str(large), dtype="float32")
    assert llm.drafter.name == f"suffix+model:{small}"
    output = llm.generate("abc", max_tokens=20, draft_with="model", draft_length=2)
    assert output.stats.num_drafted > 0
    assert output.text == load(str(large), "none", dtype="float32").generate("abc", max_tokens=20).text


def test_the_largest_of_several_small_models_drafts(large: Path) -> None:
    write_small(large, "a")
    largest = write_small(large, "b", num_hidden_layers=4)
    write_small(large, "c")
    write_llama(large.parent / "d", seed=2, num_hidden_layers=6)  # more than an eighth
    write_eagle(large.parent / "head", large, "org/other")
    assert [(found.name, bool(found.obstacle)) for found in found_for_module(large)] == [
        (f"model:{largest}", False),
        (f"eagle:{large.parent / 'head'}", True),
    ]


def test_a_trained_drafter_and_a_copy_are_preferred_to_a_small_model(
    large: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_small(large)
    with monkeypatch.context() as patches:
        patches.setattr(Checkpoint, "has_room_for_copy", lambda target, weight_format: True)
        assert not found_for_module(large)
    head = write_eagle(large.parent / "head", large, "org/large")
    assert [found.name for found in found_for_module(large)] == [f"eagle:{head}"]


def test_a_small_model_without_the_chat_template_of_the_target_does_not_draft(large: Path) -> None:
    write_small(large)
    (large / "chat_template.jinja").write_text("{{ messages }}")
    (found,) = found_for_module(large)
    assert found.obstacle == "it has no chat template, and the target has one"
    assert load(str(large), dtype="float32").drafter.name == "suffix"


def test_a_small_model_for_which_memory_is_short_does_not_draft(
    large: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_small(large)
    needed = Checkpoint.resolve(str(large), dtype="float32").memory().total + 100
    monkeypatch.setattr("secondguess.heads.discovery.available_memory", lambda device: needed)
    (found,) = found_for_module(large)
    assert "MiB of memory" in found.obstacle


def without_a_norm(small: Path) -> None:
    content = load_file(small / "model.safetensors")
    del content["model.norm.weight"]
    save_file(content, small / "model.safetensors")


def with_a_decoder_that_is_not_read(small: Path) -> None:
    description = json.loads((small / "tokenizer.json").read_text())
    decoder = {"type": "CTC", "pad_token": "", "word_delimiter_token": "", "cleanup": True}
    (small / "tokenizer.json").write_text(json.dumps(description | {"decoder": decoder}))


def test_a_small_model_that_cannot_be_loaded_is_left_out_with_a_warning(large: Path) -> None:
    without_a_norm(write_small(large))
    with pytest.warns(MismatchWarning, match="found for this target, is left out"):
        llm = load(str(large), dtype="float32")
    assert llm.drafter.name == "suffix"
    assert llm.generate("abc", max_tokens=3).text


def test_the_next_small_model_is_taken_if_a_tokenizer_cannot_be_compared(large: Path) -> None:
    with_a_decoder_that_is_not_read(write_small(large, "a", vocab_size=290, num_hidden_layers=3))
    other = write_small(large, "b", vocab_size=290)
    first, second = found_for_module(large)
    assert (first.name, first.obstacle) == (f"model:{other}", "")
    assert "decoder CTC" in second.obstacle


def test_a_small_model_is_found_beside_a_link_to_the_target(large: Path, tmp_path: Path) -> None:
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "target").symlink_to(large)
    small = write_small(tmp_path / "links" / "target")
    assert [found.name for found in found_for_module(tmp_path / "links" / "target")] == [f"model:{small}"]


def test_a_model_for_embeddings_does_not_draft(large: Path) -> None:
    (write_small(large) / "modules.json").write_text("[]")
    assert not found_for_module(large)


@pytest.mark.filterwarnings("default")
def test_a_drafter_that_is_no_better_than_chance_is_reported_once(target: Path) -> None:
    head = write_eagle(target.parent / "head", target)
    llm = load(str(target), f"eagle:{head}", dtype="float32", controller="fixed:2")
    with pytest.warns(MismatchWarning, match="trained for another target") as found:
        llm.generate(["ab", "bc", "cd"], max_tokens=60)
    assert len(found) == 1
    assert re.search(r"in [01] of its first 32 rounds", str(found[0].message))


def test_a_drafter_with_accepted_tokens_is_not_reported(target: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        llm = load(str(target), "early-exit:2", dtype="float32", controller="fixed:2")
        assert llm.generate(["ab", "bc", "cd"], max_tokens=60)[0].stats.num_accepted > 4


def test_a_file_of_weights_has_the_name_of_its_model(target: Path) -> None:
    from secondguess.heads.discovery import _last_part

    for name in (
        "org/Some-8B",
        "folder/Some-8B.Q4_K_M.gguf",
        "Some-8B-bf16.gguf",
        "Some-8B.gguf",
        "x/some-8b/",
    ):
        assert _last_part(name) == "some-8b"
