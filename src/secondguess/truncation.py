"""From edited logits to probabilities: temperature, top-k, top-p, min-p.

Rows of a batch are grouped by the work they ask for, so a row's law comes from the same operations whatever
its neighbours want, and nobody pays for a setting that no row uses.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import numpy
import torch
from torch import Tensor

if TYPE_CHECKING:
    from secondguess.sampling import SamplingParams


class Rule(ABC):
    """How the laws of some rows are made from their logits."""

    @classmethod
    @abstractmethod
    def of(cls, params: Sequence[SamplingParams], device: torch.device) -> Self:
        """The rule with the settings of these rows."""

    @abstractmethod
    def laws(self, logits: Tensor) -> Tensor:
        """Probabilities `[row, query, vocab]`; all NaN where no token is possible."""


class Greedy(Rule):
    """Temperature 0: everything on the largest logit, the lowest id among equals."""

    @classmethod
    def of(cls, params: Sequence[SamplingParams], device: torch.device) -> Self:
        return cls()

    def laws(self, logits: Tensor) -> Tensor:
        tokens = most_likely(logits)[..., None]
        laws = torch.zeros_like(logits).scatter_(-1, tokens, 1.0)
        return _undefined_where_not_finite(laws, logits.gather(-1, tokens))


@dataclass(frozen=True)
class Softmax(Rule):
    """Temperature alone.

    Args:
        temperature: `[row, 1, 1]`, None when it is 1 everywhere.
    """

    temperature: Tensor | None

    @classmethod
    def of(cls, params: Sequence[SamplingParams], device: torch.device) -> Self:
        return cls(_temperatures(params, device))

    def laws(self, logits: Tensor) -> Tensor:
        return _tempered(logits, self.temperature).softmax(-1)


@dataclass(frozen=True)
class MinP(Rule):
    """Temperature and min-p: a threshold below the largest logit, found without sorting.

    Args:
        temperature: as in `Softmax`.
        log_min_p: `[row, 1, 1]` float64.
    """

    temperature: Tensor | None
    log_min_p: Tensor

    @classmethod
    def of(cls, params: Sequence[SamplingParams], device: torch.device) -> Self:
        return cls(_temperatures(params, device), _log_min_p(params, device))

    def laws(self, logits: Tensor) -> Tensor:
        logits = _tempered(logits, self.temperature)
        threshold = logits.amax(-1, keepdim=True) + self.log_min_p.to(logits.dtype)
        return logits.masked_fill(logits < threshold, -math.inf).softmax(-1)


@dataclass(frozen=True)
class Truncated(Rule):
    """Top-k, top-p and min-p in this order, looking at little more of the vocabulary than they keep.

    The largest logits are taken out and sorted; if what is kept might reach beyond them (a flat law, a tie
    at the edge), more are taken. The arithmetic on these few is in float64, so that their number does not
    show in the law.

    Args:
        temperature: as in `Softmax`.
        top_k: `[row, 1, 1]` int64, 0 where it is off.
        top_p: `[row, 1, 1]` float64, infinity where it is off, so that rounding drops nothing.
        log_min_p: `[row, 1, 1]` float64, -inf where it is off.
        width: how many of the largest logits to look at first.
        needs_whole_mass: whether a row has no top-k, so that its top-p is relative to the whole vocabulary.
    """

    temperature: Tensor | None
    top_k: Tensor
    top_p: Tensor
    log_min_p: Tensor
    width: int
    needs_whole_mass: bool

    @classmethod
    def of(cls, params: Sequence[SamplingParams], device: torch.device) -> Self:
        return cls(
            _temperatures(params, device),
            _per_row([each.top_k for each in params], torch.long, device),
            _per_row([each.top_p if each.top_p < 1 else math.inf for each in params], torch.float64, device),
            _log_min_p(params, device),
            width=max(each.top_k + 16 if each.top_k else 128 for each in params),
            needs_whole_mass=any(each.top_k == 0 for each in params),
        )

    def laws(self, logits: Tensor) -> Tensor:
        width = self.width
        while True:
            values, tokens = largest(logits, width)
            probs, complete = self._law_of_largest(values.double(), logits)
            if complete or width >= logits.shape[-1]:
                break
            width *= 8
        laws = torch.zeros_like(logits).scatter_(-1, tokens, probs.to(logits.dtype))
        return _undefined_where_not_finite(laws, values[..., :1])

    def _law_of_largest(self, values: Tensor, logits: Tensor) -> tuple[Tensor, bool]:
        """Probabilities of the sorted `values` `[row, query, width]`; whether nothing beyond them is kept."""
        values = _tempered(values, self.temperature)
        possible = values > -math.inf
        last = (self.top_k - 1).clamp(min=0, max=values.shape[-1] - 1).expand(*values.shape[:-1], 1)
        among_top_k = possible & ((self.top_k == 0) | (values >= values.gather(-1, last)))
        mass = values.masked_fill(~among_top_k, -math.inf).logsumexp(-1, keepdim=True)
        if self.needs_whole_mass:
            whole = _tempered(logits, self.temperature).logsumexp(-1, keepdim=True).double()
            mass = torch.where(self.top_k == 0, whole, mass)
        probs = (values - mass).exp()
        before = probs.cumsum(-1) - probs
        kept = among_top_k & (before < self.top_p) & (values >= values[..., :1] + self.log_min_p)
        # Where top-k is on its whole set must have been seen, because top-p is relative to its mass.
        needed = torch.where(self.top_k == 0, kept, among_top_k)
        smallest = values.masked_fill(~needed, math.inf).amin(-1)
        complete = bool((values[..., -1] < smallest).all())
        return values.masked_fill(~kept, -math.inf).softmax(-1), complete


def most_likely(values: Tensor) -> Tensor:
    """Ids `[...]` of the largest of `values` `[..., vocab]`, logits or probabilities: the lowest id among equals.

    A value that is not a number counts as the largest.
    """
    if values.device.type == "cpu" and values.dtype in (torch.float32, torch.float64):
        # A quarter of what torch takes for one row of a few thousand, and a tenth for several.
        return torch.from_numpy(numpy.asarray(values.numpy().argmax(-1)))
    return values.max(-1).indices


def largest(logits: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The `width` largest logits, descending, and their token ids; lower ids first among equals.

    Which of the tokens tied with the last value are among them is undefined unless `width` is the vocabulary.
    """
    if width >= logits.shape[-1]:
        ordered = logits.sort(dim=-1, descending=True, stable=True)
        return ordered.values, ordered.indices
    if width * 16 <= logits.shape[-1]:
        candidates = _candidates(logits, width)
        places = logits.gather(-1, candidates).topk(width, sorted=False).indices
        tokens = candidates.gather(-1, places)
    else:
        tokens = logits.topk(width, sorted=False).indices
    tokens = tokens.sort(-1).values
    ordered = logits.gather(-1, tokens).sort(dim=-1, descending=True, stable=True)
    return ordered.values, tokens.gather(-1, ordered.indices)


def _candidates(logits: Tensor, width: int) -> Tensor:
    """Ids of a few tokens that hold the `width` largest logits: those of the blocks with the largest maxima.

    No token outside these blocks is larger than any of the `width` maxima within them. To read the vocabulary
    once for the maxima is several times faster than to select from all of it.
    """
    vocab_size = logits.shape[-1]
    size = math.isqrt(vocab_size // width)
    num_blocks = vocab_size // size
    # Block b consists of the tokens b, b + num_blocks, b + 2 num_blocks, ...: their maxima vectorise.
    maxima = logits[..., : size * num_blocks].view(*logits.shape[:-1], size, num_blocks).amax(-2)
    blocks = maxima.topk(width, sorted=False).indices
    steps = torch.arange(0, size * num_blocks, num_blocks, device=logits.device)
    left_over = torch.arange(size * num_blocks, vocab_size, device=logits.device)
    inside = (blocks[..., None] + steps).flatten(-2)
    return torch.cat([inside, left_over.expand(*inside.shape[:-1], -1)], -1)


@dataclass(frozen=True)
class RowRules:
    """The rules of a batch, each with the `[n]` indices of its rows."""

    groups: tuple[tuple[Tensor, Rule], ...]

    @classmethod
    def of(cls, params: Sequence[SamplingParams], device: torch.device) -> RowRules:
        members: dict[type[Rule], list[int]] = {}
        for index, each in enumerate(params):
            members.setdefault(_kind_of_rule(each), []).append(index)
        return cls(
            tuple(
                (torch.tensor(rows, device=device), kind.of([params[row] for row in rows], device))
                for kind, rows in members.items()
            )
        )

    def laws(self, logits: Tensor) -> Tensor:
        """Probabilities `[row, query, vocab]`; all NaN where no token is possible."""
        if len(self.groups) == 1:
            return self.groups[0][1].laws(logits)
        laws = torch.empty_like(logits)
        for rows, rule in self.groups:
            laws[rows] = rule.laws(logits[rows])
        return laws


def _kind_of_rule(params: SamplingParams) -> type[Rule]:
    if params.temperature == 0:
        return Greedy
    if params.top_k or params.top_p < 1:
        return Truncated
    return MinP if params.min_p else Softmax


def _per_row(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=device)[:, None, None]


def _temperatures(params: Sequence[SamplingParams], device: torch.device) -> Tensor | None:
    values = [each.temperature for each in params]
    return None if all(value == 1 for value in values) else _per_row(values, torch.float64, device)


def _log_min_p(params: Sequence[SamplingParams], device: torch.device) -> Tensor:
    values = [math.log(each.min_p) if each.min_p else -math.inf for each in params]
    return _per_row(values, torch.float64, device)


def _tempered(logits: Tensor, temperature: Tensor | None) -> Tensor:
    return logits if temperature is None else logits / temperature.to(logits.dtype)


def _undefined_where_not_finite(laws: Tensor, top: Tensor) -> Tensor:
    """NaN throughout each law whose largest logit (`top` `[row, query, 1]`) is not a finite number."""
    # One number tells of all, and a number's own function takes a fraction of a tensor's.
    if math.isfinite(top.item() if top.numel() == 1 else top.sum().item()):
        return laws
    return laws.masked_fill(~top.isfinite(), math.nan)
