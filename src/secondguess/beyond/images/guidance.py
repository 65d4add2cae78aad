"""Classifier-free guidance: a second row of the target, whose logits are combined before verification."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from secondguess.core import Draft, Row
from secondguess.engine.generation import check_request
from secondguess.engine.models import Models
from secondguess.errors import BadInputError
from secondguess.prompts import ExtendedPrompt, Prompt, encode
from secondguess.runtime.base import ForwardOutput, HiddenStates, Runtime


@dataclass(frozen=True)
class GuidedPrompt(ExtendedPrompt):
    """Prompt with classifier-free guidance, as image models use it.

    The logits are those after the negative prompt plus `scale` times the difference between those
    after the prompt and them, each as log-probabilities (arXiv 2207.12598).

    Args:
        prompt: text, token ids or a conversation.
        negative: the same without the condition, or with what the output shall not be.
        scale: 1 for the prompt alone.

    Raises:
        BadInputError: a scale that is not a finite number.
    """

    prompt: Prompt
    negative: Prompt
    scale: float

    def __post_init__(self) -> None:
        if isinstance(self.scale, bool) or not isinstance(self.scale, Real) or not math.isfinite(self.scale):
            raise BadInputError(
                f"expected the scale of a guided prompt to be a finite number, got {self.scale!r}; 1 is no guidance"
            )

    def prepare(self, models: Models, rows: Sequence[Row]) -> None:
        """Guide rows, by a runtime around the target, which is put there before the next round."""
        negative = encode(models.target, self.negative)
        check_request(models.target, models.verifier, negative, rows[0].params)
        for row in rows:
            _check_row(models, row)
            row.context_length -= max(0, len(negative) - row.num_prompt)
        batch = models.shared_batch
        with batch.between_rounds():
            target = batch.components.target
            if not isinstance(target, GuidedRuntime):
                target = GuidedRuntime(target)
                batch.replace_target(target)
        for row in rows:
            target.guide(row, negative, float(self.scale))


def _check_row(models: Models, row: Row) -> None:
    """Keep the drafters of a row to those that run no layers of the target, and refuse what cannot be guided."""
    params, usable = row.params, models.drafter.parts_without_target
    if params.prompt_logprobs is not None:
        raise BadInputError(
            "expected prompt_logprobs only with a prompt of text, got a guided one; leave it out"
        )
    parts = usable if row.parts is None else row.parts
    if not usable or not parts <= usable:
        drafter = models.drafter.name if params.draft_with is None else params.draft_with
        raise BadInputError(
            f"expected a drafter that runs no layers of the target for a guided prompt, got {drafter}; "
            "use another one, such as model:PATH or suffix"
        )
    row.parts = parts


class _Guidance(NamedTuple):
    """Guidance of a row: its twin in the target, which has the negative prompt and the same output."""

    twin: Row
    scale: float


class GuidedRuntime(Runtime):
    """Runtime around a target, which scores guided rows with their negative prompt as well.

    A guided row has a twin in the target: its negative prompt and the same output. Each pass scores
    the draft in both. Everything after the logits is as for other rows, so that any drafter and
    verifier keeps the guided distribution. Drafters use the target itself.
    """

    def __init__(self, runtime: Runtime) -> None:
        self.vocab_size, self.context_length = runtime.vocab_size, runtime.context_length
        self.num_layers, self.device = runtime.num_layers, runtime.device
        self.num_prefilled = runtime.num_prefilled
        self._runtime = runtime
        self._guidance: WeakKeyDictionary[Row, _Guidance] = WeakKeyDictionary()

    def guide(self, row: Row, negative: Sequence[int], scale: float) -> Row:
        """Guide a row, which is not admitted yet, away from a negative prompt; return it."""
        self._guidance[row] = _Guidance(Row(list(negative), row.params), scale)
        return row

    def slot_lengths(self, row: Row) -> list[int]:
        twins = self._twins_of([row])
        return [len(row.tokens), *(twin.num_prompt + row.num_output for twin in twins)]

    @property
    def num_input_tokens(self) -> int:
        return self._runtime.num_input_tokens

    def request_hidden_states(self, layers: Sequence[int], rows: Sequence[Row] | None = None) -> None:
        self._runtime.request_hidden_states(layers, None if rows is None else [*rows, *self._twins_of(rows)])

    def admit(self, rows: Sequence[Row], reuse_limits: Sequence[int | None] | None = None) -> list[int]:
        twins = self._twins_of(rows)
        limits = [None] * len(rows) if reuse_limits is None else list(reuse_limits)
        reused = self._runtime.admit([*rows, *twins], [*limits, *[None] * len(twins)])
        return reused[: len(rows)]

    def prefill(
        self, rows: Sequence[Row], max_tokens: int | None = None, with_hidden: bool = True
    ) -> list[HiddenStates]:
        before = sum(map(self._runtime.num_to_prefill, rows))
        hidden = self._runtime.prefill(rows, max_tokens, with_hidden)
        left = max_tokens
        if max_tokens is not None:
            left = max_tokens - before + sum(map(self._runtime.num_to_prefill, rows))
        twins = self._twins_of(rows)
        if twins and left != 0:
            self._runtime.prefill(twins, left, with_hidden=False)
        self.num_prefilled = self._runtime.num_prefilled
        return hidden

    def num_to_prefill(self, row: Row) -> int:
        return sum(map(self._runtime.num_to_prefill, [row, *self._twins_of([row])]))

    def reset_prefix_cache(self) -> None:
        self._runtime.reset_prefix_cache()

    def score(self, rows: Sequence[Row], draft: Draft) -> ForwardOutput:
        twins = self._twins_of(rows)
        if not twins:
            return self._runtime.score(rows, draft)
        guided = [index for index, row in enumerate(rows) if row in self._guidance]
        for index, twin in zip(guided, twins, strict=True):
            twin.tokens[twin.num_prompt :] = rows[index].output
        members = torch.tensor([*range(len(rows)), *guided], device=draft.tokens.device)
        scores = self._runtime.score([*rows, *twins], draft.select(members))
        scales = [self._guidance[rows[index]].scale for index in guided]
        logits = scores.logits[: len(rows)].clone()
        logits[guided] = combine(logits[guided], scores.logits[len(rows) :], scales)
        return ForwardOutput(logits, {layer: states[: len(rows)] for layer, states in scores.hidden.items()})

    def keep(self, rows: Sequence[Row], paths: Sequence[Sequence[int]]) -> None:
        twin_paths = [path for row, path in zip(rows, paths, strict=True) if row in self._guidance]
        self._runtime.keep([*rows, *self._twins_of(rows)], [*paths, *twin_paths])

    def rewind(self, rows: Sequence[Row], lengths: Sequence[int]) -> None:
        twin_lengths = [
            self._guidance[row].twin.num_prompt + length - row.num_prompt if length >= row.num_prompt else 0
            for row, length in zip(rows, lengths, strict=True)
            if row in self._guidance
        ]
        self._runtime.rewind([*rows, *self._twins_of(rows)], [*lengths, *twin_lengths])

    def erase(self, rows: Sequence[Row], num_nodes: int) -> None:
        self._runtime.erase([*rows, *self._twins_of(rows)], num_nodes)

    def release(self, row: Row) -> None:
        for member in (*self._twins_of([row]), row):
            self._runtime.release(member)

    def _twins_of(self, rows: Sequence[Row]) -> list[Row]:
        return [self._guidance[row].twin for row in rows if row in self._guidance]


def combine(own: Tensor, negative: Tensor, scales: Sequence[float]) -> Tensor:
    """Return the logits of guidance, `negative + scale (own - negative)` of log-probabilities `[row, query, vocab]`.

    A token that is impossible after one of the prompts stays impossible.
    """
    own, negative = own.log_softmax(-1), negative.log_softmax(-1)
    factors = torch.tensor(scales, dtype=own.dtype, device=own.device)[:, None, None]
    guided = negative + factors * (own - negative)
    return guided.masked_fill(own.isneginf() | negative.isneginf(), -math.inf)
