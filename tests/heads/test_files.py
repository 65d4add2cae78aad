"""Files of trained drafters: a full disk is reported, and the previous files are kept."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch

from secondguess.drafters.spec import make_drafter
from secondguess.errors import CheckpointError
from secondguess.heads.files import (
    Provenance,
    read_config,
    read_provenance,
    read_tensors,
    write_head,
)
from secondguess.heads.folders import refuse_head


def fill_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(file: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", refuse)


def test_a_failed_write_keeps_the_provenance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Provenance("medusa", "tiny", "0" * 64).write(tmp_path)
    fill_disk(monkeypatch)
    with pytest.raises(OSError, match=r"No space left on device: .*secondguess.json"):
        Provenance("eagle", "tiny", "0" * 64).write(tmp_path)
    provenance = read_provenance(tmp_path)
    assert provenance is not None
    assert provenance.kind == "medusa"


def test_a_failed_write_keeps_the_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_head(tmp_path, {"version": 1}, {"weight": torch.ones(3)})
    fill_disk(monkeypatch)
    with pytest.raises(OSError, match=r"No space left on device: .*model.safetensors"):
        write_head(tmp_path, {"version": 2}, {"weight": torch.zeros(3)})
    assert read_config(tmp_path) == {"version": 1}
    assert torch.equal(read_tensors(tmp_path)["weight"], torch.ones(3))


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_weights_of_which_git_lfs_has_left_a_pointer_are_named(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with pytest.raises(CheckpointError, match=f"got: {name}, a pointer of Git LFS; run `git lfs pull`"):
        read_tensors(tmp_path)


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ({"medusa_num_heads": 4}, "medusa"),
        ({"model_type": "medusa"}, "medusa"),
        ({"speculators_model_type": "eagle3", "draft_vocab_size": 9}, "eagle"),
        ({"speculators_model_type": "peagle", "draft_vocab_size": 9}, "eagle"),
        ({"model_type": "llama", "draft_vocab_size": 9}, "eagle"),
        ({"model_type": "eagle", "model": {"model_type": "llama"}}, "eagle"),
        ({"model_type": "llama", "num_hidden_layers": 1}, "eagle"),
        ({"speculators_model_type": "dflash", "draft_vocab_size": 9}, "dspark"),
        ({"model_type": "secondguess-early-exit"}, "early-exit"),
    ],
)
def test_a_head_that_is_named_as_a_draft_model_is_refused_with_its_own_name(
    tmp_path: Path, config: dict[str, object], kind: str
) -> None:
    write_head(tmp_path, config, {"fc.weight": torch.ones(3)})
    with pytest.raises(CheckpointError, match=f"drafter of the kind {kind}; write {kind}:{tmp_path}"):
        make_drafter(f"model:{tmp_path}", target_vocab_size=9, load_draft_model=pytest.fail)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "head.pt"])
def test_the_kind_of_a_head_is_known_by_a_tensor_in_any_file(tmp_path: Path, name: str) -> None:
    tensors = {"model.midlayer.hidden_norm.weight": torch.ones(3)}
    write_head(tmp_path, {"model_type": "llama", "num_hidden_layers": 40}, tensors)
    if name != "model.safetensors":
        (tmp_path / "model.safetensors").unlink()
        torch.save(tensors, tmp_path / name)
    with pytest.raises(CheckpointError, match=f"drafter of the kind eagle; write eagle:{tmp_path}"):
        refuse_head(str(tmp_path))


def test_a_speculator_of_another_type_is_not_taken_for_eagle(tmp_path: Path) -> None:
    config = {"speculators_model_type": "another", "draft_vocab_size": 9, "num_hidden_layers": 1}
    write_head(tmp_path, config, {"fc.weight": torch.ones(3), "layers.0.hidden_norm.weight": torch.ones(3)})
    refuse_head(str(tmp_path))


def test_a_trained_head_without_a_published_format_is_known_by_its_provenance(tmp_path: Path) -> None:
    write_head(tmp_path, {"model_type": "llama"}, {})
    Provenance("mtp", "tiny", "0" * 64).write(tmp_path)
    with pytest.raises(CheckpointError, match=f"write mtp:{tmp_path}"):
        refuse_head(str(tmp_path))


def test_draft_models_are_not_taken_for_heads(tmp_path: Path) -> None:
    refuse_head(str(tmp_path / "missing"))
    write_head(
        tmp_path, {"model_type": "llama", "num_hidden_layers": 1}, {"model.norm.weight": torch.ones(3)}
    )
    refuse_head(str(tmp_path))
    write_head(tmp_path, {"model_type": "llama", "text_config": None}, {})
    refuse_head(str(tmp_path))
    Provenance("draft", "tiny", "0" * 64).write(tmp_path)
    refuse_head(str(tmp_path))
