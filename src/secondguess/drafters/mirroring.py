"""Drafters that run a model with its own KV cache: draft models, feature heads, layer skipping.

The drafter's runtime has the same interface as the target. Each target row has a *shadow*: a row
of the committed tokens plus, in a chain, the tokens drafted this round. A draft step scores the
shadows; the runtime forwards the tokens that it has not cached yet: normally one, or two after a
draft was accepted in full. The nodes of a tree are scored as nodes, all levels again for each
level, which is cheap compared with the target's pass.

A row that is not drafted for costs nothing: its tokens are prefilled when the controller first
requests a draft, and tokens committed without a draft at the next request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from secondguess.core import MAX_DRAFT_LENGTH, Candidate, Draft, Row
from secondguess.drafters.base import single_candidate
from secondguess.drafters.sampling_drafter import SamplingDrafter, expand_to_batch
from secondguess.drafters.trees import TreeShape
from secondguess.runtime.base import ForwardOutput, Runtime

UNKNOWN_TOKEN = 0
"""Token that a draft model reads in place of a token outside its vocabulary."""

PREFILL_THRESHOLD = 16
"""Number of uncached tokens above which a shadow is prefilled before the draft.

Up to this many are forwarded in the first draft step. Candidates report the number of uncached
tokens in multiples of it.
"""


@dataclass(eq=False)
class MirrorRow:
    """Row of the draft model that mirrors a target row.

    Args:
        row: committed tokens, then those drafted this round; the draft model caches a prefix.
        num_committed: number of leading tokens that are known to be committed.
    """

    row: Row
    num_committed: int


class MirroringDrafter(SamplingDrafter):
    """Drafter with its own runtime, whose rows mirror the target's.

    Args:
        runtime: the draft model, for the exclusive use of this drafter.
        name, vocab_size, shape: as in `SamplingDrafter`. A token outside the draft model's
            vocabulary is read as token 0.
    """

    def __init__(self, runtime: Runtime, name: str, vocab_size: int, shape: TreeShape | None = None) -> None:
        super().__init__(name, vocab_size, runtime.device, shape)
        self.runtime = runtime
        self._mirror_rows: dict[Row, MirrorRow] = {}

    def candidates(self, rows: Sequence[Row]) -> list[tuple[Candidate]]:
        """Return one candidate per row, of length 0 if the draft model's context is full."""
        return [self._choices(row) for row in rows]

    def _choices(self, row: Row) -> tuple[Candidate]:
        mirror_row = self._mirror_rows.get(row)
        num_uncached = len(row.tokens) - (mirror_row.num_committed if mirror_row else 0)
        # Rounded, so that few values occur and the cache of `single_candidate` is hit.
        coarse = (
            num_uncached // PREFILL_THRESHOLD * PREFILL_THRESHOLD if num_uncached > PREFILL_THRESHOLD else 0
        )
        longest = min(self.room(row), MAX_DRAFT_LENGTH if self.shape is None else self.shape.depth)
        return single_candidate(longest, coarse)

    def prepare(self, rows: Sequence[Row], parts: Sequence[int]) -> None:
        """Synchronise the shadows with the rows, and prefill those that are far behind."""
        held = [row for row in rows if self.room(row) > 0]
        new = [row for row in held if row not in self._mirror_rows]
        known = [row for row in held if row in self._mirror_rows]
        behind = [self._mirror_rows[row] for row in known]
        for row, mirror_row in zip(known, behind, strict=True):
            self._sync_tokens(mirror_row, row.tokens)
        self.runtime.rewind(
            [mirror_row.row for mirror_row in behind], [mirror_row.num_committed for mirror_row in behind]
        )
        far = [
            mirror_row.row
            for mirror_row in behind
            if len(mirror_row.row.tokens) - mirror_row.num_committed > PREFILL_THRESHOLD
        ]
        if far:
            self.runtime.prefill(far)
        if new:
            self._admit(new)

    def _admit(self, rows: Sequence[Row]) -> None:
        mirror_rows = [Row([self._known_token(token) for token in row.tokens], row.params) for row in rows]
        # Registered before the prefill, so that `end` releases them even if it is interrupted.
        for row, mirror_row in zip(rows, mirror_rows, strict=True):
            self._mirror_rows[row] = MirrorRow(mirror_row, num_committed=len(mirror_row.tokens))
        self.runtime.begin(mirror_rows)

    def chain_logits(self, rows: Sequence[Row], active: list[int]) -> Tensor:
        """Return logits from one forward pass of the active rows; zeros for the others."""
        nothing = Draft.empty(len(rows), self.device)
        return expand_to_batch(self._score(rows, active, nothing).logits[:, 0], len(rows), active)

    def extend(self, rows: Sequence[Row], active: list[int], tokens: list[int]) -> None:
        for index in active:
            self._mirror_rows[rows[index]].row.tokens.append(tokens[index])

    def tree_logits(self, rows: Sequence[Row], active: list[int], tree: Draft) -> Tensor:
        return expand_to_batch(self._score(rows, active, tree).logits, len(rows), active)

    def _score(self, rows: Sequence[Row], active: list[int], tree: Draft) -> ForwardOutput:
        """Run one forward pass over the active rows and their trees."""
        mirror_rows = [self._mirror_rows[rows[index]].row for index in active]
        members = tree if len(active) == len(rows) else tree.select(torch.tensor(active, device=self.device))
        return self.runtime.score(mirror_rows, members)

    def end(self, row: Row) -> None:
        mirror_row = self._mirror_rows.pop(row, None)
        if mirror_row is not None:
            self.runtime.end(mirror_row.row)

    def reset_prefix_cache(self) -> None:
        self.runtime.reset_prefix_cache()

    def room(self, row: Row) -> int:
        """Return how many levels fit the draft model's context; the last is never forwarded."""
        return max(0, self.runtime.context_length - len(row.tokens) + 1)

    def _sync_tokens(self, mirror_row: MirrorRow, tokens: list[int]) -> None:
        """Replace a shadow's tokens by `tokens`, and count the leading tokens that were equal."""
        believed = mirror_row.row.tokens
        agreed = mirror_row.num_committed
        # The last token is never counted, so that it is forwarded: the next draft starts from its
        # logits. Comparing tokens does not ensure that, since a correction may equal the token
        # that it replaces (block verification).
        last = min(len(believed), len(tokens) - 1)
        while agreed < last and believed[agreed] == self._known_token(tokens[agreed]):
            agreed += 1
        believed[agreed:] = [self._known_token(token) for token in tokens[agreed:]]
        mirror_row.num_committed = agreed

    def _known_token(self, token: int) -> int:
        return token if token < self.runtime.vocab_size else UNKNOWN_TOKEN
