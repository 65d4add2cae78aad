"""Training prompts: code and prose from the installed standard library, and repetitive text.

Evaluation prompts must stay unseen, so no prompt is taken from the data of a benchmark, and no
third-party text is committed. The same interpreter gives the same prompts.
"""

from __future__ import annotations

import ast
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from secondguess.workloads.loading import evenly_spaced

MAX_PROMPT_CHARACTERS = 900
"""Maximum length of a prompt from the library, so that it fits into a small context."""

_FOLDERS = [
    ".",
    "asyncio",
    "collections",
    "email",
    "html",
    "http",
    "importlib",
    "json",
    "logging",
    "urllib",
    "xml/etree",
]

_REPETITIVE = (
    "".join(f"    case {number}:\n        return '{number:b}'\n" for number in range(12)),
    "".join(f"self.assertTrue(is_even({2 * number}))\n" for number in range(1, 16)),
    "| key | square |\n|---|---|\n" + "".join(f"| {number} | {number**2} |\n" for number in range(16)),
    "".join(f'{{"key": "k{number}", "size": {number * 5}}},\n' for number in range(14)),
    "".join(
        f"def is_{word}(self):\n    return self.state == '{word}'\n\n\n"
        for word in ("open", "closed", "locked", "ready", "broken")
    ),
    "A hundred sheep went over the hill,\nover the hill, over the hill.\n" * 6,
    "".join(f"<option value='{number}'>Choice {number}</option>\n" for number in range(14)),
    "".join(f"export VARIABLE_{number}=value_{number}\n" for number in range(16)),
    "".join(f"from package.module_{name} import {name.title()}\n" for name in "abcdefghijklmno"),
    "CREATE TABLE\n" + "".join(f"    column_{number} INTEGER NOT NULL,\n" for number in range(14)),
)
"""Texts that continue a pattern."""


def standard_library_prompts(num_prompts: int) -> list[str]:
    """Return prompts in fixed proportions.

    Of ten prompts, five are function heads, two openings of files, two prose and one repetitive.
    """
    files = list(_sources(Path(sysconfig.get_path("stdlib"))))
    trees = [ast.parse(source) for source in files]
    heads = [
        head for source, tree in zip(files, trees, strict=True) for head in _function_heads(source, tree)
    ]
    openings = [_opening(source) for source in files]
    prose = [text for tree in trees for text in _long_docstrings(tree)]
    shares = ((heads, 5), (openings, 2), (prose, 2), (_REPETITIVE, 1))
    parts = [evenly_spaced(texts, -(-num_prompts * share // 10)) for texts, share in shares]
    # Interleaved by relative position, so that any section is a mixture.
    placed = sorted(((index + 0.5) / len(part), text) for part in parts for index, text in enumerate(part))
    return [text for _, text in placed[:num_prompts]]


def _sources(library: Path) -> Iterator[str]:
    for folder in _FOLDERS:
        for path in sorted((library / folder).glob("*.py")):
            if not path.name.startswith("_"):
                yield path.read_text(encoding="utf-8", errors="replace")


def _function_heads(source: str, tree: ast.Module) -> Iterator[str]:
    """Yield signatures with docstrings of top-level functions, a typical completion prompt."""
    lines = source.splitlines()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node):
            head = "\n".join(lines[node.lineno - 1 : node.body[0].end_lineno]) + "\n"
            if len(head) <= MAX_PROMPT_CHARACTERS:
                yield head


def _opening(source: str) -> str:
    """Return the first complete lines of a file."""
    cut = source[:MAX_PROMPT_CHARACTERS]
    return cut[: cut.rfind("\n") + 1] or cut


def _long_docstrings(tree: ast.Module) -> Iterator[str]:
    """Yield the beginnings of long docstrings without doctests."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            text = ast.get_docstring(node) or ""
            if len(text) > MAX_PROMPT_CHARACTERS and ">>>" not in text:
                yield text[: MAX_PROMPT_CHARACTERS // 2]
