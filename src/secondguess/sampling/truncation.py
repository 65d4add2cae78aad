"""Conversion of edited logits to probabilities: temperature, top-k, top-p, min-p.

Rows of a batch are grouped by the operations that they need. The probabilities of a row do not
depend on the settings of other rows, and a setting that no row uses costs nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy
import torch
from torch import Tensor

from secondguess.params import SamplingParams
from secondguess.runtime.chains import KernelSettings
from secondguess.sampling.kernels import kernels_for, softmax, truncated_softmax

Rule = Callable[[Tensor], Tensor]
"""Conversion of logits `[row, query, vocab]` to probabilities, all NaN where no token is possible."""


def make_rule(params: Sequence[SamplingParams], device: torch.device) -> Rule:
    """Return the rule for a batch of rows with these settings."""
    settings = [kernel_settings(row_params) for row_params in params]
    members: dict[Callable[..., Rule], list[int]] = {}
    for index, row_settings in enumerate(settings):
        members.setdefault(_maker_of(row_settings), []).append(index)
    groups = [
        (torch.tensor(rows, device=device), make([settings[row] for row in rows], device))
        for make, rows in members.items()
    ]
    if len(groups) == 1:
        return groups[0][1]

    def rule(logits: Tensor) -> Tensor:
        dists = torch.empty_like(logits)
        for rows, rule_of_rows in groups:
            dists[rows] = rule_of_rows(logits[rows])
        return dists

    return rule


def kernel_settings(params: SamplingParams) -> KernelSettings:
    """Return the settings of a request as the kernels take them."""
    top_p = params.top_p if params.top_p < 1 else math.inf
    log_min_p = math.log(params.min_p) if params.min_p else -math.inf
    return KernelSettings(params.temperature, params.top_k, top_p, log_min_p)


def _maker_of(settings: KernelSettings) -> Callable[[Sequence[KernelSettings], torch.device], Rule]:
    if settings.temperature == 0:
        return _make_greedy
    return _make_top_k_top_p if settings.truncates else _make_softmax


def _make_greedy(settings: Sequence[KernelSettings], device: torch.device) -> Rule:
    return greedy_dists


def greedy_dists(logits: Tensor) -> Tensor:
    """Return probability 1 for the largest logit, the lowest id among equals."""
    tokens = most_likely(logits)[..., None]
    dists = torch.zeros_like(logits).scatter_(-1, tokens, 1.0)
    return _nan_where_not_finite(dists, logits.gather(-1, tokens))


def _make_softmax(settings: Sequence[KernelSettings], device: torch.device) -> Rule:
    """Return the rule for temperature and min-p: a threshold below the largest logit, without sorting."""
    temperature, _, _, log_min_p = _per_row(settings, device)
    has_min_p = any(row.log_min_p > -math.inf for row in settings)
    for_kernels = [(row.temperature, row.log_min_p) for row in settings]

    def rule(logits: Tensor) -> Tensor:
        if kernels := kernels_for(logits):
            return softmax(kernels, logits, for_kernels)
        logits = logits / temperature.to(logits.dtype)
        if has_min_p:
            threshold = logits.amax(-1, keepdim=True) + log_min_p.to(logits.dtype)
            logits = logits.masked_fill(logits < threshold, -math.inf)
        return logits.softmax(-1)

    return rule


def _make_top_k_top_p(settings: Sequence[KernelSettings], device: torch.device) -> Rule:
    in_torch = TopKTopP(settings, device)

    def rule(logits: Tensor) -> Tensor:
        if kernels := kernels_for(logits):
            return truncated_softmax(kernels, logits, settings)
        return in_torch.dists(logits)

    return rule


def _per_row(settings: Sequence[KernelSettings], device: torch.device) -> tuple[Tensor, ...]:
    """Return each of the settings as `[row, 1, 1]` float64, in their order."""
    return torch.tensor(settings, dtype=torch.float64, device=device)[:, :, None, None].unbind(1)


class TopKTopP:
    """Top-k, top-p and min-p in this order, computed in torch on little more than the tokens they keep.

    The largest logits are selected and sorted. If tokens beyond them may have to be kept (a flat
    distribution, a tie at the edge), more are selected. The arithmetic on the selected logits is
    in float64, so that their number does not affect the probabilities.
    """

    def __init__(self, settings: Sequence[KernelSettings], device: torch.device) -> None:
        self._temperature, top_k, self._top_p, self._log_min_p = _per_row(settings, device)
        self._top_k = top_k.long()
        # Number of largest logits to select first.
        self._width = max(row.top_k + 16 if row.top_k else 128 for row in settings)
        # Without top-k, top-p is relative to the whole vocabulary.
        self._needs_full_softmax = any(row.top_k == 0 for row in settings)

    def dists(self, logits: Tensor) -> Tensor:
        width = self._width
        while True:
            values, tokens = largest(logits, width)
            probs, complete = self._probs_of_largest(values.double(), logits)
            if complete or width >= logits.shape[-1]:
                break
            width *= 8
        dists = torch.zeros_like(logits).scatter_(-1, tokens, probs.to(logits.dtype))
        return _nan_where_not_finite(dists, values[..., :1])

    def _probs_of_largest(self, values: Tensor, logits: Tensor) -> tuple[Tensor, bool]:
        """Return the probabilities of the largest logits, sorted descending, and True if no token beyond them is kept."""
        values = values / self._temperature
        possible = values > -math.inf
        last = (self._top_k - 1).clamp(min=0, max=values.shape[-1] - 1).expand(*values.shape[:-1], 1)
        among_top_k = possible & ((self._top_k == 0) | (values >= values.gather(-1, last)))
        mass = values.masked_fill(~among_top_k, -math.inf).logsumexp(-1, keepdim=True)
        if self._needs_full_softmax:
            whole = (logits / self._temperature.to(logits.dtype)).logsumexp(-1, keepdim=True)
            mass = torch.where(self._top_k == 0, whole, mass)
        probs = (values - mass).exp()
        before = probs.cumsum(-1) - probs
        kept = among_top_k & (before < self._top_p) & (values >= values[..., :1] + self._log_min_p)
        # top-p is relative to the mass of the top-k set, so `values` must contain all of that set.
        needed = torch.where(self._top_k == 0, kept, among_top_k)
        smallest = values.masked_fill(~needed, math.inf).amin(-1)
        complete = bool((values[..., -1] < smallest).all())
        return values.masked_fill(~kept, -math.inf).softmax(-1), complete


def most_likely(values: Tensor) -> Tensor:
    """Return ids `[...]` of the largest of `values` `[..., vocab]`, the lowest id among equals.

    Values are logits or probabilities; NaN counts as the largest.
    """
    if values.device.type == "cpu" and values.dtype in (torch.float32, torch.float64):
        # NumPy takes a quarter of torch's time for one row of a few thousand tokens, a tenth for
        # several rows.
        return torch.from_numpy(numpy.asarray(values.numpy().argmax(-1)))
    return values.max(-1).indices


def largest(logits: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Return the `width` largest logits, descending, and their ids; lower ids first among equals.

    Which of the tokens tied with the last value are included is undefined unless `width` is the
    size of the vocabulary.
    """
    if width >= logits.shape[-1]:
        ordered = logits.sort(dim=-1, descending=True, stable=True)
        return ordered.values, ordered.indices
    if width * 16 <= logits.shape[-1]:
        candidates = _candidates(logits, width)
        indices = logits.gather(-1, candidates).topk(width, sorted=False).indices
        tokens = candidates.gather(-1, indices)
    else:
        tokens = logits.topk(width, sorted=False).indices
    tokens = tokens.sort(-1).values
    ordered = logits.gather(-1, tokens).sort(dim=-1, descending=True, stable=True)
    return ordered.values, tokens.gather(-1, ordered.indices)


def _candidates(logits: Tensor, width: int) -> Tensor:
    """Return ids of a few tokens that include those of the `width` largest logits.

    These are the tokens of the blocks with the largest maxima: no token outside of these blocks is
    larger than any of the `width` maxima within them. Reading the vocabulary once for the maxima
    is several times faster than selecting from all of it.
    """
    vocab_size = logits.shape[-1]
    size = math.isqrt(vocab_size // width)
    num_blocks = vocab_size // size
    # Block b has the tokens b, b + num_blocks, b + 2 num_blocks, ...: their maxima vectorise.
    maxima = logits[..., : size * num_blocks].view(*logits.shape[:-1], size, num_blocks).amax(-2)
    blocks = maxima.topk(width, sorted=False).indices
    steps = torch.arange(0, size * num_blocks, num_blocks, device=logits.device)
    left_over = torch.arange(size * num_blocks, vocab_size, device=logits.device)
    inside = (blocks[..., None] + steps).flatten(-2)
    return torch.cat([inside, left_over.expand(*inside.shape[:-1], -1)], -1)


def _nan_where_not_finite(dists: Tensor, top: Tensor) -> Tensor:
    """Set distributions to NaN whose largest logit (`top` `[row, query, 1]`) is not finite."""
    # One sum checks all of them, and `math.isfinite` takes a fraction of the time of a tensor's.
    if math.isfinite(top.item() if top.numel() == 1 else top.sum().item()):
        return dists
    return dists.masked_fill(~top.isfinite(), math.nan)
