"""A small file of prompts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from secondguess.bench.systems import Models


@pytest.fixture
def prompt_file(tmp_path: Path) -> Path:
    """Three prompts of different lengths."""
    path = tmp_path / "prompts.jsonl"
    texts = ["def quicksort(items):\n", "class Stack:\n    def push(", "print("]
    path.write_text("".join(json.dumps({"prompt": text, "id": 1}) + "\n" for text in texts), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def models(tiny_checkpoint: Path) -> Models:
    """The tiny target, loaded once for a file's systems."""
    return Models(str(tiny_checkpoint), "float32", "cpu")
