"""Base class of deterministic drafters that look up continuations in texts."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar

from secondguess.core import Budgets, Candidate, Draft, Row
from secondguess.drafters.base import Drafter, DrafterResources, Requirements
from secondguess.names import Name, format_options, read_options, refuse_argument
from secondguess.runtime.base import HiddenStates
from secondguess.sampling.noise import Noise
from secondguess.tensors import within_vocabulary


class TextIndex(Protocol):
    """Index of a growing text."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the text."""
        ...

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens to the text."""
        ...


IndexT = TypeVar("IndexT", bound=TextIndex)


class LookupDrafter(Drafter, Generic[IndexT]):
    """Drafter that keeps an index of each row's text and drafts from it.

    Args:
        options: instance of `options_type`, the options of the name.
        vocab_size: width of the target's logits; by default as wide as the tokens of any text.
    """

    deterministic = True
    kind: ClassVar[str]
    options_type: ClassVar[type[Any]]

    def __init__(self, options: Any = None, vocab_size: float = math.inf) -> None:
        self._vocab_size = vocab_size
        self.options = options or self.options_type()
        self.name = f"{self.kind}{format_options(self.options)}"
        self._indices: dict[Row, IndexT] = {}

    @classmethod
    def requirements(cls, name: Name, head: Path | None = None) -> Requirements:
        refuse_argument(name, "drafter")
        return Requirements(options=asdict(cls._read_options(name)))

    @classmethod
    def build(cls, name: Name, resources: DrafterResources) -> Self:
        return cls(cls._read_options(name), resources.target_vocab_size)

    @classmethod
    def _read_options(cls, name: Name) -> Any:
        return read_options(cls.options_type, name.options, f"drafter {cls.kind}")

    @abstractmethod
    def make_index(self, row: Row) -> IndexT:
        """Return the index of a row, which does not hold its text yet."""

    def choices(self, index: IndexT) -> tuple[Candidate, ...]:
        """Return the draft candidates after an indexed text; override it if they depend on the text."""
        return (Candidate(deterministic=True),)

    @abstractmethod
    def chain(self, index: IndexT, limit: int) -> list[int]:
        """Return a draft of at most `limit` tokens after an indexed text."""

    def begin(self, rows: Sequence[Row], hidden: Sequence[HiddenStates] = ()) -> None:
        for row in rows:
            self._indices[row] = self.make_index(row)
            self._index(row)

    def candidates(self, rows: Sequence[Row]) -> list[tuple[Candidate, ...]]:
        return [self.choices(self._index(row)) for row in rows]

    def propose(self, rows: Sequence[Row], budgets: Budgets, noise: Noise) -> Draft:
        limits = zip(rows, budgets.lengths, strict=True)
        chains = [
            within_vocabulary(self.chain(self._index(row), limit), self._vocab_size) for row, limit in limits
        ]
        return Draft.chains(chains, device=noise.device)

    def release(self, row: Row) -> None:
        self._indices.pop(row, None)

    def _index(self, row: Row) -> IndexT:
        """Return the index of a row, after it has read what was committed since the last call.

        Rounds that ask for no candidates leave their tokens unread: several at once take less time.
        """
        index = self._indices[row]
        try:
            index.extend(row.tokens[index.num_tokens :])
        except BaseException:  # an interrupt, which may leave a part of a token in the index
            self._indices[row] = self.make_index(row)
            raise
        return index
