"""Draft lengths of each controller, and refused names."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from secondguess.controllers import make_controller
from secondguess.controllers.base import Controller
from secondguess.controllers.confidence import ConfidenceController, ConfidenceOptions
from secondguess.controllers.draft_probs import DraftProbs
from secondguess.controllers.fixed import FixedController
from secondguess.core import Candidate, Plan, Row
from secondguess.decode import Components, decode
from secondguess.drafters.model import ModelDrafter
from secondguess.errors import BadInputError
from secondguess.proof.fakes import TableModel
from secondguess.sampling import SamplingParams
from secondguess.verifiers import make_verifier


def rows_of(num_rows: int) -> list[Row]:
    return [Row([1], SamplingParams(max_tokens=20), seed=index) for index in range(num_rows)]


def tensor_with(*confidences: float) -> Tensor:
    """Return distributions over ten tokens with the given largest probability."""
    draft_probs = [[confidence, *[(1 - confidence) / 9] * 9] for confidence in confidences]
    return torch.tensor(draft_probs, dtype=torch.float64)


def probs_with(*confidences: float) -> DraftProbs:
    return DraftProbs(tensor_with(*confidences).log())


def alike(confidence: float) -> TableModel:
    """A model that gives token 0 this probability in every context."""
    return TableModel(10, lambda context: tensor_with(confidence)[0])


def run(controller: Controller, target: TableModel, drafter: TableModel) -> list[int]:
    """Drafted nodes of each round of one row."""
    components = Components(
        target, ModelDrafter(drafter, "model:table", 10), make_verifier("greedy"), controller
    )
    row = rows_of(1)[0]
    drafted = [0]
    for _ in decode(components, [row]):
        drafted.append(components.recorder.of(row).num_drafted)
    return [after - before for before, after in pairwise(drafted)]


def test_fixed_drafts_the_same_number_in_every_round() -> None:
    # 20 tokens are 3 rounds of 5 + 1 and a last one of 2, whose second token is the target's own.
    assert run(make_controller("fixed:5"), alike(0.5), alike(0.5)) == [5, 5, 5, 1]


def test_fixed_zero_is_plain_decoding() -> None:
    drafter = alike(0.5)
    assert run(make_controller("fixed:0"), alike(0.5), drafter) == [0] * 20
    assert drafter.num_forwards == 0


def test_fixed_receives_no_distributions() -> None:
    class Blind(FixedController):
        def keep_drafting(self, rows: Sequence[Row], draft_probs: DraftProbs, depth: int) -> list[bool]:
            raise AssertionError("asked for nothing")

    assert run(Blind(), alike(0.5), alike(0.5))[0] == 5


@pytest.mark.parametrize(
    ("confidence", "threshold", "expected"),
    [
        (0.9, 0.4, 8),  # 0.9 ** 7 = 0.478: the length runs out first
        (0.9, 0.5, 7),  # 0.9 ** 6 = 0.531, 0.9 ** 7 = 0.478
        (0.8, 0.4, 5),  # 0.8 ** 4 = 0.410, 0.8 ** 5 = 0.328
        (0.7, 0.4, 3),
        (0.3, 0.4, 1),  # the node that was not sure stays in the draft
        (0.3, 0.0, 8),
        (0.9, 1.0, 1),
        (1.0, 1.0, 8),  # at the threshold is sure enough
    ],
)
def test_confidence_stops_after_the_node_that_makes_survival_unlikely(
    confidence: float, threshold: float, expected: int
) -> None:
    controller = ConfidenceController(ConfidenceOptions(length=8, threshold=threshold))
    assert run(controller, alike(0.5), alike(confidence))[0] == expected


def test_confidence_uses_the_product_along_each_rows_path() -> None:
    controller = ConfidenceController(ConfidenceOptions(length=8, threshold=0.5))
    rows = rows_of(3)
    assert controller.keep_drafting(rows, probs_with(0.9, 0.7, 0.4), 0) == [True, True, False]
    # The third row has stopped; what stands in its line must not matter to the others.
    assert controller.keep_drafting(rows, probs_with(0.9, 0.7, 1.0), 1)[:2] == [True, False]
    assert controller.keep_drafting(rows, probs_with(0.65, 1.0, 0.1), 2)[:1] == [True]


def test_confidence_uses_predicted_acceptance_probabilities() -> None:
    controller = ConfidenceController(ConfidenceOptions(length=8, threshold=0.5))
    draft_probs = DraftProbs(tensor_with(0.9, 0.3).log(), [0.4, 0.8])
    assert controller.keep_drafting(rows_of(2), draft_probs, 0) == [False, True]
    assert draft_probs.confidences == [
        pytest.approx(0.9),
        pytest.approx(0.3),
    ]  # the other entries stay those of the distribution


def test_confidence_restarts_in_every_round() -> None:
    controller = ConfidenceController(ConfidenceOptions(length=8, threshold=0.5))
    for _ in range(3):
        assert controller.keep_drafting(rows_of(1), probs_with(0.6), 0) == [True]
        assert controller.keep_drafting(rows_of(1), probs_with(0.6), 1) == [False]
    assert controller.keep_drafting(rows_of(2), probs_with(0.6, 0.3), 0) == [True, False]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("fixed", "fixed:5"),
        ("fixed:3", "fixed:3"),
        ("fixed,length=3", "fixed:3"),
        ("fixed:0", "fixed:0"),
        ("fixed:64", "fixed:64"),
        ("confidence", "confidence:8,threshold=0.2"),
        ("confidence:12", "confidence:12,threshold=0.2"),
        ("confidence:4,threshold=0.75", "confidence:4,threshold=0.75"),
        ("confidence,threshold=0", "confidence:8,threshold=0"),
    ],
)
def test_the_name_of_a_controller_contains_its_options(text: str, name: str) -> None:
    made = make_controller(text)
    assert made.name == name
    assert make_controller(made.name).name == name


def test_the_length_in_a_name_is_the_budget() -> None:
    for text, length in (("fixed:3", 3), ("confidence:7", 7)):
        assert make_controller(text).plan(rows_of(2), [(Candidate(),)] * 2) == [Plan(0, length)] * 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("magic:3", "fixed, confidence, .*cost.*, got 'magic:3'"),
        ("fixed:-1", "between 0 and 64, got -1"),
        ("fixed:65", "between 0 and 64, got 65"),
        ("fixed:many", "a whole number for length .* got 'many'"),
        ("fixed:2.5", "a whole number"),
        ("fixed:", "a whole number"),
        ("fixed:5,length=4", "length of fixed once"),
        ("fixed:5,threshold=0.4", "one of the options length .* got the option 'threshold'"),
        ("confidence:65", "between 0 and 64"),
        ("confidence:8,threshold=1.2", "between 0 and 1, got 1.2"),
        ("confidence:8,threshold=nan", "between 0 and 1, got nan"),
        ("confidence:8,0.4", "key=value"),
    ],
)
def test_invalid_names_are_refused(text: str, message: str) -> None:
    with pytest.raises(BadInputError, match=message):
        make_controller(text)
