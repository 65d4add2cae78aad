"""Interface of controllers, which choose the draft length.

Non-anticipation (DSpark, arXiv 2607.05147, appendix A): whether a *sampled* node is verified may
depend on earlier tokens and on the draft distribution, never on the node's own token. The
interface enforces it: `plan` is called before anything is drawn, `keep_drafting` receives distributions
and not tokens, and a drawn node always stays in the draft.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from secondguess.controllers.draft_probs import DraftProbs
from secondguess.core import Candidate, Draft, Plan, RoundTime, Row, Verdict
from secondguess.names import Name, refuse_argument, refuse_options


class Controller(ABC):
    """Base class of controllers, which choose how many levels (in a chain, nodes) to draft.

    Attributes:
        name: as given to `--controller`, with the options in use.
        uses_probs: False if `keep_drafting` always returns True, so that drafters need not compute
            probabilities to call it.
        needs_probs: True if the controller cannot be used with drafters that have no probabilities
            (n-gram and suffix lookup).
        measures_plain: True after `plan` if its round measures plain decoding, so that nothing may
            be drafted, not even what is certain to be accepted.
    """

    name: str
    uses_probs: bool = True
    needs_probs: bool = False
    measures_plain: bool = False

    @classmethod
    def build(cls, name: Name) -> Controller:
        """Return the controller for a parsed name; override it to take an argument or options.

        Raises:
            BadInputError: an argument, option or value that this controller does not accept.
        """
        refuse_argument(name, "controller")
        refuse_options(name, "controller")
        return cls()

    def begin_round(self, rows: Sequence[Row]) -> bool:
        """Begin a round; return False if nothing is drafted in it, whatever the candidates are.

        Then neither `plan` nor the drafter is called before the target's forward pass. A controller
        must not return False for rows with draft lengths or draft sources of their own.
        """
        return True

    @abstractmethod
    def plan(self, rows: Sequence[Row], candidates: Sequence[Sequence[Candidate]]) -> list[Plan]:
        """Return, for each row, the drafter to use and the maximum number of levels this round.

        Lengths beyond a candidate's `longest` or a row's room are cut by the drafter and the
        decoding loop.

        Args:
            candidates: per row, at least one draft candidate, the drafter's preferred one first.
        """

    def keep_drafting(self, rows: Sequence[Row], draft_probs: DraftProbs, depth: int) -> list[bool]:
        """Return, for each row, whether to draft another level after the one drawn from `draft_probs`.

        Args:
            draft_probs: draft distributions before sampling settings (which make them one-hot at
                temperature 0); in a tree, those at the level's most likely parent. The entry of a
                row that drew no node at this depth is meaningless, and so is its result.
        """
        return [True] * len(rows)

    def learn(self, rows: Sequence[Row], draft: Draft, verdict: Verdict, time: RoundTime) -> None:
        """Update the controller after a round, for later rounds. Rounds run in inference mode."""

    def release(self, row: Row) -> None:
        """Release the state kept for a row."""
