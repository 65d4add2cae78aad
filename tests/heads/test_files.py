"""Files of trained drafters: a full disk is reported, and the previous files are kept."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch

from secondguess.heads.files import Provenance, read_config, read_provenance, read_tensors, write_head


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
