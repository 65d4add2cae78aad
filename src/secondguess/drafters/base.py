"""Interface of drafters.

A drafter owns its state per row and can always resynchronise it with the committed tokens:
`observe` is called after each commit, when `row.tokens` already holds them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import NoReturn

from secondguess.core import Budgets, Candidate, Draft, Row, Verdict
from secondguess.drafters.vocabulary.pair import VocabularyPair
from secondguess.errors import BadInputError
from secondguess.names import Name, refuse_argument, refuse_options
from secondguess.runtime.base import HiddenStates, Runtime
from secondguess.runtime.weight_format import WeightFormat
from secondguess.sampling.noise import Noise


def _refuse_without_target(name: Name) -> NoReturn:
    raise BadInputError(
        f"expected a target for the drafter {name}, which drafts with the target's own states, got none; name one, as in "
        "--model builtin"
    )


@dataclass(frozen=True)
class DrafterResources:
    """Resources available to a drafter that is built from its name.

    Args:
        target_vocab_size: width of the target's logits.
        load_draft_model: returns the runtime of the model at a path.
        pair_vocabularies: compares the target's tokenizer with that of the draft model for a name; None
            if it is the same.
        find_head_folder: returns the folder of the trained head for a name: the folder in the name, the
            head shipped for the target, or the target's own folder.
        target: runtime of the target, if there is one.
    """

    target_vocab_size: int
    load_draft_model: Callable[[str], Runtime]
    pair_vocabularies: Callable[[Name], VocabularyPair | None] = lambda name: None
    find_head_folder: Callable[[Name], Path] = _refuse_without_target
    target: Runtime | None = None

    def require_target(self, name: Name) -> Runtime:
        """Return the target, for a drafter that uses its weights or hidden states.

        Raises:
            BadInputError: there is no target.
        """
        if self.target is None:
            _refuse_without_target(name)
        return self.target


@dataclass(frozen=True)
class Requirements:
    """Requirements of a drafter, as far as its name determines them.

    Args:
        draft_model: name or path of the draft model.
        head: True if it reads the folder of a trained head (`DrafterResources.find_head_folder`).
        num_target_layers: smallest number of layers that the target must have.
        target_copy: encoding of the weights of a copy of the target, for a drafter that makes one.
        options: values of the options that `secondguess export` translates for other engines.
    """

    draft_model: str | None = None
    head: bool = False
    num_target_layers: int = 0
    target_copy: WeightFormat | None = None
    options: Mapping[str, float] = field(default_factory=dict)


class Drafter(ABC):
    """Base class of drafters, which propose tokens that continue each row's pending token.

    Attributes:
        name: as given to `--drafter`, with the options that were used.
        deterministic: True if drafts never carry probabilities (`Draft.probs` is None), as for n-gram
            and suffix lookup.
        never_drafts: True for plain decoding.
        can_draft_trees: True if drafts can be trees; False for drafters of chains only.
        default_controller: name of the controller used if the user names none.
        hidden_layers: layers of the target whose hidden states `begin` and `observe` receive.
        uses_target_layers: True if drafting runs layers of the target.
        needs_samples: True if it drafts from the samples of earlier rounds (`Verdict.samples`).
        draws_by_race: True if draft tokens use the Gumbel noise of a coupled row (`Row.coupled`), which makes
            drafts without probabilities match more often.
        shares_history: True if it drafts from the recent outputs of a row's owner (`Row.history`).
        argument: placeholder of its argument in help texts, such as PATH.
        is_of_package: True for drafters of this package, whose drafts the loop does not check. Set by each class;
            subclasses do not inherit it.
    """

    name: str
    deterministic: bool = False
    never_drafts: bool = False
    can_draft_trees: bool = False
    default_controller: str = "cost"
    hidden_layers: Sequence[int] = ()
    uses_target_layers: bool = False
    needs_samples: bool = False
    draws_by_race: bool = False
    shares_history: bool = False
    argument: str = "PATH"
    is_of_package: bool = False

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.is_of_package = vars(cls).get("is_of_package", False)

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of its parts, by part number (`Candidate.part`)."""
        return (self.name.partition(",")[0].partition(":")[0],)

    @property
    def parts_without_target(self) -> frozenset[int]:
        """Part numbers of the components that run no layers of the target."""
        return frozenset() if self.uses_target_layers else frozenset({0})

    @classmethod
    def requirements(cls, name: Name, head: Path | None = None) -> Requirements:
        """Check a user's name and return what it requires, before anything is loaded.

        Override it, like `build`, to accept an argument or options.

        Args:
            head: folder of the trained head, if one is required and was found.

        Raises:
            BadInputError: an argument or an option that this drafter does not accept.
            CheckpointError: a folder whose configuration cannot be read.
        """
        refuse_argument(name, "drafter")
        refuse_options(name, "drafter")
        return Requirements()

    @classmethod
    def build(cls, name: Name, resources: DrafterResources) -> Drafter:
        """Build the drafter for a user's name, which `requirements` has checked."""
        return cls()

    def admit(self, rows: Sequence[Row]) -> list[int | None]:
        """Add rows, which hold their whole prompt, before it is prefilled.

        Returns:
            Per row, the number of leading tokens that may be reused from the target's cache without
            their hidden states; None for all.
        """
        return [0 if self.hidden_layers else None] * len(rows)

    def begin(self, rows: Sequence[Row], hidden: Sequence[HiddenStates] = ()) -> None:
        """Begin to draft for rows whose prompt has been prefilled.

        Leave work that may never be needed to `prepare`.

        Args:
            hidden: per row, the target's hidden states `[position, width]` by layer, for the layers
                in `hidden_layers`, of all tokens but the last and those whose cache entries the
                target has reused.
        """

    def candidates(self, rows: Sequence[Row]) -> Sequence[Sequence[Candidate]]:
        """Return the draft candidates of each row, the preferred one first; at least one per row.

        They contain only what is known before drafting, such as the length of an n-gram match.
        """
        return [(Candidate(deterministic=self.deterministic),)] * len(rows)

    def prepare(self, rows: Sequence[Row], parts: Sequence[int], max_tokens: int | None = None) -> list[bool]:
        """Prepare to draft for rows; called before `propose` in every round that drafts.

        A draft model prefills its uncached tokens here. The time counts as prefill.

        Args:
            rows: rows with a draft length above 0.
            parts: per row, the number of the part that drafts for it (`Candidate.part`).
            max_tokens: number of tokens above which a row's prefill is left to `prefill`, so that the
                other rows of the round do not wait for it; None for no limit.

        Returns:
            Per row, True if it can be drafted for in this round.
        """
        return [True] * len(rows)

    @property
    def unfinished(self) -> list[Row]:
        """Rows whose prefill `prepare` has left to `prefill`; they have no candidates until it is done."""
        return []

    def prefill(self, rows: Sequence[Row], max_tokens: int) -> None:
        """Continue the prefill of unfinished rows by at most `max_tokens` tokens."""

    def empty_draft(self, num_rows: int, noise: Noise, vocab_size: int) -> Draft:
        """Return the empty draft of a round in which every draft length is 0.

        The verification rule depends on whether a draft has `probs`, so this must agree with
        `propose`.
        """
        deterministic = self.deterministic or noise.all_greedy
        return Draft.empty(num_rows, noise.device, None if deterministic else vocab_size)

    @abstractmethod
    def propose(self, rows: Sequence[Row], budgets: Budgets, noise: Noise) -> Draft:
        """Draft at most `budgets.lengths[i]` levels (in a chain, nodes) for row i.

        Called only if some length is above 0. A sampled node is drawn with `noise.draft` from the
        distribution reported in `Draft.probs`, which includes the row's own sampling settings.
        After each level, `budgets.keep_drafting` decides from its logits whether to draft another.
        """

    def observe(self, rows: Sequence[Row], verdict: Verdict, hidden: HiddenStates) -> None:
        """Process the committed tokens and roll back the others.

        `row.tokens` is already extended.
        Rounds run in inference mode: clone tensors before training on them.

        Args:
            hidden: the target's hidden states `[row, node + 1, width]` at pending and each node,
                by layer.
        """

    def release(self, row: Row) -> None:
        """Release the state held for a row."""

    def reset_prefix_cache(self) -> None:
        """Forget the cache entries of released rows, if any are kept."""


def prepare_drafter(
    drafter: Drafter, rows: Sequence[Row], budgets: Budgets, max_tokens: int | None
) -> Budgets:
    """Prepare a drafter for the rows that it drafts for; return budgets without rows that are not ready.

    Args:
        budgets: draft lengths and parts; rows with a source of their own have a negative part.
        max_tokens: as in `Drafter.prepare`.
    """
    parts, lengths = budgets.parts, list(budgets.lengths)
    members = [index for index, part in enumerate(parts) if part >= 0 and lengths[index] > 0]
    if not members:
        return budgets
    is_ready = drafter.prepare(
        [rows[index] for index in members], [parts[index] for index in members], max_tokens
    )
    for index, ready in zip(members, is_ready, strict=True):
        if not ready:
            lengths[index] = 0
    return budgets._replace(lengths=lengths)


@lru_cache(maxsize=4096)
def single_candidate(longest: int, num_uncached: int = 0) -> tuple[Candidate]:
    """Return the candidate of a drafter with a single one; cached, as the same values recur."""
    return (Candidate(longest=longest, num_uncached=num_uncached),)
