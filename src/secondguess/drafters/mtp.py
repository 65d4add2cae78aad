"""MTP drafter: a multi-token-prediction module (DeepSeek-V3, arXiv 2412.19437).

Use `mtp` for the module in the target's checkpoint or shipped for the target, `mtp:PATH` for one
that was trained for it, and `mtp,tree=3x2x1` for trees.
"""

from __future__ import annotations

from secondguess.drafters.base import DrafterResources
from secondguess.drafters.feature import FeatureDrafter
from secondguess.drafters.trees import read_tree_options
from secondguess.heads.mtp_files import load_mtp
from secondguess.names import Name


class MtpDrafter(FeatureDrafter):
    """Drafter that applies one MTP module repeatedly, each step to the token drafted before."""

    @classmethod
    def build(cls, name: Name, resources: DrafterResources) -> MtpDrafter:
        options, shape = read_tree_options(name)
        folder = resources.find_head_folder(name)
        target = resources.require_target(name)
        embedding_and_head = target.embedding_and_head()
        head = load_mtp(folder, embedding_and_head, target.vocab_size, target.num_layers)
        where = f":{name.argument}" if name.argument else ""
        head = head.to(target.device, embedding_and_head.dtype).eval()
        return cls(head, target, f"{name.kind}{where}{options}", shape)
