"""EAGLE drafter: a decoder layer on the target's hidden states.

EAGLE-1 to 3, arXiv 2401.15077, 2406.16858, 2503.01840. Use `eagle:PATH`, or
`eagle:PATH,tree=dynamic` for trees.
"""

from __future__ import annotations

from secondguess.drafters.base import DrafterResources
from secondguess.drafters.feature import FeatureDrafter
from secondguess.drafters.trees import read_tree_options
from secondguess.heads.eagle_files import load_eagle
from secondguess.names import Name


class EagleDrafter(FeatureDrafter):
    """Drafter that uses a trained EAGLE head, in any of the published formats."""

    @classmethod
    def build(cls, name: Name, resources: DrafterResources) -> EagleDrafter:
        options, shape = read_tree_options(name)
        folder = resources.find_head_folder(name)
        target = resources.require_target(name)
        embedding_and_head = target.embedding_and_head()
        head = load_eagle(folder, embedding_and_head, target.vocab_size, target.num_layers, target.device)
        where = f":{name.argument}" if name.argument else ""
        head = head.to(target.device, embedding_and_head.dtype).eval()
        return cls(head, target, f"{name.kind}{where}{options}", shape)
