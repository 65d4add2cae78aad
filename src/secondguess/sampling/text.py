"""Incremental detokenization: whole characters only, cut before a stop string.

Tokens cannot be decoded one by one: a character can span several tokens, and the spaces of a token
depend on its neighbours. So a short window of tokens is decoded again with each new token, and the
text that was added is returned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import itemgetter
from typing import Any, Protocol

from secondguess.core import Commit, FinishReason

REPLACEMENT = "\ufffd"
"""Character that tokenizers write for bytes that do not (yet) form a character."""

SENTENCEPIECE_SPACE = "▁"
"""Character that stands for a space in SentencePiece tokens."""

MAX_BYTES_PER_CHARACTER = 4
"""Largest number of bytes, and therefore of tokens, in one UTF-8 character."""

CONTEXT_TOKENS = 8
"""Tokens kept before new ones; the preceding token decides whether a leading space is written."""

MAX_WINDOW_TOKENS = 64
"""Largest number of tokens decoded together, even if none of them completes a character."""


class Tokenizer(Protocol):
    """Subset of the Transformers tokenizer interface that is used here."""

    def decode(
        self, token_ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool
    ) -> str:
        """Return the text of some tokens."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the tokens of a text."""
        ...


@dataclass(frozen=True)
class Piece:
    """Text that one commit adds to a row.

    Attributes:
        text: whole characters; empty while they are held back. The pieces of a row concatenate to
            its text.
        tokens: the committed tokens. Text that was held back can be in a later piece than its
            tokens.
        drafted: per token, True if a drafter proposed it.
        segments: parts of `text`, each with True if the token that completed it was drafted.
        rejected: draft tokens in whose place the last of `tokens` was sampled.
    """

    text: str
    tokens: list[int]
    drafted: list[bool]
    segments: list[tuple[str, bool]]
    rejected: Sequence[int] = ()


class IncrementalDecoder:
    """Decoder of the tokens after a prompt, with the same result as decoding prompt and output at once.

    Each step decodes a bounded number of tokens.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        width = CONTEXT_TOKENS
        while True:  # until the text begins with a whole character
            window = list(prompt_ids[-width:])
            text = self._decode(window)
            if width >= len(prompt_ids) or (text and not text.startswith(REPLACEMENT)):
                break
            width *= 2
        self._set_window(window, text)
        if num_incomplete(text):
            end = slice(1 - MAX_BYTES_PER_CHARACTER, None)
            if tokenizer.encode(text, add_special_tokens=False)[end] == window[end]:
                self._num_given = len(text)  # a real one, not a part of a character

    def _set_window(self, window: list[int], text: str) -> None:
        self._window = window
        # A prompt may end inside a character, which the output completes.
        self._num_given = len(text) - num_incomplete(text)
        self._num_settled = self._boundary = len(window)

    def push(self, *tokens: int) -> str:
        """Return the text that these tokens complete; empty inside a character.

        Special tokens have no text. The text does not depend on how many tokens are pushed together.
        """
        self._window += tokens
        was_settled = self._num_settled == len(self._window) - len(tokens)
        text = self._decode(self._window)
        if len(tokens) > 1 and not (was_settled and REPLACEMENT not in text[self._num_given :]):
            del self._window[-len(tokens) :]
            return "".join([self.push(token) for token in tokens])
        num_open = num_incomplete(text)
        if num_open and len(self._window) - self._num_settled < MAX_BYTES_PER_CHARACTER:
            return ""
        # More tokens than one character can have: only the end may still become a character.
        end = len(text) - num_open
        piece = text[self._num_given : end]
        self._num_given = end
        if not num_open:
            self._num_settled = len(self._window)
            if self._num_settled - self._boundary >= CONTEXT_TOKENS:
                self._trim_window(self._boundary)
        elif len(self._window) > MAX_WINDOW_TOKENS:
            self._trim_window(len(self._window) - MAX_BYTES_PER_CHARACTER)
        return piece

    def flush(self) -> str:
        """Return the rest of an incomplete character; call it when no more tokens follow."""
        text = self._decode(self._window)
        piece = text[self._num_given :]
        self._num_given = len(text)
        return piece

    def _trim_window(self, start: int) -> None:
        """Drop the window's tokens before `start`, unless the remaining ones decode to nothing."""
        rest = self._window[start:]
        text = self._decode(rest)
        if text:
            self._set_window(rest, text)

    def _decode(self, tokens: list[int]) -> str:
        # A clean-up removes spaces of text that was returned before.
        return self._tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def text_of_token(tokenizer: Any, token: int) -> str:
    """Return the text of a token decoded by itself, special tokens and leading spaces included."""
    return text_of_tokens(tokenizer, [token])


def text_of_tokens(tokenizer: Any, tokens: Sequence[int]) -> str:
    """Return the text of at least one token without its context, as `text_of_token` does."""
    text: str = tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    # SentencePiece marks a space with ▁, and its decoders drop a leading one. Ids that only pad
    # the vocabulary have no token string.
    name = tokenizer.convert_ids_to_tokens(tokens[0]) or ""
    num_spaces = len(name) - len(name.lstrip(SENTENCEPIECE_SPACE))
    return " " * num_spaces + text.lstrip(" ") if num_spaces else text


def num_incomplete(text: str) -> int:
    """Return the number of replacement characters at the end that may be an incomplete character.

    Tokenizers write one to three of them.
    """
    end = text[1 - MAX_BYTES_PER_CHARACTER :]
    return len(end) - len(end.rstrip(REPLACEMENT))


class StopSearch:
    """Search for stop strings in text that comes in parts.

    `held` is the text that has not been released, `match` the span in it of the stop string that the last part completed.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = stop
        self._longest = max(map(len, stop), default=1) - 1
        self._search_from = 0  # offset in `held` at which the next stop string may begin
        self.held = ""
        self.match: tuple[int, int] | None = None

    def push(self, text: str) -> None:
        """Add a part; a match that did not end the text stays in it."""
        self.skip_match()
        num_known = len(self.held)
        self.held += text
        matches = []
        for stop in self._stop if text else ():
            start = self.held.find(stop, max(self._search_from, num_known - len(stop) + 1))
            if start >= 0:
                matches.append((start, start + len(stop)))
        self.match = min(matches, default=None)

    def skip_match(self) -> None:
        """Continue the search after the match, if there is one."""
        if self.match is not None:
            self._search_from, self.match = self.match[1], None

    @property
    def num_certain(self) -> int:
        """Number of held characters that no stop string can cut off."""
        if self.match is not None:
            return self.match[0]
        unmatched = self.held[self._search_from :]
        for size in range(min(self._longest, len(unmatched)), 0, -1):
            if any(stop.startswith(unmatched[-size:]) for stop in self._stop):
                return len(self.held) - size
        return len(self.held)

    def release(self, size: int) -> str:
        """Return the first `size` characters, which are no longer held."""
        text, self.held = self.held[:size], self.held[size:]
        self._search_from = max(0, self._search_from - size)
        if self.match is not None:
            self.match = (self.match[0] - size, self.match[1] - size)
        return text


class StreamingDetokenizer:
    """Text of a row: detects stop strings and returns the text in pieces.

    A stop string before `min_tokens` stays in the text, and the search continues after it; with `include_stop`, so
    does the one that ends the text. That is `stop_string`, which is empty if none has ended it.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        stop: Sequence[str] = (),
        min_tokens: int = 0,
        include_stop: bool = False,
    ) -> None:
        self.stop_string = ""
        self._min_tokens = min_tokens
        self._include_stop = include_stop
        self._decoder = IncrementalDecoder(tokenizer, prompt_ids)
        self._has_stop = bool(stop)
        self._search = StopSearch(tuple(stop))
        # Text of each token that is not returned yet, and True if a drafter proposed the token.
        self._segments: list[tuple[str, bool]] = []
        self._num_read = 0

    @property
    def stop_checker(self) -> StreamingDetokenizer | None:
        """Itself if there are stop strings, to read each token as it is committed; else None.

        Without them, `take` decodes the tokens of a commit together, and `flush` all that are left.
        """
        return self if self._has_stop else None

    def push(self, token: int) -> bool:
        """Add the row's next token; return True if it completes a stop string."""
        self._num_read += 1
        text = self._decoder.push(token)
        self._segments.append((text, False))
        self._search.push(text)
        if self._num_read < self._min_tokens:
            self._search.skip_match()
        return self._search.match is not None

    def take(self, commit: Commit) -> Piece:
        """Return the text that is final after this commit, whose tokens were just pushed if there are stop strings.

        Text that may be the beginning of a stop string is held back until the row is finished.
        """
        search = self._search
        if self._has_stop:
            first = len(self._segments) - len(commit.tokens)
            for index, drafted in enumerate(commit.drafted, first):
                self._segments[index] = (self._segments[index][0], drafted)
        else:
            self._decode(commit.tokens[: commit.num_accepted], True)
            self._decode(commit.tokens[commit.num_accepted :], False)
        if commit.row.finish_reason is not None:
            size = self._end(commit.row.finish_reason, commit.drafted[-1])
        else:
            search.skip_match()
            size = search.num_certain
        return replace(self._release(size, commit.tokens, commit.drafted), rejected=commit.rejected)

    def _decode(self, tokens: Sequence[int], drafted: bool) -> None:
        if tokens:
            self._num_read += len(tokens)
            text = self._decoder.push(*tokens)
            self._search.held += text
            self._segments.append((text, drafted))

    def _end(self, finish_reason: FinishReason, drafted: bool) -> int:
        """Complete the text of a row that has ended; return the number of held characters in it."""
        search = self._search
        if search.match and finish_reason == "stop":
            start, end = search.match
            self.stop_string = search.held[start:end]
            return end if self._include_stop else start
        rest = self._decoder.flush()
        search.held += rest
        self._segments.append((rest, drafted))
        return len(search.held)

    def flush(self, output: Sequence[int], finish_reason: FinishReason | None = None) -> Piece:
        """Return the text that `take` has not returned of all output tokens; no commit follows.

        A row without a finish reason was interrupted.
        """
        self._decode(output[self._num_read :], False)
        size = len(self._search.held) if finish_reason is None else self._end(finish_reason, False)
        return self._release(size, [], [])

    def _release(self, size: int, tokens: list[int], drafted: list[bool]) -> Piece:
        """Return the first `size` characters; adjacent segments with equal flags are joined."""
        text = self._search.release(size)
        parts: list[tuple[str, bool]] = []
        num_taken = 0
        while size > 0:
            part, flag = self._segments[num_taken]
            if len(part) > size:
                self._segments[num_taken] = part[size:], flag
                part = part[:size]
            else:
                num_taken += 1
            size -= len(part)
            if part:
                parts.append((part, flag))
        del self._segments[:num_taken]
        runs = groupby(parts, key=itemgetter(1))
        segments = [("".join([part for part, _ in run]), flag) for flag, run in runs]
        return Piece(text, tokens, drafted, segments)
