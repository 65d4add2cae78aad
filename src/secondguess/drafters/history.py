"""Recent outputs of the same owner, which rows draft from (SuffixDecoding, arXiv 2411.04975).

The texts of an owner (an API key, or the process) are in at most two suffix automata. When the
newer one is full, it becomes the older one, and the one before is dropped with all its texts: no
text is ever removed from an automaton, and none is cut.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from secondguess.core import MAX_DRAFT_LENGTH, Row
from secondguess.drafters.automaton import SuffixAutomaton, SuffixMatch

MAX_TOKENS = 2**16
"""Tokens of all owners together; about 0.7 KB each."""
NUM_PROMPT_TOKENS = 16
"""Tokens of the end of the prompt that are stored with an output, so that its beginning is found."""
NUM_READ = 2 * MAX_DRAFT_LENGTH
"""Last tokens of a row that are looked up; more than a round and the paused rounds before it add, which are read together."""


class History:
    """Recent texts of one owner.

    Attributes:
        automata: the newer automaton, then the older one; replaced when one is added or dropped.
    """

    def __init__(self) -> None:
        self.automata: tuple[SuffixAutomaton, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(automaton.num_tokens for automaton in self.automata)

    def add(self, text: Sequence[int], max_tokens: int) -> None:
        """Add a text of at most half of `max_tokens`; the history stays within `max_tokens`."""
        if not self.automata or self.automata[0].num_tokens + len(text) > max_tokens // 2:
            self.automata = (SuffixAutomaton(), *self.automata[:1])
        try:
            self.automata[0].begin_text()
            self.automata[0].extend(text)
        except BaseException:  # an interrupt, which may leave a part of a token in the automaton
            self.automata = self.automata[1:]
            raise

    def drop_oldest(self) -> None:
        """Drop the older automaton, or the only one."""
        self.automata = self.automata[:-1]


class Histories:
    """Histories by owner, within one limit: that of the owner whose last text is oldest is dropped first.

    Args:
        max_tokens: largest number of tokens of all of them.
    """

    def __init__(self, max_tokens: int = MAX_TOKENS) -> None:
        self.max_tokens = max_tokens
        self._by_owner: dict[str, History] = {}

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all histories."""
        return sum(history.num_tokens for history in self._by_owner.values())

    def of(self, owner: str) -> History:
        """Return the history of an owner."""
        return self._by_owner.setdefault(owner, History())

    def add(self, row: Row) -> None:
        """Add a finished row's output to its history; one that takes more than half of the limit is left out."""
        text = row.tokens[max(0, row.num_prompt - NUM_PROMPT_TOKENS) :]
        if row.history is None or len(text) > self.max_tokens // 2:
            return
        history = self.of(row.history)
        self._by_owner[row.history] = self._by_owner.pop(row.history)  # the order is that of the last texts
        history.add(text, self.max_tokens)
        while self.num_tokens > self.max_tokens:
            next(each for each in self._by_owner.values() if each.automata).drop_oldest()


class HistoryReader:
    """Matches of a growing text with a history, whose automata may change between two tokens."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._last: deque[int] = deque(maxlen=NUM_READ)
        self._automata: tuple[SuffixAutomaton, ...] = ()
        self._matches: list[SuffixMatch] = []

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens to the text."""
        new = tokens[-NUM_READ:]
        self._last.extend(new)
        for match in self._matches:
            match.read(new)

    def longest(self) -> SuffixMatch | None:
        """Return the longest match, the newer texts' among equals; None without texts."""
        if self._automata is not self._history.automata:
            known = {match.automaton: match for match in self._matches}
            self._automata = self._history.automata
            self._matches = [known.get(automaton) or self._found(automaton) for automaton in self._automata]
        return max(self._matches, key=lambda match: match.num_matched, default=None)

    def _found(self, automaton: SuffixAutomaton) -> SuffixMatch:
        match = SuffixMatch(automaton)
        match.read(self._last)
        return match
