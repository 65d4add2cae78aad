"""Progress of long commands: a bar on a terminal, lines elsewhere, never on standard output."""

import json
from types import SimpleNamespace

import pytest

from secondguess.cli import progress
from secondguess.cli.progress import progress_bar

VERIFY = ["verify", "--samples", 1000, "--max-tokens", 2, "--cells", 9, "--limit", 0.5, "--batch-size", 500]


@pytest.fixture
def _terminal(monkeypatch):
    """Standard error counts as a terminal."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")


@pytest.mark.usefixtures("_terminal")
def test_verify_shows_a_bar_from_the_start(secondguess_command):
    """Importing torch and loading a model take longest for short tests."""
    done = secondguess_command(*VERIFY)
    assert done.code == 0
    assert "loading" in done.err
    assert "1000/1000" in done.err
    assert "loading" not in done.out


@pytest.mark.usefixtures("_terminal")
def test_loading_shows_the_bytes_of_the_weights(secondguess_command):
    done = secondguess_command("generate", "def", "--max-tokens", 1)
    assert "loading builtin" in done.err or "checking the kernels, once for builtin" in done.err
    assert "MB" in done.err
    assert "loading" not in done.out


def test_loading_without_a_terminal_prints_lines(secondguess_command, monkeypatch):
    monkeypatch.setattr(progress, "SECONDS_PER_LINE", 0.0)
    assert "loading builtin: 0.0 of 0.0 GB" in secondguess_command("generate", "def", "--max-tokens", 1).err


def test_verify_without_a_terminal_prints_lines(secondguess_command, monkeypatch):
    monkeypatch.setattr(progress, "SECONDS_PER_LINE", 0.0)
    done = secondguess_command(*VERIFY, "--json")
    assert done.code == 0
    assert json.loads(done.out)["passed"]
    lines = done.err.splitlines()
    assert lines[0] == "exact probabilities: 1 of 9"
    assert lines[-1] == "sampling texts: 1,000 of 1,000"


def test_short_work_prints_nothing_without_a_terminal(capsys):
    with progress_bar("loading") as show:
        show(1, 2, "half")
        show(2, 2, "whole")
    assert capsys.readouterr() == ("", "")


def test_lines_are_rate_limited(capsys, monkeypatch):
    now = iter([0.0, 4.0, 11.0, 11.0, 15.0, 22.0, 22.0])
    # The module's own name: servers of other tests run in threads that read the clock.
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: next(now)))
    with progress_bar("loading") as show:
        for done in range(4):
            show(done, 2000, "texts")
    assert capsys.readouterr().err == "texts: 1 of 2,000\ntexts: 3 of 2,000\n"
