"""A row's text in the tokens of a draft model with another tokenizer, followed as the row grows."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from tokenizers import Encoding

from secondguess.drafters.vocabulary.pair import VocabularyPair

MAX_TAIL_TOKENS = 32
"""Largest number of tokens of a word that is encoded again; a longer one is cut in two."""
MAX_TAIL_CHARACTERS = 512
"""Number of characters from which on a tail ends, whatever it is encoded to."""


class DraftView:
    """Tokens of the draft model for the text of one row.

    Tokens of the row are never encoded again. The draft model's tokenizer encodes their text: with
    each call only the *tail*, the last word, since a token at the end of a text can become part of a
    longer one. So the cost does not depend on the length of the row. The bytes of an incomplete
    character are held back.

    Special tokens of the target that the draft model lacks are left out.

    Attributes:
        tokens: tokens of the draft model.
        num_read: number of the row's tokens in it.
    """

    def __init__(self, pair: VocabularyPair) -> None:
        self._target, self._draft, self._special = pair.target, pair.draft, pair.special
        self.tokens = list(pair.draft.prefix)
        self.num_read = 0
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")
        self._has_text = False
        self._tail, self._tail_start, self._tail_begins = "", len(self.tokens), True

    @property
    def is_complete(self) -> bool:
        """True unless bytes of an incomplete character are held back."""
        return not self._characters.getstate()[0]

    def follow(self, tokens: Sequence[int]) -> int:
        """Read the new tokens of the row; return how many leading tokens of `self.tokens` did not change."""
        unchanged = self._tail_start
        for token in tokens[self.num_read :]:
            data = self._target.bytes_of(token, begins=not self._has_text)
            translated = self._special.get(token)
            if data is not None and (translated is None or not self.is_complete):
                self._tail += self._characters.decode(data)
                self._has_text = True
            else:
                self._end_tail()
                if translated is not None and (self._has_text or translated not in self._draft.prefix):
                    self.tokens.append(translated)
                    self._tail_begins &= data is None
                self._tail_start = len(self.tokens)
        self.num_read = len(tokens)
        self._encode_tail()
        return unchanged

    def _end_tail(self) -> None:
        """Encode the tail for the last time, and begin an empty one."""
        self._tail += self._characters.decode(b"", final=True)
        if self._tail:
            self._encode_tail()
            self._tail, self._tail_begins = "", False

    def _encode_tail(self) -> None:
        if self._tail:
            encoding = self._draft.encode(self._tail, self._tail_begins)
            self.tokens[self._tail_start :] = encoding.ids
            num_settled, end = _settled(encoding, self._tail)
            if num_settled:
                self._tail, self._tail_begins = self._tail[end:], False
                self._tail_start += num_settled


def _settled(encoding: Encoding, text: str) -> tuple[int, int]:
    """Return how many tokens of a tail, and of its characters, precede the new tail."""
    offsets, last_word = encoding.offsets, len(text.rstrip())
    num_tokens, middle = len(offsets), (len(offsets), len(text))
    for count in range(num_tokens - 1, max(num_tokens - MAX_TAIL_TOKENS, 1) - 1, -1):
        (begin, end), (following, _) = offsets[count - 1 : count + 1]
        # Tokens that share a character, or are only a part of one, are not separated.
        if begin < end <= following and end < last_word:
            if text[end].isspace():
                return count, end
            if num_tokens - count <= MAX_TAIL_TOKENS // 2:
                middle = count, end
    is_long = num_tokens > MAX_TAIL_TOKENS or len(text) > MAX_TAIL_CHARACTERS
    return middle if is_long else (0, 0)
