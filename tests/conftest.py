"""Shared fixtures: two checkpoints, and the command line in this process."""

from __future__ import annotations

import gc
import io
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

from checkpoints import write_llama

# Workers that run at the same time share the cores: a parallel region waits for its slowest thread, and with more threads than
# cores it waits for a thread that does not run. Read by whatever a test starts, too.
_num_workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
_num_threads = int(os.environ.get("OMP_NUM_THREADS") or max(1, (os.cpu_count() or 1) // _num_workers))
os.environ["OMP_NUM_THREADS"] = str(_num_threads)
os.environ["SECONDGUESS_CACHE"] = ""  # every model is checked, and no verdict is kept
torch.set_num_threads(_num_threads)
# A full garbage collection visits the objects of all imported libraries, which takes 0.2 s.
gc.set_threshold(50_000)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--released", nargs="+", default=["smollm2"], help="released models that take part")


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target: a Llama of 2 layers, width 32, 300 tokens, 256 positions."""
    return write_llama(tmp_path_factory.mktemp("tiny"), seed=0)


@pytest.fixture(scope="session")
def tiny_draft_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft model for `tiny_checkpoint`: one layer of width 16 with the same tokenizer."""
    return write_llama(
        tmp_path_factory.mktemp("tiny-draft"),
        seed=1,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
    )


@dataclass(frozen=True)
class Finished:
    """Exit code and output of a command."""

    code: int
    out: str
    err: str

    @property
    def records(self) -> list[dict[str, Any]]:
        """Standard output, read as one JSON object per line."""
        return [json.loads(line) for line in self.out.splitlines()]


CommandLine = Callable[..., Finished]


_get_command = cache(typer.main.get_command)
"""Building the tree of commands takes longer than most commands of the tests."""


@pytest.fixture
def secondguess_command(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> CommandLine:
    """Runs the command line inside this process: `secondguess_command("generate", "x", stdin=b"...")`."""
    from secondguess.cli import main

    def run(*arguments: object, stdin: bytes = b"") -> Finished:
        monkeypatch.setattr("typer.main.get_command", _get_command)
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8"))
        capfd.readouterr()
        code = main([str(argument) for argument in arguments])
        out, err = capfd.readouterr()
        return Finished(code, out, err)

    return run


@pytest.fixture
def loaded(
    secondguess_command: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., dict[str, object]]:
    """Runs a command and gives what it called `load` with."""

    class EnoughError(Exception):
        pass

    def run(*arguments: object) -> dict[str, object]:
        seen: dict[str, object] = {}

        def load(**settings: object) -> None:
            seen.update(settings)
            raise EnoughError

        monkeypatch.setattr("secondguess.api.load", load)
        done = secondguess_command(*arguments)
        assert "EnoughError" in done.err, done
        return seen

    return run


@pytest.fixture(scope="session")
def llava_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random vision-language model with its processor."""
    from test_images import llava, write_vision_model

    return write_vision_model(llava(), tmp_path_factory.mktemp("llava"))


@pytest.fixture(autouse=True, scope="session")
def no_drafters_beside_targets() -> Iterator[None]:
    """Folders of other tests, beside a test's target, have drafters that would be found."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("secondguess.heads.discovery.MAX_FOLDERS", 0)
        patched.setattr("secondguess.heads.discovery.cached_folders", list)
        yield
