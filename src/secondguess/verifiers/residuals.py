"""Residuals of target and draft probabilities, and the arithmetic that verification rules share."""

from __future__ import annotations

from functools import lru_cache

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from secondguess.core import Draft, Verdict
from secondguess.sampling.kernels import residual_masses, residuals
from secondguess.sampling.noise import Noise

FloatArray = NDArray[numpy.float64]


SMALLEST = torch.finfo(torch.float32).tiny
"""Lower bound on the draft probability of a drawn token, which rounding may have set to 0."""


def likelihood_ratios(draft: Draft, target_probs: Tensor) -> FloatArray:
    """Return `p(x) / q(x)` `[row, node]` for the tokens x of chains; q(x) is 1 without `probs`."""
    target = _probs_of(draft.tokens, target_probs[:, :-1])
    if draft.probs is None:
        return target.astype(numpy.float64)
    drawn = numpy.maximum(_probs_of(draft.tokens, draft.probs), SMALLEST)
    ratios: FloatArray = numpy.divide(target, drawn, dtype=numpy.float64)
    return ratios


def _probs_of(tokens: Tensor, dists: Tensor) -> NDArray[numpy.floating]:
    """Return the probabilities `[row, node]` of `tokens` in `dists` `[row, node, vocab]`, on the host."""
    if not dists.is_cpu:
        found: NDArray[numpy.floating] = dists.gather(-1, tokens[..., None])[..., 0].cpu().numpy()
        return found
    rows, nodes = _node_indices(*tokens.shape)
    found = dists.numpy()[rows, nodes, tokens.numpy()]
    return found


@lru_cache(maxsize=256)
def _node_indices(num_rows: int, num_nodes: int) -> tuple[NDArray[numpy.int64], NDArray[numpy.int64]]:
    """Return the indices `[row, 1]` and `[1, node]` of an array; cached, as few shapes occur."""
    return numpy.arange(num_rows)[:, None], numpy.arange(num_nodes)[None]


def to_host(values: Tensor) -> FloatArray:
    """Return per-node values as float64 on the host.

    They are so few that arithmetic on the host is faster than launching kernels on a device.
    """
    return values.cpu().numpy().astype(numpy.float64)


def accepted_prefix(draft: Draft, accepted: NDArray[numpy.bool_]) -> NDArray[numpy.int64]:
    """Return the lengths `[row]` of the accepted prefixes of chains, padding excluded."""
    lengths: NDArray[numpy.int64] = numpy.minimum(accepted.cumprod(1).sum(1), draft.lengths.cpu().numpy())
    return lengths


def residual(
    weights: FloatArray, target_probs: Tensor, draft_probs: Tensor | None, tokens: Tensor
) -> tuple[Tensor, FloatArray]:
    """Return the residuals `max(w p - q, 0)` `[..., vocab]`, and their sums `[...]` on the host.

    The `weights` w are 1 for token-level rejection. Without `draft_probs`, q is one-hot on the draft `tokens` `[...]`.
    """
    if draft_probs is not None:
        return residuals(weights, target_probs, draft_probs)
    # q is one-hot: w p(x) <= 1 = q(x) at the draft token, and q is 0 elsewhere
    factors = torch.from_numpy(weights).to(target_probs)
    dists = (factors[..., None] * target_probs).scatter_(-1, tokens[..., None], 0.0)
    return dists, to_host(dists.sum(-1))


def masses_of_residuals(weights: FloatArray, draft: Draft, target_probs: Tensor) -> FloatArray:
    """Return the sums `[row, node]` of the residuals at the nodes of chains, given `weights` `[row, node]`."""
    before = target_probs[:, :-1]
    if draft.probs is not None:
        return residual_masses(weights, before, draft.probs)
    return residual(weights, before, None, draft.tokens)[1]


def at(values: Tensor, positions: NDArray[numpy.int64]) -> Tensor:
    """Select one position per row, `positions` `[row]`, from `values` `[row, position, ...]`."""
    if len(positions) == 1 or (positions == positions[0]).all():
        return values[:, int(positions[0])]
    if values.is_cpu:  # a third of the time of an index
        return torch.stack([values[row, position] for row, position in enumerate(positions.tolist())])
    rows = torch.arange(len(positions), device=values.device)
    return values[rows, torch.from_numpy(positions).to(values.device)]


def next_token_probs(
    draft: Draft,
    target_probs: Tensor,
    lengths: NDArray[numpy.int64],
    weights: FloatArray,
) -> Tensor:
    """Return the distribution `[row, vocab]` of the token after the first `lengths` nodes of chains.

    After a fully accepted draft it is the target distribution (bonus token), otherwise the
    residual at the first node that was not accepted (correction token), not normalised.
    `weights` `[row, node]` are those of `residual`.
    """
    is_early = lengths < draft.lengths.cpu().numpy()
    if not is_early.any():
        return at(target_probs, lengths)
    nodes = numpy.minimum(lengths, draft.num_nodes - 1)
    draft_probs = None if draft.probs is None else at(draft.probs, nodes)
    node_weights = weights[numpy.arange(draft.num_rows), nodes]
    dists, masses = residual(node_weights, at(target_probs, nodes), draft_probs, at(draft.tokens, nodes))
    # Where p and q differ by less than rounding, the residual may be empty; p is used instead.
    corrects = is_early & (masses > 0)
    if corrects.all():
        return dists
    before = at(target_probs, lengths)
    if before.is_cpu:
        choices = zip(corrects.tolist(), dists, before, strict=True)
        return torch.stack([own if is_corrected else other for is_corrected, own, other in choices])
    return torch.where(torch.from_numpy(corrects).to(before.device)[:, None], dists, before)


def make_chain_verdict(
    draft: Draft,
    target_probs: Tensor,
    lengths: NDArray[numpy.int64],
    weights: FloatArray,
    noise: Noise,
) -> Verdict:
    """Accept each chain's first `lengths` `[row]` nodes and draw the next token; `weights` as in `next_token_probs`."""
    dist = next_token_probs(draft, target_probs, lengths, weights)
    next_tokens = noise.draw(dist, torch.from_numpy(lengths))
    return Verdict.from_chain(lengths.tolist(), next_tokens.tolist())
