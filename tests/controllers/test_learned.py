"""The controller `learned`: a logistic regression that is fitted during decoding."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import numpy
import pytest
import torch

from secondguess.controllers import make_controller
from secondguess.controllers.draft_probs import DraftProbs
from secondguess.controllers.learned import LearnedController, LearnedOptions, node_features
from secondguess.core import Candidate, Draft, Plan, RoundTime, Row, Verdict
from secondguess.errors import BadInputError
from secondguess.sampling import SamplingParams

NO_TIME = RoundTime(0.0, 0.0, 1.0)


def probs_with(*confidences: float) -> DraftProbs:
    """Return distributions over ten tokens with the given largest probability."""
    draft_probs = [[confidence, *[(1 - confidence) / 9] * 9] for confidence in confidences]
    return DraftProbs(torch.tensor(draft_probs, dtype=torch.float64).log())


def rows_of(num_rows: int, temperature: float = 0.0, coupled: bool = False) -> list[Row]:
    params = SamplingParams(max_tokens=20, temperature=temperature)
    return [Row([1], params, seed=index, coupled=coupled) for index in range(num_rows)]


def plan(controller: LearnedController, num_rows: int, deterministic: bool = False) -> list[Plan]:
    return controller.plan(rows_of(num_rows), [(Candidate(deterministic=deterministic),)] * num_rows)


def nodes_until_stop(controller: LearnedController, confidences: Sequence[float]) -> int:
    plan(controller, 1)
    for depth, confidence in enumerate(confidences):
        if not controller.keep_drafting(rows_of(1), probs_with(confidence), depth)[0]:
            return depth + 1
    return len(confidences)


def learn(controller: LearnedController, confidences: Sequence[float], num_accepted: int) -> None:
    """Draft a chain of nodes for one row, of which the target accepts some."""
    plan(controller, 1)
    for depth, confidence in enumerate(confidences):
        controller.keep_drafting(rows_of(1), probs_with(confidence), depth)
    verdict = Verdict.from_chain([num_accepted], [0])
    controller.learn(rows_of(1), Draft.chains([[0] * len(confidences)]), verdict, NO_TIME)


def predicted(controller: LearnedController, confidence: float) -> float:
    (runner_up,), (entropy,) = probs_with(confidence).runners_up, probs_with(confidence).entropies
    return controller.acceptance_prob(node_features(rows_of(1)[0], 0, confidence, runner_up, entropy))


@pytest.mark.parametrize(
    ("confidences", "threshold", "expected"),
    [
        ([0.9] * 8, 0.5, 7),  # 1 - 0.9 ** 6 = 0.47, 1 - 0.9 ** 7 = 0.52
        ([0.9] * 8, 0.3, 4),  # 1 - 0.9 ** 3 = 0.27, 1 - 0.9 ** 4 = 0.34
        ([0.3] * 8, 0.3, 1),  # the node that was in doubt stays in the draft
        ([0.9, 0.9, 0.5, 0.9], 0.4, 3),
        ([0.3] * 8, 1.0, 8),
        ([0.9] * 8, 0.0, 1),
    ],
)
def test_a_fresh_controller_takes_the_confidence_for_the_acceptance_probability(
    confidences: list[float], threshold: float, expected: int
) -> None:
    controller = LearnedController(LearnedOptions(threshold=threshold))
    # Twice: a round begins anew.
    assert [nodes_until_stop(controller, confidences) for _ in range(2)] == [expected, expected]


def test_each_row_has_its_own_product() -> None:
    controller = LearnedController(LearnedOptions(threshold=0.4))
    rows = rows_of(3)
    plan(controller, 3)
    assert controller.keep_drafting(rows, probs_with(0.9, 0.7, 0.4), 0) == [True, True, False]
    # The third row has stopped; what stands in its line must not matter to the others.
    assert controller.keep_drafting(rows, probs_with(0.9, 0.7, 1.0), 1)[:2] == [True, False]
    assert controller.keep_drafting(rows, probs_with(0.75, 1.0, 0.1), 2)[:1] == [True]


def test_the_length_is_the_budget() -> None:
    assert plan(LearnedController(LearnedOptions(length=6)), 2) == [Plan(0, 6)] * 2


@pytest.mark.parametrize("power", [0.5, 1.0, 3.0])
def test_the_predictions_approach_the_observed_acceptance(power: float) -> None:
    """The drafter is too modest, calibrated, or overconfident: a node is accepted with a power of its confidence."""
    controller, choice = LearnedController(), random.Random(1)
    for _ in range(3000):
        confidence = choice.choice([0.3, 0.5, 0.7, 0.9])
        learn(controller, [confidence], int(choice.random() < confidence**power))
    for confidence in (0.3, 0.5, 0.7, 0.9):
        assert predicted(controller, confidence) == pytest.approx(confidence**power, abs=0.06)


def test_an_overconfident_drafter_drafts_less_after_few_rounds() -> None:
    controller = LearnedController(LearnedOptions(threshold=0.5))
    before = nodes_until_stop(controller, [0.9] * 8)
    for _ in range(20):
        learn(controller, [0.9], 0)
    assert nodes_until_stop(controller, [0.9] * 8) == 1 < before


def test_nodes_after_a_rejected_one_are_ignored() -> None:
    one, other = LearnedController(), LearnedController()
    learn(one, [0.8], 0)
    learn(other, [0.8, 0.5, 0.9], 0)
    assert predicted(one, 0.5) == predicted(other, 0.5) != predicted(LearnedController(), 0.5)


def test_lookup_rows_are_not_learned_from() -> None:
    controller = LearnedController()
    plan(controller, 1, deterministic=True)
    assert controller.keep_drafting(rows_of(1), probs_with(0.1), 0) == [True]
    controller.learn(rows_of(1), Draft.chains([[0]]), Verdict.from_chain([0], [0]), NO_TIME)
    assert predicted(controller, 0.5) == pytest.approx(0.5)


def test_decisions_do_not_depend_on_token_ids() -> None:
    controller = LearnedController(LearnedOptions(length=6, threshold=0.5))
    draft_probs = torch.softmax(torch.randn(12, 3, 10, generator=torch.Generator().manual_seed(0)) * 2, -1)
    rows, decisions = rows_of(3, temperature=1.0), []
    for order in (torch.arange(10), torch.randperm(10)):
        plan(controller, 3)
        decisions.append(
            [
                controller.keep_drafting(rows, DraftProbs(dist[:, order].log()), depth)
                for depth, dist in enumerate(draft_probs)
            ]
        )
    assert decisions[0] == decisions[1]


def test_features_are_finite_and_those_of_the_request() -> None:
    row = rows_of(1, temperature=0.7, coupled=True)[0]
    features = node_features(row, 3, 0.5, 0.25, 1.2)
    assert features[1:6] == pytest.approx([0, math.log(0.25), 1.2, math.log(4), 0.5])
    assert features[6:] == pytest.approx([0.7, 1.0])
    for confidence, runner_up in ((1.0, 0.0), (0.0, 0.0)):
        assert numpy.isfinite(node_features(row, 0, confidence, runner_up, 0.0)).all()


def test_coupling_is_not_a_feature_at_temperature_0() -> None:
    def features(temperature: float, coupled: bool) -> list[float]:
        (row,) = rows_of(1, temperature, coupled)
        return node_features(row, 0, 0.5, 0.2, 1.0).tolist()

    assert features(0.0, True) == features(0.0, False)
    assert features(1.0, True) != features(1.0, False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("width", [3, 16, 40])
def test_draft_distributions_summarise_the_softmax_of_logits(width: int, dtype: torch.dtype) -> None:
    logits = 5 * torch.randn(6, width, dtype=dtype, generator=torch.Generator().manual_seed(1))
    logits[4] = torch.nn.functional.one_hot(torch.tensor(1), width).log()
    logits[5] = -1000.0
    wider = torch.nn.functional.pad(logits, (0, 5), value=100.0)[
        :, :width
    ]  # rows that are not contiguous in memory
    draft_probs = logits.softmax(-1)
    largest = draft_probs.topk(2).values
    for summary in (DraftProbs(logits), DraftProbs(wider)):
        assert summary.confidences == pytest.approx(largest[:, 0].tolist(), rel=1e-5)
        assert summary.runners_up == pytest.approx(largest[:, 1].tolist(), rel=1e-5)
        assert summary.entropies == pytest.approx(torch.special.entr(draft_probs).sum(-1).tolist(), abs=1e-5)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("learned", "learned:8,threshold=0.5"),
        ("learned:3,threshold=0.25", "learned:3,threshold=0.25"),
        ("learned,length=3", "learned:3,threshold=0.5"),
    ],
)
def test_names_of_learned(text: str, name: str) -> None:
    assert make_controller(text).name == name


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("learned:predictor.json", "a whole number"),
        ("learned:65", "between 0 and 64"),
        ("learned,length=2.5", "a whole number"),
        ("learned,threshold=1.5", "between 0 and 1, got 1.5"),
        ("learned,threshold=nan", "between 0 and 1"),
        ("learned,depth=3", "one of the options length, threshold"),
    ],
)
def test_invalid_names_of_learned_are_refused(text: str, words: str) -> None:
    with pytest.raises(BadInputError, match=words):
        make_controller(text)
