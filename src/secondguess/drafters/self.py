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
from secondguess.runtime.weight_format import INT4, WeightFormat

FORMATS = {each.name: each for each in (INT4,)}


class SelfDrafter(SamplingDrafter):
    """Drafter that runs a copy of the target with quantised weights.

    Args:
        target: target to copy; the kernels must run it in bfloat16.
        weight_format: encoding of the copy's weights.
        name, shape: as in `SamplingDrafter`.

    Raises:
        UnsupportedModelError: a target that cannot be copied.
    """

    uses_target_layers = True
    argument = INT4.name

    def __init__(
        self, target: Runtime, weight_format: WeightFormat, name: str, shape: TreeShape | None = None
    ) -> None:
        super().__init__(name, target.vocab_size, target.device, shape)
        self._copy = target.quantised_copy(weight_format)
        self._chains: list[list[int]] = []
        self._nums_known: list[int] = []
        """Number of queries per row, pending and nodes, that the copy has run in this round."""

    @classmethod
    def requirements(cls, name: Name, head: Path | None = None) -> Requirements:
        read_tree_options(name)
        return Requirements(target_copy=_format_of(name))

    @classmethod
    def build(cls, name: Name, resources: DrafterResources) -> SelfDrafter:
        shown, shape = read_tree_options(name)
        return cls(resources.require_target(name), _format_of(name), shown, shape)

    def start(self, rows: Sequence[Row], longest: int) -> None:
        self._chains = [[] for _ in rows]
        self._nums_known = [0] * len(rows)

    def chain_logits(self, rows: Sequence[Row], active: list[int]) -> Tensor:
        chains = Draft.chains([self._chains[index] for index in active], device=self.device)
        return expand_to_batch(self._run(rows, active, chains)[:, -1], len(rows), active)

    def extend(self, rows: Sequence[Row], active: list[int], tokens: list[int]) -> None:
        for index in active:
            self._chains[index].append(tokens[index])

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


def _format_of(name: Name) -> WeightFormat:
    if name.argument not in FORMATS:
        raise BadInputError(
            f"expected the encoding of the copied weights, {' or '.join(f'self:{each}' for each in FORMATS)}, got {name}"
        )
    return FORMATS[name.argument]
