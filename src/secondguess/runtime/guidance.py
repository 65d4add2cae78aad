"""Classifier-free guidance: a second row of the target, whose logits are combined before verification."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from secondguess.core import Draft, Row
from secondguess.runtime.base import ForwardOutput, HiddenStates, Runtime


class GuidedRuntime(Runtime):
    """Target of the decoding loop, which scores guided rows with their negative prompt as well.

    A guided row (`Row.guidance`) has a twin in the target: its negative prompt and the same output.
    Each pass scores the draft in both. Everything after the logits is as for other rows, so that
    any drafter and verifier keeps the guided distribution. Drafters use the target itself.

    Args:
        runtime: the target.
    """

    def __init__(self, runtime: Runtime) -> None:
        self.vocab_size, self.context_length = runtime.vocab_size, runtime.context_length
        self.num_layers, self.device = runtime.num_layers, runtime.device
        self._runtime = runtime
        self._twins: dict[Row, Row] = {}

    @property
    def num_input_tokens(self) -> int:
        return self._runtime.num_input_tokens

    def request_hidden_states(self, layers: Sequence[int], rows: Sequence[Row] | None = None) -> None:
        self._runtime.request_hidden_states(layers, None if rows is None else [*rows, *self._twins_of(rows)])

    def admit(self, rows: Sequence[Row], reuse_limits: Sequence[int | None] | None = None) -> list[int]:
        new = {row: Row(list(row.guidance.negative), row.params) for row in rows if row.guidance}
        self._twins.update(new)  # first, so that `release` frees them even if this is interrupted
        limits = [None] * len(rows) if reuse_limits is None else list(reuse_limits)
        reused = self._runtime.admit([*rows, *new.values()], [*limits, *[None] * len(new)])
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
        guided = [index for index, row in enumerate(rows) if row in self._twins]
        for index, twin in zip(guided, twins, strict=True):
            twin.tokens[twin.num_prompt :] = rows[index].output
        members = torch.tensor([*range(len(rows)), *guided], device=draft.tokens.device)
        scores = self._runtime.score([*rows, *twins], draft.select(members))
        scales = [row.guidance.scale for row in rows if row.guidance]
        logits = scores.logits[: len(rows)].clone()
        logits[guided] = combine(logits[guided], scores.logits[len(rows) :], scales)
        return ForwardOutput(logits, {layer: states[: len(rows)] for layer, states in scores.hidden.items()})

    def keep(self, rows: Sequence[Row], paths: Sequence[Sequence[int]]) -> None:
        twin_paths = [path for row, path in zip(rows, paths, strict=True) if row in self._twins]
        self._runtime.keep([*rows, *self._twins_of(rows)], [*paths, *twin_paths])

    def rewind(self, rows: Sequence[Row], lengths: Sequence[int]) -> None:
        twin_lengths = [
            self._twins[row].num_prompt + length - row.num_prompt if length >= row.num_prompt else 0
            for row, length in zip(rows, lengths, strict=True)
            if row in self._twins
        ]
        self._runtime.rewind([*rows, *self._twins_of(rows)], [*lengths, *twin_lengths])

    def erase(self, rows: Sequence[Row], num_nodes: int) -> None:
        self._runtime.erase([*rows, *self._twins_of(rows)], num_nodes)

    def release(self, row: Row) -> None:
        for each in (*self._twins_of([row]), row):
            self._runtime.release(each)
        self._twins.pop(row, None)

    def _twins_of(self, rows: Sequence[Row]) -> list[Row]:
        return [self._twins[row] for row in rows if row in self._twins]


def combine(own: Tensor, negative: Tensor, scales: Sequence[float]) -> Tensor:
    """Return the logits of guidance, `negative + scale (own - negative)` of log-probabilities.

    A token that is impossible after one of the prompts stays impossible.
    """
    own, negative = own.log_softmax(-1), negative.log_softmax(-1)
    factors = torch.tensor(scales, dtype=own.dtype, device=own.device)[:, None, None]
    guided = negative + factors * (own - negative)
    return guided.masked_fill(own.isneginf() | negative.isneginf(), -math.inf)
