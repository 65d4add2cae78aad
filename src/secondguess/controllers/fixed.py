"""Constant draft length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from secondguess.controllers.base import Controller
from secondguess.core import MAX_DRAFT_LENGTH, Candidate, Plan, Row
from secondguess.names import Name, check_range, options_with_argument, read_options


@dataclass(frozen=True)
class FixedOptions:
    """Options of `fixed:LENGTH`.

    Args:
        length: levels per round (in a chain, nodes), 0 to 64; 0 is plain decoding.
    """

    length: int = 5

    def __post_init__(self) -> None:
        check_range("the draft length of the controller fixed", self.length, 0, MAX_DRAFT_LENGTH)


class FixedController(Controller):
    """Controller with the same draft length in every round."""

    uses_probs = False

    def __init__(self, options: FixedOptions = FixedOptions()) -> None:
        self.options = options
        self.name = f"fixed:{options.length}"

    @classmethod
    def build(cls, name: Name) -> FixedController:
        return cls(read_options(FixedOptions, options_with_argument(name, "length"), "controller fixed"))

    def plan(self, rows: Sequence[Row], candidates: Sequence[Sequence[Candidate]]) -> list[Plan]:
        return [Plan(choices[0].part, self.options.length) for choices in candidates]
