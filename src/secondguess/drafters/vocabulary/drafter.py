"""Drafter with a model whose tokenizer is another one than the target's (arXiv 2502.05202)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from secondguess.core import MAX_DRAFT_LENGTH, Budgets, Draft, Row
from secondguess.drafters.mirroring import TokenDrafter
from secondguess.drafters.vocabulary.pair import VocabularyPair
from secondguess.drafters.vocabulary.view import DraftView
from secondguess.runtime.base import Runtime
from secondguess.runtime.chains import KernelSettings, VocabularyMap
from secondguess.sampling import SamplingParams
from secondguess.sampling.kernels import with_confidences
from secondguess.sampling.noise import Noise
from secondguess.sampling.probs import at_least_float32, warn_unless_finite
from secondguess.sampling.truncation import kernel_settings, make_rule
from secondguess.tensors import token_tensor, within_vocabulary

GREEDY = KernelSettings(temperature=0.0, top_k=0, top_p=math.inf, log_min_p=-math.inf)
"""Settings of drafts of text for rows that are not coupled, whatever the request's settings are."""


class TranslatingDrafter(TokenDrafter):
    """Drafter whose model reads a row's text in its own tokens, and writes text, which the target's tokenizer encodes.

    Drafts carry no probabilities. Those of coupled rows are sampled: a token of both vocabularies arrives
    at the time at which it arrives in the race for the target's token, so that models that agree mostly
    draw the same token. Others are greedy. The verifier keeps the target's distribution either way.
    Unlike a look-up it takes steps, after each of which `Budgets.keep_drafting` decides.
    (String-level exact match, SLEM, in the paper.)
    """

    is_of_package = True
    deterministic = True
    draws_by_race = True

    def __init__(self, runtime: Runtime, name: str, vocab_size: int, pair: VocabularyPair) -> None:
        super().__init__(runtime, name, vocab_size)
        self.pair = pair
        self._views: dict[Row, DraftView] = {}
        own_by_draft = {
            other: own for own, other in [*pair.shared.items(), *pair.special.items()] if own < vocab_size
        }
        ids = [own_by_draft.get(token, vocab_size + token) for token in range(runtime.vocab_size)]
        self._lengths = pair.lengths(runtime.vocab_size)
        self._vocabulary = VocabularyMap(
            token_tensor(ids, self.device), token_tensor(self._lengths, self.device)
        )

    def num_uncached(self, row: Row) -> int:
        view, mirror = self._views.get(row), self._mirror_rows.get(row)
        if view is None:
            return len(row.tokens)
        num_unread = len(row.tokens) - view.num_read
        return num_unread + len(view.tokens) - (mirror.num_committed if mirror else 0) + self.num_left(row)

    def room(self, row: Row) -> int:
        view = self._views.get(row)
        if view is None:
            return max(0, self.runtime.context_length - len(row.tokens) + 1)
        num_unread = len(row.tokens) - view.num_read
        if not num_unread and not (view.tokens and view.is_complete):
            return 0  # the model cannot go on from within a character
        return max(0, self.runtime.context_length - len(view.tokens) - num_unread + 1)

    def prepare(self, rows: Sequence[Row], parts: Sequence[int], max_tokens: int | None = None) -> list[bool]:
        for row in rows:
            self._follow(row)
        return super().prepare(rows, parts, max_tokens)

    def tokens_of(self, row: Row) -> list[int]:
        return self._views[row].tokens

    def release(self, row: Row) -> None:
        super().release(row)
        self._views.pop(row, None)

    def _follow(self, row: Row) -> None:
        if row not in self._views:
            self._views[row] = DraftView(self.pair)
        view, mirror = self._views[row], self._mirror_rows.get(row)
        num_unchanged = view.follow(row.tokens)
        if mirror is not None:
            # The last token is forwarded again even if the new tokens of the row add no text.
            mirror.num_committed = min(mirror.num_committed, num_unchanged, len(view.tokens) - 1)

    def propose(self, rows: Sequence[Row], budgets: Budgets, noise: Noise) -> Draft:
        limits = [min(limit, self.room(row)) for row, limit in zip(rows, budgets.lengths, strict=True)]
        steps = [self._num_steps(row, limit) if limit else 0 for row, limit in zip(rows, limits, strict=True)]
        drawn = self._draw_whole(rows, steps, budgets, noise) if any(steps) else None
        if drawn is None:
            drawn = self._draw(rows, steps, budgets, noise)
        encoded = (self._encoded(tokens)[:limit] for tokens, limit in zip(drawn, limits, strict=True))
        chains = [within_vocabulary(chain, self.vocab_size) for chain in encoded]
        return Draft.chains(chains, device=self.device)

    def _num_steps(self, row: Row, limit: int) -> int:
        """Return how many tokens to draft for `limit` tokens of the target, as in the row so far."""
        view = self._views[row]
        room = self.runtime.context_length - len(view.tokens) + 1
        return min(math.ceil(limit * len(view.tokens) / view.num_read), room, MAX_DRAFT_LENGTH)

    def _draw_whole(
        self, rows: Sequence[Row], steps: list[int], budgets: Budgets, noise: Noise
    ) -> list[list[int]] | None:
        """Return the chains that `_draw` returns, drawn at once; None if they cannot be."""
        settings = [kernel_settings(row.params) if _is_raced(row) else GREEDY for row in rows]
        drawn = self._draw_at_once(
            rows, steps, self.runtime.vocab_size, settings, budgets, noise, self._vocabulary
        )
        if drawn is None:
            return None
        chains = iter(drawn.tokens)
        return [next(chains) if limit else [] for limit in steps]

    def _draw(self, rows: Sequence[Row], steps: list[int], budgets: Budgets, noise: Noise) -> list[list[int]]:
        """Return per row a chain of the draft model, up to the end of the text."""
        chains: list[list[int]] = [[] for _ in rows]
        depths = [0] * len(rows)  # in tokens of the target
        active = [index for index, limit in enumerate(steps) if limit > 0]
        while active:
            depth = max(map(len, chains))
            logits = self.chain_logits(rows, active)
            tokens, confidences = with_confidences(logits)
            raced = [index for index in active if _is_raced(rows[index])]
            undefined = [index for index in raced if math.isnan(confidences[index])]
            if undefined:
                warn_unless_finite(logits)
                active, raced = (
                    [index for index in some if index not in undefined] for some in (active, raced)
                )
            if raced:
                noises = [noise.select(torch.tensor([index])) for index in raced]
                params = [rows[index].params for index in raced]
                drawn = self._race(params, logits[raced], noises, [depths[index] for index in raced])
                for index, token in zip(raced, drawn, strict=True):
                    tokens[index] = token
            for index in active:
                depths[index] += self._lengths[tokens[index]]
                chains[index].append(tokens[index])
            self.extend(rows, active, tokens)
            active = [
                index
                for index in active
                if len(chains[index]) < steps[index] and self._lengths[tokens[index]]
            ]
            if active and budgets.uses_probs:
                kept = budgets.keep_drafting(logits, depth, None, confidences)
                active = [index for index in active if kept[index]]
        return chains

    def _race(
        self, params: Sequence[SamplingParams], logits: Tensor, noises: Sequence[Noise], depths: Sequence[int]
    ) -> list[int]:
        """Return the draft model's tokens that are drawn by races for logits `[row, vocab]`.

        Depths count tokens of the target. Settings that name its tokens do not apply.
        """
        dists = make_rule(params, self.device)(at_least_float32(logits)[:, None])
        return [
            int(noise.draft(dist, depth, token_ids=self._vocabulary.ids))
            for noise, dist, depth in zip(noises, dists, depths, strict=True)
        ]

    def _encoded(self, chain: list[int]) -> list[int]:
        """Return the target's tokens of a draft, up to a last one that a longer text might change.

        That one is complete if both vocabularies have it, or if the text ends after it.
        """
        target, draft = self.pair.target, self.pair.draft
        data = [draft.bytes_of(token) for token in chain]
        tokens = target.encode(b"".join(each or b"" for each in data).decode(errors="ignore")).ids
        if chain and data[-1] is None:
            end = self.pair.special_by_draft.get(chain[-1])
            return tokens if end is None else [*tokens, end]
        if tokens and target.bytes_of(tokens[-1]) != data[-1]:
            del tokens[-1]
        return tokens


def _is_raced(row: Row) -> bool:
    return row.coupled and row.params.temperature > 0
