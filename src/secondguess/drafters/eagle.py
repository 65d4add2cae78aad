"""EAGLE drafter: a decoder layer on the target's hidden states.

EAGLE-1 to 3, arXiv 2401.15077, 2406.16858, 2503.01840. Use `eagle:PATH`, or
`eagle:PATH,tree=dynamic` for trees.
"""

from __future__ import annotations

from secondguess.drafters.feature_drafter import FeatureDrafter
from secondguess.heads.eagle import load_eagle


class EagleDrafter(FeatureDrafter):
    """Drafter that uses a trained EAGLE head, in any of the published formats."""

    is_of_package = True
    load_head = staticmethod(load_eagle)
