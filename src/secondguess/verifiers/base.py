"""The contract of whoever decides, and the arithmetic that several rules share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from secondguess.core import Draft, Row, Verdict
from secondguess.errors import BadInputError
from secondguess.noise import Noise

if TYPE_CHECKING:
    from secondguess.sampling import SamplingParams


Numbers = NDArray[numpy.float64]
SMALLEST = torch.finfo(torch.float32).tiny
"""What a drafter's probability is at least taken for: a drawn token has some, however it was rounded."""


class Exactness(StrEnum):
    """What a rule promises about the law of the text."""

    LOSSLESS = "lossless"
    """The text follows the target's law exactly."""
    DRAFTER_INVARIANT = "drafter-invariant"
    """Lossless, and for a given seed the text itself does not depend on the drafter or its draft lengths."""
    LOSSY = "lossy"
    """The law changes; never used unless asked for by name."""


class Verifier(ABC):
    """A pure function from a draft, the target's laws and noise to a verdict.

    Because every random decision is asked of `noise`, the law of a verdict can be enumerated exactly.
    """

    name: str
    exactness: Exactness
    judges_trees: bool = True
    """Whether it judges drafts that branch; a rule for single paths is refused beside a drafter that may branch."""

    def couples(self, seeded: bool) -> bool:
        """Whether a row's drafts are to be drawn by the race that decides its text (`Row.coupled`)."""
        return False

    def promise(self, row: Row) -> Exactness:
        """What the text of this very row may claim."""
        return self.exactness

    def check(self, params: SamplingParams) -> None:
        """Refuse, before any work is spent, the settings of a request that this rule cannot serve.

        Raises:
            BadInputError: naming the setting.
        """

    @abstractmethod
    def judge(self, draft: Draft, target_probs: Tensor, noise: Noise) -> Verdict:
        """Decide which nodes become text and which token follows.

        Args:
            draft: nodes with the laws they were drawn from.
            target_probs: `[row, node + 1, vocab]`, after the row's sampling settings; rows sum to one.
            noise: answers this round's random questions.

        Raises:
            BadInputError: a draft or rows that this rule cannot judge exactly.
        """


def require_independent_chains(name: str, draft: Draft, noise: Noise) -> None:
    """Refuse what a rule for single paths that accepts by chance would judge inexactly."""
    if not draft.is_chain:
        raise BadInputError(
            f"verifier '{name}' expects a chain, got a draft that branches; "
            "use a drafter that proposes chains, or verifier 'auto', 'traversal' or 'coupled'"
        )
    require_independent(name, noise)


def require_independent(name: str, noise: Noise) -> None:
    """Refuse coupled rows, which a rule that accepts by chance would judge inexactly.

    Such a rule takes its noise to be independent of the draft. A coupled row's nodes come from races that
    later rounds meet again, so a rejection here would say something about them.
    """
    if noise.any_coupled:
        raise BadInputError(
            f"verifier '{name}' expects drafts drawn independently of the text, got coupled rows; "
            "use verifier 'auto' or 'coupled' with them"
        )


def likelihood_ratios(draft: Draft, target_probs: Tensor) -> Numbers:
    """`p(x) / q(x)` `[row, node]` for the chain's nodes x; a certain drafter has q(x) = 1."""
    nodes = draft.tokens[..., None]
    target = to_host(target_probs[:, :-1].gather(-1, nodes))
    if draft.probs is not None:
        target = target / to_host(draft.probs.gather(-1, nodes)).clip(SMALLEST)
    return target[..., 0]


def to_host(values: Tensor) -> Numbers:
    """What there is one of per node: so little that arithmetic on the host beats starting a device's kernels."""
    return values.cpu().numpy().astype(numpy.float64)


def real_nodes(draft: Draft) -> NDArray[numpy.bool_]:
    """`[row, node]` on the host, True where a node is real."""
    return _first_nodes(tuple(draft.lengths.tolist()), draft.num_nodes)


@lru_cache(maxsize=256)
def _first_nodes(lengths: tuple[int, ...], num_nodes: int) -> NDArray[numpy.bool_]:
    """Each row's first nodes; the same few shapes come back in every round."""
    mask: NDArray[numpy.bool_] = numpy.arange(num_nodes) < numpy.array(lengths)[:, None]
    return mask


@dataclass(frozen=True)
class Excess:
    """What the drafter leaves to be said at some places: `(w p - q)+`, and how much that is.

    Args:
        laws: `[..., vocab]`, not normalised.
        masses: `[...]` on the host, their sums.
    """

    laws: Tensor
    masses: Numbers

    def at(self, places: NDArray[numpy.int64]) -> Excess:
        """Of `[row, place]` excesses those at each row's own place `[row]`."""
        if _all_equal(places):
            place = int(places[0])
            return Excess(self.laws[:, place], self.masses[:, place])
        return Excess(at(self.laws, places), self.masses[numpy.arange(len(places)), places])


def excess(weights: Numbers, target_probs: Tensor, draft_probs: Tensor | None, tokens: Tensor) -> Excess:
    """`(w p - q)+` at the places `[...]`.

    Args:
        weights: `[...]` on the host, the w of each law; 1 for token-level rejection.
        target_probs: `[..., vocab]`, p.
        draft_probs: `[..., vocab]`, q; None where the drafter was certain of `tokens`, so that q is one-hot.
        tokens: `[...]`, the drafted tokens.
    """
    factors = torch.from_numpy(weights).to(target_probs)
    weighted = factors[..., None] * target_probs
    if draft_probs is not None:
        laws = weighted.sub_(draft_probs).clamp_min_(0.0)
    else:  # w p(x) <= 1 = q(x) on the drafted token, and q is nothing elsewhere
        laws = weighted.scatter_(-1, tokens[..., None], 0.0)
    return Excess(laws, to_host(laws.sum(-1)))


def _all_equal(places: NDArray[numpy.int64]) -> bool:
    return len(places) == 1 or bool((places == places[0]).all())


def at(values: Tensor, places: NDArray[numpy.int64]) -> Tensor:
    """Of `values` `[row, place, ...]` each row's at its own place `[row]`."""
    if _all_equal(places):
        return values[:, int(places[0])]
    rows = torch.arange(len(places), device=values.device)
    return values[rows, torch.from_numpy(places).to(values.device)]


def law_after(
    draft: Draft,
    target_probs: Tensor,
    lengths: NDArray[numpy.int64],
    excess_at: Callable[[NDArray[numpy.int64]], Excess],
) -> Tensor:
    """The law `[row, vocab]`, not normalised, of the token behind each chain's first `lengths` `[row]` nodes.

    After a whole draft it is the target's own (the bonus); before its end, the excess at the node that was not
    accepted (the correction), which `excess_at` gives for nodes `[row]`.
    """
    is_early = lengths < draft.lengths.cpu().numpy()
    if not is_early.any():
        return at(target_probs, lengths)
    left = excess_at(numpy.minimum(lengths, draft.num_nodes - 1))
    # Where p and q differ by less than rounding, the excess may vanish: nothing then tells p from q.
    corrects = is_early & (left.masses > 0)
    if corrects.all():
        return left.laws
    chosen = torch.from_numpy(corrects).to(target_probs.device)
    return torch.where(chosen[:, None], left.laws, at(target_probs, lengths))


def verdict_of(
    draft: Draft,
    target_probs: Tensor,
    lengths: NDArray[numpy.int64],
    excess_at: Callable[[NDArray[numpy.int64]], Excess],
    noise: Noise,
) -> Verdict:
    """Accept each chain's first `lengths` `[row]` nodes and draw what follows; the rest as in `law_after`."""
    law = law_after(draft, target_probs, lengths, excess_at)
    on_device = torch.from_numpy(lengths).to(draft.tokens.device)
    return Verdict.of_chain(on_device, noise.draw(law, on_device))


def plain_verdict(target_probs: Tensor, noise: Noise) -> Verdict:
    """What follows pending where nothing was drafted: a round of plain decoding, in which there is nothing to judge."""
    nothing = no_nodes(len(target_probs), target_probs.device)
    return Verdict.of_chain(nothing, noise.draw(target_probs.select(1, 0), nothing))


@lru_cache(maxsize=64)
def no_nodes(num_rows: int, device: torch.device) -> Tensor:
    """`[row]` zeros, made once: the lengths of empty drafts."""
    return torch.zeros(num_rows, dtype=torch.long, device=device)


def query_depths(draft: Draft) -> Tensor:
    """`[row, query]`: how many nodes lie on the path that ends at each query; 0 behind pending."""
    depths = _chain_depths(draft.num_rows, draft.num_nodes, draft.tokens.device)
    if draft.is_chain:
        return depths
    depths = depths.clone()
    for node in range(draft.num_nodes):
        depths[:, node + 1] = depths.gather(1, draft.parents[:, node, None] + 1)[:, 0] + 1
    return depths


@lru_cache(maxsize=256)
def _chain_depths(num_rows: int, num_nodes: int, device: torch.device) -> Tensor:
    """Every round of as many nodes has the same."""
    return torch.arange(num_nodes + 1, device=device).repeat(num_rows, 1)


def follow(draft: Draft, chosen: Tensor) -> Verdict:
    """Walk from pending to the child that carries the chosen token, as long as there is one.

    Args:
        draft: chains or trees.
        chosen: `[row, query]`, the token that follows each query. What the walk meets is the text.
    """
    if not draft.num_nodes:
        return Verdict.of_chain(no_nodes(draft.num_rows, chosen.device), chosen[:, 0])
    if draft.is_chain:
        agrees = (draft.tokens == chosen[:, :-1]).cpu().numpy() & real_nodes(draft)
        lengths = agrees.cumprod(1).sum(1)
        return Verdict.of_chain(torch.from_numpy(lengths).to(chosen.device), at(chosen, lengths))
    query = torch.zeros(draft.num_rows, 1, dtype=torch.long, device=chosen.device)
    steps: list[Tensor] = []
    while True:
        children = (draft.parents == query - 1) & draft.mask
        matches = children & (draft.tokens == chosen.gather(1, query))
        found = matches.any(1, keepdim=True)
        if steps:
            found &= steps[-1] >= 0
        if not bool(found.any()):
            break
        child = matches.long().argmax(1, keepdim=True)
        steps.append(torch.where(found, child, -1))
        query = torch.where(found, child + 1, query)
    paths = torch.cat(steps, 1) if steps else query[:, :0]
    return Verdict(paths, (paths >= 0).sum(1), chosen.gather(1, query)[:, 0])
