"""Comparison of two vocabularies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Self

from secondguess.drafters.vocabulary.tokens import Vocabulary


@dataclass(frozen=True, eq=False)
class VocabularyPair:
    """Vocabularies of a target and a draft model.

    Args:
        target, draft: the vocabularies.
        shared: token of the draft model by token of the target with the same bytes; one to one.
        special: the same for special tokens: those of the same content, and the end of a text.
    """

    target: Vocabulary
    draft: Vocabulary
    shared: Mapping[int, int]
    special: Mapping[int, int]

    @classmethod
    def from_vocabularies(cls, target: Vocabulary, draft: Vocabulary) -> Self:
        """Compare two vocabularies."""
        target_tokens, draft_tokens = _preferred(target), _preferred(draft)
        shared = {index: draft_tokens[data] for data, index in target_tokens.items() if data in draft_tokens}
        return cls(target, draft, shared, _special_tokens(target, draft))

    @cached_property
    def special_by_draft(self) -> dict[int, int]:
        """Special tokens of the target by those of the draft model."""
        return {other: own for own, other in self.special.items()}

    @lru_cache(maxsize=4)  # noqa: B019 - a pair is kept as long as its models
    def lengths(self, vocab_size: int) -> list[int]:
        """Return the number of the target's tokens for each of the draft model's first tokens.

        It is 0 for tokens without bytes, and at least 1 for others.
        """
        data = [self.draft.bytes_of(token) for token in range(vocab_size)]
        lengths, shared = [0 if each is None else 1 for each in data], set(self.shared.values())
        others = {
            token: each.decode(errors="ignore")
            for token, each in enumerate(data)
            if each and token not in shared
        }
        for token, encoding in zip(others, self.target.encode_batch(list(others.values())), strict=True):
            lengths[token] = max(len(encoding), 1)
        return lengths

    @property
    def target_share(self) -> float:
        """Share of the target's tokens that are shared."""
        return len(self.shared) / max(len(self.target), 1)

    @property
    def draft_share(self) -> float:
        """Share of the draft model's tokens that are shared."""
        return len(self.shared) / max(len(self.draft), 1)

    def __str__(self) -> str:
        return (
            f"another tokenizer: drafts are text (shared are {self.target_share:.0%} of the target's tokens, "
            f"{self.draft_share:.0%} of the draft model's)"
        )

    def as_dict(self) -> dict[str, object]:
        """Return the verdict, ready for JSON."""
        return {"method": "string", "target_share": self.target_share, "draft_share": self.draft_share}


def _preferred(vocabulary: Vocabulary) -> dict[bytes, int]:
    """Return the token of each sequence of bytes; of several, the one that a text is encoded to."""
    known = [(data, index) for index, data in enumerate(vocabulary.tokens) if data]
    known.sort(key=lambda item: (item[1] not in vocabulary.unusual, -item[1]))
    return dict(known)


def _special_tokens(target: Vocabulary, draft: Vocabulary) -> dict[int, int]:
    """Return the draft model's special tokens by those of the target."""
    pairs = {
        index: draft.special_tokens[content]
        for content, index in target.special_tokens.items()
        if content in draft.special_tokens
    }
    own, other = target.end_token, draft.end_token
    if own is not None and other is not None and other not in pairs.values():
        pairs.setdefault(own, other)
    return pairs
