"""Drafter with a head that takes a feature of the target's states with each token: EAGLE, MTP."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from secondguess.core import Draft, Row, Verdict
from secondguess.drafters.hidden_states import HiddenStateBuffer
from secondguess.drafters.mirroring import MirrorRow, MirrorRows
from secondguess.drafters.sampling_drafter import HeadDrafter, expand_to_batch
from secondguess.drafters.trees import TreeShape
from secondguess.heads.feature import FeatureHead
from secondguess.heads.native import feature_runtime
from secondguess.runtime.base import HiddenStates, Runtime
from secondguess.runtime.chains import ChainDecision, ChainRequest, DrawnChains


class FeatureDrafter(HeadDrafter):
    """Base class of drafters with a head that takes a feature with each token.

    A mirror row is the row without its first token, which has no feature. The features of
    committed tokens come from the target, those of draft nodes from the head itself. So accepted
    tokens are run through the head again with the target's features, in the first step of the next
    draft.
    """

    head: FeatureHead

    def __init__(self, head: FeatureHead, target: Runtime, name: str, shape: TreeShape | None = None) -> None:
        super().__init__(head, target, name, shape)
        self.runtime = feature_runtime(self.head, target)
        self._mirror_rows = MirrorRows(self.runtime)
        self._hidden_buffer = HiddenStateBuffer(head.hidden_layers)
        self._longest = 0
        self._levels: Tensor | None = None  # of a parallel head, this round

    def room(self, row: Row) -> int:
        """Return how many levels fit the context; 0 for a row of one token, which has no feature."""
        if len(row.tokens) <= 1:
            return 0
        left = max(0, self.runtime.context_length - len(row.tokens) + 1)
        return min(left, self.head.num_steps) if self._is_parallel else left

    @property
    def _is_parallel(self) -> bool:
        return self.head.mask_token is not None

    def start(self, rows: Sequence[Row], longest: int) -> None:
        self._levels, self._longest = None, longest

    def _level_logits(self, rows: Sequence[Row], active: list[int]) -> Tensor:
        """Return the logits `[row, level, vocab]` of a head that drafts in parallel; it runs once per draft."""
        if self._levels is None:
            counts = [min(self._longest, self.room(rows[index])) for index in active]
            mirrors = [self._mirror_rows[rows[index]].row for index in active]
            self._levels = expand_to_batch(self.runtime.score_masks(mirrors, counts), len(rows), active)
        return self._levels

    def num_uncached(self, row: Row) -> int:
        return 0 if self._is_beyond(row) else self._mirror_rows.num_uncached(row, self._unfinished)

    def chain_logits(self, rows: Sequence[Row], active: list[int]) -> Tensor:
        if self._is_parallel:
            return self._level_logits(rows, active)[:, max(map(len, self.chains))]
        return self._mirror_rows.chain_logits(rows, active)

    def extend(self, rows: Sequence[Row], active: list[int], tokens: list[int]) -> None:
        if not self._is_parallel:
            self._mirror_rows.append(rows, active, tokens)

    def tree_logits(self, rows: Sequence[Row], active: list[int], tree: Draft) -> Tensor:
        if self._is_parallel:
            logits = self._level_logits(rows, active)[:, max(tree.num_levels), None]
            return logits.expand(-1, tree.num_nodes + 1, -1)
        return self._mirror_rows.tree_logits(rows, active, tree)

    def whole_chains(
        self, rows: Sequence[Row], requests: Sequence[ChainRequest], decision: ChainDecision
    ) -> DrawnChains | None:
        if self._is_parallel:
            return None
        return self._mirror_rows.draft_chains(rows, requests, decision)

    def admit(self, rows: Sequence[Row]) -> list[int | None]:
        self._admit([row for row in rows if len(row.tokens) > 1 and not self._is_beyond(row)])
        return [self._num_reusable(row) for row in rows]

    def _num_reusable(self, row: Row) -> int | None:
        if row in self._mirror_rows:
            return self._mirror_rows[row].num_committed
        return None if self._is_beyond(row) else 0

    def _admit(self, rows: Sequence[Row], reuse_limits: Sequence[int | None] | None = None) -> None:
        mirrors = {row: MirrorRow(Row(row.tokens[1:], row.params)) for row in rows}
        nums_reused = self._mirror_rows.admit(mirrors, reuse_limits)
        for mirror, num_reused in zip(mirrors.values(), nums_reused, strict=True):
            mirror.num_committed = num_reused

    def begin(self, rows: Sequence[Row], hidden: Sequence[HiddenStates] = ()) -> None:
        for row, received in zip(rows, hidden, strict=True):
            row_hidden = {} if self._is_beyond(row) else received
            self._hidden_buffer.begin(row, row_hidden)
            if row_hidden:
                num_reused = len(row.tokens) - 1 - len(row_hidden[self.hidden_layers[0]])
                if row not in self._mirror_rows:
                    self._admit([row], [num_reused])
                self._mirror_rows[row].num_committed = num_reused

    def observe(self, rows: Sequence[Row], verdict: Verdict, hidden: HiddenStates) -> None:
        self._hidden_buffer.observe(rows, verdict, hidden)
        for row in rows:
            if self._is_beyond(row):
                self._hidden_buffer.begin(row, {})

    def catch_up(self, rows: Sequence[Row], max_tokens: int | None = None) -> None:
        """Synchronise the mirror rows with the rows, and prefill those that are far behind."""
        rows = [row for row in rows if not self._is_beyond(row)]
        new = [row for row in rows if row not in self._mirror_rows]
        self._admit(new, [0] * len(new))
        mirrors = [self._mirror_rows[row] for row in rows]
        self._mirror_rows.rewind(mirrors)
        for row, mirror in zip(rows, mirrors, strict=True):
            mirror.row.tokens[:] = row.tokens[1:]
            if self._hidden_buffer.has(row):
                features = self.runtime.features(self._hidden_buffer.take(row))
                self.runtime.set_features(mirror.row, mirror.num_committed, features)
            mirror.num_committed = len(mirror.row.tokens)
        self._mirror_rows.prefill(mirrors, max_tokens)

    def _is_beyond(self, row: Row) -> bool:
        """Return whether a row is longer than the head's context, so that it is never drafted for again."""
        return len(row.tokens) > self.runtime.context_length

    def release(self, row: Row) -> None:
        super().release(row)
        mirror = self._mirror_rows.get(row)
        if mirror is not None and mirror.row in self.runtime.slots:
            # Entries of draft nodes have features of the head's own: they are not reused.
            self._mirror_rows.rewind([mirror])
        self._mirror_rows.release(row)
        self._hidden_buffer.release(row)

    def reset_prefix_cache(self) -> None:
        self.runtime.reset_prefix_cache()
