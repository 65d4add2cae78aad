"""Early-exit drafter: the target's own first layers (arXiv 2404.16710, 2404.18911).

Use `early-exit:K`, or `early-exit[:PATH]` with an adapter.

The target has to run its first layers over the draft anyway: their cache entries are kept, and the
verification pass starts at the layer after them. So a draft step costs the first layers for the
preceding node, nothing is computed twice, and there is no second KV cache. (A tree that is pruned
after it was drawn is computed again.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from secondguess.core import Budgets, Draft, Row
from secondguess.drafters.base import DrafterResources, Requirements
from secondguess.drafters.sampling_drafter import SamplingDrafter
from secondguess.drafters.trees import TreeShape, read_tree_options
from secondguess.errors import BadInputError
from secondguess.heads.early_exit import EarlyExitHead
from secondguess.names import Name
from secondguess.noise import Noise
from secondguess.runtime.base import Runtime


class EarlyExitDrafter(SamplingDrafter):
    """Drafter that runs the target's first layers, an optional adapter, and the target's LM head.

    Args:
        target: target whose layers run; it must support `run_first_layers`.
        num_layers: number of layers to run.
        finish: maps their hidden states to the input of the LM head: an adapter, or the target's
            final norm.
        name, shape: as in `SamplingDrafter`.
    """

    uses_target_layers = True

    def __init__(
        self,
        target: Runtime,
        num_layers: int,
        finish: Callable[[Tensor], Tensor],
        name: str,
        shape: TreeShape | None = None,
    ) -> None:
        _check_exit(target, num_layers)
        super().__init__(name, target.vocab_size, target.device, shape)
        self._target = target
        self._num_layers = num_layers
        self._finish = finish
        self._unembed = target.ends().unembed
        self._chains: list[list[int]] = []

    @classmethod
    def requirements(cls, name: Name, head: Path | None = None) -> Requirements:
        if name.argument is None or not name.argument.isdecimal():
            return super().requirements(name, head)
        read_tree_options(name)
        exit_layer = int(name.argument)
        if exit_layer < 1:
            raise BadInputError(f"expected an exit behind layer 1 or a later one, got {exit_layer}")
        return Requirements(num_target_layers=exit_layer + 1)

    @classmethod
    def build(cls, name: Name, resources: DrafterResources) -> EarlyExitDrafter:
        options, shape = read_tree_options(name)
        if name.argument is not None and name.argument.isdecimal():
            target, num_layers, shown = resources.require_target(name), int(name.argument), name.argument
            _check_exit(target, num_layers)
            finish: Callable[[Tensor], Tensor] = target.ends().normalise
        else:
            folder = resources.find_head(name)
            target = resources.require_target(name)
            head = _load_head(folder, target)
            num_layers, finish, shown = head.exit_layer, head, name.argument or ""
        text = f"{name.kind}:{shown}{options}" if shown else f"{name.kind}{options}"
        return cls(target, num_layers, finish, text, shape)

    def propose(self, rows: Sequence[Row], budgets: Budgets, noise: Noise) -> Draft:
        self._chains = [[] for _ in rows]
        return super().propose(rows, budgets, noise)

    def chain_logits(self, rows: Sequence[Row], active: list[int]) -> Tensor:
        states = self._read(rows, Draft.chains(self._chains, device=self.device))
        return self._logits(states[:, -1])

    def extend(self, rows: Sequence[Row], active: list[int], tokens: list[int]) -> None:
        for index in active:
            self._chains[index].append(tokens[index])

    def tree_logits(self, rows: Sequence[Row], active: list[int], tree: Draft) -> Tensor:
        return self._logits(self._read(rows, tree))

    def _logits(self, states: Tensor) -> Tensor:
        logits = self._unembed(self._finish(states))
        return logits if logits.dtype == torch.float64 else logits.float()

    def _read(self, rows: Sequence[Row], draft: Draft) -> Tensor:
        # All rows, even without a draft: the target needs these layers for each pending token.
        return self._target.run_first_layers(rows, draft, self._num_layers)


def _check_exit(target: Runtime, num_layers: int) -> None:
    """Check that the target can exit after `num_layers` layers.

    `build` calls this before it uses any weights, so that a name can be rejected before the target
    is loaded.

    Raises:
        BadInputError: no such exit layer.
        UnsupportedModelError: a runtime whose layers cannot be run separately.
    """
    target.require_partial_forward()
    if not 0 < num_layers < target.num_layers:
        raise BadInputError(
            f"expected an exit behind layer 1 to {target.num_layers - 1} of the target's {target.num_layers}, "
            f"got {num_layers}"
        )


def _load_head(folder: Path, target: Runtime) -> EarlyExitHead:
    target.require_partial_forward()
    ends, head = target.ends(), EarlyExitHead.load(folder)
    width = head.norm.weight.shape[0]
    if width != ends.width:
        raise BadInputError(
            f"expected an adapter for states of width {ends.width}, got one for {width} in {folder}; "
            "it was trained for another target"
        )
    return head.to(device=target.device, dtype=ends.dtype).eval().requires_grad_(False)
