"""Fakes that obey the contracts, for our tests and for yours: no Transformers, no weights, milliseconds.

`TableModel` is a language model given by a function from context to law; it checks its caller as strictly as a real cache
would. `ScriptedDrafter` proposes whatever it is told to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from secondguess.core import Budgets, Draft, Row
from secondguess.drafters.base import Drafter
from secondguess.errors import BadInputError
from secondguess.noise import Noise
from secondguess.runtime.base import Hidden, Runtime, Scores

Law = Callable[[tuple[int, ...]], Tensor]


class TableModel(Runtime):
    """A target or a draft model whose next-token law is looked up.

    Args:
        vocab_size: number of tokens.
        law: maps the whole context (a tuple of token ids) to probabilities `[vocab]`; zeros are allowed.
        context_length: positions it claims to hold.
    """

    def __init__(self, vocab_size: int, law: Law, context_length: int = 10_000) -> None:
        self.vocab_size = vocab_size
        self.context_length = context_length
        self.num_layers = 0
        self.device = torch.device("cpu")
        self.law = law
        self.num_forwards = 0
        self.num_scored_tokens = 0
        self._cached: dict[Row, list[int]] = {}
        self._held: dict[Row, list[list[int]]] = {}

    def begin(self, rows: Sequence[Row]) -> list[Hidden]:
        for row in rows:
            if row in self._cached:
                raise BadInputError("expected a new row, got one that has begun already; call end(row) first")
            self._cached[row] = row.tokens[:-1]
        return [{}] * len(rows)

    def read_up(self, rows: Sequence[Row]) -> None:
        for row in rows:
            self._cached[row] = row.tokens[:-1]

    def score(self, rows: Sequence[Row], draft: Draft) -> Scores:
        self.num_forwards += 1
        laws = [self._score_row(row, draft, index) for index, row in enumerate(rows)]
        return Scores(torch.stack(laws).log(), {})

    def _score_row(self, row: Row, draft: Draft, index: int) -> Tensor:
        cached = self._cached[row]
        if cached != row.tokens[: len(cached)]:
            raise BadInputError(
                "expected a cache that is a prefix of the row, got a stale one: keep or rewind it"
            )
        self.num_scored_tokens += len(row.tokens) - len(cached) + int(draft.lengths[index])
        self._cached[row] = list(row.tokens)
        paths: list[list[int]] = []
        for node in range(int(draft.lengths[index])):
            parent = int(draft.parents[index, node])
            paths.append([*([] if parent < 0 else paths[parent]), int(draft.tokens[index, node])])
        self._held[row] = paths
        known = [self.law(tuple(row.tokens)), *(self.law((*row.tokens, *path)) for path in paths)]
        padding = [torch.ones_like(known[0])] * (draft.num_nodes + 1 - len(known))
        return torch.stack([*known, *padding])

    def keep(self, rows: Sequence[Row], paths: Sequence[Sequence[int]]) -> None:
        for row, path in zip(rows, paths, strict=True):
            if path:
                self._cached[row] += self._held[row][path[-1]]
            self._held[row] = []

    def rewind(self, rows: Sequence[Row], lengths: Sequence[int]) -> None:
        for row, length in zip(rows, lengths, strict=True):
            self._cached[row] = self._cached[row][:length]
            self._held[row] = []

    def end(self, row: Row) -> None:
        self._cached.pop(row, None)
        self._held.pop(row, None)

    @property
    def num_live_rows(self) -> int:
        """Rows that have begun and not ended."""
        return len(self._cached)


def random_law(vocab_size: int, seed: int, sharpness: float = 1.5, zeros: float = 0.0) -> Law:
    """A context-dependent random law: each context has its own, the same on every call.

    Args:
        vocab_size: number of tokens.
        seed: two seeds give unrelated laws.
        sharpness: standard deviation of the logits.
        zeros: chance of each token to have probability zero (one token always keeps its mass).
    """
    laws: dict[tuple[int, ...], Tensor] = {}

    def law(context: tuple[int, ...]) -> Tensor:
        if context not in laws:
            generator = torch.Generator().manual_seed(hash((seed, *context)) & 0x7FFFFFFF)
            logits = sharpness * torch.randn(vocab_size, generator=generator, dtype=torch.float64)
            dropped = torch.rand(vocab_size, generator=generator) < zeros
            dropped[int(logits.argmax())] = False
            laws[context] = logits.masked_fill(dropped, -torch.inf).softmax(-1)
        return laws[context]

    return law


class ScriptedDrafter(Drafter):
    """Proposes the chain that a function names for each row, cut to the row's budget; certain of it."""

    name = "scripted"
    certain = True

    def __init__(self, script: Callable[[Row], Sequence[int]]) -> None:
        self.script = script

    def propose(self, rows: Sequence[Row], budgets: Budgets, noise: Noise) -> Draft:
        chains = [list(self.script(row))[:limit] for row, limit in zip(rows, budgets.lengths, strict=True)]
        return Draft.chains(chains, device=noise.device)
