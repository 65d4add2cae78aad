"""A corpus of a few hundred small files, a tiny recipe, and the tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from builtin_pair.pair import PairRecipe, prepare_data
from builtin_pair.target import TargetShape
from builtin_pair.tokens import TokenStore
from secondguess.train.run_folder import Budget
from secondguess.train.training_texts import AnswerSettings

MODULE = '''"""Numbers about the {name} of things."""

import math


def {name}_of(first: float, second: float) -> float:
    """Return the {name} of two numbers, {number} times.

    >>> {name}_of(1.0, {number}.0) > 0
    True
    """
    total = 0.0
    for step in range({number}):
        if first > second:
            total += math.sqrt(first * step)
        else:
            total -= second / (step + {number})
    return total


class {name}Keeper:
    def __init__(self, limit={number}):
        self.limit = limit
        self.items = []

    def add(self, item):
        if len(self.items) < self.limit:
            self.items.append(item)
        return self
'''


@pytest.fixture(scope="session")
def corpus_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    record = folder / "things-1.0.dist-info"
    record.mkdir()
    (record / "METADATA").write_text(
        "Metadata-Version: 2.4\nName: things\nVersion: 1.0\nLicense-Expression: MIT\n"
    )
    (folder / "things").mkdir()
    names = [f"{word}{number}" for word in ("size", "weight", "colour", "speed") for number in range(200)]
    for index, name in enumerate(names):
        (folder / "things" / f"{name}.py").write_text(MODULE.format(name=name, number=index % 9 + 2))
    (record / "RECORD").write_text("".join(f"things/{name}.py,,\n" for name in names))
    return folder


@pytest.fixture(scope="session")
def recipe(corpus_folder: Path) -> PairRecipe:
    """A few steps of two tiny models."""
    return PairRecipe(
        corpus=(corpus_folder,),
        include_standard_library=False,
        target=TargetShape(2, 64, 2, 1, 128, 512),
        drafter=("num_layers=1", "width=64"),
        target_budget=Budget(steps=7),
        drafter_budget=Budget(steps=3),
        answers=AnswerSettings(temperatures=(0.0, 1.0), max_tokens=16, length=64),
        num_prompts=8,
        compile=False,
    )


@pytest.fixture(scope="session")
def store(recipe: PairRecipe, tmp_path_factory: pytest.TempPathFactory) -> TokenStore:
    return prepare_data(recipe, tmp_path_factory.mktemp("run"), lambda line: None)
