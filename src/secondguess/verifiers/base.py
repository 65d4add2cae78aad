"""The contract of whoever decides, and the arithmetic that several rules share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import StrEnum

from torch import Tensor

from secondguess.core import Draft, Row, Verdict
from secondguess.noise import Noise


class Exactness(StrEnum):
    """What a rule promises about the law of the text."""

    LOSSLESS = "lossless"
    """The text follows the target's law exactly."""
    DRAFTER_INVARIANT = "drafter-invariant"
    """Lossless, and for a given seed the text itself does not depend on the drafter or its draft lengths."""
    LOSSY = "lossy"
    """The law changes; never used unless asked for by name."""


class Verifier(ABC):
    """A pure function from a draft, the target's laws and noise to a verdict.

    Because every random decision is asked of `noise`, the law of a verdict can be enumerated exactly.
    """

    name: str
    exactness: Exactness
    supports_tree: bool = False

    def couples(self, seeded: bool) -> bool:
        """Whether a row's drafts should be drawn by the race that decides its text (`Row.coupled`)."""
        return False

    def promise(self, row: Row) -> Exactness:
        """What the text of this very row may claim."""
        return self.exactness

    @abstractmethod
    def judge(self, draft: Draft, target_probs: Tensor, noise: Noise) -> Verdict:
        """Decide which nodes become text and which token follows.

        Args:
            draft: nodes with the laws they were drawn from.
            target_probs: `[row, node + 1, vocab]`, after the row's sampling settings; rows sum to one.
            noise: answers this round's random questions.
        """
