"""Fake models and drafters for tests of this package and of extensions.

They need neither Transformers nor weights and run in milliseconds. `TableModel` is a language
model given by a function from context to probabilities; it checks its caller as strictly as a real
KV cache. `ScriptedDrafter` proposes given tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain

import torch
from torch import Tensor

from secondguess.core import Budgets, Draft, Row
from secondguess.drafters.base import Drafter
from secondguess.errors import BadInputError
from secondguess.runtime.base import ForwardOutput, HiddenStates, Runtime
from secondguess.sampling.noise import Noise

NextTokenDist = Callable[[tuple[int, ...]], Tensor]


class TableModel(Runtime):
    """Target or draft model whose next-token distribution is a function of the context.

    Args:
        vocab_size: number of tokens.
        dist: maps the whole context (a tuple of token ids) to probabilities `[vocab]`; zeros are
            allowed.
        context_length: reported context length.
    """

    def __init__(self, vocab_size: int, dist: NextTokenDist, context_length: int = 10_000) -> None:
        self.vocab_size = vocab_size
        self.context_length = context_length
        self.num_layers = 0
        self.device = torch.device("cpu")
        self.dist = dist
        self.num_forwards = 0
        self.num_scored_tokens = 0
        self._cached: dict[Row, list[int]] = {}
        self._held: dict[Row, list[list[int]]] = {}

    def admit(self, rows: Sequence[Row], reuse_limits: Sequence[int | None] | None = None) -> list[int]:
        for row in rows:
            if row in self._cached:
                raise BadInputError("cannot admit the row: it is admitted already. Call release(row) first.")
            self._cached[row] = []
        return [0] * len(rows)

    def prefill(
        self, rows: Sequence[Row], max_tokens: int | None = None, with_hidden: bool = True
    ) -> list[HiddenStates]:
        left = sum(map(self.num_to_prefill, rows)) if max_tokens is None else max_tokens
        for row in rows:
            num_cached = len(self._cached[row])
            self._cached[row] += row.tokens[num_cached : min(num_cached + left, len(row.tokens) - 1)]
            left -= len(self._cached[row]) - num_cached
        return [{}] * len(rows)

    def num_to_prefill(self, row: Row) -> int:
        return max(0, len(row.tokens) - 1 - len(self._cached[row]))

    def score(self, rows: Sequence[Row], draft: Draft) -> ForwardOutput:
        self.num_forwards += 1
        contexts = [self._cache_row(row, draft, index) for index, row in enumerate(rows)]
        # Rows of an enumeration share most contexts: each distribution is computed once.
        indices = {context: index for index, context in enumerate(dict.fromkeys(chain(*contexts)))}
        dists = torch.stack([self.dist(context) for context in indices])
        with_padding = torch.cat([dists.log(), torch.zeros_like(dists[:1])])
        num_queries = draft.num_nodes + 1
        index = [
            [
                *(indices[context] for context in row_contexts),
                *[len(indices)] * (num_queries - len(row_contexts)),
            ]
            for row_contexts in contexts
        ]
        return ForwardOutput(with_padding[torch.tensor(index)], {})

    def _cache_row(self, row: Row, draft: Draft, index: int) -> list[tuple[int, ...]]:
        """Cache a row's tokens and hold its draft; return the contexts of its queries."""
        cached = self._cached[row]
        if cached != row.tokens[: len(cached)]:
            raise BadInputError(
                "cannot score the row: its cache is no prefix of it. Call keep or rewind first."
            )
        parents = draft.shapes[index]
        self.num_scored_tokens += len(row.tokens) - len(cached) + len(parents)
        self._cached[row] = list(row.tokens)
        paths: list[list[int]] = []
        for token, parent in zip(draft.token_lists[index], parents, strict=False):
            paths.append([*([] if parent < 0 else paths[parent]), token])
        self._held[row] = paths
        return [(*row.tokens, *path) for path in ([], *paths)]

    def keep(self, rows: Sequence[Row], paths: Sequence[Sequence[int]]) -> None:
        for row, path in zip(rows, paths, strict=True):
            if path:
                self._cached[row] += self._held[row][path[-1]]
            self._held[row] = []

    def rewind(self, rows: Sequence[Row], lengths: Sequence[int]) -> None:
        for row, length in zip(rows, lengths, strict=True):
            self._cached[row] = self._cached[row][:length]
            self._held[row] = []

    def release(self, row: Row) -> None:
        self._cached.pop(row, None)
        self._held.pop(row, None)

    @property
    def num_live_rows(self) -> int:
        """Number of rows that have begun and not ended."""
        return len(self._cached)


def random_probs(vocab_size: int, seed: int, sharpness: float = 1.5, zeros: float = 0.0) -> NextTokenDist:
    """Return a function that maps each context to a random, but fixed, distribution.

    `sharpness` is the standard deviation of the logits, `zeros` the probability that a token gets probability zero; the
    most probable token never does.
    """
    dists: dict[tuple[int, ...], Tensor] = {}

    def dist(context: tuple[int, ...]) -> Tensor:
        if context not in dists:
            generator = torch.Generator().manual_seed(hash((seed, *context)) & 0x7FFFFFFF)
            logits = sharpness * torch.randn(vocab_size, generator=generator, dtype=torch.float64)
            dropped = torch.rand(vocab_size, generator=generator) < zeros
            dropped[int(logits.argmax())] = False
            dists[context] = logits.masked_fill(dropped, -torch.inf).softmax(-1)
        return dists[context]

    return dist


class ScriptedDrafter(Drafter):
    """Deterministic drafter whose chains come from a function of the row.

    Chains are truncated to the row's draft length.
    """

    name = "scripted"
    deterministic = True

    def __init__(self, script: Callable[[Row], Sequence[int]]) -> None:
        self.script = script

    def propose(self, rows: Sequence[Row], budgets: Budgets, noise: Noise) -> Draft:
        chains = [list(self.script(row))[:limit] for row, limit in zip(rows, budgets.lengths, strict=True)]
        return Draft.chains(chains, device=noise.device)
