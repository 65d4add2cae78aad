"""The contract of whoever guesses.

A drafter owns its state per row and can always rejoin the truth: `observe` is called after each commit, when
`row.tokens` already holds what was decided.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from secondguess.core import Budgets, Draft, Prospect, Row, Verdict
from secondguess.errors import BadInputError
from secondguess.names import Name, refuse_argument, refuse_options
from secondguess.noise import Noise
from secondguess.runtime.base import Hidden, Runtime


def _no_head(name: Name) -> Path:
    raise BadInputError(
        f"expected a target for the drafter {name}, which drafts with the target's own states, got none; name one, as in "
        "--model builtin"
    )


@dataclass(frozen=True)
class Supplies:
    """What a drafter may need from outside when it is made from its name.

    Args:
        target_vocab_size: width of the target's logits.
        load_draft_model: gives the runtime of the model at a path.
        find_head: gives the folder of what a name's drafter was trained to be: the one that the name says, or the one that
            was shipped for the target. To be asked before `target`.
        target: whom the drafts are for, when it is loaded.
    """

    target_vocab_size: int
    load_draft_model: Callable[[str], Runtime]
    find_head: Callable[[Name], Path] = _no_head
    target: Runtime | None = None

    def require_target(self, name: Name) -> Runtime:
        """The target, for a drafter that borrows from it.

        Raises:
            BadInputError: there is none.
        """
        if self.target is None:
            self.find_head(name)
            _no_head(name)
        assert self.target is not None
        return self.target


class Drafter(ABC):
    """Guesses nodes that continue each row's pending token.

    Attributes:
        name: as given to `--drafter`, with the options that were used.
        certain: True when drafts never carry a law (`Draft.probs` is None): look-ups and argmax heads.
        may_branch: whether a draft of its may be more than a single path; False for whoever guesses chains only.
        default_controller: name of the controller that suits it when the user names none.
        hidden_layers: of the target, whose states `begin` and `observe` are to be given.
        runs_target: whether it guesses with the target's own layers.
    """

    name: str
    certain: bool
    may_branch: bool = False
    default_controller: str = "cost"
    hidden_layers: Sequence[int] = ()
    runs_target: bool = False

    @classmethod
    def build(cls, name: Name, supplies: Supplies) -> Drafter:
        """Make the drafter that a user's name asks for; override it to take an argument or options.

        Raises:
            BadInputError: an argument or an option that this drafter does not take.
        """
        refuse_argument(name, "drafter")
        refuse_options(name, "drafter")
        return cls()

    def begin(self, rows: Sequence[Row], hidden: Sequence[Hidden] = ()) -> None:
        """Admit rows; they hold their whole prompt. What takes long and may never be needed is for `prepare`.

        Args:
            hidden: per row, the target's hidden states `[position, width]` of all tokens but the last, by layer, of
                those in `hidden_layers`.
        """

    def prospects(self, rows: Sequence[Row]) -> Sequence[Sequence[Prospect]]:
        """Per row, the ways in which it could be drafted for now, the preferred one first; at least one.

        A look-up can say how good its match is. What is said must be known before anything is drafted.
        """
        return [(Prospect(certain=self.certain),)] * len(rows)

    def prepare(self, rows: Sequence[Row], parts: Sequence[int]) -> None:
        """Get ready to draft for these rows, by these parts: called before `propose` in every round that drafts.

        A draft model reads here what it has not read yet. Its time counts as prefill.
        """

    def decline(self, num_rows: int, noise: Noise, law_width: int) -> Draft:
        """The draft of a round in which nobody is to be drafted for; its laws, where it has some, are of `law_width` tokens.

        Laws or none decides what rule judges the round, so this has to agree with `propose`.
        """
        certain = self.certain or noise.all_greedy
        return Draft.empty(num_rows, noise.device, None if certain else law_width)

    @abstractmethod
    def propose(self, rows: Sequence[Row], budgets: Budgets, noise: Noise) -> Draft:
        """Guess at most `budgets.lengths[i]` levels for row i: of a chain, nodes. Called where some row has a budget.

        A sampled node is drawn with `noise.draft` from the law that is reported in `Draft.probs`, after the
        row's own sampling settings; after each level `budgets.go_on` decides, from its law, whether to go on.
        """

    def observe(self, rows: Sequence[Row], verdict: Verdict, hidden: Hidden) -> None:
        """See what was committed (`row.tokens` is already extended) and roll back what was not.

        Args:
            hidden: the target's states `[row, node + 1, width]` behind pending and behind each node, by layer.

        Rounds run in inference mode: clone tensors that are to be trained on.
        """

    def end(self, row: Row) -> None:
        """Release what is held for a row."""


@lru_cache(maxsize=4096)
def only_choice(longest: int, unread: int = 0) -> tuple[Prospect]:
    """What a drafter with laws has to offer for a row, remembered: it is asked in every round, and mostly says the same."""
    return (Prospect(longest=longest, unread=unread),)
