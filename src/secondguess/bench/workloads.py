"""What the systems are asked to continue: prompts from a JSONL file, or a small set of our own.

HumanEval is never in the training text of the built-in pair, which makes it the default workload where it is
present.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path

from secondguess.errors import BadInputError

HUMANEVAL = "../shared/data/humaneval.jsonl"
BUILTIN = "builtin"

_OWN_PROMPTS = (
    'def quicksort(items):\n    """Return a sorted copy of items."""\n',
    'class Stack:\n    """A last-in, first-out collection."""\n\n    def __init__(self):\n',
    "import json\nfrom pathlib import Path\n\n\ndef load_settings(path):\n",
    'def is_palindrome(text: str) -> bool:\n    """Whether text reads the same backwards."""\n',
    "import unittest\n\n\nclass TestParser(unittest.TestCase):\n    def setUp(self):\n",
    'def fibonacci(n):\n    """Yield the first n Fibonacci numbers."""\n',
    "def read_csv(path, delimiter=','):\n    rows = []\n    with open(path) as file:\n",
    'class Node:\n    def __init__(self, value, left=None, right=None):\n        self.value = value\n',
    'def moving_average(values, window):\n    """Mean of each run of `window` neighbours."""\n',
    "import argparse\n\n\ndef main():\n    parser = argparse.ArgumentParser(description=__doc__)\n",
    'def retry(times, exceptions):\n    """Call a function again if it raises."""\n\n    def decorate(f):\n',
    'def matrix_multiply(a, b):\n    """Product of two matrices."""\n    if len(a[0]) != len(b):\n',
)  # fmt: skip


@dataclass(frozen=True)
class Workload:
    """Prompts with the name and the hash that identify them in a report.

    Args:
        note: why these prompts and not the default ones, for readers of a report; empty if there is nothing to say.
    """

    name: str
    prompts: tuple[str, ...]
    note: str = ""

    @property
    def sha256(self) -> str:
        return hashlib.sha256("\0".join(self.prompts).encode()).hexdigest()


def load_workload(source: str | None = None, num_prompts: int = 40) -> Workload:
    """`num_prompts` prompts spread evenly over a source, always the same ones.

    Args:
        source: a file with one JSON object per line whose `prompt` is text, or `builtin` for our own prompts;
            None for HumanEval at `HUMANEVAL` where that is a file, else our own, with a note.
        num_prompts: how many to take; all of them when the source has fewer.

    Raises:
        BadInputError: the file is absent, empty, or a line holds no prompt.
    """
    if source is None and not Path(HUMANEVAL).is_file():
        note = f"no HumanEval at {HUMANEVAL}: the built-in prompts instead"
        return replace(load_workload(BUILTIN, num_prompts), note=note)
    if source == BUILTIN:
        return Workload(BUILTIN, spread(_OWN_PROMPTS, num_prompts))
    path = Path(HUMANEVAL if source is None else source)
    return Workload(path.name, spread(_read_prompts(path), num_prompts))


def spread(prompts: tuple[str, ...], num_prompts: int) -> tuple[str, ...]:
    """Every so-many-th prompt, so that a small sample covers the whole source.

    >>> spread(("a", "b", "c", "d", "e"), 2)
    ('a', 'c')
    """
    if num_prompts >= len(prompts):
        return prompts
    return tuple(prompts[index * len(prompts) // num_prompts] for index in range(num_prompts))


def _read_prompts(path: Path) -> tuple[str, ...]:
    if not path.is_file():
        raise BadInputError(
            f"expected a JSONL file of prompts, found none at {path}; give one with --prompts FILE "
            f"(one object with a 'prompt' per line), or --prompts {BUILTIN} for a small set of our own"
        )
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise BadInputError(
            f"expected UTF-8 text in {path.name}, got byte {error.start} of another encoding"
        ) from error
    prompts = tuple(
        _prompt_of(line, number, path) for number, line in enumerate(lines, start=1) if line.strip()
    )
    if not prompts:
        raise BadInputError(f"expected at least one prompt in {path.name}, got an empty file")
    return prompts


def _prompt_of(line: str, number: int, path: Path) -> str:
    place = f"{path.name}, line {number}"
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise BadInputError(
            f"expected one JSON object per line, got something else in {place}: {error}"
        ) from error
    prompt = record.get("prompt") if isinstance(record, dict) else None
    if not isinstance(prompt, str) or not prompt:
        raise BadInputError(f"expected an object with a non-empty text 'prompt' in {place}")
    return prompt
