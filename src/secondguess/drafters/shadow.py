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

from secondguess.core import MAX_DRAFT_LENGTH, Draft, Prospect, Row
from secondguess.drafters.base import only_choice
from secondguess.drafters.stepping import SteppingDrafter, for_everybody
from secondguess.drafters.trees import TreeShape
from secondguess.runtime.base import Runtime, Scores

UNREADABLE = 0
"""Token that a draft model reads in place of a token outside its vocabulary."""

FAR_BEHIND = 16
"""Number of uncached tokens above which a shadow is prefilled before the draft.

Up to this many are forwarded in the first draft step. Candidates report the number of uncached
tokens in multiples of it.
"""


@dataclass(eq=False)
class Shadow:
    """Row of the draft model that mirrors a target row.

    Args:
        row: committed tokens, then those drafted this round; the draft model caches a prefix.
        num_agreed: number of leading tokens that are known to be committed.
    """

    row: Row
    num_agreed: int


class ShadowDrafter(SteppingDrafter):
    """Drafter with its own runtime, whose rows mirror the target's.

    Args:
        runtime: the draft model, for the exclusive use of this drafter.
        name, vocab_size, shape: as in `SteppingDrafter`. A token outside the draft model's
            vocabulary is read as token 0.
    """

    def __init__(self, runtime: Runtime, name: str, vocab_size: int, shape: TreeShape | None = None) -> None:
        super().__init__(name, vocab_size, runtime.device, shape)
        self.runtime = runtime
        self._shadows: dict[Row, Shadow] = {}

    def prospects(self, rows: Sequence[Row]) -> list[tuple[Prospect]]:
        """Return one candidate per row, of length 0 if the draft model's context is full."""
        return [self._choices(row) for row in rows]

    def _choices(self, row: Row) -> tuple[Prospect]:
        shadow = self._shadows.get(row)
        unread = len(row.tokens) - (shadow.num_agreed if shadow else 0)
        # Rounded, so that few values occur and the cache of `only_choice` is hit.
        coarse = unread // FAR_BEHIND * FAR_BEHIND if unread > FAR_BEHIND else 0
        longest = min(self.room(row), MAX_DRAFT_LENGTH if self.shape is None else self.shape.depth)
        return only_choice(longest, coarse)

    def prepare(self, rows: Sequence[Row], parts: Sequence[int]) -> None:
        """Synchronise the shadows with the rows, and prefill those that are far behind."""
        held = [row for row in rows if self.room(row) > 0]
        new = [row for row in held if row not in self._shadows]
        known = [row for row in held if row in self._shadows]
        behind = [self._shadows[row] for row in known]
        for row, shadow in zip(known, behind, strict=True):
            self._agree(shadow, row.tokens)
        self.runtime.rewind([shadow.row for shadow in behind], [shadow.num_agreed for shadow in behind])
        far = [shadow.row for shadow in behind if len(shadow.row.tokens) - shadow.num_agreed > FAR_BEHIND]
        if far:
            self.runtime.read_up(far)
        if new:
            self._admit(new)

    def _admit(self, rows: Sequence[Row]) -> None:
        shadows = [Row([self._readable(token) for token in row.tokens], row.params) for row in rows]
        # Registered before the prefill, so that `end` releases them even if it is interrupted.
        for row, shadow in zip(rows, shadows, strict=True):
            self._shadows[row] = Shadow(shadow, num_agreed=len(shadow.tokens))
        self.runtime.begin(shadows)

    def chain_logits(self, rows: Sequence[Row], active: list[int]) -> Tensor:
        """Return logits from one forward pass of the active rows; zeros for the others."""
        nothing = Draft.empty(len(rows), self.device)
        return for_everybody(self._score(rows, active, nothing).logits[:, 0], len(rows), active)

    def extend(self, rows: Sequence[Row], active: list[int], tokens: list[int]) -> None:
        for index in active:
            self._shadows[rows[index]].row.tokens.append(tokens[index])

    def tree_logits(self, rows: Sequence[Row], active: list[int], tree: Draft) -> Tensor:
        return for_everybody(self._score(rows, active, tree).logits, len(rows), active)

    def _score(self, rows: Sequence[Row], active: list[int], tree: Draft) -> Scores:
        """Run one forward pass over the active rows and their trees."""
        shadows = [self._shadows[rows[index]].row for index in active]
        members = tree if len(active) == len(rows) else tree.select(torch.tensor(active, device=self.device))
        return self.runtime.score(shadows, members)

    def end(self, row: Row) -> None:
        shadow = self._shadows.pop(row, None)
        if shadow is not None:
            self.runtime.end(shadow.row)

    def room(self, row: Row) -> int:
        """Return how many levels fit the draft model's context; the last is never forwarded."""
        return max(0, self.runtime.context_length - len(row.tokens) + 1)

    def _agree(self, shadow: Shadow, tokens: list[int]) -> None:
        """Replace a shadow's tokens by `tokens`, and count the leading tokens that were equal."""
        believed = shadow.row.tokens
        agreed = shadow.num_agreed
        # The last token is never counted, so that it is forwarded: the next draft starts from its
        # logits. Comparing tokens does not ensure that, since a correction may equal the token
        # that it replaces (block verification).
        last = min(len(believed), len(tokens) - 1)
        while agreed < last and believed[agreed] == self._readable(tokens[agreed]):
            agreed += 1
        believed[agreed:] = [self._readable(token) for token in tokens[agreed:]]
        shadow.num_agreed = agreed

    def _readable(self, token: int) -> int:
        return token if token < self.runtime.vocab_size else UNREADABLE
