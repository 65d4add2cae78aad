"""Prompts by task: public datasets by name, files, or a small built-in set.

HumanEval is the default workload if its file is in the folder `SECONDGUESS_DATA`, since it is not
part of the training data of the built-in models.
"""

from __future__ import annotations

import hashlib
import os
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from secondguess.bench.prompt_files import (
    Prompt,
    read_any,
    read_records,
    record_with,
    spec_bench_record,
)
from secondguess.errors import BadInputError

DATA_VARIABLE = "SECONDGUESS_DATA"
"""Environment variable with the folder of the datasets."""
BUILTIN = "builtin"


@dataclass(frozen=True)
class DataSet:
    """Public dataset: name of its file in the folder `SECONDGUESS_DATA`, and the function that reads it."""

    file_name: str
    read: Callable[[Path], list[Prompt]]

    @property
    def path(self) -> Path | None:
        """Path of the file; None if there is none."""
        folder = os.environ.get(DATA_VARIABLE)
        path = Path(folder) / self.file_name if folder else None
        return path if path is not None and path.is_file() else None


DATA_SETS = {
    "spec-bench": DataSet("spec_bench.jsonl", partial(read_records, convert=spec_bench_record)),
    "humaneval": DataSet(
        "humaneval.jsonl", partial(read_records, convert=record_with("prompt", "humaneval"))
    ),
    "gsm8k": DataSet("gsm8k_test_400.jsonl", partial(read_records, convert=record_with("question", "gsm8k"))),
}
"""Datasets by the name that `--prompts` takes, alone or as `NAME:PATH`."""

Item = TypeVar("Item")

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
        prompts: texts; those of several tasks are interleaved evenly.
        tasks: the task of each prompt.
        note: reason why the default prompts were not used, for the report; empty if there is none.
    """

    name: str
    prompts: tuple[str, ...]
    tasks: tuple[str, ...]
    note: str = ""

    def __post_init__(self) -> None:
        if len(self.tasks) != len(self.prompts):
            raise BadInputError(
                f"expected a task for each of {len(self.prompts)} prompts, got {len(self.tasks)}; give one per prompt"
            )

    @property
    def sha256(self) -> str:
        """SHA-256 of the prompts in order: with equal hashes, prompt i is the same prompt."""
        return hashlib.sha256("\0".join(self.prompts).encode()).hexdigest()


def load_workload(
    sources: str | Sequence[str] | None = None, num_prompts: int = 40, tasks: Sequence[str] = ()
) -> Workload:
    """Load `num_prompts` prompts, spread evenly over tasks; the choice is deterministic.

    Args:
        sources: one or several of: a name from `DATA_SETS`, alone or as `NAME:PATH`; `builtin` for
            our own prompts; a file of JSON lines or plain text (see `prompt_files`). None takes
            HumanEval if its file is in `SECONDGUESS_DATA`, else our own prompts, with a note.
        num_prompts: number of prompts; all of them if the sources have fewer.
        tasks: only prompts of these tasks; empty for all.

    Raises:
        BadInputError: a file that is missing, empty or has a line without a prompt; a task without
            prompts; fewer prompts than tasks.
    """
    note = ""
    if sources is None:
        sources = "humaneval" if DATA_SETS["humaneval"].path else BUILTIN
        if sources == BUILTIN:
            note = f"no humaneval.jsonl in the folder {DATA_VARIABLE}: the built-in prompts instead"
    loaded = [_load(source) for source in ([sources] if isinstance(sources, str) else sources)]
    by_task: dict[str, list[str]] = defaultdict(list)
    for prompt in (prompt for _, prompts in loaded for prompt in prompts):
        by_task[prompt.task].append(prompt.text)
    name = " + ".join(name for name, _ in loaded)
    chosen = sample(_only(by_task, tasks, name), num_prompts)
    return Workload(
        name, tuple(prompt.text for prompt in chosen), tuple(prompt.task for prompt in chosen), note
    )


def sample(by_task: Mapping[str, Sequence[str]], num_prompts: int) -> list[Prompt]:
    """Return equally many prompts of every task as far as available, interleaved evenly.

    Interleaving makes an early stop or a slowdown of the machine affect all tasks alike.

    Raises:
        BadInputError: fewer prompts than tasks.
    """
    if num_prompts < len(by_task):
        raise BadInputError(
            f"expected at least one prompt for each of {len(by_task)} tasks ({shorten(by_task)}), got num_prompts "
            f"{num_prompts}; ask for more with --num-prompts or for fewer tasks with --task"
        )
    counts = equal_shares([len(texts) for texts in by_task.values()], num_prompts)
    return interleave(
        [
            [Prompt(text, task) for text in evenly_spaced(tuple(texts), count)]
            for (task, texts), count in zip(by_task.items(), counts, strict=True)
        ]
    )


def equal_shares(sizes: Sequence[int], total: int) -> list[int]:
    """Divide `total` equally among groups of these sizes; full groups leave the rest to others.

    >>> equal_shares([80, 80, 3], 40), equal_shares([5, 5], 100)
    ([19, 18, 3], [5, 5])
    """
    shares = [0] * len(sizes)
    for _ in range(min(total, sum(sizes))):
        open_groups = [group for group, size in enumerate(sizes) if shares[group] < size]
        shares[min(open_groups, key=lambda group: shares[group])] += 1
    return shares


def interleave(groups: Sequence[Sequence[Item]]) -> list[Item]:
    """Merge groups into one list in which each keeps its order and is spread evenly.

    >>> interleave([["a", "b", "c"], ["1"]])
    ['a', 'b', '1', 'c']
    """
    placed = [
        ((place + 0.5) / len(group), number, place, item)
        for number, group in enumerate(groups)
        for place, item in enumerate(group)
    ]
    return [item for *_, item in sorted(placed, key=lambda each: each[:3])]


def evenly_spaced(prompts: tuple[Item, ...], num_prompts: int) -> tuple[Item, ...]:
    """Return `num_prompts` evenly spaced prompts, so that a small sample covers the whole source.

    >>> evenly_spaced(("a", "b", "c", "d", "e"), 2)
    ('a', 'c')
    """
    if num_prompts >= len(prompts):
        return prompts
    return tuple(prompts[index * len(prompts) // num_prompts] for index in range(num_prompts))


def shorten(names: Sequence[str] | Mapping[str, object], most: int = 12) -> str:
    """Join names with commas, listing at most `most` of them."""
    shown = list(names)
    return ", ".join(shown[:most]) + (f" and {len(shown) - most} more" if len(shown) > most else "")


def _load(source: str) -> tuple[str, list[Prompt]]:
    """Return the name and all prompts of one source."""
    if source == BUILTIN:
        return BUILTIN, [Prompt(text, BUILTIN) for text in _OWN_PROMPTS]
    name, colon, place = source.partition(":")
    data_set = DATA_SETS.get(name)
    if data_set is None:
        return Path(source).name, read_any(Path(source))
    path = Path(place) if colon else data_set.path
    if path is None or not path.is_file():
        where = path or f"{data_set.file_name} in the folder {DATA_VARIABLE}"
        raise BadInputError(
            f"expected the file of {name} at {where}, found none; give it with --prompts {name}:PATH, "
            f"or take --prompts {BUILTIN} for a small built-in set"
        )
    return path.name, data_set.read(path)


def _only(by_task: Mapping[str, list[str]], tasks: Sequence[str], name: str) -> Mapping[str, list[str]]:
    for task in tasks:
        if task not in by_task:
            raise BadInputError(
                f"expected a task of {name} ({shorten(by_task)}), got {task!r}; take one of these"
            )
    return {task: by_task[task] for task in tasks} if tasks else by_task
