"""Interface of verifiers, and the rules for paths of matching tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from enum import StrEnum
from functools import lru_cache

import torch
from torch import Tensor

from secondguess.core import Draft, Row, Verdict
from secondguess.errors import BadInputError
from secondguess.sampling import SamplingParams
from secondguess.sampling.noise import Noise
from secondguess.sampling.probs import compute_greedy_tokens, compute_target_probs


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
