"""What is in the box: a target and its drafter, in Transformers format, made by ``secondguess train pair``, a predictor of
what the one accepts from the other, made by ``secondguess train acceptance``, and heads for the target, a folder each, made by
``secondguess train KIND``."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from secondguess.errors import CheckpointError


class BuiltinPaths(NamedTuple):
    """The directories of the two models; both hold the same tokenizer."""

    target: Path
    drafter: Path


def builtin_paths() -> BuiltinPaths:
    """Where the pair lies; an error if this installation came without it."""
    paths = BuiltinPaths(*(Path(__file__).parent / name for name in BuiltinPaths._fields))
    for path in paths:
        if not (path / "model.safetensors").is_file():
            raise CheckpointError(
                f"the built-in pair is missing: no model.safetensors in {path}; install secondguess again, or train "
                "a pair with `secondguess train pair` and copy its target and drafter folders there"
            )
    return paths


def acceptance_path() -> Path:
    """Where the predictor for the pair lies (`secondguess.controllers.predictor` reads it)."""
    return Path(__file__).parent / "acceptance" / "predictor.json"


def head_path(kind: str) -> Path | None:
    """Where a drafter of this kind that was trained for the built-in target lies; None if none is in the box."""
    path = Path(__file__).parent / kind
    return path if (path / "config.json").is_file() else None
