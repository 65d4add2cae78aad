"""What test files share: two checkpoints, and the command line in this process."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from checkpoints import write_llama


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
    """What a command left behind."""

    code: int
    out: str
    err: str

    @property
    def records(self) -> list[dict[str, Any]]:
        """Standard output, read as one JSON object per line."""
        return [json.loads(line) for line in self.out.splitlines()]


CommandLine = Callable[..., Finished]


@pytest.fixture
def secondguess_command(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> CommandLine:
    """Runs the command line inside this process: `secondguess_command("generate", "x", stdin=b"...")`."""
    from secondguess.cli import main

    def run(*arguments: object, stdin: bytes = b"") -> Finished:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8"))
        capfd.readouterr()
        code = main([str(argument) for argument in arguments])
        out, err = capfd.readouterr()
        return Finished(code, out, err)

    return run
