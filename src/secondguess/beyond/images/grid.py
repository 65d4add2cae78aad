"""Grid drafter: look-up of the neighbours of a pixel in the picture so far. Use `grid,width=N`.

Prompt lookup in two dimensions: where `ngram` compares the last tokens of a text, this compares the
tokens to the left and above, in a picture whose lines of `width` tokens follow each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from secondguess.core import Candidate, Row
from secondguess.drafters.lookup import LookupDrafter
from secondguess.names import check_range

MAX_WIDTH = 8192


@dataclass(frozen=True)
class GridOptions:
    """Options of `grid,width=N`."""

    width: int = 32  # tokens per line of the picture, with the one for its end; 2 to 8192

    def __post_init__(self) -> None:
        check_range("width of the drafter grid, the tokens per line,", self.width, 2, MAX_WIDTH)


class GridIndex:
    """Token that last followed each combination of neighbours; one hash map per number of them."""

    def __init__(self, width: int) -> None:
        self.tokens: list[int] = []
        left, above = 1, width
        # Distances of the neighbours, most first. Those at the edges are in the next line, which is
        # the same for all pixels of a column.
        offsets = [(left, above + 1, above, above - 1), (left, above + 1, above), (left, above)]
        self._followers: list[tuple[tuple[int, ...], dict[tuple[int, ...], int]]] = [
            (distances, {}) for distances in offsets
        ]

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens to the picture."""
        for token in tokens:
            for offsets, followers in self._followers:
                if max(offsets) <= len(self.tokens):
                    followers[self._neighbours(offsets)] = token
            self.tokens.append(token)

    def match(self) -> tuple[int, int] | None:
        """Return the number of neighbours that occurred together, and the token that followed them."""
        for offsets, followers in self._followers:
            if max(offsets) <= len(self.tokens):
                token = followers.get(self._neighbours(offsets))
                if token is not None:
                    return len(offsets), token
        return None

    def continuation(self, limit: int) -> list[int]:
        """Return up to `limit` tokens, each found by its neighbours, drafted ones among them."""
        num_known = len(self.tokens)
        while len(self.tokens) < num_known + limit and (found := self.match()) is not None:
            self.tokens.append(found[1])
        chain = self.tokens[num_known:]
        del self.tokens[num_known:]
        return chain

    def _neighbours(self, offsets: Sequence[int]) -> tuple[int, ...]:
        return tuple([self.tokens[-offset] for offset in offsets])


class GridDrafter(LookupDrafter[GridIndex]):
    """Deterministic drafter that copies what followed the same neighbours."""

    kind = "grid"
    options_type = GridOptions
    options: GridOptions

    def make_index(self, row: Row) -> GridIndex:
        return GridIndex(self.options.width)

    def choices(self, index: GridIndex) -> tuple[Candidate]:
        """Return one candidate, of length 0 without a match; its `kind` is the match's size."""
        found = index.match()
        return (CANDIDATES[found[0] if found else 0],)

    def chain(self, index: GridIndex, limit: int) -> list[int]:
        return index.continuation(limit)


CANDIDATES = {size: Candidate(kind=("grid", size), deterministic=True) for size in (2, 3, 4)} | {
    0: Candidate(longest=0, deterministic=True)
}
"""Candidates by the number of neighbours that match."""
