"""Prompts: text or token ids, checked and encoded."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import numpy
from torch import Tensor

from secondguess.errors import BadInputError
from secondguess.runtime.loading import LoadedModel

Prompt = str | Sequence[int] | numpy.ndarray | Tensor
"""Text, or token ids: a sequence of whole numbers, or an array or a tensor `[position]` of them."""

_ARRAYS = (numpy.ndarray, Tensor)


def is_single(prompts: Prompt | Sequence[Prompt]) -> bool:
    """Whether this is one prompt (or nothing that could hold several) and not a list of them."""
    if isinstance(prompts, str | bytes | bytearray) or not isinstance(prompts, Sequence):
        return True
    return len(prompts) > 0 and not isinstance(prompts[0], (Sequence, *_ARRAYS))


def checked_prompt(prompt: object) -> str | list[int]:
    """Text that can be encoded, or token ids as plain numbers.

    Raises:
        BadInputError: anything else, naming it.
    """
    if isinstance(prompt, str):
        return _checked_text(prompt)
    if isinstance(prompt, bytes | bytearray):
        raise BadInputError("expected text or token ids, got bytes; decode them first: prompt.decode()")
    if isinstance(prompt, _ARRAYS):
        if prompt.ndim != 1:
            raise BadInputError(
                f"expected token ids of one prompt [position], got an array of shape {list(prompt.shape)}; "
                "give a list of prompts, each without its padding"
            )
        prompt = prompt.tolist()
    if not isinstance(prompt, Sequence):
        raise BadInputError(
            f"expected text or a list of token ids, got {type(prompt).__name__}; "
            'give "text", [5, 6, 7], or a list of such prompts'
        )
    return [_checked_token(token, place) for place, token in enumerate(prompt)]


def _checked_text(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadInputError(
            f"expected text that UTF-8 can write, got the lone surrogate {text[error.start]!r} at character "
            f"{error.start}; remove it"
        ) from None
    return text


def _checked_token(token: object, place: int) -> int:
    # Python lets True pass for 1; nobody means that as a token.
    if not isinstance(token, bool):
        try:
            return operator.index(token)  # type: ignore[arg-type]
        except TypeError:
            pass
    raise BadInputError(f"expected token ids to be whole numbers, got {token!r} at place {place}")


def encode(target: LoadedModel, prompt: Prompt) -> list[int]:
    """Token ids of a prompt, refused when it is no prompt or there is nothing to continue."""
    checked = checked_prompt(prompt)
    ids = target.encode(checked) if isinstance(checked, str) else checked
    if not checked or not ids:
        raise BadInputError("expected a prompt with at least one token, got an empty one")
    vocab_size = target.runtime.vocab_size
    if any(not 0 <= token < vocab_size for token in ids):
        raise BadInputError(f"expected token ids from 0 to {vocab_size - 1}, got {min(ids)} to {max(ids)}")
    return ids
