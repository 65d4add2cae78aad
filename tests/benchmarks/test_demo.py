"""The demo makes its pair once, races on it, and reports what is missing in one line."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import demo
import make_pair
import pytest
from growth import GrownShape
from transformers import AutoModelForCausalLM


@pytest.fixture
def shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shape that is made at once: a wider built-in pair."""
    small = (GrownShape(256, 1024, 16, 4, 2), GrownShape(512, 1024, 1, 4, 2))
    monkeypatch.setitem(make_pair.GROWN_SHAPES, "small", small)


def run(folder: Path, *arguments: str) -> int:
    code: int = demo.main(["--shape", "small", "--tokens", "40", "--folder", str(folder), *arguments])
    return code


@pytest.mark.usefixtures("shapes")
def test_the_pair_is_made_once_and_both_runs_write_the_same_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # In so few tokens on a busy machine the default controller may not draft.
    monkeypatch.setattr(demo, "load", partial(demo.load, controller="fixed:3"))
    prompt = "def read_lines(path):"
    assert run(tmp_path) == 0
    first = capsys.readouterr().out
    assert f"Making a pair of shape small in {tmp_path / 'grown-small'}" in first
    assert re.search(r"The same text, [\d.]+ times as fast: [\d.]+ and [\d.]+ tokens/s", first)
    plain, speculative = first.split(prompt)[1:]
    assert demo.GREEN not in plain
    assert demo.GREEN in speculative
    assert run(tmp_path, prompt) == 0
    assert "Making" not in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["grown-small"]


@pytest.mark.usefixtures("shapes")
def test_too_little_disk_space_is_one_error_before_anything_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo.shutil, "disk_usage", lambda folder: SimpleNamespace(free=10**6))
    assert run(tmp_path) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert error.startswith("demo: error: expected 0.04 GB of free disk space")
    assert not any(tmp_path.iterdir())


@pytest.mark.usefixtures("shapes")
def test_an_interrupted_making_leaves_no_pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(out: Path, small: Path | None, shape: str) -> None:
        out.mkdir()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(make_pair, "grow_pair", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path)
    assert not (tmp_path / "grown-small").exists()
    assert run(tmp_path) == 0


@pytest.mark.usefixtures("shapes")
def test_the_stated_size_is_that_of_the_files(tmp_path: Path) -> None:
    make_pair.grow_pair(tmp_path, None, "small")
    for name, shape in zip(("target", "drafter"), make_pair.GROWN_SHAPES["small"], strict=True):
        model = AutoModelForCausalLM.from_pretrained(tmp_path / name)
        stated = demo.num_bytes(shape, model.config.vocab_size, model.config.head_dim)
        written = sum(path.stat().st_size for path in (tmp_path / name).glob("*.safetensors"))
        assert 0.9 * written < stated < 1.2 * written


def test_a_folder_that_cannot_be_written_is_one_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert demo.main(["--folder", str(tmp_path / "file" / "below")]) == 2
    assert capsys.readouterr().err.startswith("demo: error: expected a folder that can be written")
