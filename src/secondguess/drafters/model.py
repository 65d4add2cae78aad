"""Draft-model drafter: a smaller language model (arXiv 2211.17192, 2302.01318).

Use `model:PATH`, or `model:PATH,tree=3x2x1` for trees. A model with another tokenizer drafts text.
"""

from __future__ import annotations

from pathlib import Path

from secondguess.drafters.base import DrafterResources, Requirements
from secondguess.drafters.mirroring import TokenDrafter
from secondguess.drafters.trees import read_tree_options
from secondguess.drafters.vocabulary.drafter import TranslatingDrafter
from secondguess.errors import BadInputError
from secondguess.heads.folders import refuse_head
from secondguess.names import Name


class ModelDrafter(TokenDrafter):
    """Drafter that samples from a draft model."""

    is_of_package = True

    @classmethod
    def requirements(cls, name: Name, head: Path | None = None) -> Requirements:
        if not name.argument:
            raise BadInputError("expected the path of a draft model, as in model:PATH, got none")
        refuse_head(name.argument)
        read_tree_options(name)
        return Requirements(draft_model=name.argument)

    @classmethod
    def build(cls, name: Name, resources: DrafterResources) -> TokenDrafter:
        assert name.argument is not None  # by `requirements`
        full_name, shape = read_tree_options(name)
        pair = resources.pair_vocabularies(name)
        runtime, vocab_size = resources.load_draft_model(name.argument), resources.target_vocab_size
        if pair is None:
            return cls(runtime, full_name, vocab_size, shape)
        return TranslatingDrafter(runtime, full_name, vocab_size, pair)
