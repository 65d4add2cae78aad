"""The controller `entropy`: it stops at high entropy, with a constant fitted to the acceptance."""

from __future__ import annotations

import math
import random

import pytest
import torch

from secondguess.controllers import make_controller
from secondguess.controllers.draft_probs import DraftProbs
from secondguess.controllers.entropy import FIRST_CONSTANT, EntropyController, EntropyOptions
from secondguess.core import Candidate, Draft, RoundTime, Row, Verdict
from secondguess.errors import BadInputError
from secondguess.sampling import SamplingParams

NO_TIME = RoundTime(0.0, 0.0, 1.0)


def even_probs(num_tokens: int) -> torch.Tensor:
    """Entropy log(num_tokens)."""
    dist = torch.zeros(16)
    dist[:num_tokens] = 1 / num_tokens
    return dist


def draft_probs(*num_tokens: int) -> DraftProbs:
    return DraftProbs(torch.stack([even_probs(count) for count in num_tokens]).log())


def rows(count: int) -> list[Row]:
    return [Row([1], SamplingParams(max_tokens=100)) for _ in range(count)]


def verdict(*accepted: int) -> Verdict:
    return Verdict.from_chain(accepted, [0] * len(accepted))


def test_entropy_continues_while_the_product_of_bounds_is_large_enough() -> None:
    controller = EntropyController(EntropyOptions(8, threshold=0.3))
    batch = rows(3)
    controller.plan(batch, [(Candidate(),)] * 3)
    bounds = [1 - math.sqrt(FIRST_CONSTANT * math.log(count)) for count in (1, 2, 4)]
    assert [bound >= 0.3 for bound in bounds] == [True, True, True]
    assert controller.keep_drafting(batch, draft_probs(1, 2, 4), 0) == [True, True, True]
    assert [bound**2 >= 0.3 for bound in bounds] == [True, True, False]
    assert controller.keep_drafting(batch, draft_probs(1, 2, 4), 1) == [True, True, False]


def test_entropy_restarts_in_every_round() -> None:
    controller = EntropyController(EntropyOptions(8, threshold=0.3))
    for _ in range(3):
        controller.plan(rows(1), [(Candidate(),)])
        assert controller.keep_drafting(rows(1), draft_probs(4), 0) == [True]
        assert controller.keep_drafting(rows(1), draft_probs(4), 1) == [False]


@pytest.mark.parametrize("constant", [0.05, 0.2, 0.5])
def test_the_constant_is_fitted_to_the_observed_acceptance(constant: float) -> None:
    """Nodes are accepted with exactly the probability of the bound with this constant."""
    controller, batch, draft = EntropyController(), rows(1), Draft.chains([[0]])
    probs, verdicts = {count: draft_probs(count) for count in (1, 2, 3)}, [verdict(0), verdict(1)]
    rng = random.Random(1)
    for _ in range(3000):
        controller.plan(batch, [(Candidate(),)])
        count = rng.choice([1, 2, 3])
        controller.keep_drafting(batch, probs[count], 0)
        accepted = int(rng.random() < 1 - math.sqrt(constant * math.log(count)))
        controller.learn(batch, draft, verdicts[accepted], NO_TIME)
    assert controller.constant == pytest.approx(constant, rel=0.35)


def test_nodes_after_a_rejected_one_are_ignored() -> None:
    one, other = EntropyController(), EntropyController()
    for controller, length in ((one, 1), (other, 3)):
        controller.plan(rows(1), [(Candidate(),)])
        for depth in range(length):
            controller.keep_drafting(rows(1), draft_probs(3), depth)
        controller.learn(rows(1), Draft.chains([[0] * length]), verdict(0), NO_TIME)
    assert one.constant == other.constant != FIRST_CONSTANT


@pytest.mark.parametrize("num_tokens", [1, 16])
def test_entropies_of_rows_that_have_stopped_are_ignored(num_tokens: int) -> None:
    """Their lines mean nothing while another row of the batch is asked about."""
    alone, batch = EntropyController(), EntropyController()
    for controller in (alone, batch):
        controller.plan(rows(2), [(Candidate(),)] * 2)
        controller.keep_drafting(rows(2), draft_probs(3, 3), 0)
    batch.keep_drafting(rows(2), draft_probs(num_tokens, num_tokens), 1)
    for controller in (alone, batch):
        controller.learn(rows(2), Draft.chains([[0], [0]]), verdict(1, 1), NO_TIME)
    assert alone.constant == batch.constant


def test_lookup_rows_do_not_affect_the_constant() -> None:
    """Their lines mean nothing while another row of the batch is asked about."""
    controller = EntropyController()
    controller.plan(rows(2), [(Candidate(deterministic=True),), (Candidate(part=1),)])
    controller.keep_drafting(rows(2), draft_probs(16, 1), 0)
    controller.learn(rows(2), Draft.chains([[0, 0], [0, 0]]), verdict(0, 2), NO_TIME)
    assert controller.constant == pytest.approx(FIRST_CONSTANT)


def test_names_and_invalid_options_of_entropy() -> None:
    assert make_controller("entropy").name == "entropy:8,threshold=0.5"
    assert make_controller("entropy:3,threshold=0.25").name == "entropy:3,threshold=0.25"
    for text in (
        "entropy:65",
        "entropy:4,threshold=2",
        "entropy:four",
        "cost:65",
        "cost:-1",
        "cost:3,threshold=1",
    ):
        with pytest.raises(BadInputError):
            make_controller(text)
    assert make_controller("cost").name == make_controller("cost:16").name == "cost"
