"""Block drafter: a block of draft positions in one forward pass (DSpark, arXiv 2607.05147).

Use `dspark:PATH`, or `dspark:PATH,tree=3x2x1` for trees.

The backbone runs once per draft, over pending and mask tokens. After that a node costs one small
matrix product: the Markov head adds a bias to the logits that depends on the preceding token (in a
tree, the node's parent), or on all tokens of the block before it. The target's hidden states of
committed tokens become keys and values when the row is next drafted for.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from secondguess.core import Draft, Row, Verdict
from secondguess.drafters.hidden_states import HiddenStateBuffer
from secondguess.drafters.sampling_drafter import PREFILL_THRESHOLD, HeadDrafter, expand_to_batch
from secondguess.drafters.trees import TreeShape
from secondguess.heads.dspark import DsparkHead
from secondguess.heads.native import block_runtime
from secondguess.heads.runtime import Block
from secondguess.runtime.base import HiddenStates, Runtime
from secondguess.sampling.probs import at_least_float32


class DsparkDrafter(HeadDrafter):
    """Drafter that uses a DSpark or DFlash head: its levels are the positions of a block."""

    is_of_package = True
    load_head = staticmethod(DsparkHead.load)
    head: DsparkHead

    def __init__(self, head: DsparkHead, target: Runtime, name: str, shape: TreeShape | None = None) -> None:
        super().__init__(head, target, name, shape)
        self.runtime = block_runtime(head, target)
        self._hidden_buffer = HiddenStateBuffer(head.hidden_layers)
        self._longest = 0
        self._block: Block | None = None
        self._previous: list[list[int]] = []

    def admit(self, rows: Sequence[Row]) -> list[int | None]:
        return [state.length for state in self.runtime.slots.admit(rows)]

    def begin(self, rows: Sequence[Row], hidden: Sequence[HiddenStates] = ()) -> None:
        for row, row_hidden in zip(rows, hidden, strict=True):
            self._hidden_buffer.begin(row, row_hidden)
            num_reused = len(row.tokens) - 1 - (len(row_hidden[self.hidden_layers[0]]) if row_hidden else 0)
            slots = self.runtime.slots
            if row not in slots:
                slots.admit([row], [num_reused])
            slots[row].length = min(slots[row].length, num_reused)

    def observe(self, rows: Sequence[Row], verdict: Verdict, hidden: HiddenStates) -> None:
        self._hidden_buffer.observe(rows, verdict, hidden)
        for row in rows:
            if self._is_beyond(row):
                self._hidden_buffer.begin(row, {})  # nothing will read them

    def release(self, row: Row) -> None:
        super().release(row)
        self._hidden_buffer.release(row)
        self.runtime.slots.release(row)

    def reset_prefix_cache(self) -> None:
        self.runtime.slots.forget()

    def room(self, row: Row) -> int:
        """Return how many levels fit a block, the row, and the context that the head was made for.

        0 for a row of one token, for which the target has no hidden states yet.
        """
        levels = min(self.head.config.num_drafted, row.room) if len(row.tokens) > 1 else 0
        left = self._num_left(row)
        return levels if left is None else max(0, min(levels, left))

    def _num_left(self, row: Row) -> int | None:
        """Return the number of draft positions before the end of the head's context; None if it has no end."""
        config = self.head.config
        limit = config.context_length
        return None if limit is None else limit - len(row.tokens) + 1 - config.first_drafted

    def _is_beyond(self, row: Row) -> bool:
        left = self._num_left(row)
        return left is not None and left <= 0

    def num_uncached(self, row: Row) -> int:
        return 0 if self._is_beyond(row) else len(row.tokens) - 1 - self.runtime.length(row)

    def catch_up(self, rows: Sequence[Row], max_tokens: int | None = None) -> None:
        """Compute keys and values from the hidden states received since the last draft."""
        behind = [row for row in rows if self._hidden_buffer.has(row)]
        far = [row for row in behind if self.num_uncached(row) > PREFILL_THRESHOLD]
        near = [row for row in behind if self.num_uncached(row) <= PREFILL_THRESHOLD]
        # Each row that is far behind goes alone: rows with few new tokens would be mostly padding.
        for group in [*([row] for row in far), near]:
            if group:
                self._read(group)

    def _read(self, rows: Sequence[Row]) -> None:
        self.runtime.append(rows, [self._hidden_buffer.take(row) for row in rows])

    def start(self, rows: Sequence[Row], longest: int) -> None:
        self._block = None
        self._longest = min(longest, self.head.config.num_drafted)
        # by position of the block: the tokens before it
        pending = [row.pending for row in rows]
        self._previous = [pending]
        if self.head.config.first_drafted:
            markov_head = self.head.markov_head
            precedes = markov_head is not None and markov_head.precedes_anchor
            self._previous.insert(0, [row.tokens[-2:][0] for row in rows] if precedes else pending)

    def _block_of(self, rows: Sequence[Row], active: list[int]) -> Block:
        """Return the block of this round; the backbone runs once, for the rows active at first."""
        if self._block is None:
            block = self.runtime.run([rows[index] for index in active], self._longest)
            self._block = Block(
                expand_to_batch(block.states, len(rows), active),
                expand_to_batch(at_least_float32(block.base), len(rows), active),
            )
        return self._block

    def _tokens_before(self, num_positions: int | None = None) -> Tensor:
        """Return the tokens before the first positions of the block, or all that are known, `[row, position]`."""
        return torch.tensor(self._previous[:num_positions], device=self.device).T

    def _logits(self, block: Block, previous: Tensor) -> Tensor:
        return self.head.vocabulary.to_target(self.runtime.logits(block, previous))

    def chain_logits(self, rows: Sequence[Row], active: list[int]) -> Tensor:
        return self._logits(self._block_of(rows, active), self._tokens_before())

    def extend(self, rows: Sequence[Row], active: list[int], tokens: list[int]) -> None:
        self._previous.append(tokens)

    def acceptance_probs(self, depth: int) -> list[float] | None:
        """Return the confidence head's acceptance probabilities; it reads the preceding token."""
        if self._block is None or not self.head.config.has_confidence:
            return None
        previous = self._tokens_before(self.head.config.first_drafted + depth + 1)
        probs: list[float] = self.runtime.confidence(self._block, previous).sigmoid().tolist()
        return probs

    def tree_logits(self, rows: Sequence[Row], active: list[int], tree: Draft) -> Tensor:
        before = self._tokens_before()
        nodes = torch.cat((before[:, -1:], tree.tokens), 1)
        parents = torch.cat((torch.zeros_like(before[:, -1:]), tree.parents + 1), 1)
        node = torch.arange(nodes.shape[1], device=self.device).expand_as(nodes)
        path: list[Tensor] = []  # of each node of the last level, from pending on
        for _ in range(max(tree.num_levels) + 1):
            path.insert(0, nodes.gather(1, node))
            node = parents.gather(1, node)
        earlier = before[:, None, :-1].expand(*nodes.shape, -1)
        return self._logits(self._block_of(rows, active), torch.cat((earlier, torch.stack(path, -1)), -1))
