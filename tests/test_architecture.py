"""Paths of a prompt and of a checkpoint, as the page on the architecture lists them."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest

import secondguess
from checkpoints import write_llama
from secondguess import load
from secondguess.runtime.cpu.library import units

PACKAGE = Path(secondguess.__file__).parent
PAGE = PACKAGE.parents[1] / "docs" / "architecture.md"


def listed_files(heading: str) -> list[str]:
    section = PAGE.read_text().split(f"## {heading}")[1].partition("\n## ")[0]
    return re.findall(r"^\| \d+ \| `([\w/]+\.py)`", section, re.MULTILINE)


def called_files(function: Callable[[], object]) -> list[str]:
    """Return the files of the package in the order of the first call of a function in them."""
    found: dict[str, None] = {}

    def record(frame: FrameType, event: str, argument: object) -> None:
        path = Path(frame.f_code.co_filename)
        is_function = event == "call" and not frame.f_code.co_name.startswith("<")
        if is_function and path.is_relative_to(PACKAGE):
            found.setdefault(path.relative_to(PACKAGE).as_posix())

    sys.setprofile(record)
    try:
        function()
    finally:
        sys.setprofile(None)
    return list(found)


@pytest.mark.skipif(not units(), reason="the page follows the compiled kernels")
def test_a_prompt_and_a_checkpoint_pass_the_files_that_the_page_lists(tmp_path: Path) -> None:
    path = str(write_llama(tmp_path, seed=1))
    loaded = {}

    def load_target() -> None:
        loaded["llm"] = load(path, "none", dtype="bfloat16")

    for heading, most, function in (
        ("A checkpoint, through `load`", 8, load_target),
        ("A prompt, from `LLM.generate` to text", 12, lambda: loaded["llm"].generate("ab", max_tokens=3)),
    ):
        listed = listed_files(heading)
        called = called_files(function)
        assert 5 < len(listed) <= most
        assert [file for file in called if file in listed] == listed
