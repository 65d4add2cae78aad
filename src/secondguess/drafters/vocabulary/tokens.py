"""Tokens of a tokenizer as bytes, and its encoding of text.

Tokens of two vocabularies are compared by the bytes that they add to a text: `Ġthe` of byte-level
BPE, `▁the` of SentencePiece and `the` of WordPiece (after another word) are all " the".
"""

from __future__ import annotations

import json
import re
from copy import deepcopy
from functools import cached_property
from itertools import takewhile
from typing import Any

from tokenizers import Encoding, Tokenizer

from secondguess.errors import CheckpointError

DERIVED = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace", "WordPiece"}
"""Decoders under which a token adds the same bytes after any other token."""

BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")
"""Token of a single byte in a vocabulary with byte fallback."""

ANCHOR = "a"
"""Text before a token that is decoded: leading spaces are dropped only at the beginning of a text."""


class Vocabulary:
    """Tokenizer with the bytes of its tokens. Its settings of padding and truncation are ignored.

    Attributes:
        tokens: bytes of each token id; None for special and unknown tokens and unused ids.
        special_tokens: ids of the special tokens, by content.
        unusual: ids of byte tokens, which a text is encoded to only if no other token has its characters.
    """

    def __init__(self, tokenizer: Tokenizer, end_token: int | None = None, name: str = "") -> None:
        self.end_token = end_token
        self._name = name
        self._tokenizer = tokenizer
        self._description = json.loads(tokenizer.to_str())
        kinds = self._require_decoder()
        self._is_byte_level, self._has_byte_fallback = kinds == {"ByteLevel"}, "ByteFallback" in kinds
        ids: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
        added = tokenizer.get_added_tokens_decoder()
        self.special_tokens = {token.content: index for index, token in added.items() if token.special}
        self.unusual = {index for token, index in ids.items() if self._byte_of(token) is not None}
        without_bytes = {*self.special_tokens.values(), self._unknown_token(ids)}
        self.tokens: list[bytes | None] = [None] * (max(ids.values(), default=-1) + 1)
        for token, index in ids.items():
            if index not in without_bytes:
                self.tokens[index] = self._bytes_of(token)

    @classmethod
    def from_tokenizer(cls, tokenizer: Any, name: str) -> Vocabulary:
        """Return the vocabulary of a Transformers tokenizer, which a tokenizer.json must describe."""
        if not tokenizer.is_fast:
            raise _not_comparable(name, f"a {type(tokenizer).__name__} without tokenizer.json")
        return cls(tokenizer.backend_tokenizer, tokenizer.eos_token_id, name)

    def __len__(self) -> int:
        """Return the number of tokens that have bytes."""
        return len(self.tokens) - self.tokens.count(None)

    def bytes_of(self, token: int, begins: bool = False) -> bytes | None:
        """Return the bytes of a token; None for one without, such as an id of padding.

        Where a token `begins` a text, decoders drop a space.
        """
        found = self.tokens[token] if token < len(self.tokens) else None
        if not begins or found is None or self._is_byte_level or token in self.unusual:
            return found
        return self._decode(self._tokenizer.id_to_token(token) or "").encode()

    def encode(self, text: str, begins: bool = False) -> Encoding:
        """Return the tokens of a text, in which special tokens are characters like any others.

        Where the text `begins`, a tokenizer may write a space; otherwise it continues another one.
        """
        return (self._beginning if begins else self._continuing).encode(text, add_special_tokens=False)

    def encode_batch(self, texts: list[str]) -> list[Encoding]:
        """Return the tokens of texts that continue others, without special tokens."""
        return self._continuing.encode_batch(texts, add_special_tokens=False)

    @cached_property
    def prefix(self) -> list[int]:
        """Special tokens that the tokenizer writes before a text."""
        processor = self._tokenizer.post_processor
        if processor is None:
            return []
        encoding = processor.process(self._beginning.encode(ANCHOR))
        flags = zip(encoding.ids, encoding.special_tokens_mask, strict=True)
        return [token for token, _ in takewhile(lambda pair: pair[1], flags)]

    @cached_property
    def _beginning(self) -> Tokenizer:
        return self._rebuilt(self._description)

    @cached_property
    def _continuing(self) -> Tokenizer:
        changed = deepcopy({key: self._description[key] for key in ("normalizer", "pre_tokenizer")})
        changed = {key: _without_prefix(part) for key, part in changed.items()}
        description = self._description | changed
        return self._beginning if description == self._description else self._rebuilt(description)

    @staticmethod
    def _rebuilt(description: dict[str, Any]) -> Tokenizer:
        plain = description | {"truncation": None, "padding": None, "post_processor": None}
        tokenizer = Tokenizer.from_str(json.dumps(plain))
        tokenizer.encode_special_tokens = True
        return tokenizer

    def _require_decoder(self) -> set[str]:
        """Return the kinds of the decoder's steps, if they are known ones."""
        steps = _decoder_steps(self._description["decoder"])
        kinds = {step["type"] for step in steps}
        is_derived = bool(kinds) and kinds <= DERIVED and not any(step.get("stop") for step in steps)
        if not is_derived and kinds != {"ByteLevel"}:
            raise _not_comparable(self._name, f"one with the decoder {', '.join(sorted(kinds)) or 'none'}")
        return kinds

    def _unknown_token(self, ids: dict[str, int]) -> int | None:
        model = self._description["model"]
        unknown: int | None = model.get("unk_id")
        return ids.get(model.get("unk_token") or "") if unknown is None else unknown

    def _byte_of(self, token: str) -> bytes | None:
        """Return the byte of a byte token; None for other tokens."""
        match = BYTE_TOKEN.fullmatch(token) if self._has_byte_fallback else None
        return bytes.fromhex(match[1]) if match else None

    def _bytes_of(self, token: str) -> bytes:
        if self._is_byte_level:
            known = [BYTES.get(character) for character in token]
            # As the decoder does: a token with other characters is the text itself.
            return token.encode() if None in known else bytes(byte for byte in known if byte is not None)
        byte = self._byte_of(token)
        return self._decode(ANCHOR, token)[len(ANCHOR) :].encode() if byte is None else byte

    def _decode(self, *tokens: str) -> str:
        text: str = self._tokenizer.decoder.decode(tokens)
        return text


def _byte_characters() -> dict[str, int]:
    """Return the bytes by the characters that byte-level tokens have for them.

    Printable bytes are characters of Latin-1, the others those from U+0100.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)).difference(printable))
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTES = _byte_characters()


def _decoder_steps(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Return the steps of a decoder, sequences flattened."""
    if decoder is None:
        return []
    if decoder["type"] != "Sequence":
        return [decoder]
    return [step for each in decoder["decoders"] for step in _decoder_steps(each)]


def _without_prefix(part: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return a normaliser or pre-tokenizer that neither adds nor strips spaces at the ends of a text."""
    if part is None or part["type"] in ("Prepend", "Strip"):
        return None
    for members in ("normalizers", "pretokenizers"):
        if members in part:
            kept = [_without_prefix(each) for each in part[members]]
            part[members] = [each for each in kept if each is not None]
    if "prepend_scheme" in part:
        part["prepend_scheme"] = "never"
    if "add_prefix_space" in part:
        part["add_prefix_space"] = False
    return part


def _not_comparable(name: str, found: str) -> CheckpointError:
    return CheckpointError(
        f"expected tokenizers that can be compared, byte-level BPE, SentencePiece or WordPiece in a tokenizer.json, got {found} "
        f"for {name}; choose a draft model with the target's tokenizer, or a drafter without a model such as suffix"
    )
