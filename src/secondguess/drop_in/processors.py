"""Conversion of Transformers' logits processors and stopping criteria to `SamplingParams`.

Transformers merges the user's lists with those it makes from the generation config, and passes on
the objects that it would have run itself. The settings are read from these objects, not from the
config.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
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
    """Stopping conditions of all rows.

    Args:
        max_length: most tokens of a row: padding, prompt and new tokens.
        end_tokens: token ids that end a row.
        has_end_tokens: an end token was given; only then does Transformers pad finished rows.
        stop_strings: `StopStringCriteria` that end a row.
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

    Raises:
        BadInputError: a criterion has an unsupported class (subclasses are not supported), or none
            limits the length.
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
    """Return token ids given as a number, a list, an array or a tensor of at most one dimension.

    Raises:
        BadInputError: the numbers are floating-point.
    """
    ids = torch.as_tensor(value).reshape(-1)
    if ids.is_floating_point() and ids.numel():
        raise BadInputError(f"expected {name} to be whole numbers, got {value!r}; give token ids")
    return [int(token) for token in ids.tolist()]


@dataclass
class _ProcessorReader:
    """Sampling settings collected from logits processors.

    Args:
        width: tokens of each prompt, padding included.
        padding: number of padding tokens per row.
        end_tokens: token ids that end a row.
        settings: keyword arguments for `SamplingParams`.
    """

    width: int
    padding: list[int]
    end_tokens: frozenset[int]
    settings: dict[str, Any] = field(default_factory=dict)

    def repetition_penalty(self, processor: Any) -> None:
        ignored = processor.prompt_ignore_length
        ignored = (
            ignored.tolist() if isinstance(ignored, torch.Tensor) else [ignored or 0] * len(self.padding)
        )
        if ignored != self.padding:
            raise BadInputError(
                f"expected prompt_ignore_length of {type(processor).__name__} to be the padding of each row, "
                f"{self.padding}, got {ignored}: custom_generate penalises the whole prompt and no padding; "
                "use repetition_penalty=..."
            )
        self.settings["repetition_penalty"] = processor.penalty

    def min_length(self, processor: Any) -> None:
        self._ban_end_tokens(processor, processor.min_length)

    def min_new_tokens(self, processor: Any) -> None:
        self._ban_end_tokens(processor, processor.prompt_length_to_skip + processor.min_new_tokens)

    def _ban_end_tokens(self, processor: Any, min_length: int) -> None:
        banned = token_ids("eos_token_id", processor.eos_token_id)
        if frozenset(token for token in banned if token >= 0) != self.end_tokens:
            raise BadInputError(
                f"expected {type(processor).__name__} to ban the end tokens {sorted(self.end_tokens)}, got {banned}; "
                "use min_new_tokens=... and eos_token_id=..."
            )
        self.settings["min_tokens"] = max(self.settings.get("min_tokens", 0), min_length - self.width)

    def temperature(self, processor: Any) -> None:
        self.settings["temperature"] = processor.temperature

    def top_k(self, processor: Any) -> None:
        _require(processor, filter_value=-math.inf)
        self.settings["top_k"] = processor.top_k

    def top_p(self, processor: Any) -> None:
        _require(processor, filter_value=-math.inf, min_tokens_to_keep=1)
        self.settings["top_p"] = processor.top_p

    def min_p(self, processor: Any) -> None:
        _require(processor, filter_value=-math.inf, min_tokens_to_keep=1)
        self.settings["min_p"] = processor.min_p


_ORDER: dict[type, tuple[int, Callable[[_ProcessorReader, Any], None]]] = {
    RepetitionPenaltyLogitsProcessor: (0, _ProcessorReader.repetition_penalty),
    MinLengthLogitsProcessor: (0, _ProcessorReader.min_length),
    MinNewTokensLengthLogitsProcessor: (0, _ProcessorReader.min_new_tokens),
    TemperatureLogitsWarper: (1, _ProcessorReader.temperature),
    TopKLogitsWarper: (2, _ProcessorReader.top_k),
    TopPLogitsWarper: (3, _ProcessorReader.top_p),
    MinPLogitsWarper: (4, _ProcessorReader.min_p),
}
"""Class -> its position in our order of processing, and the method that reads it.

Processors with the same position may come in any order.
"""


def read_logits_processors(
    processors: Sequence[Any], *, width: int, padding: list[int], end_tokens: frozenset[int], do_sample: bool
) -> dict[str, Any]:
    """Return keyword arguments for `SamplingParams` equivalent to these processors.

    Args:
        processors: the logits processors, in the order in which Transformers would apply them.
        width: tokens of each prompt, padding included.
        padding: number of padding tokens per row.
        end_tokens: token ids that end a row.
        do_sample: True for sampling, False for greedy decoding.

    Raises:
        BadInputError: a processor has an unsupported class (subclasses are not supported), occurs
            twice, comes in an order other than ours, or has values without an equivalent.
    """
    reading = _ProcessorReader(width, padding, end_tokens, {"temperature": 1.0 if do_sample else 0.0})
    last = -1
    for number, processor in enumerate(processors):
        name = type(processor).__name__
        if type(processor) not in _ORDER:
            raise _unsupported("logits processor", processor)
        place, read = _ORDER[type(processor)]
        if place > 0 and not do_sample:
            raise BadInputError(
                f"expected no {name} without sampling, got one in logits_processor; give do_sample=True or remove it"
            )
        repeated = any(type(processor) is type(earlier) for earlier in processors[:number])
        if repeated or place < last:
            raise BadInputError(
                f"expected one logits processor of each kind, in the order in which Transformers makes them, got {name} "
                f"{'twice' if repeated else 'too late'}; remove it from logits_processor and use generate's own settings, "
                "such as top_k=0 to switch off the default"
            )
        last = place
        read(reading, processor)
    return reading.settings


def _require(processor: Any, **values: object) -> None:
    for name, value in values.items():
        if getattr(processor, name) != value:
            raise BadInputError(
                f"expected {name} of {type(processor).__name__} to be {value!r}, got {getattr(processor, name)!r}; "
                "leave it out or generate without custom_generate"
            )


def _unsupported(kind: str, part: Any) -> BadInputError:
    return BadInputError(
        f"expected no custom {kind}, got {type(part).__name__}: custom_generate cannot run it on drafted tokens; "
        "remove it or generate without custom_generate"
    )
