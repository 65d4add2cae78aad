"""The target without some of its layers guesses: `layer-skip:PATH` or `layer-skip:2-5-6` (SWIFT, arXiv 2410.06916).

No weight is copied and nothing is trained: which layers can be spared for one's own text is found by search
(`secondguess train layer-skip`). Behind a layer that was left out states differ from the target's, so the drafts have a cache
of their own for the layers that remain.
"""

from __future__ import annotations

from secondguess.drafters.base import Supplies
from secondguess.drafters.shadow import ShadowDrafter
from secondguess.drafters.trees import read_tree_options
from secondguess.errors import BadInputError
from secondguess.heads.skip import read_skipped
from secondguess.names import Name


class LayerSkipDrafter(ShadowDrafter):
    """Drafts with some of the target's own layers."""

    runs_target = True

    @classmethod
    def build(cls, name: Name, supplies: Supplies) -> LayerSkipDrafter:
        options, shape = read_tree_options(name)
        skipped = _parse(name.argument)
        if skipped is None:
            skipped = read_skipped(supplies.find_head(name))
        target = supplies.require_target(name)
        runtime = target.without_layers(skipped)
        shown = f"{name.kind}{f':{name.argument}' if name.argument else ''}{options}"
        return cls(runtime, shown, supplies.target_vocab_size, shape)


def _parse(argument: str | None) -> list[int] | None:
    """Layers from `2-5-6`; None for what is no list of numbers."""
    parts = (argument or "").split("-")
    if not all(part.isdecimal() for part in parts):
        return None
    layers = [int(part) for part in parts]
    if len(set(layers)) < len(layers):
        raise BadInputError(f"expected each layer once for layer-skip, got {argument}")
    return layers
