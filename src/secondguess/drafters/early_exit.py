"""Early-exit drafter: the target's own first layers (arXiv 2404.16710, 2404.18911).

Use `early-exit:K`, or `early-exit[:PATH]` with an adapter.

The target has to run its first layers over the draft anyway: their cache entries are kept, and the
verification pass starts at the layer after them. So a draft step costs the first layers for the
preceding node, nothing is computed twice, and there is no second KV cache. (A tree that is pruned
after it was drawn is computed again.)
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from secondguess.core import Draft, Row
from secondguess.drafters.base import DrafterResources, Requirements
from secondguess.drafters.sampling_drafter import SamplingDrafter, load_trained
from secondguess.drafters.trees import TreeShape, read_tree_options
from secondguess.errors import BadInputError
from secondguess.heads.early_exit import EarlyExitHead
from secondguess.heads.native import exit_logits
from secondguess.names import Name
from secondguess.runtime.base import Runtime
from secondguess.sampling.probs import at_least_float32


class EarlyExitDrafter(SamplingDrafter):
    """Drafter that runs the target's first layers, an adapter or else the target's last norm, and its LM head."""

    is_of_package = True
    uses_target_layers = True

    def __init__(
        self,
        target: Runtime,
        num_layers: int,
        name: str,
        shape: TreeShape | None = None,
        head: EarlyExitHead | None = None,
    ) -> None:
        # Checked before any weights are used, so that a name can be rejected before they are loaded.
        target.require_partial_forward()
        if not 0 < num_layers < target.num_layers:
            raise BadInputError(
                f"expected an exit after layer 1 to {target.num_layers - 1} of the target's {target.num_layers}, "
                f"got {num_layers}"
            )
        super().__init__(name, target.vocab_size, target.device, shape)
        self._target = target
        self._num_layers = num_layers
        self._exit_logits = exit_logits(head, target)

    @classmethod
    def requirements(cls, name: Name, head: Path | None = None) -> Requirements:
        read_tree_options(name)
        if name.argument is None or not name.argument.isdecimal():
            return Requirements(head=True)
        exit_layer = int(name.argument)
        if exit_layer < 1:
            raise BadInputError(f"expected an exit after layer 1 or a later one, got {exit_layer}")
        return Requirements(num_target_layers=exit_layer + 1)

    @classmethod
    def build(cls, name: Name, resources: DrafterResources) -> EarlyExitDrafter:
        full_name, shape = read_tree_options(name)
        if name.argument is not None and name.argument.isdecimal():
            return cls(resources.require_target(name), int(name.argument), full_name, shape)
        if resources.target is not None:
            resources.target.require_partial_forward()
        head, target = load_trained(EarlyExitHead.load, name, resources)
        return cls(target, head.exit_layer, full_name, shape, head.eval().requires_grad_(False))

    def chain_logits(self, rows: Sequence[Row], active: list[int]) -> Tensor:
        return self._logits(self._read(rows, Draft.chains(self.chains, device=self.device))[:, -1])

    def tree_logits(self, rows: Sequence[Row], active: list[int], tree: Draft) -> Tensor:
        return self._logits(self._read(rows, tree))

    def _read(self, rows: Sequence[Row], draft: Draft) -> Tensor:
        # All rows, even without a draft: the target needs these layers for each pending token.
        return self._target.run_first_layers(rows, draft, self._num_layers)

    def _logits(self, states: Tensor) -> Tensor:
        return at_least_float32(self._exit_logits(states))
