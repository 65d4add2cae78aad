"""Draft-model drafter: a smaller language model (arXiv 2211.17192, 2302.01318).

Use `model:PATH`, or `model:PATH,tree=3x2x1` for trees.
"""

from __future__ import annotations

from pathlib import Path

from secondguess.drafters.base import DrafterResources, Requirements
from secondguess.drafters.mirroring import TokenDrafter
from secondguess.drafters.optimal_tree import OptimalTree, measure_costs
from secondguess.drafters.trees import TreeOptions
from secondguess.errors import BadInputError
from secondguess.names import Name


class ModelDrafter(TokenDrafter):
    """Drafter that samples from a draft model."""

    @classmethod
    def requirements(cls, name: Name, head: Path | None = None) -> Requirements:
        if not name.argument:
            raise BadInputError("expected the path of a draft model, as in model:PATH, got none")
        TreeOptions.of(name)
        return Requirements(draft_model=name.argument)

    @classmethod
    def build(cls, name: Name, resources: DrafterResources) -> ModelDrafter:
        assert name.argument is not None  # by `requirements`
        options = TreeOptions.of(name)
        runtime = resources.load_draft_model(name.argument)
        shown = f"{name.kind}:{name.argument}{options}"
        if options.is_optimal:
            if resources.target is None:
                raise BadInputError(
                    f"expected a loaded target to plan the trees of {name} for, got none; give the tree, as in tree=2x2x1"
                )
            costs = measure_costs(resources.target, runtime, options.nodes)
            return cls(runtime, shown, resources.target_vocab_size, OptimalTree(options.nodes, costs))
        return cls(runtime, shown, resources.target_vocab_size, options.shape)
