"""Check of the drafts of drafters outside of the package, against the contract of docs/adding-a-drafter.md."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from secondguess.core import Draft
from secondguess.drafters.base import Drafter
from secondguess.errors import BadInputError
from secondguess.sampling.noise import Noise

TOLERANCE = 1e-3
"""Largest difference from 1 of the sum of a node's probabilities: float32 rounds a vocabulary's to less."""


def check_draft(drafter: Drafter, draft: Draft, num_rows: int, vocab_size: int, noise: Noise) -> Draft:
    """Return what a drafter has proposed, if it keeps the contract.

    The runtimes and kernels read drafts without checks of their own. Drafters of the package are not checked.

    Args:
        num_rows: number of rows of the batch.
        vocab_size: width of the target's logits.
        noise: noise of the round.

    Raises:
        BadInputError: a draft of another shape, tokens that the target lacks, or probabilities that are none.
    """
    if drafter.is_of_package:
        return draft
    if isinstance(draft, Draft):
        vars(draft)["token_lists"] = draft.tokens.tolist()  # `Draft.chains` may have been given tensors
    has_probs = None if noise.all_greedy and not drafter.deterministic else not drafter.deterministic
    broken = _broken_rule(draft, num_rows, vocab_size, has_probs)
    if broken is not None:
        expected, got, advice = broken
        raise BadInputError(f"expected the drafter {drafter.name} to return {expected}, got {got}; {advice}")
    return draft


def _broken_rule(
    draft: Draft, num_rows: int, vocab_size: int, has_probs: bool | None
) -> tuple[str, str, str] | None:
    """Return what was expected of a draft, what it has and what to do; None if nothing is wrong.

    `has_probs` is None where either is right.
    """
    builder = "build it by Draft.chains"
    if not isinstance(draft, Draft):
        return "a Draft", type(draft).__name__, builder
    tokens, probs = draft.tokens, draft.probs
    types = {each.dtype for each in (tokens, draft.parents, draft.lengths)}
    if types != {torch.int64}:
        return "int64 tokens, parents and lengths", ", ".join(sorted(map(str, types))), builder
    if tokens.dim() != 2 or tokens.shape != draft.parents.shape:
        shapes = f"{list(tokens.shape)} and {list(draft.parents.shape)}"
        return "tokens and parents of [row, node]", shapes, builder
    num_nodes, lengths = draft.num_nodes, draft.lengths.tolist()
    if not draft.num_rows == len(lengths) == num_rows:
        return f"a draft of {num_rows} rows", f"{draft.num_rows}", "a row without a draft has length 0"
    if min(lengths) < 0 or max(lengths) > num_nodes:
        return f"lengths from 0 to its {num_nodes} nodes", f"{lengths!r:.60}", builder
    if num_nodes:
        lowest, highest = min(map(min, draft.token_lists)), max(map(max, draft.token_lists))
        if lowest < 0 or highest >= vocab_size:
            advice = "end a chain before such a token (secondguess.core.within_vocabulary)"
            return f"token ids from 0 to {vocab_size - 1}", f"{highest if lowest >= 0 else lowest}", advice
    if not draft.is_chain and not all(map(_is_tree, draft.shapes)):
        return "parents before their children", f"{draft.shapes!r:.60}", "-1 is the pending token"
    if probs is None:
        if has_probs:
            return "Draft.probs where a row samples", "none", "set deterministic = True if it never has them"
    elif has_probs is False:
        return "no Draft.probs", f"{list(probs.shape)}", "set deterministic = False if it samples"
    elif probs.shape != (num_rows, num_nodes, vocab_size):
        expected = f"Draft.probs of [row, node, vocab] {[num_rows, num_nodes, vocab_size]}"
        return expected, f"{list(probs.shape)}", "report them in the target's vocabulary"
    elif probs.dtype not in (torch.float32, torch.float64):
        return "Draft.probs in float32 or float64", f"{probs.dtype}", "draw from what you report"
    elif has_probs and (found := _sum_and_minimum(draft, probs)) is not None:
        expected = "Draft.probs that sum to 1 at each node and are at least 0"
        return expected, found, "report the distribution that the token was drawn from"
    return None


def _sum_and_minimum(draft: Draft, probs: Tensor) -> str | None:
    """Return those of the first node whose probabilities are not a distribution; None if there is none."""
    sums, minima = probs.sum(-1), probs.amin(-1)
    # NaN is in no range
    wrong = ~((minima >= 0) & ((sums - 1).abs() <= TOLERANCE)) & draft.mask
    if not wrong.any():
        return None
    row, node = wrong.nonzero()[0].tolist()
    return (
        f"a sum of {sums[row, node]:.4g} and a minimum of {minima[row, node]:.4g} at node {node} of row {row}"
    )


def _is_tree(parents: Sequence[int]) -> bool:
    return all(-1 <= parent < node for node, parent in enumerate(parents))
