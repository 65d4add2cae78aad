"""Block drafter: a block of draft positions in one forward pass (DSpark, arXiv 2607.05147).

Use `dspark:PATH`, or `dspark:PATH,tree=3x2x1` for trees.

The backbone runs once per draft, over pending and mask tokens. After that a node costs one small
matrix product: the Markov head adds a bias to the logits that depends on the preceding token (in a
tree, the node's parent). The target's hidden states of committed tokens become keys and values
when the row is next drafted for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from secondguess.core import Budgets, Candidate, Draft, Row, Verdict
from secondguess.drafters.base import DrafterResources, single_candidate
from secondguess.drafters.hidden_states import HiddenStateBuffer
from secondguess.drafters.mirroring import PREFILL_THRESHOLD
from secondguess.drafters.sampling_drafter import SamplingDrafter, expand_to_batch
from secondguess.drafters.trees import TreeShape, read_tree_options
from secondguess.heads.context import FeatureCache
from secondguess.heads.dspark import DsparkHead
from secondguess.names import Name
from secondguess.noise import Noise
from secondguess.runtime.base import HiddenStates, Runtime


class Block(NamedTuple):
    """Output of the backbone in a round, for every row (zeros for rows that are not drafted for).

    Args:
        backbone_hidden: `[row, position, width]`, hidden states at the draft positions.
        base: `[row, position, word]`, logits before the Markov head, over the head's vocabulary.
    """

    backbone_hidden: Tensor
    base: Tensor


class DsparkDrafter(SamplingDrafter):
    """Drafter that uses a DSpark or DFlash head.

    Args:
        head: on the target's device.
        target: target whose hidden states the head reads.
        name, shape: as in `SamplingDrafter`.
    """

    def __init__(self, head: DsparkHead, target: Runtime, name: str, shape: TreeShape | None = None) -> None:
        super().__init__(name, target.vocab_size, target.device, shape)
        self.hidden_layers = head.hidden_layers
        self.head = head.eval().requires_grad_(False)
        self._context = FeatureCache(target.device)
        self._hidden_buffer = HiddenStateBuffer(head.hidden_layers)
        self._longest = 0
        self._block: Block | None = None
        self._previous: list[list[int]] = []

    @classmethod
    def build(cls, name: Name, resources: DrafterResources) -> DsparkDrafter:
        options, shape = read_tree_options(name)
        folder = resources.find_head_folder(name)
        target = resources.require_target(name)
        head = DsparkHead.load(folder, target.embedding_and_head(), target.vocab_size).to(target.device)
        argument = "" if name.argument is None else f":{name.argument}"
        return cls(head, target, f"{name.kind}{argument}{options}", shape)

    def begin(self, rows: Sequence[Row], hidden: Sequence[HiddenStates] = ()) -> None:
        for row, of_row in zip(rows, hidden, strict=True):
            self._hidden_buffer.begin(row, of_row)

    def observe(self, rows: Sequence[Row], verdict: Verdict, hidden: HiddenStates) -> None:
        super().observe(rows, verdict, hidden)
        self._hidden_buffer.observe(rows, verdict, hidden)

    def candidates(self, rows: Sequence[Row]) -> list[tuple[Candidate]]:
        return [single_candidate(self.room(row), self._rounded_num_uncached(row)) for row in rows]

    def room(self, row: Row) -> int:
        """Return how many levels fit a block and the row.

        0 for a row of one token, for which the target has no hidden states yet.
        """
        if len(row.tokens) < 2:
            return 0
        depth = self.head.shape.num_guesses if self.shape is None else self.shape.depth
        return min(depth, self.head.shape.num_guesses, row.room)

    def prepare(self, rows: Sequence[Row], parts: Sequence[int]) -> None:
        """Compute keys and values from the hidden states received since the last draft."""
        behind = [row for row in rows if self.room(row) > 0 and self._hidden_buffer.has(row)]
        far = [row for row in behind if self._num_uncached(row) > PREFILL_THRESHOLD]
        near = [row for row in behind if self._num_uncached(row) <= PREFILL_THRESHOLD]
        # Each row that is far behind goes alone: rows with few new tokens would be mostly padding.
        for group in [*([row] for row in far), near]:
            if group:
                self._read(group)

    def _read(self, rows: Sequence[Row]) -> None:
        layers = self.head.hidden_layers
        heard = [self._hidden_buffer.take(row) for row in rows]
        counts = [len(states[layers[0]]) for states in heard]
        together = {layer: pad_sequence([states[layer] for states in heard], True) for layer in layers}
        starts = torch.tensor([self._context.length(row) for row in rows], device=self.device)
        positions = starts[:, None] + torch.arange(max(counts), device=self.device)
        keys_values = self.head.context(self.head.features(together), positions)
        self._context.append(rows, counts, keys_values)

    def _num_uncached(self, row: Row) -> int:
        return len(row.tokens) - 1 - self._context.length(row)

    def _rounded_num_uncached(self, row: Row) -> int:
        """Return `_num_uncached` rounded down to multiples of `PREFILL_THRESHOLD`, so that few values occur."""
        num_uncached = self._num_uncached(row)
        return (
            num_uncached // PREFILL_THRESHOLD * PREFILL_THRESHOLD if num_uncached > PREFILL_THRESHOLD else 0
        )

    def propose(self, rows: Sequence[Row], budgets: Budgets, noise: Noise) -> Draft:
        self._block = None
        self._longest = min(budgets.longest, self.head.shape.num_guesses)
        self._previous = [[row.pending for row in rows]]
        return super().propose(rows, budgets, noise)

    def _run_backbone(self, rows: Sequence[Row], active: list[int]) -> Block:
        """Run the backbone on the active rows, and the output matrix once for all positions."""
        members = [rows[index] for index in active]
        attend = self._context.attend(members, self.head.shape.block_size)
        anchors = torch.tensor([row.pending for row in members], device=self.device)
        positions = torch.tensor([len(row.tokens) - 1 for row in members], device=self.device)
        backbone_hidden = self.head.run_backbone(anchors[:, None], positions[:, None], attend)[
            :, 0, : self._longest
        ]
        base = self.head.base_logits(backbone_hidden)
        base = base if base.dtype == torch.float64 else base.float()
        return Block(*(expand_to_batch(each, len(rows), active) for each in (backbone_hidden, base)))

    def chain_logits(self, rows: Sequence[Row], active: list[int]) -> Tensor:
        if self._block is None:
            self._block = self._run_backbone(rows, active)
        previous = torch.tensor(self._previous[-1], device=self.device)
        return self.head.to_target_vocab(
            self.head.add_markov_bias(self._block.base[:, len(self._previous) - 1], previous)
        )

    def extend(self, rows: Sequence[Row], active: list[int], tokens: list[int]) -> None:
        self._previous.append(tokens)

    def acceptance_probs(self, depth: int) -> list[float] | None:
        """Return the confidence head's acceptance probabilities; it reads the preceding token."""
        if self._block is None or not self.head.shape.has_confidence:
            return None
        previous = torch.tensor(self._previous[depth], device=self.device)
        told: list[float] = (
            self.head.confidence(self._block.backbone_hidden[:, depth], previous).sigmoid().tolist()
        )
        return told

    def tree_logits(self, rows: Sequence[Row], active: list[int], tree: Draft) -> Tensor:
        if self._block is None:
            self._block = self._run_backbone(rows, active)
        level = int(tree.depths.max()) if tree.num_nodes else 0
        pending = torch.tensor(self._previous[0], device=self.device)[:, None]
        previous = torch.cat((pending, tree.tokens), 1)
        base = self._block.base[:, level, None].expand(-1, tree.num_nodes + 1, -1)
        return self.head.to_target_vocab(self.head.add_markov_bias(base, previous))

    def end(self, row: Row) -> None:
        self._hidden_buffer.end(row)
        self._context.end(row)
