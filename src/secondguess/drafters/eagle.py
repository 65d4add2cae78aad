"""EAGLE drafter: a decoder layer on the target's hidden states.

EAGLE-1 to 3, arXiv 2401.15077, 2406.16858, 2503.01840. Use `eagle:PATH`, or
`eagle:PATH,tree=dynamic` for trees.
"""

from __future__ import annotations

from typing import Self

from secondguess.drafters.base import DrafterResources
from secondguess.drafters.mirroring import FeatureStepper
from secondguess.drafters.sampling_drafter import SamplingDrafter
from secondguess.heads.eagle import load_eagle
from secondguess.names import Name


class EagleDrafter(SamplingDrafter):
    """Drafter that uses a trained EAGLE head, in any of the published formats."""

    @classmethod
    def build(cls, name: Name, resources: DrafterResources) -> Self:
        return cls.build_with_head(name, resources, load_eagle, FeatureStepper)
