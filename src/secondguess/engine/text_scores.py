"""Log-probabilities of given texts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from secondguess.core import TokenLogprob
from secondguess.errors import BadInputError


@dataclass(frozen=True)
class TextScore:
    """Log-probabilities of a text under the target.

    Attributes:
        token_ids: tokens of the text.
        logprobs: per token from the second on, after the tokens before it in its window.
    """

    token_ids: list[int]
    logprobs: list[TokenLogprob]

    @property
    def logprob(self) -> float:
        """Natural logarithm of the probability of the tokens after the first."""
        return math.fsum(token.logprob for token in self.logprobs)

    @property
    def perplexity(self) -> float:
        """Inverse of the geometric mean of the tokens' probabilities."""
        return math.exp(-self.logprob / len(self.logprobs))


def windows_of(ids: Sequence[int], size: int) -> list[list[int]]:
    """Return windows of at most `size` tokens; each begins with the last token of the one before it.

    Raises:
        BadInputError: fewer than two tokens, or windows that hold fewer.
    """
    if size < 2:
        raise BadInputError(f"expected a window of at least 2 tokens, got {size}")
    if len(ids) < 2:
        raise BadInputError(
            f"expected a text of at least 2 tokens, as the first is not scored, got {len(ids)}; give a longer one"
        )
    return [list(ids[start : start + size]) for start in range(0, len(ids) - 1, size - 1)]
