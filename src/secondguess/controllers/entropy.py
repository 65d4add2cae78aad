"""Stop drafting where the drafter is undecided: AdaEDL (arXiv 2410.18351; SVIP, 2411.18462, stops by the same bound).

A node is accepted with probability 1 - TV(p, q). By Pinsker's inequality TV <= sqrt(KL(q || p) / 2), and with the
cross-entropy H(q, p) taken as a multiple of the drafter's entropy H(q), KL = H(q, p) - H(q), so that

    1 - TV  >=  1 - sqrt(g H(q))

bounds a node's acceptance from below by what the drafter knows. The constant g depends on the pair and the text; here it
is calibrated as rounds go by, so that on average the bound predicts what was accepted. The entropy says nothing of the target:
a drafter that is wrongly sure of itself is only found out by this calibration.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from secondguess.controllers.base import Controller
from secondguess.controllers.laws import DraftLaws
from secondguess.core import MAX_DRAFT_LENGTH, Draft, Plan, Prospect, RoundTime, Row, Verdict
from secondguess.names import Name, read_options, require_between, with_argument

MEMORY = 500.0
"""The calibration remembers about so many nodes."""
FIRST_CONSTANT = 0.2
STRENGTH = 16.0
"""How many nodes the first constant is worth."""


@dataclass(frozen=True)
class EntropyOptions:
    """Options of `entropy:LENGTH,threshold=T`.

    Args:
        length: levels per round at most (in a chain, nodes), 0 to 64; 0 is plain decoding.
        threshold: draft on while the bound gives the whole path at least this chance, 0 to 1.
    """

    length: int = 8
    threshold: float = 0.5

    def __post_init__(self) -> None:
        require_between("the draft length of the controller entropy", self.length, 0, MAX_DRAFT_LENGTH)
        require_between("the threshold of the controller entropy", self.threshold, 0, 1)


class EntropyController(Controller):
    """Drafts on while the product of the nodes' bounds along the path is large enough."""

    needs_laws = True

    def __init__(self, options: EntropyOptions = EntropyOptions()) -> None:
        self.options = options
        self.name = f"entropy:{options.length},threshold={options.threshold:g}"
        self._survival: list[float] = []
        self._roots: list[list[float]] = []
        self._has_laws: list[bool] = []
        # Sums over judged nodes, as if some had been seen that fit the first constant.
        self._rejected = STRENGTH * math.sqrt(FIRST_CONSTANT)
        self._root_entropy = STRENGTH

    @classmethod
    def build(cls, name: Name) -> EntropyController:
        return cls(read_options(EntropyOptions, with_argument(name, "length"), "controller entropy"))

    @property
    def constant(self) -> float:
        """g, as calibrated so far: what makes the mean of sqrt(g H) the share of nodes rejected."""
        return (self._rejected / self._root_entropy) ** 2

    def plan(self, rows: Sequence[Row], prospects: Sequence[Sequence[Prospect]]) -> list[Plan]:
        self._survival = [1.0] * len(rows)
        self._roots = [[] for _ in rows]
        # A look-up's nodes have no law: what stands in its rows' lines while another row is asked about means nothing.
        self._has_laws = [not choices[0].certain for choices in prospects]
        return [Plan(choices[0].part, self.options.length) for choices in prospects]

    def go_on(self, rows: Sequence[Row], laws: DraftLaws, depth: int) -> list[bool]:
        root_constant = math.sqrt(self.constant)
        for index, entropy in enumerate(laws.entropies):
            if not self._has_laws[index]:
                continue
            root = math.sqrt(max(entropy, 0.0))
            self._roots[index].append(root)
            self._survival[index] *= max(1 - root_constant * root, 0.0)
        return [survival >= self.options.threshold for survival in self._survival]

    def learn(self, rows: Sequence[Row], draft: Draft, verdict: Verdict, time: RoundTime) -> None:
        depths = draft.depths.tolist()
        for index, accepted in enumerate(verdict.lengths.tolist()):
            # Levels up to the first rejected one were judged on their own merits. Nobody asked about the last.
            for place, root in enumerate(self._roots[index][: min(accepted + 1, depths[index])]):
                self._see(root, place >= accepted)

    def _see(self, root: float, rejected: bool) -> None:
        decay = 1 - 1 / MEMORY
        self._rejected = self._rejected * decay + rejected
        self._root_entropy = self._root_entropy * decay + root
