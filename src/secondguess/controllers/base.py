"""The contract of whoever decides how far to guess.

Non-anticipation (DSpark, arXiv 2607.05147, appendix A): whether a *sampled* node is verified may depend on
earlier tokens and on the drafter's law, never on the node's own token. The types enforce it: `budget` is
asked before anything is drawn, `go_on` is shown laws and not tokens, and a node once drawn always stays in
the draft.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor

from secondguess.core import Draft, Row, Verdict
from secondguess.names import Name, refuse_argument, refuse_options

MAX_DRAFT_LENGTH = 64
"""No draft is useful beyond this many nodes: a larger number in a name is a mistake."""


class Controller(ABC):
    """Decides how many nodes to draft.

    Attributes:
        name: as given to `--controller`, with the options that were used.
        reads_laws: False when `go_on` always says yes, so that drafters need not make a law to ask it.
    """

    name: str
    reads_laws: bool = True

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
    def budget(self, row: Row) -> int:
        """The largest number of nodes to draft for this row in the coming round; 0 is plain decoding."""

    def go_on(self, rows: Sequence[Row], laws: Tensor, depth: int) -> list[bool]:
        """Per row, whether to draft another node after one drawn from `laws` `[row, vocab]`.

        The laws are the draft model's own, before sampling settings (which make them one-hot at temperature
        0). The line of a row that drew no node at this depth means nothing, and neither does its answer.
        """
        return [True] * len(rows)

    def learn(self, rows: Sequence[Row], draft: Draft, verdict: Verdict) -> None:
        """See how the round went; what is learnt serves later rounds. Rounds run in inference mode."""
