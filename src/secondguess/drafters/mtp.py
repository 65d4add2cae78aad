"""MTP drafter: a multi-token-prediction module (DeepSeek-V3, arXiv 2412.19437).

Use `mtp` for the module in the target's checkpoint or shipped for the target, `mtp:PATH` for one
that was trained for it, and `mtp,tree=3x2x1` for trees.
"""

from __future__ import annotations

from typing import Self

from secondguess.drafters.base import DrafterResources
from secondguess.drafters.mirroring import FeatureStepper
from secondguess.drafters.sampling_drafter import SamplingDrafter
from secondguess.heads.mtp import MtpHead
from secondguess.names import Name


class MtpDrafter(SamplingDrafter):
    """Drafter that applies one MTP module repeatedly, each step to the token drafted before."""

    @classmethod
    def build(cls, name: Name, resources: DrafterResources) -> Self:
        return cls.build_with_head(name, resources, MtpHead.load, FeatureStepper)
