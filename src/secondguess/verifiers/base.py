"""Interface of verifiers, and the arithmetic that several verification rules share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from secondguess.core import Draft, Row, Verdict
from secondguess.errors import BadInputError
from secondguess.sampling import SamplingParams
from secondguess.sampling.kernels import residual_masses, residuals
from secondguess.sampling.noise import Noise
from secondguess.sampling.probs import compute_greedy_tokens, compute_target_probs

FloatArray = NDArray[numpy.float64]
SMALLEST = torch.finfo(torch.float32).tiny
"""Lower bound on the draft probability of a drawn token, which rounding may have set to 0."""


class Exactness(StrEnum):
    """Guarantee of a verifier about the distribution of the generated text."""

    LOSSLESS = "lossless"
    """The text follows the target distribution exactly."""
    DRAFTER_INVARIANT = "drafter-invariant"
    """Lossless; for a given seed the text is also independent of the drafter and draft lengths."""


class Verifier(ABC):
    """Base class of verifiers.

    A verifier is a pure function from a draft, target probabilities and noise to a verdict. All
    random decisions are made through `noise`, so the distribution of verdicts can be enumerated.

    Where all rows have temperature 0 and drafts no probabilities, the loop calls `verify_greedy`.
    """

    name: str
    exactness: Exactness
    supports_trees: bool = True
    """True if drafts that branch are supported; otherwise drafters that may branch are refused."""
    reports_samples: bool = False
    """True if verdicts have the token sampled at every query (`Verdict.samples`)."""

    def uses_coupling(self, seeded: bool, draws_by_race: bool = False) -> bool:
        """Return True if drafts are drawn by the race that samples the row's text (`Row.coupled`).

        Args:
            seeded: whether the request gave a seed.
            draws_by_race: as in `Drafter`.
        """
        return False

    def guarantee(self, row: Row) -> Exactness:
        """Return the guarantee for the text of this row."""
        return self.exactness

    def check(self, params: SamplingParams) -> None:
        """Check the settings of a request before any work is done for it.

        Raises:
            BadInputError: a setting that this verifier does not support.
        """

    @abstractmethod
    def verify(self, draft: Draft, target_probs: Tensor, noise: Noise) -> Verdict:
        """Return the accepted path and the next token of each row.

        Args:
            draft: nodes with the distributions they were drawn from.
            target_probs: `[row, node + 1, vocab]`, after the row's sampling settings; each
                distribution sums to one.
            noise: makes this round's random decisions.

        Raises:
            BadInputError: a draft or rows that this rule cannot verify exactly.
        """

    def verify_greedy(self, draft: Draft, chosen: Sequence[Sequence[int]]) -> Verdict:
        """Return the verdict for rows at temperature 0, without their one-hot distributions.

        Every rule accepts what matches there, if the draft is deterministic.

        Args:
            draft: nodes without `probs`.
            chosen: per row, the target's most likely token at each query.
        """
        return accept_matching(draft, chosen)


class UncoupledVerifier(Verifier):
    """Base class of rules that accept a node with a probability; coupled rows are refused.

    They need noise that is independent of the draft. The nodes of a coupled row are drawn by races
    that later rounds use again, so a rejection here would condition those races.
    """

    def verify(self, draft: Draft, target_probs: Tensor, noise: Noise) -> Verdict:
        if not self.supports_trees and not draft.is_chain:
            raise BadInputError(
                f"verifier '{self.name}' expects a chain, got a draft that branches; "
                "use a drafter that proposes chains, or verifier 'auto', 'traversal' or 'coupled'"
            )
        if noise.any_coupled:
            raise BadInputError(
                f"verifier '{self.name}' expects drafts drawn independently of the text, got coupled rows; "
                "use verifier 'auto' or 'coupled' with them"
            )
        if draft.num_nodes == 0:
            next_tokens = noise.draw(target_probs.select(1, 0), draft.lengths)
            return Verdict.from_chain([0] * draft.num_rows, next_tokens.tolist())
        return self.verify_nodes(draft, target_probs, noise)

    @abstractmethod
    def verify_nodes(self, draft: Draft, target_probs: Tensor, noise: Noise) -> Verdict:
        """Verify drafts of at least one node, as `verify` does."""


def verify_logits(
    verifier: Verifier, rows: Sequence[Row], draft: Draft, logits: Tensor, noise: Noise
) -> Verdict:
    """Verify a draft with the target's logits `[row, node + 1, vocab]`.

    At temperature 0 the one-hot distributions are not built.
    """
    if noise.all_greedy and draft.probs is None:
        return verifier.verify_greedy(draft, compute_greedy_tokens(logits, rows, draft))
    return verifier.verify(draft, compute_target_probs(logits, rows, draft), noise)


def verify_groups(
    groups: Iterable[tuple[Verifier, Tensor]], draft: Draft, target_probs: Tensor, noise: Noise
) -> Verdict:
    """Verify each group of rows (`[n]` int64 indices on the host) with its own verifier."""
    parts = []
    for verifier, rows in groups:
        if len(rows):
            there = rows.to(target_probs.device)
            part = verifier.verify(draft.select(there), target_probs[there], noise.select(rows))
            parts.append((rows.tolist(), part))
    return Verdict.merged(parts, draft.num_rows)


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


@dataclass(frozen=True)
class Residual:
    """Residuals `max(w p - q, 0)` at some positions, and their sums.

    Args:
        dists: `[..., vocab]`, the residuals, not normalised.
        masses: `[...]` on the host, their sums.
    """

    dists: Tensor
    masses: FloatArray


def residual(
    weights: FloatArray, target_probs: Tensor, draft_probs: Tensor | None, tokens: Tensor
) -> Residual:
    """Return the residuals `max(w p - q, 0)` at positions `[...]`.

    Args:
        weights: `[...]` on the host, w; 1 for token-level rejection.
        target_probs: `[..., vocab]`, p.
        draft_probs: `[..., vocab]`, q; None if q is one-hot on `tokens`.
        tokens: `[...]`, the draft tokens.
    """
    if draft_probs is not None:
        return Residual(*residuals(weights, target_probs, draft_probs))
    # q is one-hot: w p(x) <= 1 = q(x) at the draft token, and q is 0 elsewhere
    factors = torch.from_numpy(weights).to(target_probs)
    dists = (factors[..., None] * target_probs).scatter_(-1, tokens[..., None], 0.0)
    return Residual(dists, to_host(dists.sum(-1)))


def masses_of_residuals(weights: FloatArray, draft: Draft, target_probs: Tensor) -> FloatArray:
    """Return the sums `[row, node]` of the residuals at the nodes of chains, given `weights` `[row, node]`."""
    before = target_probs[:, :-1]
    if draft.probs is not None:
        return residual_masses(weights, before, draft.probs)
    return residual(weights, before, None, draft.tokens).masses


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
    left = residual(node_weights, at(target_probs, nodes), draft_probs, at(draft.tokens, nodes))
    # Where p and q differ by less than rounding, the residual may be empty; p is used instead.
    corrects = is_early & (left.masses > 0)
    if corrects.all():
        return left.dists
    before = at(target_probs, lengths)
    if before.is_cpu:
        choices = zip(corrects.tolist(), left.dists, before, strict=True)
        return torch.stack([own if is_corrected else other for is_corrected, own, other in choices])
    return torch.where(torch.from_numpy(corrects).to(before.device)[:, None], left.dists, before)


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


def accept_matching(draft: Draft, chosen: Sequence[Sequence[int]]) -> Verdict:
    """Accept the path on which every node has the token chosen at its parent.

    `chosen` has per row one token for each query.
    """
    paths = [
        _matching_path(tokens, parents, own)
        for tokens, parents, own in zip(draft.token_lists, draft.shapes, chosen, strict=True)
    ]
    ends = [path[-1] + 1 if path else 0 for path in paths]
    samples = [own[: len(parents) + 1] for own, parents in zip(chosen, draft.shapes, strict=True)]
    return Verdict(paths, [own[end] for own, end in zip(chosen, ends, strict=True)], samples)


def _matching_path(tokens: Sequence[int], parents: Sequence[int], chosen: Sequence[int]) -> list[int]:
    path: list[int] = []
    last = -1
    for node, parent in enumerate(parents):
        if parent == last and tokens[node] == chosen[last + 1]:
            path.append(node)
            last = node
    return path


def query_depths(draft: Draft) -> Tensor:
    """Return `[row, query]`, the number of nodes on the path to each query; 0 for pending."""
    if draft.is_chain:
        return _chain_depths(draft.num_rows, draft.num_nodes, draft.tokens.device)
    return torch.nn.functional.pad(draft.ancestors().sum(-1), (1, 0))


@lru_cache(maxsize=256)
def _chain_depths(num_rows: int, num_nodes: int, device: torch.device) -> Tensor:
    """Return the `query_depths` of chains; cached, as few shapes occur."""
    return torch.arange(num_nodes + 1, device=device).repeat(num_rows, 1)
