"""Suffix drafter: the most frequent continuation of the longest repeated suffix. Use `suffix`.

A suffix automaton of prompt and output, extended token by token, gives the longest suffix of the
text that occurred earlier (SAM Decoding, arXiv 2411.10666). The draft follows the most frequent
transitions while they are probable enough (SuffixDecoding, arXiv 2411.04975).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from secondguess.core import MAX_DRAFT_LENGTH, Candidate, Row
from secondguess.drafters.lookup import LookupDrafter
from secondguess.names import check_range

MAX_COUNTED_CONTEXTS = 32
"""Number of contexts counted per position, longest first; bounds the work per token."""

ROOT = 0
NO_STATE = -1


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

    min: int = 2
    factor: float = 1.0
    offset: int = 0
    threshold: float = 0.1

    def __post_init__(self) -> None:
        check_range("min of the drafter suffix", self.min, 1, 64)
        check_range("factor of the drafter suffix", self.factor, 0, 64)
        check_range("offset of the drafter suffix", self.offset, 0, 64)
        check_range("threshold of the drafter suffix", self.threshold, 0, 1)


@dataclass(slots=True)
class Context:
    """State of the automaton: the substrings that end at exactly the same positions of the text.

    Args:
        length: length of the longest of them.
        suffix: the state of their longest suffix that also ends elsewhere (the suffix link).
        next: state reached by each token that has followed.
        counts: number of times that each token followed.
        most_frequent: the token that followed most often, the latest among equals; None if nothing was
            counted.
        total: the sum of `counts`.
    """

    length: int
    suffix: int
    next: dict[int, int] = field(default_factory=dict)
    counts: dict[int, int] = field(default_factory=dict)
    most_frequent: int | None = None
    total: int = 0

    def count(self, token: int) -> None:
        """Count one more occurrence of a following token."""
        self.total += 1
        self.counts[token] = self.counts.get(token, 0) + 1
        if self.most_frequent is None or self.counts[token] >= self.counts[self.most_frequent]:
            self.most_frequent = token

    def split(self, length: int) -> Context:
        """Return a state for the substrings up to `length`, which now end elsewhere too."""
        return Context(
            length, self.suffix, dict(self.next), dict(self.counts), self.most_frequent, self.total
        )


class SuffixAutomaton:
    """Online suffix automaton with counts (Blumer et al. 1985).

    It has at most two states and three transitions per token, and appends in amortised constant
    time if the number of distinct followers is bounded (a split copies the transitions of one
    context).

    The textbook automaton does not count online: a position has as many contexts as its suffix
    links are deep (about log n in ordinary text, n in a text of one repeated token). So `append`
    counts the token for at most `MAX_COUNTED_CONTEXTS` contexts, the longest first. A context's counts are
    exact if it was always among these; otherwise they cover only the positions at which it was,
    and their ratios are estimates.
    """

    def __init__(self) -> None:
        self.num_tokens = 0
        self.contexts = [Context(0, NO_STATE)]
        self.num_matched = 0
        """Length of the longest suffix of the text that occurred before."""
        self._match = self.contexts[ROOT]
        self._last = ROOT

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens to the text."""
        for token in tokens:
            self.append(token)

    def append(self, token: int) -> None:
        """Append one token to the text."""
        self._count(token)
        self._grow(token)
        self.num_tokens += 1
        # The suffix link of the whole text is its longest suffix that also ends elsewhere.
        self._match = self.contexts[self.contexts[self._last].suffix]
        self.num_matched = self._match.length

    def continuation(self, min_length: int) -> Iterator[tuple[int, float]]:
        """Yield the most frequent continuation of the longest match; endless if the text repeats.

        Each token comes with its relative frequency after its context. A context without followers
        is replaced by its longest suffix that has some; iteration ends if that is shorter than
        `min_length`.
        """
        context = self._match
        while True:
            while context.most_frequent is None and context.length >= min_length:
                context = self.contexts[max(context.suffix, ROOT)]
            if context.most_frequent is None or context.length < min_length:
                return
            token = context.most_frequent
            yield token, context.counts[token] / context.total
            context = self.contexts[context.next[token]]

    def _count(self, token: int) -> None:
        state = self._last
        for _ in range(MAX_COUNTED_CONTEXTS):
            if state == NO_STATE:
                break
            self.contexts[state].count(token)
            state = self.contexts[state].suffix

    def _grow(self, token: int) -> None:
        contexts = self.contexts
        new = len(contexts)
        contexts.append(Context(contexts[self._last].length + 1, ROOT))
        state = self._last
        self._last = new
        while state != NO_STATE and token not in contexts[state].next:
            contexts[state].next[token] = new
            state = contexts[state].suffix
        if state == NO_STATE:
            return
        target = contexts[state].next[token]
        if contexts[target].length > contexts[state].length + 1:
            target = self._split(state, token, target)
        contexts[new].suffix = target

    def _split(self, state: int, token: int, target: int) -> int:
        """Create a separate state for the substrings of `target` that also end here."""
        contexts = self.contexts
        shorter = len(contexts)
        contexts.append(contexts[target].split(contexts[state].length + 1))
        contexts[target].suffix = shorter
        while state != NO_STATE and contexts[state].next.get(token) == target:
            contexts[state].next[token] = shorter
            state = contexts[state].suffix
        return shorter


class SuffixDrafter(LookupDrafter[SuffixAutomaton]):
    """Deterministic drafter that continues the longest repeated suffix of the row's own text."""

    kind = "suffix"
    options_type = SuffixOptions
    options: SuffixOptions

    def __init__(self, options: SuffixOptions = SuffixOptions()) -> None:
        super().__init__(options)
        # Cached, as it is called in every round.
        self._choices = lru_cache(maxsize=4096)(self._choices_for)

    def make_index(self) -> SuffixAutomaton:
        return SuffixAutomaton()

    def candidates(self, rows: Sequence[Row]) -> list[tuple[Candidate]]:
        """Return one candidate per row, of length 0 if the match is shorter than `min`.

        Its `kind` groups matches of similar length, which have similar acceptance.
        """
        return [self._choices(self._indices[row].num_matched) for row in rows]

    def _choices_for(self, num_matched: int) -> tuple[Candidate]:
        # Powers of two: matches of 9 and 12 tokens are about equally good, one of 3 is worse.
        kind = ("suffix", num_matched.bit_length())
        return (Candidate(kind=kind, longest=self._longest(num_matched), deterministic=True),)

    def _longest(self, num_matched: int) -> int:
        if num_matched < self.options.min:
            return 0
        return min(int(self.options.factor * num_matched) + self.options.offset, MAX_DRAFT_LENGTH)

    def chain(self, index: SuffixAutomaton, limit: int) -> list[int]:
        limit = min(limit, self._longest(index.num_matched))
        chain: list[int] = []
        survival = 1.0
        for token, chance in index.continuation(self.options.min):
            survival *= chance
            if len(chain) == limit or survival < self.options.threshold:
                break
            chain.append(token)
        return chain
