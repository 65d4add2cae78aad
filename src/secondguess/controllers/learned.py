"""Stop drafting when a trained predictor estimates that a rejection has become too likely."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from secondguess.builtin import acceptance_path
from secondguess.controllers.base import Controller
from secondguess.controllers.draft_probs import DraftProbs
from secondguess.controllers.predictor import PathFeatures, Predictor
from secondguess.core import MAX_DRAFT_LENGTH, Candidate, Plan, Row
from secondguess.names import Name, check_range, read_options


@dataclass(frozen=True)
class LearnedOptions:
    """Options of `learned:PATH,length=K,threshold=H`.

    Args:
        length: maximum levels per round (in a chain, nodes), 0 to 64; 0 is plain decoding.
        threshold: draft on while the predicted probability that any draft node is rejected is at
            most this, 0 to 1.
    """

    length: int = 8
    threshold: float = 0.3

    def __post_init__(self) -> None:
        check_range("the draft length of the controller learned", self.length, 0, MAX_DRAFT_LENGTH)
        check_range("the threshold of the controller learned", self.threshold, 0, 1)


class LearnedController(Controller):
    """Controller that drafts on while 1 - a_1 a_2 ... a_k <= threshold.

    a_i is the predicted acceptance probability of node i. The threshold form is optimal for fixed
    costs of drafting and verification (SpecDec++, arXiv 2405.19715). Only distributions, depths
    and request settings are used, never drawn tokens, so the rule is non-anticipating.

    Args:
        options: maximum draft length and threshold.
        path: the predictor file; None for the built-in one, trained for the built-in models.
    """

    needs_probs = True

    def __init__(self, options: LearnedOptions = LearnedOptions(), path: str | None = None) -> None:
        self.options = options
        where = "" if path is None else f":{path}"
        self.name = f"learned{where},length={options.length},threshold={options.threshold:g}"
        self._predictor = Predictor.read(acceptance_path() if path is None else Path(path))
        self._features = PathFeatures()
        self._survivals: list[float] = []

    @classmethod
    def build(cls, name: Name) -> LearnedController:
        return cls(read_options(LearnedOptions, name.options, "controller learned"), name.argument)

    def plan(self, rows: Sequence[Row], candidates: Sequence[Sequence[Candidate]]) -> list[Plan]:
        return [Plan(choices[0].part, self.options.length) for choices in candidates]

    def keep_drafting(self, rows: Sequence[Row], draft_probs: DraftProbs, depth: int) -> list[bool]:
        # Depth 0 begins a round and resets the products; those of rows that stopped are not used.
        survivals = self._survivals if depth else [1.0] * len(rows)
        probs = self._predictor.acceptance_probs(
            self._features.level_features(rows, draft_probs, depth), depth
        )
        self._survivals = [before * prob for before, prob in zip(survivals, probs, strict=True)]
        return [1 - survival <= self.options.threshold for survival in self._survivals]
