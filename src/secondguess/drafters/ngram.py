"""N-gram drafter: prompt lookup in the row's own text (LLMA, arXiv 2304.04487). Use `ngram`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from secondguess.core import Candidate, Row
from secondguess.drafters.lookup import LookupDrafter
from secondguess.drafters.row_sources import LOOKUP_PART
from secondguess.errors import BadInputError
from secondguess.names import check_range

MAX_NGRAM = 32


@dataclass(frozen=True)
class NgramOptions:
    """Options of `ngram,max=N,min=N`.

    Args:
        max: longest n-gram that is looked up, 1 to 32 tokens.
        min: shortest n-gram that is looked up, 1 to `max` tokens.
    """

    max: int = 4
    min: int = 2

    def __post_init__(self) -> None:
        check_range("max of the drafter ngram", self.max, 1, MAX_NGRAM)
        check_range("min of the drafter ngram", self.min, 1, MAX_NGRAM)
        if self.min > self.max:
            raise BadInputError(f"expected min of the drafter ngram at most max={self.max}, got {self.min}")


class NgramIndex:
    """Position after the latest occurrence of each n-gram of a text; one hash map per n."""

    def __init__(self, options: NgramOptions) -> None:
        self.tokens: list[int] = []
        # Longest first. Each maps an n-gram to the position after its latest occurrence, not
        # counting the end of the text.
        self._followers: list[tuple[int, dict[tuple[int, ...], int]]] = [
            (length, {}) for length in range(options.max, options.min - 1, -1)
        ]

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens to the text."""
        for token in tokens:
            position = len(self.tokens)
            for length, followers in self._followers:
                if length <= position:
                    followers[tuple(self.tokens[position - length :])] = position
            self.tokens.append(token)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    def continuation(self, limit: int) -> list[int]:
        """Return the tokens after the latest earlier occurrence of the longest matching n-gram.

        There are `limit` of them, or none if the n-grams at the end of the text are all new.
        """
        start = self._follower()
        if start is None:
            return []
        # The copy may continue into its own output, so a periodic text is continued indefinitely.
        period = len(self.tokens) - start
        return [self.tokens[start + offset % period] for offset in range(limit)]

    @property
    def has_match(self) -> bool:
        """True if an n-gram at the end of the text occurred before."""
        return self._follower() is not None

    def _follower(self) -> int | None:
        for length, followers in self._followers:
            start = followers.get(tuple(self.tokens[-length:]))
            if start is not None:
                return start
        return None


MATCH, NO_MATCH = Candidate(deterministic=True), Candidate(longest=0, deterministic=True)


class NgramDrafter(LookupDrafter[NgramIndex]):
    """Deterministic drafter that copies from the row's own text."""

    is_of_package = True
    kind = "ngram"
    options_type = NgramOptions
    options: NgramOptions

    def make_index(self, row: Row) -> NgramIndex:
        return NgramIndex(self.options)

    def choices(self, index: NgramIndex) -> tuple[Candidate]:
        """Return one candidate, of length 0 if no n-gram matches."""
        return (MATCH if index.has_match else NO_MATCH,)

    def chain(self, index: NgramIndex, limit: int) -> list[int]:
        return index.continuation(limit)


SOURCE_MATCH, SOURCE_NO_MATCH = (each._replace(part=LOOKUP_PART, kind="ngram") for each in (MATCH, NO_MATCH))


class NgramSource:
    """The same look-up as a row's own draft source, for a request that names it."""

    part = LOOKUP_PART

    def __init__(self) -> None:
        self._index = NgramIndex(NgramOptions())

    def candidate(self, row: Row) -> Candidate:
        self._index.extend(row.tokens[len(self._index.tokens) :])
        return SOURCE_MATCH if self._index.has_match else SOURCE_NO_MATCH

    def chain(self, limit: int) -> list[int]:
        return self._index.continuation(limit)
