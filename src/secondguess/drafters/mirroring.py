"""Drafters that run a language model with its own KV cache, and the rows of such a model.

The model's runtime has the same interface as the target. Each target row has a *mirror row* in
it: the committed tokens plus, in a chain, the tokens drafted this round. A draft step scores the
mirror rows; the runtime forwards the tokens that it has not cached yet: normally one, or two after
a draft was accepted in full. The nodes of a tree are scored as nodes, all levels again for each
level, which is cheap compared with the target's pass.

A row that is not drafted for costs nothing: its tokens are prefilled when the controller first
requests a draft, and tokens committed without a draft at the next request.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from secondguess.core import Draft, Row
from secondguess.drafters.sampling_drafter import PREFILL_THRESHOLD, SamplingDrafter, expand_to_batch
from secondguess.drafters.trees import TreeShape
from secondguess.runtime.base import Runtime
from secondguess.runtime.chains import ChainDecision, ChainRequest, DrawnChains

UNKNOWN_TOKEN = 0
"""Token that a draft model reads in place of a token outside its vocabulary."""


@dataclass(eq=False)
class MirrorRow:
    """Row of the draft model that mirrors a target row."""

    row: Row  # committed tokens, then those drafted this round; the draft model caches a prefix
    num_committed: int = 0  # number of leading tokens that are known to be committed


class MirrorRows(dict[Row, MirrorRow]):
    """Mirror rows by target row, in a runtime for the exclusive use of one drafter."""

    def __init__(self, runtime: Runtime) -> None:
        super().__init__()
        self.runtime = runtime

    def admit(
        self, mirrors: Mapping[Row, MirrorRow], reuse_limits: Sequence[int | None] | None = None
    ) -> list[int]:
        """Admit new mirror rows; if this fails or is interrupted, the rows have none afterwards."""
        try:
            self.update(mirrors)
            return self.runtime.admit([mirror.row for mirror in mirrors.values()], reuse_limits)
        except BaseException:
            for row in mirrors:
                self.release(row)
            raise

    def release(self, row: Row) -> None:
        """Release the mirror row of a row, if it has one."""
        mirror = self.get(row)
        if mirror is not None:
            self.runtime.release(mirror.row)
            del self[row]

    def num_uncached(self, row: Row, unfinished: Container[Row]) -> int:
        """Return the number of a row's tokens to prefill; of committed ones only in unfinished rows."""
        mirror = self.get(row)
        if mirror is None:
            return len(row.tokens)
        return len(row.tokens) - mirror.num_committed + self.num_left(row, unfinished)

    def num_left(self, row: Row, unfinished: Container[Row]) -> int:
        """Return the number of known tokens that an unfinished prefill has left."""
        mirror = self.get(row) if row in unfinished else None
        return self.runtime.num_to_prefill(mirror.row) if mirror else 0

    def rewind(self, mirrors: Sequence[MirrorRow]) -> None:
        """Remove the cache entries of tokens that are not known to be committed."""
        self.runtime.rewind([mirror.row for mirror in mirrors], [mirror.num_committed for mirror in mirrors])

    def prefill(self, mirrors: Sequence[MirrorRow], max_tokens: int | None) -> None:
        """Prefill those that are far behind."""
        rows = (mirror.row for mirror in mirrors)
        far = [row for row in rows if self.runtime.num_to_prefill(row) >= PREFILL_THRESHOLD]
        if far:
            self.runtime.prefill(far, max_tokens)

    def append(self, rows: Sequence[Row], active: list[int], tokens: list[int]) -> None:
        """Append drafted tokens to the mirror rows of the active rows."""
        for index in active:
            self[rows[index]].row.tokens.append(tokens[index])

    def chain_logits(self, rows: Sequence[Row], active: list[int]) -> Tensor:
        """Return logits `[row, vocab]` after the last token of each mirror row."""
        return self.tree_logits(rows, active, Draft.empty(len(rows), self.runtime.device))[:, 0]

    def tree_logits(self, rows: Sequence[Row], active: list[int], tree: Draft) -> Tensor:
        """Return logits `[row, node + 1, vocab]` of one forward pass over mirror rows and trees."""
        members = tree if len(active) == len(rows) else tree.select(tree.lengths.new_tensor(active))
        logits = self.runtime.score([self[rows[index]].row for index in active], members).logits
        return expand_to_batch(logits, len(rows), active)

    def draft_chains(
        self, rows: Sequence[Row], requests: Sequence[ChainRequest], decision: ChainDecision
    ) -> DrawnChains | None:
        """Draw whole chains, as `Runtime.draft_chains`."""
        return self.runtime.draft_chains([self[row].row for row in rows], requests, decision)


class TokenDrafter(SamplingDrafter):
    """Drafter that runs a language model.

    A token outside the draft model's vocabulary is read as token 0.

    Args:
        runtime: the draft model, for the exclusive use of this drafter.
        name, vocab_size, shape: as in `SamplingDrafter`.
    """

    def __init__(self, runtime: Runtime, name: str, vocab_size: int, shape: TreeShape | None = None) -> None:
        super().__init__(name, vocab_size, runtime.device, shape)
        self.runtime = runtime
        self._mirror_rows = MirrorRows(runtime)

    def room(self, row: Row) -> int:
        """Return how many levels fit the draft model's context; the last is never forwarded."""
        return max(0, self.runtime.context_length - len(row.tokens) + 1) if row.tokens else 0

    def num_uncached(self, row: Row) -> int:
        return self._mirror_rows.num_uncached(row, self._unfinished)

    def num_left(self, row: Row) -> int:
        """Return the number of known tokens that an unfinished prefill has left."""
        return self._mirror_rows.num_left(row, self._unfinished)

    def chain_logits(self, rows: Sequence[Row], active: list[int]) -> Tensor:
        return self._mirror_rows.chain_logits(rows, active)

    def extend(self, rows: Sequence[Row], active: list[int], tokens: list[int]) -> None:
        self._mirror_rows.append(rows, active, tokens)

    def tree_logits(self, rows: Sequence[Row], active: list[int], tree: Draft) -> Tensor:
        return self._mirror_rows.tree_logits(rows, active, tree)

    def whole_chains(
        self, rows: Sequence[Row], requests: Sequence[ChainRequest], decision: ChainDecision
    ) -> DrawnChains | None:
        return self._mirror_rows.draft_chains(rows, requests, decision)

    def release(self, row: Row) -> None:
        super().release(row)
        self._mirror_rows.release(row)

    def reset_prefix_cache(self) -> None:
        self.runtime.reset_prefix_cache()

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
        self._mirror_rows.rewind(mirrors)
        for mirror, tokens in zip(mirrors, texts, strict=True):
            new = tokens[mirror.num_committed :]
            mirror.row.tokens[mirror.num_committed :] = [self._known_token(token) for token in new]
        if len(known) < len(rows):
            self._admit([row for row in rows if row not in self._mirror_rows])
            mirrors = [self._mirror_rows[row] for row in rows]
        self._mirror_rows.prefill(mirrors, max_tokens)

    def _admit(self, rows: Sequence[Row]) -> None:
        mirrors = {}
        for row in rows:
            mirror_row = Row([self._known_token(token) for token in self.tokens_of(row)], row.params)
            mirrors[row] = MirrorRow(mirror_row, num_committed=len(mirror_row.tokens))
        self._mirror_rows.admit(mirrors)

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
