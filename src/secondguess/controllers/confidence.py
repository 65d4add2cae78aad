"""Stop drafting once the drafter is no longer sure of what it has drafted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat
from operator import mul

from secondguess.controllers.base import Controller
from secondguess.controllers.laws import DraftLaws
from secondguess.core import MAX_DRAFT_LENGTH, Plan, Prospect, Row
from secondguess.names import Name, read_options, require_between, with_argument


@dataclass(frozen=True)
class ConfidenceOptions:
    """Options of `confidence:LENGTH,threshold=T`.

    Args:
        length: levels per round at most (in a chain, nodes), 0 to 64; 0 is plain decoding.
        threshold: draft on while the drafter gives its whole path at least this chance, 0 to 1.
    """

    length: int = 8
    threshold: float = 0.2

    def __post_init__(self) -> None:
        require_between("the draft length of the controller confidence", self.length, 0, MAX_DRAFT_LENGTH)
        require_between("the threshold of the controller confidence", self.threshold, 0, 1)


class ConfidenceController(Controller):
    """Drafts on while the path drafted so far would probably survive.

    A node's confidence is what the drafter foretells, if it was trained to, or else the largest probability of its law,
    before sampling settings. The product
    of confidences along the path estimates the chance that all of it is accepted, and so that a further node
    is worth anything at all: several middling nodes in a row are as good a reason to stop as one poor one.
    Only laws enter, never drawn tokens, so the rule does not anticipate.
    """

    needs_laws = True

    def __init__(self, options: ConfidenceOptions = ConfidenceOptions()) -> None:
        self.options = options
        self.name = f"confidence:{options.length},threshold={options.threshold:g}"
        self._survival: list[float] = []

    @classmethod
    def build(cls, name: Name) -> ConfidenceController:
        return cls(read_options(ConfidenceOptions, with_argument(name, "length"), "controller confidence"))

    def plan(self, rows: Sequence[Row], prospects: Sequence[Sequence[Prospect]]) -> list[Plan]:
        return [Plan(choices[0].part, self.options.length) for choices in prospects]

    def go_on(self, rows: Sequence[Row], laws: DraftLaws, depth: int) -> list[bool]:
        # A round begins at depth 0, which resets the products; rows that dropped out since are not read.
        so_far = repeat(1.0) if depth == 0 else self._survival
        self._survival = list(map(mul, so_far, laws.chances))
        return [survival >= self.options.threshold for survival in self._survival]
