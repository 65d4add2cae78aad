"""Edits of logits before temperature is applied: bias, penalties, ban of end tokens, grammar.

Each query of a draft counts the tokens of its own prefix: the row's tokens and the drafted nodes
before it. Only the logits of tokens that occur there change, so the cost grows with the text and
hardly with the vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from secondguess.core import Row
from secondguess.params import SamplingParams
from secondguess.sampling.grammar import mask_by_grammar_
from secondguess.tensors import padded_tensor


@dataclass(frozen=True)
class LogitProcessors:
    """Logit edits for the settings of a batch.

    `bias` has row indices, token ids and added values `[n]`.
    """

    bias: tuple[Tensor, Tensor, Tensor] | None
    penalties: Penalties | None
    has_min_tokens: bool
    has_grammar: bool

    @classmethod
    def from_params(
        cls, params: Sequence[SamplingParams], vocab_size: int, device: torch.device
    ) -> LogitProcessors:
        has_min_tokens = any(settings.min_tokens for settings in params)
        has_grammar = any(settings.grammar is not None for settings in params)
        bias, penalties = _bias(params, vocab_size, device), Penalties.from_params(params, device)
        return cls(bias, penalties, has_min_tokens, has_grammar)

    def change_logits(self, rows: Sequence[Row]) -> bool:
        """Return whether any logit changes in this round."""
        if self.bias is not None or self.penalties is not None or self.has_grammar:
            return True
        return self.has_min_tokens and any(row.num_output < row.params.min_tokens for row in rows)

    def apply(self, logits: Tensor, rows: Sequence[Row], nodes: Tensor, visible: Tensor) -> Tensor:
        """Return an edited copy of the logits `[row, query, vocab]`.

        Tokens of `rows` and draft tokens `nodes` `[row, node]` are counted, the latter where
        `visible` `[row, query, node]` is True: for nodes that precede the query.
        """
        logits = logits.clone()
        if self.bias is not None:
            batch_rows, tokens, values = self.bias
            logits.transpose(1, 2)[batch_rows, tokens] += values.to(logits.dtype)[:, None]
        if self.penalties is not None:
            self.penalties.apply_(logits, rows, nodes, visible)
        if self.has_min_tokens:
            _ban_end_tokens_(logits, rows, visible.sum(-1))
        if self.has_grammar:
            mask_by_grammar_(logits, rows, nodes, visible)
        return logits


@dataclass(frozen=True)
class Penalties:
    """Repetition (arXiv 1909.05858), frequency and presence penalties `[n, 1, 1]` of the rows that use any.

    `rows` and `index` are the indices of these rows in the batch.
    """

    rows: list[int]
    index: Tensor
    repetition: Tensor
    frequency: Tensor
    presence: Tensor

    @classmethod
    def from_params(cls, params: Sequence[SamplingParams], device: torch.device) -> Penalties | None:
        rows = [
            index
            for index, settings in enumerate(params)
            if settings.repetition_penalty != 1 or settings.frequency_penalty or settings.presence_penalty
        ]
        if not rows:
            return None
        strengths = [
            (params[row].repetition_penalty, params[row].frequency_penalty, params[row].presence_penalty)
            for row in rows
        ]
        per_row = torch.tensor(strengths, dtype=torch.float64, device=device)[:, :, None, None]
        return cls(rows, torch.tensor(rows, device=device), per_row[:, 0], per_row[:, 1], per_row[:, 2])

    def apply_(self, logits: Tensor, rows: Sequence[Row], nodes: Tensor, visible: Tensor) -> None:
        """Apply penalties in place; arguments as in `LogitProcessors.apply`."""
        nodes, visible = nodes[self.index], visible[self.index]
        tokens, in_text, in_output = _padded_tokens([rows[row] for row in self.rows], logits)
        # Tokens whose logits may change. A node outside of this vocabulary becomes token 0 and is
        # not counted.
        affected = torch.cat([tokens, nodes.masked_fill(nodes >= logits.shape[-1], 0)], 1)
        counts = torch.zeros(2, len(self.rows), logits.shape[-1], dtype=logits.dtype, device=logits.device)
        counts[0].scatter_add_(1, tokens, in_text)
        counts[1].scatter_add_(1, tokens, in_output)
        # A token that occurs twice has equal counts at both indices, so the same value is written.
        drafted = (affected[:, :, None] == nodes[:, None]).to(logits.dtype)
        drafted = visible.to(logits.dtype) @ drafted.transpose(1, 2)
        num_seen, num_output = (counts.gather(2, affected.expand(2, -1, -1))[:, :, None] + drafted).unbind(0)
        every = affected[:, None].expand(-1, logits.shape[1], -1)
        own = logits[self.index]
        scores = own.gather(2, every)
        repetition, frequency, presence = (
            penalty.to(logits.dtype) for penalty in (self.repetition, self.frequency, self.presence)
        )
        repeated = torch.where(scores < 0, scores * repetition, scores / repetition)
        scores = torch.where(num_seen > 0, repeated, scores)
        scores = scores - frequency * num_output - presence * (num_output > 0)
        logits[self.index] = own.scatter(2, every, scores)


def _padded_tokens(rows: Sequence[Row], logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the rows' tokens `[row, position]`, and weights for the text and for the output alone.

    A weight is 1 where the token counts. Padding and tokens outside of this vocabulary are token 0
    with weight 0.
    """
    tokens = padded_tensor([row.tokens for row in rows], logits.shape[-1], logits.device)
    known = tokens < logits.shape[-1]
    starts = torch.tensor([[row.num_prompt] for row in rows], device=logits.device)
    in_output = known & (torch.arange(tokens.shape[1], device=logits.device) >= starts)
    return tokens.masked_fill(~known, 0), known.to(logits.dtype), in_output.to(logits.dtype)


def _bias(
    params: Sequence[SamplingParams], vocab_size: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor] | None:
    entries = [
        (row, token, value)
        for row, settings in enumerate(params)
        for token, value in settings.logit_bias.items()
        if token < vocab_size
    ]
    if not entries:
        return None
    rows, tokens, values = zip(*entries, strict=True)
    return (
        torch.tensor(rows, device=device),
        torch.tensor(tokens, device=device),
        torch.tensor(values, dtype=torch.float64, device=device),
    )


def _ban_end_tokens_(logits: Tensor, rows: Sequence[Row], depths: Tensor) -> None:
    """Ban end tokens at positions before `min_tokens`.

    `depths` `[row, query]` is the number of nodes before each query.
    """
    for own, depth, row in zip(logits, depths, rows, strict=True):
        num_missing = row.params.min_tokens - row.num_output
        ends = [
            token for token in row.end_tokens.union(row.params.stop_token_ids) if token < logits.shape[-1]
        ]
        if num_missing > 0 and ends:
            tokens = torch.tensor(ends, device=logits.device)
            own[:, tokens] = own[:, tokens].masked_fill(depth[:, None] < num_missing, -math.inf)
