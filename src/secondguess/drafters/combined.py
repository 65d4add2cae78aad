"""Combination of drafters, one of which drafts per row and round: `suffix+model:PATH`.

An n-gram or suffix lookup with a long match drafts better than a model and at no cost; without a
match it has no draft. (Hybrids: SuffixDecoding, arXiv 2411.04975; SAM Decoding, arXiv 2411.10666.)
The controller selects the part per row and round from the draft candidates, which are known before
drafting, and never from draft tokens, which would change the output distribution.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from secondguess.core import Budgets, Candidate, Draft, Row, Verdict
from secondguess.drafters.base import Drafter
from secondguess.drafters.contract import check_draft
from secondguess.errors import BadInputError
from secondguess.runtime.base import HiddenStates
from secondguess.sampling.noise import Noise


def check_parts(kinds: Sequence[str]) -> None:
    """Check that kinds of drafters can be combined, before any of them is loaded.

    Raises:
        BadInputError: a kind that occurs twice, or `none`.
    """
    joined = "+".join(kinds)
    if len(set(kinds)) < len(kinds):
        raise BadInputError(f"expected different drafters joined by +, got {joined}; name each kind once")
    if "none" in kinds:
        raise BadInputError(f"expected no `none` among joined drafters, got {joined}; leave it out")


class CombinedDrafter(Drafter):
    """Drafter that delegates to one of its parts per row and round.

    Args:
        parts: in order of preference; a controller that does not compare them selects the first
            that has a draft.
        vocab_size: width of the target's logits.
    """

    is_of_package = True

    def __init__(self, parts: Sequence[Drafter], vocab_size: int) -> None:
        self.parts = list(parts)
        self.name = "+".join(part.name for part in self.parts)
        self.deterministic = all(part.deterministic for part in self.parts)
        self.uses_target_layers = any(part.uses_target_layers for part in self.parts)
        self.needs_samples = any(part.needs_samples for part in self.parts)
        # for the rows of other drafters, coupling would accept less than block verification
        self.draws_by_race = self.deterministic and any(part.draws_by_race for part in self.parts)
        self.shares_history = any(part.shares_history for part in self.parts)
        self.can_draft_trees = any(part.can_draft_trees for part in self.parts)
        self.hidden_layers = tuple(
            dict.fromkeys(layer for part in self.parts for layer in part.hidden_layers)
        )
        self._vocab_size = vocab_size

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(kind for part in self.parts for kind in part.kinds)

    @property
    def parts_without_target(self) -> frozenset[int]:
        return frozenset(number for number, part in enumerate(self.parts) if not part.uses_target_layers)

    def admit(self, rows: Sequence[Row]) -> list[int | None]:
        limits = zip(*(part.admit(rows) for part in self.parts), strict=True)
        return [min((limit for limit in own if limit is not None), default=None) for own in limits]

    def begin(self, rows: Sequence[Row], hidden: Sequence[HiddenStates] = ()) -> None:
        for part in self.parts:
            part.begin(rows, hidden)

    def candidates(self, rows: Sequence[Row]) -> list[tuple[Candidate, ...]]:
        """Return the candidates of all parts, those of length 0 last."""
        part_candidates = [part.candidates(rows) for part in self.parts]
        return [_ordered_candidates(*map(tuple, own)) for own in zip(*part_candidates, strict=True)]

    def prepare(self, rows: Sequence[Row], parts: Sequence[int], max_tokens: int | None = None) -> list[bool]:
        is_ready: dict[Row, bool] = {}
        for number, part in enumerate(self.parts):
            members = [row for row, chosen in zip(rows, parts, strict=True) if chosen == number]
            if members:
                are_ready = part.prepare(members, [0] * len(members), max_tokens)
                is_ready.update(zip(members, are_ready, strict=True))
        return [is_ready[row] for row in rows]

    @property
    def unfinished(self) -> list[Row]:
        return [row for part in self.parts for row in part.unfinished]

    def prefill(self, rows: Sequence[Row], max_tokens: int) -> None:
        for part in self.parts:
            part.prefill([row for row in part.unfinished if row in rows], max_tokens)

    def propose(self, rows: Sequence[Row], budgets: Budgets, noise: Noise) -> Draft:
        used = sorted({part for part, length in zip(budgets.parts, budgets.lengths, strict=True) if length})
        drafts = [self._draft_of(number, rows, budgets, noise) for number in used]
        deterministic = self.deterministic or noise.all_greedy
        merged = merge_drafts(drafts, None if deterministic else self._vocab_size)
        if deterministic or merged.is_chain:
            return merged
        return replace(merged, without_replacement=self._siblings_without_replacement(drafts))

    def observe(self, rows: Sequence[Row], verdict: Verdict, hidden: HiddenStates) -> None:
        for part in self.parts:
            part.observe(rows, verdict, hidden)

    def release(self, row: Row) -> None:
        for part in self.parts:
            part.release(row)

    def reset_prefix_cache(self) -> None:
        for part in self.parts:
            part.reset_prefix_cache()

    def _siblings_without_replacement(self, drafts: Sequence[Draft]) -> bool:
        """Return the value of `Draft.without_replacement` for merged trees; chains fit either value.

        Raises:
            BadInputError: some trees have siblings drawn with replacement, others without.
        """
        answers = {draft.without_replacement for draft in drafts if not draft.is_chain}
        if len(answers) > 1:
            raise BadInputError(
                f"expected the parts of {self.name} to draw siblings alike, got some with and some without "
                "replacement; combine them with drafters of chains"
            )
        return answers.pop()

    def _draft_of(self, number: int, rows: Sequence[Row], budgets: Budgets, noise: Noise) -> Draft:
        """Return the draft of one part for its rows.

        Raises:
            BadInputError: a part from outside of the package breaks the contract of drafters; names the part.
        """
        lengths = [
            length if part == number else 0
            for length, part in zip(budgets.lengths, budgets.parts, strict=True)
        ]
        part = self.parts[number]
        draft = part.propose(rows, budgets._replace(lengths=lengths, parts=()), noise)
        return check_draft(part, draft, len(rows), self._vocab_size, noise)


def merge_drafts(drafts: Sequence[Draft], vocab_size: int | None) -> Draft:
    """Merge drafts of the same rows, of which at most one has nodes in each row.

    Args:
        vocab_size: width of `probs`, which are one-hot for the nodes of deterministic drafts; None
            for a merged draft without them.
    """
    drafted = [draft for draft in drafts if draft.num_nodes] or [drafts[0]]
    if len(drafted) == 1:  # as in every batch of one row
        (only,) = drafted
        if (only.probs is None) == (vocab_size is None):
            return only
        return only.with_probs(None if vocab_size is None else one_hot_probs(only.tokens, vocab_size))
    merged = _merge_nodes(drafts)
    if vocab_size is None:
        return merged
    dtype = next((draft.probs.dtype for draft in drafts if draft.probs is not None), torch.float32)
    probs = merged.tokens.new_zeros(merged.num_rows, merged.num_nodes, vocab_size, dtype=dtype)
    for draft in drafts:
        rows, count = draft.lengths.nonzero()[:, 0], min(draft.num_nodes, merged.num_nodes)  # less padding
        nodes, own = draft.tokens[rows, :count], draft.probs
        probs[rows, :count] = (one_hot_probs(nodes, vocab_size) if own is None else own[rows, :count]).to(
            dtype
        )
    return merged.with_probs(probs)


def _merge_nodes(drafts: Sequence[Draft]) -> Draft:
    """Return the nodes of all drafts, without distributions."""
    widest = max(drafts, key=lambda draft: draft.num_nodes)
    if all(draft.is_chain for draft in drafts):
        chains: list[Sequence[int]] = [()] * widest.num_rows
        for draft in drafts:
            for row, length in enumerate(draft.num_levels):
                if length:
                    chains[row] = draft.token_lists[row][:length]
        return Draft.chains(chains, device=widest.tokens.device)
    tokens, lengths = torch.zeros_like(widest.tokens), torch.zeros_like(widest.lengths)
    parents = torch.full_like(tokens, -1)
    for draft in drafts:
        rows, count = draft.lengths.nonzero()[:, 0], draft.num_nodes
        tokens[rows, :count] = draft.tokens[rows]
        parents[rows, :count] = draft.parents[rows]
        lengths[rows] = draft.lengths[rows]
    return Draft(tokens, parents, lengths, None, widest.without_replacement)


def one_hot_probs(tokens: Tensor, vocab_size: int) -> Tensor:
    """Return the distribution `[..., vocab]` that each of these deterministic tokens was drawn from."""
    zeros = torch.zeros(*tokens.shape, vocab_size, dtype=torch.float32, device=tokens.device)
    return zeros.scatter_(-1, tokens[..., None], 1.0)


@lru_cache(maxsize=4096)
def _ordered_candidates(*candidates_of_parts: tuple[Candidate, ...]) -> tuple[Candidate, ...]:
    """Return the candidates of all parts in order of preference; cached, as the same few recur."""
    choices = [
        choice._replace(part=number) for number, part in enumerate(candidates_of_parts) for choice in part
    ]
    return tuple(sorted(choices, key=lambda choice: choice.longest == 0))
