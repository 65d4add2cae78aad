"""Stop drafting when the drafter's confidence in the path drafted so far is too low."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat
from operator import mul

from secondguess.controllers.base import Controller
from secondguess.controllers.draft_probs import DraftProbs
from secondguess.core import MAX_DRAFT_LENGTH, Candidate, Plan, Row
from secondguess.names import Name, check_range, options_with_argument, read_options


@dataclass(frozen=True)
class ConfidenceOptions:
    """Options of `confidence:LENGTH,threshold=T`.

    Args:
        length: maximum levels per round (in a chain, nodes), 0 to 64; 0 is plain decoding.
        threshold: draft on while the estimated acceptance probability of the whole path is at
            least this, 0 to 1.
    """

    length: int = 8
    threshold: float = 0.2

    def __post_init__(self) -> None:
        check_range("the draft length of the controller confidence", self.length, 0, MAX_DRAFT_LENGTH)
        check_range("the threshold of the controller confidence", self.threshold, 0, 1)


class ConfidenceController(Controller):
    """Controller that drafts on while the product of confidences along the path is large enough.

    The confidence of a node is the acceptance probability that the drafter predicts, if it was
    trained to, or else the largest probability of its draft distribution before sampling settings.
    The product along the path estimates the probability that all of it is accepted, without which
    a further node is useless: several nodes of medium confidence are as good a reason to stop as
    one of low confidence. Only distributions are used, never drawn tokens, so the rule is
    non-anticipating.
    """

    needs_probs = True

    def __init__(self, options: ConfidenceOptions = ConfidenceOptions()) -> None:
        self.options = options
        self.name = f"confidence:{options.length},threshold={options.threshold:g}"
        self._path_confidence: list[float] = []

    @classmethod
    def build(cls, name: Name) -> ConfidenceController:
        return cls(
            read_options(ConfidenceOptions, options_with_argument(name, "length"), "controller confidence")
        )

    def plan(self, rows: Sequence[Row], candidates: Sequence[Sequence[Candidate]]) -> list[Plan]:
        return [Plan(choices[0].part, self.options.length) for choices in candidates]

    def keep_drafting(self, rows: Sequence[Row], draft_probs: DraftProbs, depth: int) -> list[bool]:
        # Depth 0 begins a round and resets the products; those of rows that stopped are not used.
        so_far = repeat(1.0) if depth == 0 else self._path_confidence
        self._path_confidence = list(map(mul, so_far, draft_probs.acceptance_estimates))
        return [survival >= self.options.threshold for survival in self._path_confidence]
