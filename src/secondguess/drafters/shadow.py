"""Drafting with a runtime that has a cache of its own, as a draft model has and a head that reads the text.

The runtime is one like the target. Each target row has a *shadow*: a row
whose tokens are the committed ones plus, in a chain, what was drafted this round. A draft step scores the shadows; the
runtime forwards what it has not cached yet: normally one token, two after a draft was accepted whole. A tree's nodes are
scored as nodes, all levels anew for each level: beside the target's pass that is little.

A row that is not drafted for costs nothing: the runtime reads its text when (and if) the controller first
wants a draft, and what was written meanwhile when it next wants one.
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
"""What a draft model is shown in place of a token that its vocabulary lacks."""

FAR_BEHIND = 16
"""A shadow with more unread tokens than this reads them before the draft begins, and not in its first step. Unread tokens
are told in steps of so many."""


@dataclass(eq=False)
class Shadow:
    """What the draft model believes a row to be.

    Args:
        row: committed tokens, then those drafted this round; the draft model caches a prefix of them.
        num_agreed: how many of them are known to be committed and will not change.
    """

    row: Row
    num_agreed: int


class ShadowDrafter(SteppingDrafter):
    """Drafts with a runtime of its own, whose rows shadow the target's.

    Args:
        runtime: the draft model; nobody else may use it.
        name, vocab_size, shape: as in `SteppingDrafter`. A token that the draft model's vocabulary lacks is read as token 0.
    """

    def __init__(self, runtime: Runtime, name: str, vocab_size: int, shape: TreeShape | None = None) -> None:
        super().__init__(name, vocab_size, runtime.device, shape)
        self.runtime = runtime
        self._shadows: dict[Row, Shadow] = {}

    def prospects(self, rows: Sequence[Row]) -> list[tuple[Prospect]]:
        """Nothing, for rows that the draft model's context does not hold."""
        return [self._choices(row) for row in rows]

    def _choices(self, row: Row) -> tuple[Prospect]:
        shadow = self._shadows.get(row)
        unread = len(row.tokens) - (shadow.num_agreed if shadow else 0)
        # To a few tokens: the same few values come back in every round.
        coarse = unread // FAR_BEHIND * FAR_BEHIND if unread > FAR_BEHIND else 0
        longest = min(self.room(row), MAX_DRAFT_LENGTH if self.shape is None else self.shape.depth)
        return only_choice(longest, coarse)

    def prepare(self, rows: Sequence[Row], parts: Sequence[int]) -> None:
        """Make the shadows agree with the rows, and read what is more than a step's worth."""
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
        # Known before the prefill, so that `end` releases them even if it is interrupted.
        for row, shadow in zip(rows, shadows, strict=True):
            self._shadows[row] = Shadow(shadow, num_agreed=len(shadow.tokens))
        self.runtime.begin(shadows)

    def chain_logits(self, rows: Sequence[Row], active: list[int]) -> Tensor:
        """One forward of the active rows; the others get zeros."""
        nothing = Draft.empty(len(rows), self.device)
        return for_everybody(self._score(rows, active, nothing).logits[:, 0], len(rows), active)

    def extend(self, rows: Sequence[Row], active: list[int], tokens: list[int]) -> None:
        for index in active:
            self._shadows[rows[index]].row.tokens.append(tokens[index])

    def tree_logits(self, rows: Sequence[Row], active: list[int], tree: Draft) -> Tensor:
        return for_everybody(self._score(rows, active, tree).logits, len(rows), active)

    def _score(self, rows: Sequence[Row], active: list[int], tree: Draft) -> Scores:
        """One forward of the active rows and their trees."""
        shadows = [self._shadows[rows[index]].row for index in active]
        members = tree if len(active) == len(rows) else tree.select(torch.tensor(active, device=self.device))
        return self.runtime.score(shadows, members)

    def end(self, row: Row) -> None:
        shadow = self._shadows.pop(row, None)
        if shadow is not None:
            self.runtime.end(shadow.row)

    def room(self, row: Row) -> int:
        """How many nodes the draft model's context allows; its last node need not be forwarded."""
        return max(0, self.runtime.context_length - len(row.tokens) + 1)

    def _agree(self, shadow: Shadow, tokens: list[int]) -> None:
        """Replace what a shadow believed by `tokens`, counting how far it was right."""
        believed = shadow.row.tokens
        agreed = shadow.num_agreed
        # The last token is always left to be forwarded: its logits open the next draft. A correction may
        # equal the token it corrects (block verification), so the comparison alone would not see to that.
        last = min(len(believed), len(tokens) - 1)
        while agreed < last and believed[agreed] == self._readable(tokens[agreed]):
            agreed += 1
        believed[agreed:] = [self._readable(token) for token in tokens[agreed:]]
        shadow.num_agreed = agreed

    def _readable(self, token: int) -> int:
        return token if token < self.runtime.vocab_size else UNREADABLE
