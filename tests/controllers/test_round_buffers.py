"""Several rounds with drafts share a decision and are learned from together."""

from __future__ import annotations

import pytest
from simulation import FixedConfidences, Simulation

from secondguess.controllers.cost.controller import CostController
from secondguess.controllers.cost.round_buffers import (
    MAX_DRAFTED_ROUNDS,
    MAX_UNRECORDED_LOSS,
    Decision,
    DraftedRoundBuffer,
)
from secondguess.core import Candidate, Draft, RoundTime, Row, Verdict
from secondguess.sampling import SamplingParams

CANDIDATE = Candidate()


def new_row() -> Row:
    return Row([0] * 50, SamplingParams(max_tokens=10**6, temperature=1.0))


def settled() -> tuple[CostController, Row]:
    """Return a controller that drafts for a row, right after it has learned."""
    controller, row = CostController(), new_row()
    for _ in range(100):
        run_round(controller, row, accepted=2)
    controller._learn_drafted()
    return controller, row


def run_round(controller: CostController, row: Row, accepted: int, candidate: Candidate = CANDIDATE) -> int:
    """Run a round with at most two draft tokens; return the planned length."""
    (plan,) = controller.plan([row], [(candidate,)])
    length = min(plan.length, 2)
    if length == 2:
        controller.keep_drafting([row], FixedConfidences([0.9]), 0)
    verdict = Verdict.from_chain([min(accepted, length)], [0])
    row.tokens.extend([0] * (1 + min(accepted, length)))
    draft = Draft.chains([[0] * length])
    controller.learn([row], draft, verdict, RoundTime(0.0, 0.1 * length, 1 + 0.2 * length))
    return plan.length


def num_learned(controller: CostController) -> float:
    (kind,) = controller.expectations._kinds.values()
    return kind.averages.count


def test_rounds_are_learned_from_together() -> None:
    controller, row = settled()
    before = num_learned(controller)
    for _ in range(MAX_DRAFTED_ROUNDS - 1):
        assert run_round(controller, row, accepted=2)
    assert num_learned(controller) == before
    run_round(controller, row, accepted=2)
    assert num_learned(controller) != before


def test_losses_are_learned_from_immediately() -> None:
    controller, row = settled()
    before = num_learned(controller)
    lost = 0.0
    while num_learned(controller) == before:
        run_round(controller, row, accepted=0)
        lost += 0.4
    assert lost <= MAX_UNRECORDED_LOSS + 0.4


@pytest.mark.parametrize("change", ["row", "end"])
def test_rounds_of_other_rows_are_learned_from_separately(change: str) -> None:
    controller, row = settled()
    run_round(controller, row, accepted=2)
    before = num_learned(controller)
    if change == "end":
        controller.release(row)
    else:
        controller.plan([new_row()], [(CANDIDATE,)])
    assert before != max(kind.averages.count for kind in controller.expectations._kinds.values())


def test_rounds_with_other_candidates_are_learned_from_together() -> None:
    """Each kind of candidate gets its own decision and its own statistics."""
    controller, row = settled()
    kinds = [Candidate(kind=kind) for kind in "ab"]
    for candidate in kinds * 40:
        run_round(controller, row, accepted=2, candidate=candidate)
    controller._learn_drafted()
    counts = [kind.averages.count for kind in controller.expectations._kinds.values()]
    decisions = []
    for number in range(MAX_DRAFTED_ROUNDS):
        assert [kind.averages.count for kind in controller.expectations._kinds.values()] == counts
        assert run_round(controller, row, accepted=2, candidate=kinds[number % 2])
        decisions.append(controller._decision)
    learned = [
        after.averages.count - before
        for after, before in zip(controller.expectations._kinds.values(), counts, strict=True)
    ]
    assert learned[0] == 0
    assert learned[1] == pytest.approx(learned[2]) != 0
    assert decisions[0] is not decisions[1]
    assert [decision is decisions[number % 2] for number, decision in enumerate(decisions)] == [
        True
    ] * MAX_DRAFTED_ROUNDS


def test_a_row_without_room_is_not_drafted_for() -> None:
    """The decision of buffered rounds ends with the row's room."""
    simulation = Simulation(lambda number, depth: 0.95)
    controller = CostController()
    simulation.play(controller, 50)
    row = Row([0] * 50, SamplingParams(max_tokens=6, temperature=1.0))
    while row.room > 0:
        (plan,) = controller.plan([row], [(CANDIDATE,)])
        assert plan.length <= max(row.room - 1, 0)
        length = min(plan.length, 1)
        verdict = Verdict.from_chain([length], [0])
        row.tokens.extend([0] * (1 + length))
        draft = Draft.chains([[0] * length])
        controller.learn([row], draft, verdict, RoundTime(0.0, 0.1 * length, 1 + 0.2 * length))


def test_a_decision_is_repeated_a_limited_number_of_times() -> None:
    """Rounds that are not learned from would otherwise repeat it for ever."""
    buffer, row, decision = DraftedRoundBuffer(), new_row(), Decision()
    candidates = [(CANDIDATE,)]
    buffer.begin([row])
    for _ in range(2):
        buffer.keep(candidates, decision)
        assert [buffer.decision([row], candidates) for _ in range(MAX_DRAFTED_ROUNDS)] == [
            decision
        ] * MAX_DRAFTED_ROUNDS
        assert buffer.decision([row], candidates) is None
        assert buffer.take() == []
        assert buffer.decision([row], candidates) is None
