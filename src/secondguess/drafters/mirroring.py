"""Drafters that run a model with its own KV cache: draft models, layer skipping, feature heads.

The model's runtime has the same interface as the target. Each target row has a *mirror row* in
it: the committed tokens plus, in a chain, the tokens drafted this round. A draft step scores the
mirror rows; the runtime forwards the tokens that it has not cached yet: normally one, or two after
a draft was accepted in full. The nodes of a tree are scored as nodes, all levels again for each
level, which is cheap compared with the target's pass.

A row that is not drafted for costs nothing: its tokens are prefilled when the controller first
requests a draft, and tokens committed without a draft at the next request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from secondguess.core import Draft, Row, Verdict
from secondguess.drafters.hidden_states import HiddenStateBuffer
from secondguess.drafters.sampling_drafter import (
    PREFILL_THRESHOLD,
    HeadDrafter,
    SamplingDrafter,
    expand_to_batch,
)
from secondguess.drafters.trees import TreeShape
from secondguess.heads.feature import FeatureHead
from secondguess.heads.native import feature_runtime
from secondguess.heads.runtime import FeatureRuntime
from secondguess.runtime.base import ChainDecision, ChainRequest, DrawnChains, HiddenStates, Runtime

UNKNOWN_TOKEN = 0
"""Token that a draft model reads in place of a token outside its vocabulary."""


@dataclass(eq=False)
class MirrorRow:
    """Row of the draft model that mirrors a target row.

    Args:
        row: committed tokens, then those drafted this round; the draft model caches a prefix.
        num_committed: number of leading tokens that are known to be committed.
    """

    row: Row
    num_committed: int = 0


class MirroringDrafter(SamplingDrafter):
    """Base class of drafters whose runtime has a mirror row for each target row.

    Subclasses set `runtime`, the draft model, for the exclusive use of this drafter.
    """

    runtime: Runtime
    min_tokens = 1
    """Number of tokens from which on a row can be drafted for."""

    def __init__(
        self, name: str, vocab_size: int, device: torch.device, shape: TreeShape | None = None
    ) -> None:
        super().__init__(name, vocab_size, device, shape)
        self._mirror_rows: dict[Row, MirrorRow] = {}

    def num_uncached(self, row: Row) -> int:
        mirror = self._mirror_rows.get(row)
        return len(row.tokens) - mirror.num_committed + self.num_left(row) if mirror else len(row.tokens)

    def num_left(self, row: Row) -> int:
        """Return the number of known tokens that an unfinished prefill has left."""
        mirror = self._mirror_rows.get(row) if row in self._unfinished else None
        return self.runtime.num_to_prefill(mirror.row) if mirror else 0

    def room(self, row: Row) -> int:
        """Return how many levels fit the draft model's context; the last is never forwarded."""
        num_tokens = len(row.tokens)
        return max(0, self.runtime.context_length - num_tokens + 1) if num_tokens >= self.min_tokens else 0

    def chain_logits(self, rows: Sequence[Row], active: list[int]) -> Tensor:
        nothing = Draft.empty(len(rows), self.device)
        return expand_to_batch(self._score(rows, active, nothing)[:, 0], len(rows), active)

    def extend(self, rows: Sequence[Row], active: list[int], tokens: list[int]) -> None:
        for index in active:
            self._mirror_rows[rows[index]].row.tokens.append(tokens[index])

    def whole_chains(
        self, rows: Sequence[Row], requests: Sequence[ChainRequest], decision: ChainDecision
    ) -> DrawnChains | None:
        return self.runtime.draft_chains([self._mirror_rows[row].row for row in rows], requests, decision)

    def tree_logits(self, rows: Sequence[Row], active: list[int], tree: Draft) -> Tensor:
        return expand_to_batch(self._score(rows, active, tree), len(rows), active)

    def release(self, row: Row) -> None:
        super().release(row)
        mirror = self._mirror_rows.get(row)
        if mirror is not None:
            self.runtime.release(mirror.row)
            del self._mirror_rows[row]

    def reset_prefix_cache(self) -> None:
        self.runtime.reset_prefix_cache()

    def _score(self, rows: Sequence[Row], active: list[int], tree: Draft) -> Tensor:
        """Return logits `[active row, node + 1, vocab]` of one forward pass over rows and trees."""
        mirror_rows = [self._mirror_rows[rows[index]].row for index in active]
        members = tree if len(active) == len(rows) else tree.select(torch.tensor(active, device=self.device))
        return self.runtime.score(mirror_rows, members).logits

    def _admit_mirrors(
        self, mirrors: Mapping[Row, MirrorRow], reuse_limits: Sequence[int | None] | None = None
    ) -> list[int]:
        """Admit new mirror rows, by row; if this fails or is interrupted, the rows have none afterwards."""
        try:
            self._mirror_rows.update(mirrors)
            return self.runtime.admit([mirror.row for mirror in mirrors.values()], reuse_limits)
        except BaseException:
            for row in mirrors:
                MirroringDrafter.release(self, row)
            raise

    def _prefill(self, mirrors: Sequence[MirrorRow], max_tokens: int | None) -> None:
        """Prefill those that are far behind."""
        far = [each.row for each in mirrors if self.runtime.num_to_prefill(each.row) >= PREFILL_THRESHOLD]
        if far:
            self.runtime.prefill(far, max_tokens)

    def _rewind(self, mirrors: Sequence[MirrorRow]) -> None:
        self.runtime.rewind([each.row for each in mirrors], [each.num_committed for each in mirrors])


class TokenDrafter(MirroringDrafter):
    """Drafter that runs a language model.

    A token outside the draft model's vocabulary is read as token 0.

    Args:
        runtime: the draft model, for the exclusive use of this drafter.
        name, vocab_size, shape: as in `SamplingDrafter`.
    """

    def __init__(self, runtime: Runtime, name: str, vocab_size: int, shape: TreeShape | None = None) -> None:
        super().__init__(name, vocab_size, runtime.device, shape)
        self.runtime = runtime

    def tokens_of(self, row: Row) -> list[int]:
        """Return the tokens that the draft model reads for a row."""
        return row.tokens

    def catch_up(self, rows: Sequence[Row], max_tokens: int | None = None) -> None:
        """Synchronise the mirror rows with the rows, and prefill those that are far behind."""
        known = [row for row in rows if row in self._mirror_rows]
        mirrors, texts = [self._mirror_rows[row] for row in known], [self.tokens_of(row) for row in known]
        for mirror, tokens in zip(mirrors, texts, strict=True):
            self._count_committed(mirror, tokens)
        # Before the tokens are replaced, so that an interrupt leaves no entries of other tokens.
        self._rewind(mirrors)
        for mirror, tokens in zip(mirrors, texts, strict=True):
            new = tokens[mirror.num_committed :]
            mirror.row.tokens[mirror.num_committed :] = [self._known_token(token) for token in new]
        if len(known) < len(rows):
            self._admit([row for row in rows if row not in self._mirror_rows])
            mirrors = [self._mirror_rows[row] for row in rows]
        self._prefill(mirrors, max_tokens)

    def _admit(self, rows: Sequence[Row]) -> None:
        mirrors = {}
        for row in rows:
            mirror_row = Row([self._known_token(token) for token in self.tokens_of(row)], row.params)
            mirrors[row] = MirrorRow(mirror_row, num_committed=len(mirror_row.tokens))
        self._admit_mirrors(mirrors)

    def _count_committed(self, mirror: MirrorRow, tokens: list[int]) -> None:
        """Count a mirror row's leading tokens that equal those of `tokens`."""
        mirrored = mirror.row.tokens
        num_equal = mirror.num_committed
        # The last token is never counted, so that it is forwarded: the next draft starts from its
        # logits. Comparing tokens does not ensure that, since a correction may equal the token
        # that it replaces (block verification).
        last = min(len(mirrored), len(tokens) - 1)
        while num_equal < last and mirrored[num_equal] == self._known_token(tokens[num_equal]):
            num_equal += 1
        mirror.num_committed = num_equal

    def _known_token(self, token: int) -> int:
        return token if token < self.runtime.num_input_tokens else UNKNOWN_TOKEN


class FeatureDrafter(HeadDrafter, MirroringDrafter):
    """Drafter with a head that takes a feature with each token: EAGLE, MTP.

    A mirror row is the row without its first token, which has no feature. The features of
    committed tokens come from the target, those of draft nodes from the head itself. So accepted
    tokens are run through the head again with the target's features, in the first step of the next
    draft.
    """

    head: FeatureHead
    runtime: FeatureRuntime
    min_tokens = 2

    def __init__(self, head: FeatureHead, target: Runtime, name: str, shape: TreeShape | None = None) -> None:
        super().__init__(head, target, name, shape)
        self.runtime = feature_runtime(self.head, target)
        self.hidden_layers = head.hidden_layers
        self._hidden_buffer = HiddenStateBuffer(head.hidden_layers)

    def admit(self, rows: Sequence[Row]) -> list[int | None]:
        longer = [row for row in rows if len(row.tokens) > 1]
        self._admit(longer)
        return [self._mirror_rows[row].num_committed if row in self._mirror_rows else 0 for row in rows]

    def _admit(self, rows: Sequence[Row], reuse_limits: Sequence[int | None] | None = None) -> None:
        mirrors = {row: MirrorRow(Row(row.tokens[1:], row.params)) for row in rows}
        nums_reused = self._admit_mirrors(mirrors, reuse_limits)
        for mirror, num_reused in zip(mirrors.values(), nums_reused, strict=True):
            mirror.num_committed = num_reused

    def begin(self, rows: Sequence[Row], hidden: Sequence[HiddenStates] = ()) -> None:
        for row, row_hidden in zip(rows, hidden, strict=True):
            self._hidden_buffer.begin(row, row_hidden)
            if row_hidden:
                num_reused = len(row.tokens) - 1 - len(row_hidden[self.hidden_layers[0]])
                if row not in self._mirror_rows:
                    self._admit([row], [num_reused])
                self._mirror_rows[row].num_committed = num_reused

    def observe(self, rows: Sequence[Row], verdict: Verdict, hidden: HiddenStates) -> None:
        self._hidden_buffer.observe(rows, verdict, hidden)

    def catch_up(self, rows: Sequence[Row], max_tokens: int | None = None) -> None:
        """Synchronise the mirror rows with the rows, and prefill those that are far behind."""
        new = [row for row in rows if row not in self._mirror_rows]
        self._admit(new, [0] * len(new))
        mirrors = [self._mirror_rows[row] for row in rows]
        self._rewind(mirrors)
        for row, mirror in zip(rows, mirrors, strict=True):
            mirror.row.tokens[:] = row.tokens[1:]
            if self._hidden_buffer.has(row):
                features = self.runtime.features(self._hidden_buffer.take(row))
                self.runtime.set_features(mirror.row, mirror.num_committed, features)
            mirror.num_committed = len(mirror.row.tokens)
        self._prefill(mirrors, max_tokens)

    def release(self, row: Row) -> None:
        mirror = self._mirror_rows.get(row)
        if mirror is not None and mirror.row in self.runtime.slots:
            self._rewind([mirror])  # entries of draft nodes have features of the head's own: not reused
        super().release(row)
        self._hidden_buffer.release(row)
