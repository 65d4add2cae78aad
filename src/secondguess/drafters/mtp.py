"""MTP drafter: a multi-token-prediction module (DeepSeek-V3, arXiv 2412.19437).

Use `mtp` for the module in the target's checkpoint or shipped for the target, `mtp:PATH` for one
that was trained for it, and `mtp,tree=3x2x1` for trees.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from secondguess.drafters.base import DrafterResources, Requirements
from secondguess.drafters.feature_drafter import FeatureDrafter
from secondguess.drafters.mtp_chain import MtpChainDrafter
from secondguess.heads.mtp import MtpHead, find_module
from secondguess.names import Name


class MtpDrafter(FeatureDrafter):
    """Drafter that applies one MTP module repeatedly, each step to the token drafted before.

    Several modules form a chain, in which each drafts one token (`MtpChainDrafter`).
    """

    is_of_package = True
    load_head = staticmethod(MtpHead.load)

    @classmethod
    def requirements(cls, name: Name, head: Path | None = None) -> Requirements:
        if head is not None:
            find_module(head)
        return super().requirements(name, head)

    @classmethod
    def build(cls, name: Name, resources: DrafterResources) -> Any:
        is_chain = find_module(resources.find_head_folder(name)).num_modules > 1
        return MtpChainDrafter.build(name, resources) if is_chain else super().build(name, resources)
