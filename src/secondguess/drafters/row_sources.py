"""Deterministic draft sources that belong to a row: forced tokens of its grammar, its prediction, look-ups.

Their drafts are candidates in addition to those of the drafter, with negative part numbers
(`Candidate.part`). Rows without such a source take no time. As deterministic drafts, they do not
change the output distribution.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import lru_cache

from secondguess.core import MAX_DRAFT_LENGTH, Candidate, Row, within_vocabulary
from secondguess.sampling.grammar import GrammarMatcher

FORCED_PART = -1
PREDICTION_PART = -2
LOOKUP_PART = -3
NO_DRAFT = Candidate(part=-4, longest=0, deterministic=True)
"""Candidate of a row for which nothing may draft: no source has its part number."""

MAX_COMPARED = 32
"""Number of positions of the prediction that are compared with the output to resynchronise."""
MAX_MATCH = 16
"""Number of last tokens of the output that are compared at each position."""
MIN_MATCH = 2
"""Number of tokens that match after a mismatch once it is known what was replaced."""
MAX_REPLACED = 8
"""Maximum number of tokens on either side of a replacement that is expected again, and of a word."""
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
    token does not occur at all, one word is taken to be replaced by another. A position at which
    the output has differed before is resumed only with a longer match.

    If the output has replaced a few tokens, such as a name, the replacement is expected in the rest
    of the prediction too, until the output differs from it.

    Args:
        tokens: token ids of the prediction.
        text_of: returns the text of a token, by which tokens belong to one word; without it, each token
            is a word.
    """

    part = PREDICTION_PART

    def __init__(self, tokens: Sequence[int], text_of: Callable[[int], str] = lambda token: "") -> None:
        self._tokens = list(tokens)
        self._text_of = lru_cache(maxsize=1024)(text_of)
        self._positions: dict[int, list[int]] = {}
        for position, token in enumerate(self._tokens):
            self._positions.setdefault(token, []).append(position)
        # Length of the match before each position at which the output differed.
        self._mismatch_lengths: dict[int, int] = {}
        # Replaced tokens and what is expected instead, by the first replaced token.
        self._replaced: dict[int, tuple[list[int], list[int]]] = {}
        self._next = 0
        self._num_begun = 0  # tokens of the replacement at `_next` that the output has already
        self._num_matched = 0
        self._num_read = 0
        # Positions in the prediction and in the output where they last diverged and met again.
        self._diverged: tuple[int, int] | None = None
        self._met = 0, 0

    def candidate(self, row: Row) -> Candidate:
        """Return the candidate at the row's present end; its `kind` groups matches of similar length."""
        for length in range(row.num_prompt + self._num_read, len(row.tokens)):
            self._read(row, length)
        left = min(len(self._tokens) - self._next, MAX_DRAFT_LENGTH)
        return _predicted_candidate(min(self._num_matched, MAX_MATCH).bit_length(), max(left, 0))

    def chain(self, limit: int) -> list[int]:
        chain: list[int] = []
        position = self._next
        while position < len(self._tokens) and len(chain) < limit + self._num_begun:
            num_tokens, expected = self._expected(position)
            chain += expected
            position += num_tokens
        return chain[self._num_begun : self._num_begun + limit]

    def _expected(self, position: int) -> tuple[int, list[int]]:
        """Return a number of tokens of the prediction at a position, and what is expected for them."""
        replaced, replacement = self._replaced.get(self._tokens[position], ([], []))
        if replaced and self._tokens[position : position + len(replaced)] == replaced:
            return len(replaced), replacement
        return 1, self._tokens[position : position + 1]

    def _read(self, row: Row, position: int) -> None:
        """Follow the output token at this position of the row."""
        self._num_read += 1
        if self._follow(row.tokens[position]):
            self._num_matched += 1
        else:
            self._resynchronise(row.tokens[max(row.num_prompt, position + 1 - MAX_MATCH) : position + 1])
        if self._diverged is not None and self._num_matched >= MIN_MATCH and not self._num_begun:
            self._learn_replacement(self._diverged, self._met, row.output)
            self._diverged = None

    def _learn_replacement(
        self, diverged: tuple[int, int], met: tuple[int, int], output: Sequence[int]
    ) -> None:
        """Expect the tokens of the output between two positions, from the beginning of the word, later too."""
        (start, begin), (end, stop) = diverged, met
        while (
            min(start, begin) > 0
            and self._tokens[start - 1] == output[begin - 1]
            and (self._is_within_word(self._tokens, start) or self._is_within_word(output, begin))
        ):
            start, begin = start - 1, begin - 1
        replaced, replacement = self._tokens[start:end], list(output[begin:stop])
        if 0 < len(replaced) <= MAX_REPLACED and 0 < len(replacement) <= MAX_REPLACED:
            self._replaced[replaced[0]] = replaced, replacement

    def _follow(self, token: int) -> bool:
        """Advance and return True if the next output token is the expected one or the predicted one."""
        if self._next >= len(self._tokens):
            return False
        num_tokens, expected = self._expected(self._next)
        if token == expected[self._num_begun]:
            self._num_begun += 1
            if self._num_begun == len(expected):
                self._next, self._num_begun = self._next + num_tokens, 0
            return True
        predicted = self._tokens[self._next]
        if expected != [predicted]:
            del self._replaced[predicted]
        continues = token == predicted and not self._num_begun
        self._next += continues
        return continues

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
        if self._diverged is None:
            self._diverged = self._next, self._num_read - 1 - self._num_begun
        self._num_matched = self._num_begun = 0
        # In a word that goes on while the predicted one, which has been passed, does not, any token may come.
        continues = self._is_within_word(last, len(last) - 1)
        is_longer = continues and not self._is_within_word(self._tokens, self._next)
        if not is_longer:
            self._next = self._word_end(self._next)
        for each in near:
            matched = self._match(last, each)
            if matched > max(self._num_matched, self._mismatch_lengths.get(each, 0), is_longer):
                self._num_matched, self._next = matched, each + 1
        self._met = self._next - self._num_matched, self._num_read - self._num_matched

    def _word_end(self, position: int) -> int:
        """Return the position in the prediction after the word, or the rest of it, at this position."""
        end = position + 1
        while end - position < MAX_REPLACED and self._is_within_word(self._tokens, end):
            end += 1
        return end

    def _is_within_word(self, tokens: Sequence[int], position: int) -> bool:
        """Return whether the token at a position continues the word of the token before it."""
        if not 0 < position < len(tokens):
            return False
        before, after = self._text_of(tokens[position - 1])[-1:], self._text_of(tokens[position])[:1]
        return _is_of_word(before) and _is_of_word(after)

    def _match(self, last: Sequence[int], position: int) -> int:
        """Return how many of the last tokens are those of the prediction up to a position."""
        count = 0
        while count < min(len(last), position + 1) and last[-1 - count] == self._tokens[position - count]:
            count += 1
        return count


def _is_of_word(character: str) -> bool:
    """Return whether a character is a letter of a script with words, a digit or `_`.

    Scripts without spaces between words have letters without case.
    """
    return character == "_" or character.isdigit() or character.lower() != character.upper()


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
