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
from secondguess.drafters.hidden_states import HiddenStateBuffer
from secondguess.drafters.mirroring import PREFILL_THRESHOLD, MirroringDrafter, MirrorRow
from secondguess.drafters.sampling_drafter import expand_to_batch
from secondguess.drafters.trees import TreeShape
from secondguess.heads.runtime import FEATURE_KEY, FeatureHead, FeatureHeadRuntime
from secondguess.runtime.base import ForwardOutput, HiddenStates, Runtime


class FeatureDrafter(MirroringDrafter):
    """Drafter that uses a feature head. A shadow is the row without its first token.

    Args:
        head: on the target's device and in its dtype.
        target: target whose hidden states the head reads.
        name, shape: as in `SamplingDrafter`.
    """

    runtime: FeatureHeadRuntime

    def __init__(self, head: FeatureHead, target: Runtime, name: str, shape: TreeShape | None = None) -> None:
        runtime = FeatureHeadRuntime(head, target.vocab_size, target.context_length, target.device)
        super().__init__(runtime, name, target.vocab_size, shape)
        self.hidden_layers = head.hidden_layers
        self._hidden_buffer = HiddenStateBuffer(head.hidden_layers)
        self._features = torch.empty(0)

    def admit(self, rows: Sequence[Row]) -> list[int | None]:
        return [self._admit_mirror_row(row).num_committed if len(row.tokens) > 1 else 0 for row in rows]

    def _admit_mirror_row(self, row: Row, reuse_limit: int | None = None) -> MirrorRow:
        mirror_row = MirrorRow(Row(row.tokens[1:], row.params), num_committed=0)
        (mirror_row.num_committed,) = self.runtime.admit([mirror_row.row], [reuse_limit])
        self._mirror_rows[row] = mirror_row
        return mirror_row

    def begin(self, rows: Sequence[Row], hidden: Sequence[HiddenStates] = ()) -> None:
        for row, of_row in zip(rows, hidden, strict=True):
            self._hidden_buffer.begin(row, of_row)
            if of_row:
                num_reused = len(row.tokens) - 1 - len(of_row[self.hidden_layers[0]])
                mirror_row = self._mirror_rows.get(row) or self._admit_mirror_row(row, num_reused)
                mirror_row.num_committed = num_reused

    def observe(self, rows: Sequence[Row], verdict: Verdict, hidden: HiddenStates) -> None:
        super().observe(rows, verdict, hidden)
        self._hidden_buffer.observe(rows, verdict, hidden)

    def room(self, row: Row) -> int:
        """Return how many levels fit; 0 for a row of one token, which has no feature yet."""
        return super().room(row) if len(row.tokens) > 1 else 0

    def prepare(self, rows: Sequence[Row], parts: Sequence[int]) -> None:
        held = [row for row in rows if self.room(row) > 0]
        mirror_rows = [self._mirror_rows.get(row) or self._admit_mirror_row(row, 0) for row in held]
        self.runtime.rewind(
            [mirror_row.row for mirror_row in mirror_rows],
            [mirror_row.num_committed for mirror_row in mirror_rows],
        )
        far = []
        for row, mirror_row in zip(held, mirror_rows, strict=True):
            if len(row.tokens) - 1 - mirror_row.num_committed > PREFILL_THRESHOLD:
                far.append(mirror_row.row)
            self._sync_tokens(mirror_row, row.tokens)
            self._feed(row, mirror_row)
        if far:
            self.runtime.prefill(far)

    def _sync_tokens(self, mirror_row: MirrorRow, tokens: list[int]) -> None:
        """Set the shadow's tokens to the committed ones; `_feed` adds the target's features."""
        mirror_row.row.tokens[:] = tokens[1:]

    def _feed(self, row: Row, mirror_row: MirrorRow) -> None:
        features = self.runtime.head.features(self._hidden_buffer.take(row))
        self.runtime.set_features(mirror_row.row, mirror_row.num_committed, features)
        mirror_row.num_committed = len(mirror_row.row.tokens)

    def _score(self, rows: Sequence[Row], active: list[int], tree: Draft) -> ForwardOutput:
        scores = super()._score(rows, active, tree)
        self._features = expand_to_batch(scores.hidden[FEATURE_KEY], len(rows), active)
        return scores

    def extend(self, rows: Sequence[Row], active: list[int], tokens: list[int]) -> None:
        for index in active:
            mirror_row = self._mirror_rows[rows[index]].row
            self.runtime.set_features(mirror_row, len(mirror_row.tokens), self._features[index])
            mirror_row.tokens.append(tokens[index])

    def tree_logits(self, rows: Sequence[Row], active: list[int], tree: Draft) -> Tensor:
        if tree.num_nodes:
            for index in active:
                mirror_row = self._mirror_rows[rows[index]].row
                behind = tree.parents[index, : int(tree.lengths[index])] + 1
                self.runtime.set_features(mirror_row, len(mirror_row.tokens), self._features[index, behind])
        return super().tree_logits(rows, active, tree)

    def end(self, row: Row) -> None:
        mirror_row = self._mirror_rows.get(row)
        if mirror_row is not None:  # entries of draft nodes have features of the head's own: not reused
            self.runtime.rewind([mirror_row.row], [mirror_row.num_committed])
        super().end(row)
        self._hidden_buffer.end(row)
