"""Bounds on the lengths of texts that are tokenized, as tokenization takes a hundred bytes per character."""

from __future__ import annotations

from secondguess.server.errors import ApiError
from secondguess.server.model import ServedModel

CHARACTERS_PER_TOKEN = 16
"""Several times the mean of any text. Texts with more for each token of the context are examined."""


def limit_of(target: ServedModel) -> str:
    """Return the words that precede the largest number of tokens in a message."""
    if target.is_limited_by_memory:
        return "the memory that was free when the server started holds"
    return "the model's context is"


def max_characters(target: ServedModel) -> int:
    """Return a number of characters that fill the context several times in nearly every text."""
    return CHARACTERS_PER_TOKEN * target.context_length


def check_characters(target: ServedModel, text: str) -> None:
    """Refuse a text whose beginning alone fills the context, before all of it is tokenized.

    Raises:
        ApiError: the first `max_characters` have so many tokens that the text cannot fit, wherever
            tokens end in the whole text.
    """
    limit = max_characters(target)
    if len(text) <= limit:
        return
    num_tokens = len(target.encode(text[:limit]))
    if num_tokens > 2 * target.context_length:
        raise too_long(target, f"{len(text)} characters, of which the first {limit} have {num_tokens} tokens")


def too_long(target: ServedModel, got: str) -> ApiError:
    """Return the error of a prompt that leaves no position free."""
    context = target.context_length
    message = (
        f"expected a prompt of at most {context - 1} tokens ({limit_of(target)} {context} and one position must stay "
        f"free), got {got}; shorten it"
    )
    return ApiError(400, message, "prompt", "context_length_exceeded")
