"""Files of trained drafters: a full disk is reported, and the previous files are kept."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from secondguess.heads.files import Provenance, read_provenance


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
