"""Self-drafter: the target's own layers with weights in 4 bits (ML-SpecQD, arXiv 2503.13565). Use `self:int4`.

A draft step reads about a third of the bytes of a target pass in bfloat16. The copy attends to the
keys and values that the target has cached for the committed tokens; its own, for pending and the
nodes, are overwritten when the target verifies them. So there is no second KV cache, no prefill and
no training.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from secondguess.core import Draft, Row
from secondguess.drafters.base import DrafterResources, Requirements
from secondguess.drafters.sampling_drafter import SamplingDrafter, expand_to_batch
from secondguess.drafters.trees import TreeShape, read_tree_options
from secondguess.errors import BadInputError
from secondguess.names import Name
from secondguess.runtime.base import Runtime
from secondguess.runtime.chains import ChainDecision, ChainRequest, DrawnChains
from secondguess.runtime.weight_format import INT4


class SelfDrafter(SamplingDrafter):
    """Drafter that runs a copy of the target with quantised weights."""

    is_of_package = True
    uses_target_layers = True
    argument = INT4.name

    def __init__(self, target: Runtime, name: str, shape: TreeShape | None = None) -> None:
        super().__init__(name, target.vocab_size, target.device, shape)
        self._copy = target.quantised_copy(INT4)
        self._nums_known: list[int] = []
        """Number of queries per row, pending and nodes, that the copy has run in this round."""

    @classmethod
    def requirements(cls, name: Name, head: Path | None = None) -> Requirements:
        read_tree_options(name)
        if name.argument != INT4.name:
            raise BadInputError(f"expected the encoding of the copied weights, self:{INT4.name}, got {name}")
        return Requirements(target_copy=INT4)

    @classmethod
    def build(cls, name: Name, resources: DrafterResources) -> SelfDrafter:
        full_name, shape = read_tree_options(name)
        return cls(resources.require_target(name), full_name, shape)

    def start(self, rows: Sequence[Row], longest: int) -> None:
        self._nums_known = [0] * len(rows)

    def chain_logits(self, rows: Sequence[Row], active: list[int]) -> Tensor:
        chains = Draft.chains([self.chains[index] for index in active], device=self.device)
        return expand_to_batch(self._run(rows, active, chains)[:, -1], len(rows), active)

    def whole_chains(
        self, rows: Sequence[Row], requests: Sequence[ChainRequest], decision: ChainDecision
    ) -> DrawnChains | None:
        return self._copy.draft_chains(rows, requests, decision)

    def tree_logits(self, rows: Sequence[Row], active: list[int], tree: Draft) -> Tensor:
        found = self._run(rows, active, tree.select(tree.lengths.new_tensor(active)))
        logits = found.new_zeros(len(rows), tree.num_nodes + 1, found.shape[-1])
        logits[active, -found.shape[1] :] = found
        return logits

    def _run(self, rows: Sequence[Row], active: list[int], draft: Draft) -> Tensor:
        """Return logits `[active row, query, vocab]` of the queries that some active row has not run."""
        num_known = min(self._nums_known[index] for index in active)
        logits = self._copy.draft_logits([rows[index] for index in active], draft, num_known)
        for index, length in zip(active, draft.lengths.tolist(), strict=True):
            self._nums_known[index] = length + 1
        return logits
