"""Mutants, the checks that must notice them, and the test that runs both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest

Patch = pytest.MonkeyPatch
KNOWN: dict[str, bool] = {}
"""Results of checks on the code as it ships."""


@dataclass(frozen=True)
class Check:
    """A proof with its arguments; proofs of equal arguments run once on the code as it ships."""

    function: Callable[..., bool]
    args: tuple[object, ...]
    settings: tuple[tuple[str, object], ...]

    def __call__(self) -> bool:
        return self.function(*self.args, **dict(self.settings))

    @property
    def holds_unchanged(self) -> bool:
        key = repr(self)
        if key not in KNOWN:
            KNOWN[key] = self()
        return KNOWN[key]


def check(function: Callable[..., bool], *args: object, **settings: object) -> Check:
    return Check(function, args, tuple(settings.items()))


@dataclass(frozen=True)
class Mutant:
    """A mistake and the proof that must notice it."""

    mutate: Callable[[Patch], None]
    check: Check
    name: str = ""

    def __str__(self) -> str:
        return self.name or self.mutate.__name__.replace("_", "-")


def mutation_test(mutants: Sequence[Mutant]) -> Callable[[Mutant, Patch], None]:
    """Return a test of each mutant, which a test module assigns to a name that pytest collects."""

    @pytest.mark.parametrize("mutant", mutants, ids=str)
    def test(mutant: Mutant, monkeypatch: Patch) -> None:
        assert mutant.check.holds_unchanged, "the code as it ships must pass"
        mutant.mutate(monkeypatch)
        assert not mutant.check(), "the mutant survived"

    return test
