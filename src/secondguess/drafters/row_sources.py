"""Deterministic draft sources that belong to a row: forced tokens of its grammar, its prediction, look-ups.

They stand beside the drafter, whatever it is: a row that has one offers its drafts as further
candidates, with negative part numbers (`Candidate.part`), and rows without any cost nothing. As
deterministic drafts, they do not change the output distribution.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache

from secondguess.core import MAX_DRAFT_LENGTH, Candidate, Row
from secondguess.sampling.grammar import GrammarMatcher

FORCED_PART = -1
PREDICTION_PART = -2
LOOKUP_PART = -3
NO_DRAFT = Candidate(part=-4, longest=0, deterministic=True)
"""Candidate of a row for which nothing may draft: no source has its part number."""

MAX_COMPARED = 32
"""Number of places of the prediction that are compared with the output to resynchronise."""
MAX_MATCH = 16
"""Number of last tokens of the output that are compared at each place."""


class ForcedTokens:
    """Tokens that the row's grammar leaves no choice about.

    Their masked probability is 1, so the target accepts them: the candidate is `certain`.
    """

    part = FORCED_PART

    def __init__(self, grammar: GrammarMatcher) -> None:
        self._grammar = grammar

    def candidate(self, row: Row) -> Candidate:
        return _forced_candidate(min(len(self._grammar.forced()), MAX_DRAFT_LENGTH))

    def chain(self, limit: int) -> list[int]:
        return self._grammar.forced()[:limit]


class Prediction:
    """The client's guess of the output, from where the output has got to in it.

    After a divergence, the place is that whose preceding tokens match most of the last tokens of
    the output; among equals, the next one behind the last place. Where the last token does not
    occur at all, one token is taken to be replaced. A place behind which the output went on otherwise
    is returned to only with a longer match.

    Args:
        tokens: token ids of the guess.
    """

    part = PREDICTION_PART

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = list(tokens)
        self._places: dict[int, list[int]] = {}
        for place, token in enumerate(self._tokens):
            self._places.setdefault(token, []).append(place)
        # Places behind which the output went on otherwise, with the number of tokens that matched there.
        self._refuted: dict[int, int] = {}
        self._next = 0
        self._num_matched = 0
        self._num_read = 0

    def candidate(self, row: Row) -> Candidate:
        """Return the candidate at the row's present end; its `kind` groups matches of similar length."""
        for length in range(row.num_prompt + self._num_read, len(row.tokens)):
            self._read(row, length)
        left = min(len(self._tokens) - self._next, MAX_DRAFT_LENGTH)
        return _predicted_candidate(min(self._num_matched, MAX_MATCH).bit_length(), max(left, 0))

    def chain(self, limit: int) -> list[int]:
        return self._tokens[self._next : self._next + limit]

    def _read(self, row: Row, place: int) -> None:
        """Follow the output token at this place of the row."""
        self._num_read += 1
        token = row.tokens[place]
        if self._next < len(self._tokens) and self._tokens[self._next] == token:
            self._next += 1
            self._num_matched += 1
            return
        places = self._places.get(token, ())
        behind = bisect_left(places, self._next)
        near = [
            *places[behind : behind + MAX_COMPARED],
            *places[max(behind - MAX_COMPARED, 0) : behind][::-1],
        ]
        if self._num_matched:
            self._refuted[self._next - 1] = self._num_matched
        self._num_matched = 0
        found = self._next
        last = row.tokens[max(row.num_prompt, place + 1 - MAX_MATCH) : place + 1]
        for each in near:
            matched = self._match(last, each)
            if matched > max(self._num_matched, self._refuted.get(each, 0)):
                self._num_matched, found = matched, each
        self._next = found + 1

    def _match(self, last: Sequence[int], place: int) -> int:
        """Return how many of the last tokens are those of the prediction up to a place."""
        count = 0
        while count < min(len(last), place + 1) and last[-1 - count] == self._tokens[place - count]:
            count += 1
        return count


@lru_cache(maxsize=256)
def _forced_candidate(longest: int) -> Candidate:
    return Candidate(FORCED_PART, "forced", longest, deterministic=True, certain=True)


@lru_cache(maxsize=4096)
def _predicted_candidate(kind: int, longest: int) -> Candidate:
    return Candidate(PREDICTION_PART, ("prediction", kind), longest, deterministic=True)


def with_sources(
    rows: Sequence[Row], candidates: Sequence[Sequence[Candidate]]
) -> Sequence[Sequence[Candidate]]:
    """Return the candidates of each row: those of its own sources, then those of its parts of the drafter."""
    if not any([row.sources or row.parts is not None for row in rows]):
        return candidates
    return [
        (
            *(own for source in row.sources if (own := source.candidate(row)).longest),
            *(choice for choice in choices if row.parts is None or choice.part in row.parts),
        )
        or (NO_DRAFT,)
        for row, choices in zip(rows, candidates, strict=True)
    ]


def chains_of_sources(rows: Sequence[Row], lengths: Sequence[int], parts: Sequence[int]) -> list[list[int]]:
    """Return per row the draft of its own source, if one was chosen (a negative part); else []."""
    return [
        next((source.chain(length) for source in row.sources if source.part == part), []) if length else []
        for row, length, part in zip(rows, lengths, parts, strict=True)
    ]
