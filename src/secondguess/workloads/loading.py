"""Workloads: public datasets by name, files, or a small built-in set.

HumanEval is the default workload if its file is in the folder `SECONDGUESS_DATA`, since it is not
part of the training data of the built-in models.
"""

from __future__ import annotations

import hashlib
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TypeVar

from secondguess.errors import BadInputError
from secondguess.workloads.files import Prompt, Record, first_turn, read_any, read_records, text_of

DATA_VARIABLE = "SECONDGUESS_DATA"
"""Environment variable with the folder of the datasets."""
BUILTIN = "builtin"

MT_BENCH = "writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"
"""MT-bench's categories, which together are one of Spec-Bench's six tasks."""
OTHER_TASKS = "translation", "summarization", "qa", "math_reasoning", "rag"
SPEC_BENCH = dict.fromkeys(MT_BENCH, "multi-turn") | {task: task for task in OTHER_TASKS}
"""Category in Spec-Bench's file -> task."""

Item = TypeVar("Item")


def _spec_bench_record(record: Record, path: Path) -> Prompt:
    """Convert a Spec-Bench question: first turn, with its category (MT-bench's are one task)."""
    text, category = first_turn(record), record.get("category")
    if not text:
        raise BadInputError(f"expected 'turns' with a text first, got {record.get('turns')!r:.60}")
    task = SPEC_BENCH.get(category) if isinstance(category, str) else None
    if task is None:
        raise BadInputError(
            f"expected a category of Spec-Bench ({', '.join(SPEC_BENCH)}), got {category!r:.60}; "
            "other files go by --prompts PATH"
        )
    return Prompt(text, task)


def _record_with(key: str, task: str) -> Callable[[Record, Path], Prompt]:
    """Return a converter for a dataset with one task and its prompts under one key."""

    def convert(record: Record, path: Path) -> Prompt:
        if not text_of(record, key):
            raise BadInputError(f"expected an object with a non-empty text {key!r} for {task}")
        return Prompt(text_of(record, key), task)

    return convert


@dataclass(frozen=True)
class DataSet:
    """Public dataset: name of its file in the folder `SECONDGUESS_DATA`, and a converter of its records."""

    file_name: str
    convert: Callable[[Record, Path], Prompt]

    @property
    def path(self) -> Path | None:
        """Path of the file; None if there is none."""
        folder = os.environ.get(DATA_VARIABLE)
        path = Path(folder) / self.file_name if folder else None
        return path if path is not None and path.is_file() else None


DATA_SETS = {
    "spec-bench": DataSet("spec_bench.jsonl", _spec_bench_record),
    "humaneval": DataSet("humaneval.jsonl", _record_with("prompt", "humaneval")),
    "gsm8k": DataSet("gsm8k_test_400.jsonl", _record_with("question", "gsm8k")),
}
"""Datasets by the name that `--prompts` takes, alone or as `NAME:PATH`."""

BUILTIN_PROMPTS = (
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
    """Prompts, the task of each, and the name and the hash that identify them in a report.

    The note gives the reason why the default prompts were not used; empty if there is none.
    """

    name: str
    prompts: tuple[str, ...]
    tasks: tuple[str, ...]
    note: str = ""

    @property
    def sha256(self) -> str:
        """SHA-256 of the prompts in order: with equal hashes, prompt i is the same prompt."""
        return hashlib.sha256("\0".join(self.prompts).encode()).hexdigest()


def load_workload(
    sources: str | Sequence[str] | None = None, num_prompts: int = 40, tasks: Sequence[str] = ()
) -> Workload:
    """Load `num_prompts` prompts, or all, equally many per task as far as available; the choice is deterministic.

    A source is a name from `DATA_SETS`, alone or as `NAME:PATH`; `builtin` for our own prompts; or a file of JSON
    lines or plain text. None takes HumanEval if its file is in `SECONDGUESS_DATA`, else our own prompts, with a note.
    """
    note = ""
    if sources is None:
        sources = "humaneval" if DATA_SETS["humaneval"].path else BUILTIN
        if sources == BUILTIN:
            note = f"no humaneval.jsonl in the folder {DATA_VARIABLE}: the built-in prompts instead"
    loaded = [_load(source) for source in ([sources] if isinstance(sources, str) else sources)]
    by_task: dict[str, list[Prompt]] = defaultdict(list)
    for prompt in chain.from_iterable(prompts for _, prompts in loaded):
        by_task[prompt.task].append(prompt)
    name = " + ".join(name for name, _ in loaded)
    for task in tasks:
        if task not in by_task:
            raise BadInputError(
                f"expected a task of {name} ({_list_some(by_task)}), got {task!r}; take one of these"
            )
    chosen = _sample({task: by_task[task] for task in tasks or by_task}, num_prompts)
    return Workload(
        name, tuple(prompt.text for prompt in chosen), tuple(prompt.task for prompt in chosen), note
    )


def _load(source: str) -> tuple[str, list[Prompt]]:
    """Return the name and all prompts of one source."""
    if source == BUILTIN:
        return BUILTIN, [Prompt(text, BUILTIN) for text in BUILTIN_PROMPTS]
    name, colon, given = source.partition(":")
    data_set = DATA_SETS.get(name)
    if data_set is None:
        path = Path(source)
        # The name is part of reports in UTF-8, whatever the file system has.
        return os.fsencode(path.name).decode("utf-8", "replace"), read_any(path)
    found = Path(given) if colon else data_set.path
    if found is None or not found.is_file():
        raise BadInputError(
            f"expected the file of {name} at {found or f'{data_set.file_name} in the folder {DATA_VARIABLE}'}, "
            f"found none; give it with --prompts {name}:PATH, or take --prompts {BUILTIN} for a small built-in set"
        )
    return found.name, read_records(found, data_set.convert)


def _sample(by_task: Mapping[str, Sequence[Prompt]], num_prompts: int) -> list[Prompt]:
    """Return equally many prompts of every task as far as available, interleaved evenly.

    Interleaving makes an early stop or a slowdown of the machine affect all tasks alike.
    """
    if num_prompts < len(by_task):
        raise BadInputError(
            f"expected at least one prompt for each of {len(by_task)} tasks ({_list_some(by_task)}), got num_prompts "
            f"{num_prompts}; ask for more with --num-prompts or for fewer tasks with --task"
        )
    shares = equal_shares([len(prompts) for prompts in by_task.values()], num_prompts)
    groups = zip(by_task.values(), shares, strict=True)
    return interleave([evenly_spaced(prompts, share) for prompts, share in groups])


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
    positioned = [
        ((index + 0.5) / len(group), number, index, item)
        for number, group in enumerate(groups)
        for index, item in enumerate(group)
    ]
    return [item for *_, item in sorted(positioned, key=lambda placed: placed[:3])]


def evenly_spaced(prompts: Sequence[Item], num_prompts: int) -> Sequence[Item]:
    """Return `num_prompts` evenly spaced prompts, so that a small sample covers the whole source.

    >>> evenly_spaced(("a", "b", "c", "d", "e"), 2)
    ['a', 'c']
    """
    if num_prompts >= len(prompts):
        return prompts
    return [prompts[index * len(prompts) // num_prompts] for index in range(num_prompts)]


def _list_some(names: Iterable[str], most: int = 12) -> str:
    first, rest = list(names)[:most], len(list(names)) - most
    return ", ".join(first) + (f" and {rest} more" if rest > 0 else "")
