"""Drafter with the assistant of a Gemma 4 target. Use `gemma4-assistant:PATH`, and `gemma4-assistant:PATH,tree=3x2x1` for trees.

The assistant has no cache of its own: it reads the keys and values that the target has cached for
the committed tokens. So there is no prefill, and nothing is rolled back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from secondguess.core import MAX_DRAFT_LENGTH, Draft, Row
from secondguess.drafters.base import Requirements
from secondguess.drafters.last_state import LastStateDrafter
from secondguess.drafters.sampling_drafter import expand_to_batch
from secondguess.drafters.trees import TreeShape
from secondguess.errors import CheckpointError
from secondguess.heads.files import config_errors
from secondguess.heads.formats import StoredHead
from secondguess.heads.gemma_assistant import KIND, AssistantConfig, GemmaAssistant, TargetContext
from secondguess.names import Name
from secondguess.runtime.base import Runtime
from secondguess.sampling.probs import at_least_float32


@dataclass
class DraftRound:
    """State of a round: what the assistant reads, and its inputs at pending and the nodes so far.

    Args:
        members: indices of the rows that were active in the first level.
        contexts: the target's keys and values by kind of attention.
        states: `[member, query, target_width]`, inputs of the queries' children.
        nums_known: number of queries per member that have been run.
    """

    members: list[int]
    contexts: Mapping[str, TargetContext]
    states: Tensor
    nums_known: list[int]


class GemmaAssistantDrafter(LastStateDrafter):
    """Drafter that uses an assistant, each step for the token drafted before and the output there."""

    is_of_package = True
    load_head = staticmethod(GemmaAssistant.load)
    head: GemmaAssistant

    def __init__(
        self, head: GemmaAssistant, target: Runtime, name: str, shape: TreeShape | None = None
    ) -> None:
        super().__init__(head, target, name, shape)
        self._target = target
        self._layers = {kind: target.find_cached_layer(kind) for kind in head.head_sizes}
        for kind, layer in self._layers.items():
            if layer.head_size != head.head_sizes[kind]:
                raise CheckpointError(
                    f"expected an assistant for a target with heads of size {layer.head_size} in its {kind}, got one for "
                    f"heads of size {head.head_sizes[kind]}; use the target that it was trained for"
                )
        self._round: DraftRound | None = None

    @classmethod
    def requirements(cls, name: Name, head: Path | None = None) -> Requirements:
        if head is not None:
            with config_errors(head):
                AssistantConfig.read(StoredHead(head, KIND))
        return super().requirements(name, head)

    def room(self, row: Row) -> int:
        """Return how many levels can be drafted; 0 for a row without a state yet or with entries to compute again."""
        is_known = row in self._states and len(row.tokens) <= self.head.config.context_length
        if not is_known or self._target.num_to_prefill(row):
            return 0
        return min(MAX_DRAFT_LENGTH, row.room)

    def start(self, rows: Sequence[Row], longest: int) -> None:
        self._round = None

    def chain_logits(self, rows: Sequence[Row], active: list[int]) -> Tensor:
        chains = Draft.chains(self.chains, device=self.device)
        members, found = self._run(rows, active, chains)
        return expand_to_batch(found[:, -1], len(rows), members)

    def tree_logits(self, rows: Sequence[Row], active: list[int], tree: Draft) -> Tensor:
        members, found = self._run(rows, active, tree)
        logits = found.new_zeros(len(rows), tree.num_nodes + 1, found.shape[-1])
        logits[members, -found.shape[1] :] = found
        return logits

    def _run(self, rows: Sequence[Row], active: list[int], draft: Draft) -> tuple[list[int], Tensor]:
        """Return members, and logits `[member, query, vocab]` of the queries that some active row has not run."""
        round_ = self._round or self._begin_round(rows, active)
        self._round = round_
        members = [rows[index] for index in round_.members]
        drafts = draft.select(draft.lengths.new_tensor(round_.members))
        is_active = [index in active for index in round_.members]
        first = min(known for known, is_member in zip(round_.nums_known, is_active, strict=True) if is_member)
        pending = torch.tensor([[row.pending] for row in members], device=self.device)
        tokens = torch.cat((pending, drafts.tokens), 1)[:, first:]
        # The state of pending comes first, then those that the queries have left for their children.
        parents = torch.nn.functional.pad(drafts.parents + 2, (1, 0))[:, first:]
        index = parents[:, :, None].expand(-1, -1, round_.states.shape[-1])
        outputs = self.head(tokens, round_.states.gather(1, index), round_.contexts)
        left = self.head.post_projection(outputs)
        round_.states = torch.cat((round_.states[:, : first + 1], left), 1)
        round_.nums_known = [length + 1 for length in drafts.lengths.tolist()]
        return round_.members, at_least_float32(self.head.logits(outputs))

    def _begin_round(self, rows: Sequence[Row], active: list[int]) -> DraftRound:
        members = [rows[index] for index in active]
        states = torch.stack([self._states[row] for row in members])[:, None]
        keys_values = {
            kind: self._target.keys_and_values(members, layer) for kind, layer in self._layers.items()
        }
        contexts = self.head.read_target(keys_values, [len(row.tokens) - 1 for row in members])
        states = states.to(self.head.pre_projection.weight.dtype)
        return DraftRound(active, contexts, states, [0] * len(active))
