"""Encoding of a workload as token ids that fit the target's context."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from secondguess.api import encode
from secondguess.bench.costs import repeat_to_length
from secondguess.bench.workloads import Workload
from secondguess.checkpoint.loaded import LoadedModel
from secondguess.errors import BadInputError

MIN_TRUNCATED_TOKENS = 16
"""Fewest tokens of a truncated prompt; a shorter one would not represent its task."""


@dataclass(frozen=True)
class EncodedWorkload:
    """Prompts as token ids.

    Args:
        prompts: token ids of each prompt.
        tasks: the task of each prompt.
        num_truncated: number of prompts truncated on the left to fit.
        room: maximum number of tokens of a prompt.
    """

    prompts: list[list[int]]
    tasks: list[str]
    num_truncated: int
    room: int

    @property
    def note(self) -> str:
        """Note on truncated prompts for the report; empty if there are none."""
        if not self.num_truncated:
            return ""
        return (
            f"{self.num_truncated} of {len(self.prompts)} prompts were cut from the left to the {self.room} tokens that the "
            "target's context leaves for them"
        )


def encode_workload(target: LoadedModel, workload: Workload, num_tokens: int) -> EncodedWorkload:
    """Encode all prompts, truncating on the left those that leave no room for the new tokens.

    Raises:
        BadInputError: fewer than `MIN_TRUNCATED_TOKENS` tokens of a prompt would be left.
    """
    whole = [encode(target, prompt) for prompt in workload.prompts]
    room = target.runtime.context_length - num_tokens
    longest = max(map(len, whole))
    if longest > room and room < MIN_TRUNCATED_TOKENS:
        raise BadInputError(
            f"expected prompts of at most {room} tokens (the context less {num_tokens} new ones), got one of "
            f"{longest} in {workload.name}; take other prompts or fewer tokens"
        )
    first = getattr(target.tokenizer, "bos_token_id", None)
    prompts = [truncate_left(prompt, room, first) for prompt in whole]
    return EncodedWorkload(prompts, list(workload.tasks), sum(len(prompt) > room for prompt in whole), room)


def truncate_left(tokens: list[int], room: int, first: int | None) -> list[int]:
    """Return the last `room` tokens; a leading BOS token (`first`) is kept, since models need it.

    >>> truncate_left([1, 5, 6, 7], 3, None), truncate_left([1, 5, 6, 7], 3, 1), truncate_left([5, 6], 3, 1)
    ([5, 6, 7], [1, 6, 7], [5, 6])
    """
    if len(tokens) <= room:
        return tokens
    if tokens[0] == first:
        return [tokens[0], *tokens[len(tokens) - room + 1 :]]
    return tokens[len(tokens) - room :]


def typical_context(prompts: Sequence[Sequence[int]], num_tokens: int, most: int | None = None) -> list[int]:
    """Return prompt tokens, as many as a median row has halfway, at most `most`."""
    length = int(median(len(prompt) for prompt in prompts)) + num_tokens // 2
    length = length if most is None else max(1, min(length, most))
    return repeat_to_length([token for prompt in prompts for token in prompt], length)
