"""From tokens to text while they arrive: whole characters only, cut before a stop string.

A token is not a piece of text: a character may be spread over several tokens, and a token's spaces depend on
its neighbours. So a short window of tokens is decoded again with each new one, and what was added passed on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from secondguess.core import Commit

REPLACEMENT = "\ufffd"
"""What tokenizers write for bytes that are not (yet) a character."""

SPACE_MARK = "▁"
"""What stands for a space in the tokens of SentencePiece."""

LONGEST_CHARACTER = 4
"""Bytes, and so tokens, that one character of UTF-8 can take."""

CONTEXT = 8
"""Tokens kept in front of new ones; what precedes a token decides whether its leading space is written."""

LONGEST_WINDOW = 64
"""Tokens that are decoded together at most, even while none of them makes a character."""


class Tokenizer(Protocol):
    """The part of a Transformers tokenizer that is needed here."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        """The text of some tokens."""
        ...


@dataclass(frozen=True)
class Piece:
    """What one commit added to a row's text.

    Args:
        text: whole characters; empty while they are held back. All pieces of a row make up its text.
        tokens: the committed tokens. Text that was held back may come with a later piece than its tokens.
        drafted: per token, whether a drafter wrote it.
        segments: `text` in parts, each with whether the token that completed it was drafted.
    """

    text: str
    tokens: list[int]
    drafted: list[bool]
    segments: list[tuple[str, bool]]


class IncrementalDecoder:
    """Text token by token, as decoding prompt and output at once would give it.

    Args:
        tokenizer: whose `decode` is called with a bounded number of tokens per step.
        prompt_ids: what precedes the text.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._window = _context(tokenizer, prompt_ids)
        text = self._decode(self._window)
        # A prompt may end inside a character, which the output then completes.
        self._num_given = len(text) - _num_open(text)
        self._num_settled = len(self._window)
        self._boundary = len(self._window)

    def push(self, token: int) -> str:
        """The text that this token completes: empty inside a character and for special tokens."""
        self._window.append(token)
        text = self._decode(self._window)
        num_open = _num_open(text)
        if num_open and len(self._window) - self._num_settled < LONGEST_CHARACTER:
            return ""
        # More tokens than a character can have: all but the end of them will never become one.
        end = len(text) - num_open
        piece = text[self._num_given : end]
        self._num_given = end
        if not num_open:
            self._num_settled = len(self._window)
            if self._num_settled - self._boundary >= CONTEXT:
                self._forget(self._boundary)
        elif len(self._window) > LONGEST_WINDOW:
            self._forget(len(self._window) - LONGEST_CHARACTER)
        return piece

    def flush(self) -> str:
        """What is left of an incomplete character when no more tokens come."""
        text = self._decode(self._window)
        piece = text[self._num_given :]
        self._num_given = len(text)
        return piece

    def _forget(self, start: int) -> None:
        """Drop the window's tokens before `start`, unless the others have no text and so are no context."""
        rest = self._window[start:]
        text = self._decode(rest)
        if text:
            self._window = rest
            self._num_given = len(text) - _num_open(text)
            self._num_settled = self._boundary = len(rest)

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=True)


def text_of_token(tokenizer: Any, token: int) -> str:
    """Return the text of a token decoded by itself, special tokens and leading spaces included."""
    text: str = tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)
    # SentencePiece marks a space with ▁, and its decoders drop the one in front of a text. Padding has no name.
    name = tokenizer.convert_ids_to_tokens(token) or ""
    num_spaces = len(name) - len(name.lstrip(SPACE_MARK))
    return " " * num_spaces + text.lstrip(" ") if num_spaces else text


def _context(tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> list[int]:
    """The end of the prompt: enough to have text, and not to begin inside a character."""
    width = CONTEXT
    while True:
        window = list(prompt_ids[-width:])
        text = tokenizer.decode(window, skip_special_tokens=True)
        if width >= len(prompt_ids) or (text and not text.startswith(REPLACEMENT)):
            return window
        width *= 2


def _num_open(text: str) -> int:
    """How many characters at the end may be an incomplete one: tokenizers write one to three replacements."""
    end = text[1 - LONGEST_CHARACTER :]
    return len(end) - len(end.rstrip(REPLACEMENT))


class TextStream:
    """A row's text: the watcher that the row pushes its tokens to, and the source of its pieces.

    The row decides whether a stop string ends it (not before `min_tokens`). If it goes on, the string stays
    in the text, and the next one is looked for behind it.

    Args:
        tokenizer: of the target.
        prompt_ids: what precedes the text.
        stop: strings that end the text, none of them empty.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], stop: Sequence[str] = ()) -> None:
        self._decoder = IncrementalDecoder(tokenizer, prompt_ids)
        self._stop = tuple(stop)
        self._segments: list[tuple[str, bool]] = []  # not yet given out, from tokens whose commit was seen
        self._new: list[str] = []  # the text of each token pushed since
        self._held = ""  # all of the text that is not yet given out
        self._search_from = 0  # where in it the next stop string may begin
        self._match: tuple[int, int] | None = None  # where in it the last token completed one

    def push(self, token: int) -> bool:
        """Take the row's next token; True when it completes a stop string."""
        self._pass_over_match()
        text = self._decoder.push(token)
        self._new.append(text)
        num_known = len(self._held)
        self._held += text
        self._match = self._find(num_known) if text else None
        return self._match is not None

    def take(self, commit: Commit) -> Piece:
        """The text that this commit, whose tokens were just pushed, makes final.

        Held back is what may turn out to be the beginning of a stop string, until the row is finished.
        """
        self._segments += zip(self._new, commit.drafted, strict=True)
        self._new = []
        if self._match and commit.row.finish_reason == "stop":
            size = self._match[0]
        elif commit.row.finished:
            rest = self._decoder.flush()
            self._held += rest
            self._segments.append((rest, commit.drafted[-1]))
            size = len(self._held)
        else:
            self._pass_over_match()
            size = len(self._held) - self._num_undecided()
        segments = self._release(size)
        return Piece("".join(text for text, _ in segments), commit.tokens, commit.drafted, segments)

    def flush(self) -> Piece:
        """The text that is still held back, for a row that was interrupted: no commit will follow."""
        self._segments += [(text, False) for text in self._new]
        self._new = []
        segments = self._release(len(self._held))
        return Piece("".join(text for text, _ in segments), [], [], segments)

    def _pass_over_match(self) -> None:
        if self._match is not None:
            self._search_from = self._match[1]
            self._match = None

    def _find(self, num_known: int) -> tuple[int, int] | None:
        """The first stop string in the held text that ends behind its first `num_known` characters."""
        matches = []
        for stop in self._stop:
            start = self._held.find(stop, max(self._search_from, num_known - len(stop) + 1))
            if start >= 0:
                matches.append((start, start + len(stop)))
        return min(matches, default=None)

    def _num_undecided(self) -> int:
        """Length of the longest end of the held text with which a stop string begins."""
        sizes = range(max(map(len, self._stop), default=1) - 1, 0, -1)
        for size in sizes:
            start = len(self._held) - size
            if start >= self._search_from and self._held.startswith(self._beginnings(size), start):
                return size
        return 0

    def _beginnings(self, size: int) -> tuple[str, ...]:
        return tuple(stop[:size] for stop in self._stop if len(stop) > size)

    def _release(self, size: int) -> list[tuple[str, bool]]:
        """Give out the first `size` characters; neighbours by the same writer become one segment."""
        released: list[tuple[str, bool]] = []
        left = size
        while left > 0:
            text, drafted = self._segments.pop(0)
            if len(text) > left:
                self._segments.insert(0, (text[left:], drafted))
            text = text[:left]
            left -= len(text)
            if released and released[-1][1] == drafted:
                released[-1] = (released[-1][0] + text, drafted)
            elif text:
                released.append((text, drafted))
        self._held = self._held[size:]
        self._search_from = max(0, self._search_from - size)
        return released
