"""Layer-skip drafter: the target without some of its layers (SWIFT, arXiv 2410.06916).

Use `layer-skip:PATH` or `layer-skip:2-5-6`.

No weights are copied or trained: `secondguess train layer-skip` searches for layers that can be
skipped on given prompts. After a skipped layer the hidden states differ from the target's, so the
drafter has its own KV cache for the remaining layers.
"""

from __future__ import annotations

from pathlib import Path

from secondguess.drafters.base import DrafterResources, Requirements
from secondguess.drafters.mirroring import TokenDrafter
from secondguess.drafters.trees import read_tree_options
from secondguess.errors import BadInputError
from secondguess.heads.skip import read_skipped
from secondguess.names import Name


class LayerSkipDrafter(TokenDrafter):
    """Drafter that runs the target without some of its layers."""

    is_of_package = True
    uses_target_layers = True

    @classmethod
    def requirements(cls, name: Name, head: Path | None = None) -> Requirements:
        read_tree_options(name)
        skipped = _parse(name.argument)
        needs_head = skipped is None
        if head is not None:
            skipped = read_skipped(head)
        num_layers = 1 + max(len(skipped), *skipped) if skipped else 0
        return Requirements(head=needs_head, num_target_layers=num_layers)

    @classmethod
    def build(cls, name: Name, resources: DrafterResources) -> LayerSkipDrafter:
        full_name, shape = read_tree_options(name)
        skipped = _parse(name.argument)
        if skipped is None:
            skipped = read_skipped(resources.find_head_folder(name))
        target = resources.require_target(name)
        return cls(target.skip_layers(skipped), full_name, resources.target_vocab_size, shape)


def _parse(argument: str | None) -> list[int] | None:
    """Return the layers in a list such as `2-5-6`; None if the argument is not such a list."""
    parts = (argument or "").split("-")
    if not all(part.isdecimal() for part in parts):
        return None
    layers = [int(part) for part in parts]
    if len(set(layers)) < len(layers):
        raise BadInputError(f"expected each layer once for layer-skip, got {argument}")
    return layers
