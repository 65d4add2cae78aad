"""Conversion of Transformers' logits processors and stopping criteria to `SamplingParams`.

Transformers merges the user's lists with those it makes from the generation config, and passes on
the objects that it would have run itself. The settings are read from these objects, not from the
config.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    StopStringCriteria,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from secondguess.errors import BadInputError


@dataclass(frozen=True)
class StoppingConditions:
    """Stopping conditions of all rows, whose length counts padding and prompt.

    Transformers pads finished rows only if an end token was given (`has_end_tokens`).
    """

    max_length: int
    end_tokens: frozenset[int]
    has_end_tokens: bool
    stop_strings: tuple[Any, ...]

    @property
    def may_stop_early(self) -> bool:
        """True if a row may end before `max_length`."""
        return bool(self.end_tokens or self.stop_strings)


def read_stopping_criteria(criteria: Sequence[Any]) -> StoppingConditions:
    """Return the stopping conditions of the criteria, each of which ends a row.

    Unsupported classes, subclasses included, and criteria of which none limits the length raise a BadInputError.
    """
    lengths: list[int] = []
    ends: list[list[int]] = []
    strings: list[Any] = []
    for criterion in criteria:
        if type(criterion) is MaxLengthCriteria:
            lengths.append(criterion.max_length)
        elif type(criterion) is EosTokenCriteria:
            ends.append(token_ids("eos_token_id", criterion.eos_token_id))
        elif type(criterion) is StopStringCriteria:
            strings.append(criterion)
        else:
            raise _unsupported("stopping criterion", criterion)
    if not lengths:
        raise BadInputError("expected a limit of the length, got none; give max_new_tokens")
    # In Transformers, a negative id means no end token.
    end_tokens = frozenset(token for tokens in ends for token in tokens if token >= 0)
    return StoppingConditions(min(lengths), end_tokens, bool(ends), tuple(strings))


def token_ids(name: str, value: Any) -> list[int]:
    """Return token ids given as a number, a list, an array or a tensor of at most one dimension."""
    ids = torch.as_tensor(value).reshape(-1)
    if ids.is_floating_point() and ids.numel():
        raise BadInputError(f"expected {name} to be whole numbers, got {value!r}; give token ids")
    return [int(token) for token in ids.tolist()]


_PENALTIES = (
    RepetitionPenaltyLogitsProcessor,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
)
"""Supported processors whose order among each other does not matter."""
_WARPERS = {
    TemperatureLogitsWarper: "temperature",
    TopKLogitsWarper: "top_k",
    TopPLogitsWarper: "top_p",
    MinPLogitsWarper: "min_p",
}
"""Supported processors of sampled text, in our order behind the penalties, and their field of `SamplingParams`."""
_REQUIRED = {"filter_value": -math.inf, "min_tokens_to_keep": 1}
"""Values of the other attributes of warpers, where they have them."""


def read_logits_processors(
    processors: Sequence[Any], *, width: int, padding: list[int], end_tokens: frozenset[int], do_sample: bool
) -> dict[str, Any]:
    """Return keyword arguments for `SamplingParams` equivalent to these processors, which are in the order of Transformers.

    `width` is the length of each prompt, of which `padding` tokens per row are padding. Processors of unsupported classes
    (subclasses included), twice, in another order or without an equivalent raise a BadInputError.
    """
    settings: dict[str, Any] = {"temperature": 1.0 if do_sample else 0.0}
    order = list(_WARPERS)
    last = 0
    for number, processor in enumerate(processors):
        kind = type(processor)
        if kind not in _PENALTIES and kind not in _WARPERS:
            raise _unsupported("logits processor", processor)
        if kind in _WARPERS and not do_sample:
            raise BadInputError(
                f"expected no {kind.__name__} without sampling, got one in logits_processor; "
                "give do_sample=True or remove it"
            )
        position = order.index(kind) + 1 if kind in _WARPERS else 0
        repeated = any(kind is type(earlier) for earlier in processors[:number])
        if repeated or position < last:
            raise BadInputError(
                "expected one logits processor of each kind, in the order in which Transformers makes them, got "
                f"{kind.__name__} {'twice' if repeated else 'too late'}; remove it from logits_processor and use "
                "generate's own settings, such as top_k=0 to switch off the default"
            )
        last = position
        if kind in _WARPERS:
            settings[_WARPERS[kind]] = _read_warper(processor, _WARPERS[kind])
        elif kind is RepetitionPenaltyLogitsProcessor:
            settings["repetition_penalty"] = _read_penalty(processor, padding)
        else:
            min_tokens = _read_min_length(processor, end_tokens) - width
            settings["min_tokens"] = max(settings.get("min_tokens", 0), min_tokens)
    return settings


def _read_warper(processor: Any, setting: str) -> Any:
    for name, value in _REQUIRED.items():
        if getattr(processor, name, value) != value:
            raise BadInputError(
                f"expected {name} of {type(processor).__name__} to be {value!r}, got {getattr(processor, name)!r}; "
                "leave it out or generate without custom_generate"
            )
    return getattr(processor, setting)


def _read_penalty(processor: Any, padding: list[int]) -> float:
    ignored = processor.prompt_ignore_length
    ignored = ignored.tolist() if isinstance(ignored, torch.Tensor) else [ignored or 0] * len(padding)
    if ignored != padding:
        raise BadInputError(
            f"expected prompt_ignore_length of {type(processor).__name__} to be the padding of each row, "
            f"{padding}, got {ignored}: custom_generate penalises the whole prompt and no padding; "
            "use repetition_penalty=..."
        )
    penalty: float = processor.penalty
    return penalty


def _read_min_length(processor: Any, end_tokens: frozenset[int]) -> int:
    """Return the length, prompt included, before which a processor bans the end tokens."""
    banned = token_ids("eos_token_id", processor.eos_token_id)
    if frozenset(token for token in banned if token >= 0) != end_tokens:
        raise BadInputError(
            f"expected {type(processor).__name__} to ban the end tokens {sorted(end_tokens)}, got {banned}; "
            "use min_new_tokens=... and eos_token_id=..."
        )
    length: int = (
        processor.min_length
        if type(processor) is MinLengthLogitsProcessor
        else processor.prompt_length_to_skip + processor.min_new_tokens
    )
    return length


def _unsupported(kind: str, part: Any) -> BadInputError:
    return BadInputError(
        f"expected no custom {kind}, got {type(part).__name__}: custom_generate cannot run it on drafted tokens; "
        "remove it or generate without custom_generate"
    )
