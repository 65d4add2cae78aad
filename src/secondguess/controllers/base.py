"""The contract of whoever decides how far to guess.

Non-anticipation (DSpark, arXiv 2607.05147, appendix A): whether a *sampled* node is verified may depend on
earlier tokens and on the drafter's law, never on the node's own token. The types enforce it: `plan` is
asked before anything is drawn, `go_on` is shown laws and not tokens, and a node once drawn always stays in
the draft.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from secondguess.controllers.laws import DraftLaws
from secondguess.core import Draft, Plan, Prospect, RoundTime, Row, Verdict
from secondguess.names import Name, refuse_argument, refuse_options


class Controller(ABC):
    """Decides how many levels to draft: in a chain, nodes.

    Attributes:
        name: as given to `--controller`, with the options that were used.
        reads_laws: False when `go_on` always says yes, so that drafters need not make a law to ask it.
        needs_laws: True when it has nothing to decide by where the drafter has no laws (look-ups).
    """

    name: str
    reads_laws: bool = True
    needs_laws: bool = False

    @classmethod
    def build(cls, name: Name) -> Controller:
        """Make the controller that a user's name asks for; override it to take an argument or options.

        Raises:
            BadInputError: an argument, an option or a value that this controller does not take.
        """
        refuse_argument(name, "controller")
        refuse_options(name, "controller")
        return cls()

    @abstractmethod
    def plan(self, rows: Sequence[Row], prospects: Sequence[Sequence[Prospect]]) -> list[Plan]:
        """Per row, who guesses and how many levels at most in the coming round.

        Args:
            prospects: per row, the ways in which it could be drafted for, the drafter's own choice first;
                at least one. Lengths beyond `longest`, or beyond a row's room, are cut by others.
        """

    def go_on(self, rows: Sequence[Row], laws: DraftLaws, depth: int) -> list[bool]:
        """Per row, whether to draft another level after one drawn from `laws` at this depth.

        The laws are the draft model's own, before sampling settings (which make them one-hot at temperature
        0); of a tree's level, the law behind its likeliest parent. The line of a row that drew no node at this depth
        means nothing, and neither does its answer.
        """
        return [True] * len(rows)

    def learn(self, rows: Sequence[Row], draft: Draft, verdict: Verdict, time: RoundTime) -> None:
        """See how the round went; what is learnt serves later rounds. Rounds run in inference mode."""

    def end(self, row: Row) -> None:
        """Release what is held for a row."""
