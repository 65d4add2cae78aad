"""Downloads on request: a repository, a file of one, and one line for what fails."""

from __future__ import annotations

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from secondguess.checkpoint.resolve import download
from secondguess.errors import CheckpointError


def test_a_repository_or_one_of_its_files_is_downloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, ...]] = []
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *names: calls.append(names))
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *names: calls.append(names))
    download("org/model")
    download("org/model-gguf/sub/model.Q4_0.gguf")
    assert calls == [("org/model",), ("org/model-gguf", "sub/model.Q4_0.gguf")]


@pytest.mark.parametrize("error", [LocalEntryNotFoundError("no\nconnection"), OSError("disk full")])
def test_a_failed_download_is_one_line(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail(name: str) -> None:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(
        CheckpointError, match=r"^cannot download 'org/model': (no connection|disk full)"
    ) as found:
        download("org/model")
    assert "\n" not in str(found.value)


@pytest.mark.parametrize("name", ["a/b/c", "model.gguf"])
def test_what_is_no_repository_is_refused(name: str) -> None:
    with pytest.raises(CheckpointError, match="cannot download"):
        download(name)
