"""Drafters whose head takes a feature with each token: EAGLE, multi-token prediction.

The features of committed tokens come from the target, those of draft nodes from the head itself
(the output of one step is the feature of the next). So accepted tokens are run through the head
again with the target's features, in the first step of the next draft.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from secondguess.core import Draft, Row, Verdict
from secondguess.drafters.hearing import Heard
from secondguess.drafters.shadow import FAR_BEHIND, Shadow, ShadowDrafter
from secondguess.drafters.stepping import for_everybody
from secondguess.drafters.trees import TreeShape
from secondguess.heads.runtime import OWN, FeatureHead, HeadRuntime
from secondguess.runtime.base import Hidden, Runtime, Scores


class FeatureDrafter(ShadowDrafter):
    """Drafter that uses a feature head. A shadow is the row without its first token.

    Args:
        head: on the target's device and in its dtype.
        target: target whose hidden states the head reads.
        name, shape: as in `SteppingDrafter`.
    """

    runtime: HeadRuntime

    def __init__(self, head: FeatureHead, target: Runtime, name: str, shape: TreeShape | None = None) -> None:
        runtime = HeadRuntime(head, target.vocab_size, target.context_length, target.device)
        super().__init__(runtime, name, target.vocab_size, shape)
        self.hidden_layers = head.hidden_layers
        self._heard = Heard(head.hidden_layers)
        self._thoughts = torch.empty(0)

    def begin(self, rows: Sequence[Row], hidden: Sequence[Hidden] = ()) -> None:
        for row, of_row in zip(rows, hidden, strict=True):
            self._heard.begin(row, of_row)

    def observe(self, rows: Sequence[Row], verdict: Verdict, hidden: Hidden) -> None:
        super().observe(rows, verdict, hidden)
        self._heard.observe(rows, verdict, hidden)

    def room(self, row: Row) -> int:
        """Return how many levels fit; 0 for a row of one token, which has no feature yet."""
        return super().room(row) if len(row.tokens) > 1 else 0

    def prepare(self, rows: Sequence[Row], parts: Sequence[int]) -> None:
        held = [row for row in rows if self.room(row) > 0]
        known = [self._shadows[row] for row in held if row in self._shadows]
        self.runtime.rewind([shadow.row for shadow in known], [shadow.num_agreed for shadow in known])
        new = [row for row in held if row not in self._shadows]
        for row in new:
            # Registered before the prefill, so that `end` releases them even if it is interrupted.
            self._shadows[row] = Shadow(Row([], row.params), num_agreed=0)
        far = []
        for row in held:
            shadow = self._shadows[row]
            if row not in new and len(row.tokens) - 1 - shadow.num_agreed > FAR_BEHIND:
                far.append(shadow.row)
            self._agree(shadow, row.tokens)
            self._feed(row, shadow)
        if far:
            self.runtime.read_up(far)
        if new:
            self.runtime.begin([self._shadows[row].row for row in new])

    def _agree(self, shadow: Shadow, tokens: list[int]) -> None:
        """Set the shadow's tokens to the committed ones; `_feed` adds the target's features."""
        shadow.row.tokens[:] = tokens[1:]

    def _feed(self, row: Row, shadow: Shadow) -> None:
        features = self.runtime.head.features(self._heard.take(row))
        self.runtime.feed(shadow.row, shadow.num_agreed, features)
        shadow.num_agreed = len(shadow.row.tokens)

    def _score(self, rows: Sequence[Row], active: list[int], tree: Draft) -> Scores:
        scores = super()._score(rows, active, tree)
        self._thoughts = for_everybody(scores.hidden[OWN], len(rows), active)
        return scores

    def extend(self, rows: Sequence[Row], active: list[int], tokens: list[int]) -> None:
        for index in active:
            shadow = self._shadows[rows[index]].row
            self.runtime.feed(shadow, len(shadow.tokens), self._thoughts[index])
            shadow.tokens.append(tokens[index])

    def tree_logits(self, rows: Sequence[Row], active: list[int], tree: Draft) -> Tensor:
        if tree.num_nodes:
            for index in active:
                shadow = self._shadows[rows[index]].row
                behind = tree.parents[index, : int(tree.lengths[index])] + 1
                self.runtime.feed(shadow, len(shadow.tokens), self._thoughts[index, behind])
        return super().tree_logits(rows, active, tree)

    def end(self, row: Row) -> None:
        super().end(row)
        self._heard.end(row)
