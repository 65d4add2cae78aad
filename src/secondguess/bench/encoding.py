"""Encoding of a workload as token ids that fit the target's context."""

from __future__ import annotations

from typing import NamedTuple

from secondguess.api import encode
from secondguess.checkpoint.loaded import LoadedModel
from secondguess.errors import BadInputError
from secondguess.workloads.loading import Workload

MIN_TRUNCATED_TOKENS = 16
"""Fewest tokens of a truncated prompt; a shorter one would not represent its task."""


class EncodedWorkload(NamedTuple):
    """Prompts as token ids, in the order of the workload, with a note on those truncated on the left to fit."""

    prompts: list[list[int]]
    num_truncated: int
    notes: list[str]


def encode_workload(target: LoadedModel, workload: Workload, num_tokens: int) -> EncodedWorkload:
    """Encode all prompts, truncating on the left those that leave no room for the new tokens."""
    whole = [encode(target, prompt) for prompt in workload.prompts]
    room = target.runtime.context_length - num_tokens
    if room < 1:
        raise BadInputError(
            f"expected fewer new tokens than the context of {target.runtime.context_length}, got {num_tokens}; "
            "lower --max-tokens"
        )
    longest = max(map(len, whole))
    if longest > room and room < MIN_TRUNCATED_TOKENS:
        raise BadInputError(
            f"expected prompts of at most {room} tokens (the context less {num_tokens} new ones), got one of "
            f"{longest} in {workload.name}; take other prompts or fewer tokens"
        )
    first = getattr(target.tokenizer, "bos_token_id", None)
    prompts = [truncate_left(prompt, room, first) for prompt in whole]
    num_truncated = sum(len(prompt) > room for prompt in whole)
    note = (
        f"{num_truncated} of {len(prompts)} prompts were cut from the left to the {room} tokens that the target's "
        "context leaves for them"
    )
    return EncodedWorkload(prompts, num_truncated, [note] if num_truncated else [])


def truncate_left(tokens: list[int], room: int, first: int | None) -> list[int]:
    """Return the last `room` tokens; a leading BOS token (`first`) is kept, since models need it.

    >>> truncate_left([1, 5, 6, 7], 3, None), truncate_left([1, 5, 6, 7], 3, 1), truncate_left([5, 6], 3, 1)
    ([5, 6, 7], [1, 6, 7], [5, 6])
    """
    if len(tokens) <= room:
        return tokens
    kept = tokens[:1] if tokens[0] == first else []
    return kept + tokens[len(tokens) - room + len(kept) :]
