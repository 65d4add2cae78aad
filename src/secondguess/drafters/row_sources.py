"""Deterministic draft sources that belong to a row: forced tokens of its grammar, its prediction, look-ups.

Their drafts are candidates in addition to those of the drafter, with negative part numbers
(`Candidate.part`). Rows without such a source take no time. As deterministic drafts, they do not
change the output distribution.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache

from secondguess.core import MAX_DRAFT_LENGTH, Candidate, Row
from secondguess.sampling.grammar import GrammarMatcher
from secondguess.tensors import within_vocabulary

FORCED_PART = -1
PREDICTION_PART = -2
LOOKUP_PART = -3
NO_DRAFT = Candidate(part=-4, longest=0, deterministic=True)
"""Candidate of a row for which nothing may draft: no source has its part number."""

MAX_COMPARED = 32
"""Number of positions of the prediction that are compared with the output to resynchronise."""
MAX_MATCH = 16
"""Number of last tokens of the output that are compared at each position."""
LENGTH_FACTOR = 4
"""Factor by which drafts from a prediction may be longer than others: it is made for this very output."""


class ForcedTokens:
    """Tokens that are the only ones that the row's grammar allows.

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
    """Predicted output of the client, drafted from the position after the output's end.

    After a mismatch, drafting resumes at the position whose preceding tokens have the longest match
    with the end of the output; among equals, at the next one after the last position. If the last
    token does not occur at all, one token is taken to be replaced by another. A position at which
    the output has differed before is resumed only with a longer match.

    Args:
        tokens: token ids of the prediction.
    """

    part = PREDICTION_PART

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = list(tokens)
        self._positions: dict[int, list[int]] = {}
        for position, token in enumerate(self._tokens):
            self._positions.setdefault(token, []).append(position)
        # Length of the match before each position at which the output differed.
        self._mismatch_lengths: dict[int, int] = {}
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

    def _read(self, row: Row, position: int) -> None:
        """Follow the output token at this position of the row."""
        self._num_read += 1
        if self._tokens[self._next : self._next + 1] == [row.tokens[position]]:
            self._next += 1
            self._num_matched += 1
        else:
            self._resynchronise(row.tokens[max(row.num_prompt, position + 1 - MAX_MATCH) : position + 1])

    def _resynchronise(self, last: Sequence[int]) -> None:
        """Find the position in the prediction after the last tokens of the output."""
        positions = self._positions.get(last[-1], ())
        behind = bisect_left(positions, self._next)
        near = [
            *positions[behind : behind + MAX_COMPARED],
            *positions[max(behind - MAX_COMPARED, 0) : behind][::-1],
        ]
        if self._num_matched:
            self._mismatch_lengths[self._next - 1] = self._num_matched
        self._num_matched, self._next = 0, self._next + 1
        for position in near:
            matched = self._match(last, position)
            if matched > max(self._num_matched, self._mismatch_lengths.get(position, 0)):
                self._num_matched, self._next = matched, position + 1

    def _match(self, last: Sequence[int], position: int) -> int:
        """Return how many of the last tokens are those of the prediction up to a position."""
        count = 0
        while count < min(len(last), position + 1) and last[-1 - count] == self._tokens[position - count]:
            count += 1
        return count


@lru_cache(maxsize=256)
def _forced_candidate(longest: int) -> Candidate:
    return Candidate(FORCED_PART, "forced", longest, deterministic=True, certain=True)


@lru_cache(maxsize=4096)
def _predicted_candidate(kind: int, longest: int) -> Candidate:
    return Candidate(
        PREDICTION_PART, ("prediction", kind), longest, deterministic=True, length_factor=LENGTH_FACTOR
    )


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


def chains_of_sources(
    rows: Sequence[Row], lengths: Sequence[int], parts: Sequence[int], vocab_size: int
) -> list[list[int]]:
    """Return per row the draft of its own source, if one was chosen (a negative part); else []."""
    chains = [
        next((source.chain(length) for source in row.sources if source.part == part), []) if length else []
        for row, length, part in zip(rows, lengths, parts, strict=True)
    ]
    return [within_vocabulary(chain, vocab_size) for chain in chains]
