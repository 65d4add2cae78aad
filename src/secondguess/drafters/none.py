"""Drafter for plain decoding, the baseline that other drafters are compared with."""

from __future__ import annotations

from collections.abc import Sequence

from secondguess.core import Budgets, Draft, Row
from secondguess.drafters.base import Drafter
from secondguess.sampling.noise import Noise


class NoDrafter(Drafter):
    """Drafter that returns an empty draft for every row."""

    is_of_package = True
    name = "none"
    deterministic = True
    never_drafts = True
    default_controller = "fixed:0"

    def propose(self, rows: Sequence[Row], budgets: Budgets, noise: Noise) -> Draft:
        return Draft.empty(len(rows), noise.device)
