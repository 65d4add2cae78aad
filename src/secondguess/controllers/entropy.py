"""Stop drafting by the entropy of the draft distribution: AdaEDL (arXiv 2410.18351).

SVIP (arXiv 2411.18462) stops by the same bound. A node is accepted with probability 1 - TV(p, q).
By Pinsker's inequality TV <= sqrt(KL(q || p) / 2) with KL = H(q, p) - H(q). Taking the
cross-entropy H(q, p) as a multiple of the draft entropy H(q) gives

    1 - TV  >=  1 - sqrt(g H(q))

a lower bound on the acceptance probability that needs only the draft distribution. The constant g
depends on the model pair and the text; it is calibrated during decoding so that on average the
bound equals the observed acceptance. The entropy carries no information about the target: only
this calibration corrects an overconfident drafter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from secondguess.controllers.base import Controller
from secondguess.controllers.draft_probs import DraftProbs
from secondguess.core import MAX_DRAFT_LENGTH, Candidate, Draft, Plan, RoundTime, Row, Verdict
from secondguess.names import Name, check_range, options_with_argument, read_options

MEMORY = 500.0
"""Approximate number of nodes that the calibration averages over."""
FIRST_CONSTANT = 0.2
"""Initial g."""
PRIOR_WEIGHT = 16.0
"""Weight of the initial g, in nodes."""


@dataclass(frozen=True)
class EntropyOptions:
    """Options of `entropy:LENGTH,threshold=T`.

    Args:
        length: maximum levels per round (in a chain, nodes), 0 to 64; 0 is plain decoding.
        threshold: draft on while the lower bound on the acceptance probability of the whole path
            is at least this, 0 to 1.
    """

    length: int = 8
    threshold: float = 0.5

    def __post_init__(self) -> None:
        check_range("the draft length of the controller entropy", self.length, 0, MAX_DRAFT_LENGTH)
        check_range("the threshold of the controller entropy", self.threshold, 0, 1)


class EntropyController(Controller):
    """Controller that drafts on while the product of the nodes' bounds is large enough."""

    needs_probs = True

    def __init__(self, options: EntropyOptions = EntropyOptions()) -> None:
        self.options = options
        self.name = f"entropy:{options.length},threshold={options.threshold:g}"
        self._survival: list[float] = []
        self._roots: list[list[float]] = []
        self._has_dists: list[bool] = []
        # Sums over verified nodes, starting from `PRIOR_WEIGHT` nodes that fit the initial g.
        self._rejected = PRIOR_WEIGHT * math.sqrt(FIRST_CONSTANT)
        self._root_entropy = PRIOR_WEIGHT

    @classmethod
    def build(cls, name: Name) -> EntropyController:
        return cls(read_options(EntropyOptions, options_with_argument(name, "length"), "controller entropy"))

    @property
    def constant(self) -> float:
        """Calibrated g, for which the mean of sqrt(g H) equals the share of nodes rejected."""
        return (self._rejected / self._root_entropy) ** 2

    def plan(self, rows: Sequence[Row], candidates: Sequence[Sequence[Candidate]]) -> list[Plan]:
        self._survival = [1.0] * len(rows)
        self._roots = [[] for _ in rows]
        # Lookup nodes have no distribution: the entries of their rows in `draft_probs` are meaningless.
        self._has_dists = [not choices[0].deterministic for choices in candidates]
        return [Plan(choices[0].part, self.options.length) for choices in candidates]

    def keep_drafting(self, rows: Sequence[Row], draft_probs: DraftProbs, depth: int) -> list[bool]:
        root_constant = math.sqrt(self.constant)
        for index, entropy in enumerate(draft_probs.entropies):
            if not self._has_dists[index]:
                continue
            root = math.sqrt(max(entropy, 0.0))
            self._roots[index].append(root)
            self._survival[index] *= max(1 - root_constant * root, 0.0)
        return [survival >= self.options.threshold for survival in self._survival]

    def learn(self, rows: Sequence[Row], draft: Draft, verdict: Verdict, time: RoundTime) -> None:
        lengths = draft.num_levels
        for index, accepted in enumerate(verdict.lengths):
            # Levels after the first rejected one have no outcome of their own. The last level may
            # have no entropy, as `keep_drafting` need not be called after it.
            for depth, root in enumerate(self._roots[index][: min(accepted + 1, lengths[index])]):
                self._see(root, depth >= accepted)

    def _see(self, root: float, rejected: bool) -> None:
        decay = 1 - 1 / MEMORY
        self._rejected = self._rejected * decay + rejected
        self._root_entropy = self._root_entropy * decay + root
