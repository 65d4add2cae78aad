"""A small file of prompts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest


@pytest.fixture
def prompt_file(tmp_path: Path) -> Path:
    """Three prompts of different lengths."""
    path = tmp_path / "prompts.jsonl"
    texts = ["def quicksort(items):\n", "class Stack:\n    def push(", "print("]
    path.write_text("".join(json.dumps({"prompt": text, "id": 1}) + "\n" for text in texts), encoding="utf-8")
    return path
