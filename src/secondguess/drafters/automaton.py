"""Suffix automaton with counts: an index of one or several texts that grows token by token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

MAX_COUNTED_CONTEXTS = 32
"""Number of contexts counted per position, longest first; bounds the work per token."""

ROOT = 0
NO_STATE = -1


@dataclass(slots=True)
class Context:
    """State of the automaton: the substrings that end at exactly the same positions of the texts.

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

    def split(self, length: int) -> Context:
        """Return a state for the substrings up to `length`, which now end elsewhere too."""
        return Context(
            length, self.suffix, dict(self.next), dict(self.counts), self.most_frequent, self.total
        )


class SuffixAutomaton:
    """Online suffix automaton with counts (Blumer et al. 1985), of one or several texts.

    It has at most two states and three transitions per token, and appends in amortised constant
    time if the number of distinct followers is bounded (a split copies the transitions of one
    context).

    The textbook automaton does not count online: a position has as many contexts as its suffix
    links are deep (about log n in ordinary text, n in a text of one repeated token). So `extend`
    counts the token for at most `MAX_COUNTED_CONTEXTS` contexts, the longest first. A context's counts are
    exact if it was always among these; otherwise they cover only the positions at which it was,
    and their ratios are estimates.
    """

    def __init__(self) -> None:
        self.num_tokens = 0
        self.contexts = [Context(0, NO_STATE)]
        self._last = ROOT

    def begin_text(self) -> None:
        """Begin another text; no substring reaches from one text into the next."""
        self._last = ROOT

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens to the text."""
        for token in tokens:
            self._count(token)
            self._grow(token)
            self.num_tokens += 1

    @property
    def match(self) -> Context:
        """Longest suffix of a single text that occurred before: the suffix link of the whole text."""
        return self.contexts[max(self.contexts[self._last].suffix, ROOT)]

    def continuation(self, context: Context, min_length: int) -> Iterator[tuple[int, float]]:
        """Yield the most frequent continuation of a context; endless if the text repeats.

        Each token comes with its relative frequency after its context. A context without followers
        is replaced by its longest suffix that has some; iteration ends if that is shorter than
        `min_length`.
        """
        while True:
            while context.most_frequent is None and context.length >= min_length:
                context = self.contexts[max(context.suffix, ROOT)]
            if context.most_frequent is None or context.length < min_length:
                return
            token = context.most_frequent
            yield token, context.counts[token] / context.total
            context = self.contexts[context.next[token]]

    # The two methods below run for every token, after forward passes that evict the CPU caches: they call little.

    def _count(self, token: int) -> None:
        """Count a token as the follower of the longest contexts of the text."""
        contexts, state, num_left = self.contexts, self._last, MAX_COUNTED_CONTEXTS
        while state != NO_STATE and num_left:
            context = contexts[state]
            counts = context.counts
            counts[token] = count = counts.get(token, 0) + 1
            context.total += 1
            if context.most_frequent is None or count >= counts[context.most_frequent]:
                context.most_frequent = token
            state, num_left = context.suffix, num_left - 1

    def _grow(self, token: int) -> None:
        """Append a token to the text."""
        contexts, state = self.contexts, self._last
        context = contexts[state]
        if token in context.next:  # an earlier text begins like this one
            self._last = self._step(state, token)
            return
        self._last = new = len(contexts)
        contexts.append(Context(context.length + 1, ROOT, {}, {}))
        while token not in context.next:
            context.next[token] = new
            state = context.suffix
            if state == NO_STATE:
                return
            context = contexts[state]
        contexts[new].suffix = self._step(state, token)

    def _step(self, state: int, token: int) -> int:
        """Return the state of the longest substring of `state` with the token; split off if needed."""
        target = self.contexts[state].next[token]
        is_longest = self.contexts[target].length == self.contexts[state].length + 1
        return target if is_longest else self._split(state, token, target)

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


class SuffixMatch:
    """Longest suffix of a text that occurs in an automaton of other texts.

    Attributes:
        num_matched: its length.
    """

    def __init__(self, automaton: SuffixAutomaton) -> None:
        self.automaton = automaton
        self.num_matched = 0
        self._state = ROOT

    def read(self, tokens: Sequence[int]) -> None:
        """Append tokens to the text."""
        for token in tokens:
            self._read(token)

    @property
    def context(self) -> Context:
        """The state of the suffix."""
        contexts = self.automaton.contexts
        # The state may have been split since the last token: short substrings move to its suffix link.
        while self._state != ROOT and self.num_matched <= contexts[contexts[self._state].suffix].length:
            self._state = contexts[self._state].suffix
        return contexts[self._state]

    def _read(self, token: int) -> None:
        context = self.context
        while token not in context.next:
            if context.suffix == NO_STATE:
                self._state, self.num_matched = ROOT, 0
                return
            context = self.automaton.contexts[context.suffix]
            self.num_matched = context.length
        self._state = context.next[token]
        self.num_matched += 1
