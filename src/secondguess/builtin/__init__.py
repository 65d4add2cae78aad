"""Built-in models that are distributed with the package.

- A target and its draft model in Transformers format, made by `tools/builtin_pair`.
- Drafter heads for the target, one folder each, made by ``secondguess train KIND``.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from secondguess.errors import CheckpointError


class BuiltinPaths(NamedTuple):
    """Directories of the built-in target and draft model; both contain the same tokenizer."""

    target: Path
    drafter: Path


def builtin_paths() -> BuiltinPaths:
    """Return the directories of the built-in target and draft model.

    Raises:
        CheckpointError: this installation does not include their weights.
    """
    paths = BuiltinPaths(*(Path(__file__).parent / name for name in BuiltinPaths._fields))
    for path in paths:
        if not (path / "model.safetensors").is_file():
            raise CheckpointError(
                f"the built-in pair is missing: no model.safetensors in {path}; install secondguess again, or train "
                "a pair (docs/training.md) and install it there"
            )
    return paths


def head_path(kind: str) -> Path | None:
    """Return the folder of the built-in target's drafter head of this kind.

    Returns None if the package does not include one.
    """
    path = Path(__file__).parent / kind
    return path if (path / "config.json").is_file() else None
