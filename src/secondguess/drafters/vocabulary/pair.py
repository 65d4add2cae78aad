"""Comparison of two vocabularies, and the choice of the method that translates drafts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal, Self, get_args

from secondguess.drafters.vocabulary.tokens import Vocabulary
from secondguess.errors import BadInputError
from secondguess.names import Name

Method = Literal["intersection", "string"]
METHODS: tuple[Method, ...] = get_args(Method)
OPTION = "vocab"
"""Option of a drafter's name that overrides the choice of the method."""

LEAST_TEXT_SHARE = 0.75
"""Share of shared tokens in a text from which on the intersection is chosen."""

SAMPLE_TEXT = """\
The committee met again on 14 March 2024 to decide whether the old bridge should be repaired. It had
been closed for 3.5 years, and most people who live nearby wanted it to be open before the summer;
"We can't wait any longer," said one of them. How much would it cost? About $250,000, they thought.

## Usage

1. Install the package, then run `python -m server --port 8080`.
2. Send a request: {"name": "example", "values": [1, 2, 30], "active": true}

```python
import os
from dataclasses import dataclass


@dataclass
class Account:
    owner: str
    balance: float = 0.0

    def withdraw(self, amount):
        if amount > self.balance:
            raise ValueError(f"expected at most {self.balance}, got {amount}")
        self.balance -= amount
        return self.balance


for index, line in enumerate(open(os.path.join("data", "names.txt"), encoding="utf-8")):
    print(index + 1, line.strip().lower())
```

Therefore x^2 + 2x + 1 = (x + 1)^2 holds for all real numbers, and the answer is 42.
Die Straße ist für drei Wochen gesperrt. L'été dernier, nous étions à la mer. 今天的天气很好。
"""
"""Text of several kinds, whose tokens stand for those that a target generates."""


@dataclass(frozen=True, eq=False)
class VocabularyPair:
    """Vocabularies of a target and a draft model, and the method that translates drafts.

    Args:
        target, draft: the vocabularies.
        method: `intersection`: drafts are sampled from the draft model's distribution over the shared
            tokens. `string`: the text of a draft is encoded by the target's tokenizer.
        shared: token of the draft model by token of the target with the same bytes; one to one.
        special: the same for special tokens: those of the same content, and the end of a text.
        text_share: share of the target's tokens in `SAMPLE_TEXT` that are shared, an estimate of their
            share of the target's probability mass.
    """

    target: Vocabulary
    draft: Vocabulary
    method: Method
    shared: Mapping[int, int]
    special: Mapping[int, int]
    text_share: float

    @classmethod
    def from_vocabularies(cls, target: Vocabulary, draft: Vocabulary, method: Method | None = None) -> Self:
        """Compare two vocabularies.

        Args:
            method: the user's choice; None for the better one.

        Raises:
            BadInputError: the intersection of vocabularies without a shared token.
        """
        target_tokens, draft_tokens = _preferred(target), _preferred(draft)
        shared = {index: draft_tokens[data] for data, index in target_tokens.items() if data in draft_tokens}
        sample = target.encode(SAMPLE_TEXT, begins=True).ids
        text_share = sum(token in shared for token in sample) / max(len(sample), 1)
        if method == "intersection" and not shared:
            raise BadInputError(
                "expected vocabularies with shared tokens for vocab=intersection, got two without; use vocab=string"
            )
        chosen = method or ("intersection" if shared and text_share >= LEAST_TEXT_SHARE else "string")
        return cls(target, draft, chosen, shared, _special_tokens(target, draft), text_share)

    @cached_property
    def direct(self) -> dict[int, int]:
        """Tokens of the draft model that it reads in place of single tokens of the target.

        Parts of a character are not among them: the draft model reads whole characters.
        """
        if self.method == "string":
            return dict(self.special)
        whole = {own: other for own, other in self.shared.items() if _is_text(self.target.tokens[own])}
        return {**whole, **self.special}

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
            f"another tokenizer: vocab={self.method} (shared are {self.target_share:.0%} of the target's tokens, "
            f"{self.draft_share:.0%} of the draft model's, {self.text_share:.0%} of those in a text)"
        )

    def as_dict(self) -> dict[str, object]:
        """Return the verdict, ready for JSON."""
        return {
            "method": self.method,
            "target_share": self.target_share,
            "draft_share": self.draft_share,
            "text_share": self.text_share,
        }


def read_method(name: Name) -> Method | None:
    """Return the method that a drafter's name chooses; None if it leaves the choice open.

    Raises:
        BadInputError: an unknown method.
    """
    wanted = name.options.get(OPTION)
    found = next((method for method in METHODS if method == wanted), None)
    if wanted is not None and found is None:
        raise BadInputError(
            f"expected {OPTION}={' or '.join(METHODS)} for the drafter {name.kind}, got {wanted!r}"
        )
    return found


def _preferred(vocabulary: Vocabulary) -> dict[bytes, int]:
    """Return the token of each sequence of bytes; of several, the one that a text is encoded to."""
    known = [(data, index) for index, data in enumerate(vocabulary.tokens) if data]
    known.sort(key=lambda item: (item[1] not in vocabulary.unusual, -item[1]))
    return dict(known)


def _is_text(data: bytes | None) -> bool:
    """Return whether bytes are whole characters."""
    try:
        return data is not None and bool(data.decode())
    except UnicodeDecodeError:
        return False


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
