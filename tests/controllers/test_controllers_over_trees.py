"""Controllers over trees: lengths count levels, and `cost` learns the cost of whole levels."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from secondguess.controllers import make_controller
from secondguess.controllers.cost.controller import CostController
from secondguess.controllers.draft_probs import DraftProbs
from secondguess.controllers.entropy import EntropyController
from secondguess.core import Candidate, Draft, RoundTime, Row, Verdict
from secondguess.decode import Components, decode
from secondguess.drafters.model import ModelDrafter
from secondguess.drafters.trees import StaticTree
from secondguess.proof.fakes import TableModel, random_probs
from secondguess.runtime.base import ForwardOutput
from secondguess.sampling import SamplingParams
from secondguess.stats import Stats, StatsRecorder
from secondguess.verifiers import make_verifier

VOCAB_SIZE, LEVELS = 6, 3


class Clock:
    """Stands still but for those who advance it."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class TimedModel(TableModel):
    """A forward takes these seconds, and more for each node."""

    def __init__(self, seed: int, clock: Clock, seconds: float, per_node: float) -> None:
        super().__init__(VOCAB_SIZE, random_probs(VOCAB_SIZE, seed))
        self.clock, self.seconds, self.per_node = clock, seconds, per_node

    def score(self, rows: Sequence[Row], draft: Draft) -> ForwardOutput:
        self.clock.now += self.seconds + self.per_node * draft.num_nodes
        return super().score(rows, draft)


def play(controller: str, per_node: float, same_dists: bool = True) -> tuple[Stats, CostController]:
    """400 tokens by a target that takes 1 second a pass and `per_node` more, with trees of 2, 4 and 4 nodes."""
    clock = Clock()
    drafter = ModelDrafter(
        TimedModel(1 if same_dists else 2, clock, 0.05, 0.0),
        "model:table,tree=2x2x1",
        VOCAB_SIZE,
        StaticTree((2, 2, 1)),
    )
    decider, recorder = make_controller(controller), StatsRecorder(clock)
    components = Components(
        TimedModel(1, clock, 1.0, per_node), drafter, make_verifier("auto"), decider, recorder
    )
    row = Row([0, 1], SamplingParams(temperature=1.0, max_tokens=400), seed=3)
    for _ in decode(components, [row]):
        pass
    return recorder.of(row), decider


def test_cost_drafts_whole_trees_if_they_pay_and_learns_their_cost() -> None:
    stats, controller = play("cost", per_node=0.02)
    assert min(stats.drafted_per_position) > 80
    assert len(stats.drafted_per_position) == LEVELS
    # A tree of three levels has ten nodes: the curve has their cost at 3, and no observation beyond.
    assert controller.times.pass_cost(1, LEVELS) == pytest.approx(10 * 0.02, rel=0.05)
    assert stats.tokens_per_second > 0.9 * play(f"fixed:{LEVELS}", per_node=0.02)[0].tokens_per_second


@pytest.mark.parametrize(("per_node", "same_dists"), [(0.8, True), (0.3, False)], ids=["dear", "poor"])
def test_cost_stops_drafting_trees_that_do_not_pay(per_node: float, same_dists: bool) -> None:
    stats, _ = play("cost", per_node, same_dists)
    assert stats.tokens_per_second > 0.97
    assert play(f"fixed:{LEVELS}", per_node, same_dists)[0].tokens_per_second < 0.9


def play_draft(controller: EntropyController | CostController, parents: list[int], accepted: int) -> None:
    """A round with one draft of this form, with another row that was asked about one level more."""
    rows = [Row([1], SamplingParams(max_tokens=100, temperature=1.0))]
    controller.plan(rows, [(Candidate(),)])
    draft = Draft(
        torch.zeros(1, len(parents), dtype=torch.long), torch.tensor([parents]), torch.tensor([len(parents)])
    )
    for depth in range(draft.num_levels[0] + 1):
        controller.keep_drafting(rows, DraftProbs(torch.zeros(1, 4)), depth)
    verdict = Verdict.from_chain([accepted], [0])
    seconds = 0.1 if parents else 0.0
    controller.learn(rows, draft, verdict, RoundTime(0.0, seconds, 1 + seconds))


def test_the_width_of_a_level_does_not_affect_entropy() -> None:
    narrow, broad = EntropyController(), EntropyController()
    play_draft(narrow, [-1], accepted=1)
    play_draft(broad, [-1, -1, -1], accepted=1)
    assert narrow.constant == broad.constant


def test_a_tree_accepted_to_its_last_level_counts_no_rejection() -> None:
    controller = CostController()
    for _ in range(4):
        play_draft(controller, [], accepted=0)
    for _ in range(8):
        play_draft(controller, [-1, -1, 0, 0, 1], accepted=2)
    acceptance = controller._acceptance.of(Row([1], SamplingParams(temperature=1.0)), Candidate())
    assert acceptance._any_node.total == acceptance._any_node.count > 0
