"""Draft-model drafter: a smaller language model (arXiv 2211.17192, 2302.01318).

Use `model:PATH`, or `model:PATH,tree=3x2x1` for trees.
"""

from __future__ import annotations

from pathlib import Path

from secondguess.drafters.base import DrafterResources, Requirements
from secondguess.drafters.mirroring import TokenDrafter
from secondguess.drafters.trees import read_tree_options
from secondguess.errors import BadInputError
from secondguess.names import Name


class ModelDrafter(TokenDrafter):
    """Drafter that samples from a draft model."""

    @classmethod
    def requirements(cls, name: Name, head: Path | None = None) -> Requirements:
        if not name.argument:
            raise BadInputError("expected the path of a draft model, as in model:PATH, got none")
        read_tree_options(name)
        return Requirements(draft_model=name.argument)

    @classmethod
    def build(cls, name: Name, resources: DrafterResources) -> ModelDrafter:
        assert name.argument is not None  # by `requirements`
        shown, shape = read_tree_options(name)
        return cls(resources.load_draft_model(name.argument), shown, resources.target_vocab_size, shape)
