"""What is done to logits before they are tempered: bias, penalties, the ban of end tokens.

Each query of a draft counts its own prefix: the row's tokens and the drafted nodes that lie before it. Only
tokens that occur there are touched, so the cost grows with the text and hardly with the vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from secondguess.core import Row

if TYPE_CHECKING:
    from secondguess.sampling import SamplingParams


@dataclass(frozen=True)
class LogitEdits:
    """The edits that a batch's settings ask for.

    Args:
        bias: row indices `[n]`, token ids `[n]` and what to add `[n]` float64; None without any logit bias.
        penalties: None when no row uses one.
        may_ban: whether a row has `min_tokens`.
    """

    bias: tuple[Tensor, Tensor, Tensor] | None
    penalties: Penalties | None
    may_ban: bool

    @classmethod
    def of(cls, params: Sequence[SamplingParams], vocab_size: int, device: torch.device) -> LogitEdits:
        may_ban = any(each.min_tokens for each in params)
        return cls(_bias(params, vocab_size, device), Penalties.of(params, device), may_ban)

    def are_due(self, rows: Sequence[Row]) -> bool:
        """Whether any logit will change in this round."""
        if self.bias is not None or self.penalties is not None:
            return True
        return self.may_ban and any(row.num_output < row.params.min_tokens for row in rows)

    def apply(self, logits: Tensor, rows: Sequence[Row], nodes: Tensor, visible: Tensor) -> Tensor:
        """An edited copy of the logits.

        Args:
            logits: `[row, query, vocab]`.
            rows: whose tokens are counted.
            nodes: `[row, node]` drafted tokens.
            visible: `[row, query, node]` bool, the nodes that lie before each query.
        """
        logits = logits.clone()
        if self.bias is not None:
            batch_rows, tokens, values = self.bias
            logits.transpose(1, 2)[batch_rows, tokens] += values.to(logits.dtype)[:, None]
        if self.penalties is not None:
            self.penalties.apply_(logits, rows, nodes, visible)
        if self.may_ban:
            _ban_end_tokens_(logits, rows, visible.sum(-1))
        return logits


@dataclass(frozen=True)
class Penalties:
    """Repetition (arXiv 1909.05858), frequency and presence penalties of the rows that use any.

    Args:
        rows: their indices in the batch.
        index: the same as `[n]` int64.
        repetition, frequency, presence: `[n, 1, 1]` float64.
    """

    rows: list[int]
    index: Tensor
    repetition: Tensor
    frequency: Tensor
    presence: Tensor

    @classmethod
    def of(cls, params: Sequence[SamplingParams], device: torch.device) -> Penalties | None:
        rows = [
            index
            for index, each in enumerate(params)
            if each.repetition_penalty != 1 or each.frequency_penalty or each.presence_penalty
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
        """Penalise in place; the arguments are those of `LogitEdits.apply`."""
        nodes, visible = nodes[self.index], visible[self.index]
        tokens, in_text, in_output = _padded_tokens([rows[row] for row in self.rows], logits)
        # The tokens that may have to change; a node beyond this vocabulary stands as token 0 and counts as none.
        places = torch.cat([tokens, nodes.masked_fill(nodes >= logits.shape[-1], 0)], 1)
        counts = torch.zeros(2, len(self.rows), logits.shape[-1], dtype=logits.dtype, device=logits.device)
        counts[0].scatter_add_(1, tokens, in_text)
        counts[1].scatter_add_(1, tokens, in_output)
        # A token that occurs twice stands at two places with equal counts; both will write the same number.
        drafted = (places[:, :, None] == nodes[:, None]).to(logits.dtype)
        drafted = visible.to(logits.dtype) @ drafted.transpose(1, 2)
        num_seen, num_output = (counts.gather(2, places.expand(2, -1, -1))[:, :, None] + drafted).unbind(0)
        every = places[:, None].expand(-1, logits.shape[1], -1)
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
    """The rows' tokens `[row, place]` and, of each place, its weight in prompt and output and in the output.

    Padding, and tokens that this vocabulary lacks, stand as token 0 with no weight.
    """
    longest = max(len(row.tokens) for row in rows)
    padded = [row.tokens + [logits.shape[-1]] * (longest - len(row.tokens)) for row in rows]
    tokens = torch.tensor(padded, device=logits.device)
    known = tokens < logits.shape[-1]
    starts = torch.tensor([[row.num_prompt] for row in rows], device=logits.device)
    in_output = known & (torch.arange(longest, device=logits.device) >= starts)
    return tokens.masked_fill(~known, 0), known.to(logits.dtype), in_output.to(logits.dtype)


def _bias(
    params: Sequence[SamplingParams], vocab_size: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor] | None:
    entries = [
        (row, token, value)
        for row, each in enumerate(params)
        for token, value in each.logit_bias.items()
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
    """Ban what would end a row too early; `depths` `[row, query]` is how many nodes lie before each query."""
    for own, depth, row in zip(logits, depths, rows, strict=True):
        num_missing = row.params.min_tokens - row.num_output
        ends = [token for token in _end_tokens(row) if token < logits.shape[-1]]
        if num_missing > 0 and ends:
            tokens = torch.tensor(ends, device=logits.device)
            own[:, tokens] = own[:, tokens].masked_fill(depth[:, None] < num_missing, -math.inf)


def _end_tokens(row: Row) -> frozenset[int]:
    return row.end_tokens.union(row.params.stop_token_ids)
