"""Suffix drafter: the most frequent continuation of the longest repeated suffix. Use `suffix`.

A suffix automaton of prompt and output, extended token by token, gives the longest suffix of the
text that occurred earlier (SAM Decoding, arXiv 2411.10666). The draft follows the most frequent
transitions while they are probable enough (SuffixDecoding, arXiv 2411.04975). A row with a history
(`Row.history`) drafts from the recent outputs of the same owner where the match there is longer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from secondguess.core import MAX_DRAFT_LENGTH, Candidate, Row
from secondguess.drafters.automaton import Context, SuffixAutomaton, SuffixMatch
from secondguess.drafters.history import Histories, HistoryReader
from secondguess.drafters.lookup import LookupDrafter
from secondguess.names import check_range

ONCE, ALWAYS, SOMETIMES = "once", "always", "sometimes"
"""Frequency of the most frequent follower of a match: it followed the only time, every time, or not every time."""
WEIGHTS = {ONCE: 1.0, ALWAYS: 2.5, SOMETIMES: 1.0}
SHARES = {ONCE: 1.0, ALWAYS: 1.0, SOMETIMES: 0.6}
HALF_WEIGHT = 3.0
"""Parameters of `expected_acceptance`, fitted to answers of SmolLM2 135M and Qwen2.5-Coder 1.5B."""


def expected_acceptance(num_bits: int, frequency: str) -> float:
    """Return the acceptance probability of the follower of a match that is expected before any was verified.

    Args:
        num_bits: bit length of the number of matched tokens; 3 are 4 to 7 tokens.
    """
    weight = (0.0, 1.0)[num_bits] if num_bits < 2 else 1.5 * 2 ** (num_bits - 1)
    weight *= WEIGHTS[frequency]
    return SHARES[frequency] * weight / (weight + HALF_WEIGHT)


@dataclass(frozen=True)
class SuffixOptions:
    """Options of `suffix,min=N,factor=F,offset=N,threshold=P`.

    Args:
        min: shortest match that is used, 1 to 64 tokens.
        factor: draft nodes per matched token, 0 to 64.
        offset: additional draft nodes for any match, 0 to 64.
        threshold: smallest probability of the drafted path, as estimated from counts, 0 to 1; the
            draft stops before the first node below it.
    """

    min: int = 1
    factor: float = 1.0
    offset: int = 3
    threshold: float = 0.1

    def __post_init__(self) -> None:
        check_range("min of the drafter suffix", self.min, 1, 64)
        check_range("factor of the drafter suffix", self.factor, 0, 64)
        check_range("offset of the drafter suffix", self.offset, 0, 64)
        check_range("threshold of the drafter suffix", self.threshold, 0, 1)


class RowIndex:
    """Index of a row's text, and its matches with the history that the row shares, if any."""

    def __init__(self, shared: HistoryReader | None = None) -> None:
        self.own = SuffixAutomaton()
        self._shared = shared

    @property
    def num_tokens(self) -> int:
        return self.own.num_tokens

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens to the text."""
        self.own.extend(tokens)
        if self._shared is not None:
            self._shared.extend(tokens)

    def shared_match(self) -> SuffixMatch | None:
        """Return the match in the history if it is longer than the row's own, and not the end of a text."""
        found = None if self._shared is None else self._shared.longest()
        if found is None or found.num_matched <= self.own.match.length or not found.context.total:
            return None
        return found


class SuffixDrafter(LookupDrafter[RowIndex]):
    """Deterministic drafter that continues the longest repeated suffix of the row's text."""

    is_of_package = True
    kind = "suffix"
    options_type = SuffixOptions
    options: SuffixOptions
    shares_history = True

    def __init__(self, options: SuffixOptions = SuffixOptions(), vocab_size: float = math.inf) -> None:
        super().__init__(options, vocab_size)
        self.histories = Histories()
        # Cached, as it is called in every round.
        self._choices = lru_cache(maxsize=4096)(self._choices_for)

    def make_index(self, row: Row) -> RowIndex:
        return RowIndex(None if row.history is None else HistoryReader(self.histories.of(row.history)))

    def choices(self, index: RowIndex) -> tuple[Candidate]:
        """Return one candidate, of length 0 if the match is shorter than `min`.

        Its `kind` groups matches of similar length and frequency of the follower, which have similar acceptance.
        """
        shared = index.shared_match()
        if shared is None:
            context = index.own.match
            return self._choices("suffix", context.length, _frequency(context))
        return self._choices("history", shared.num_matched, _frequency(shared.context))

    def _choices_for(self, source: str, num_matched: int, frequency: str) -> tuple[Candidate]:
        # Powers of two: matches of 9 and 12 tokens are about equally good, one of 3 is worse.
        num_bits, longest = num_matched.bit_length(), self._longest(num_matched)
        kind, expected = (source, num_bits, frequency), expected_acceptance(num_bits, frequency)
        return (Candidate(kind=kind, longest=longest, deterministic=True, expected=expected),)

    def _longest(self, num_matched: int) -> int:
        if num_matched < self.options.min:
            return 0
        return min(int(self.options.factor * num_matched) + self.options.offset, MAX_DRAFT_LENGTH)

    def chain(self, index: RowIndex, limit: int) -> list[int]:
        shared = index.shared_match()
        if shared is None:
            context = index.own.match
            return self._chain(index.own, context, context.length, limit)
        return self._chain(shared.automaton, shared.context, shared.num_matched, limit)

    def _chain(self, automaton: SuffixAutomaton, context: Context, num_matched: int, limit: int) -> list[int]:
        limit = min(limit, self._longest(num_matched))
        chain: list[int] = []
        survival = 1.0
        for token, prob in automaton.continuation(context, self.options.min):
            survival *= prob
            if len(chain) == limit or survival < self.options.threshold:
                break
            chain.append(token)
        return chain

    def release(self, row: Row) -> None:
        super().release(row)
        if row.history is not None and row.finished:
            self.histories.add(row)


def _frequency(context: Context) -> str:
    if context.total < 2:
        return ONCE
    return ALWAYS if len(context.counts) == 1 else SOMETIMES
