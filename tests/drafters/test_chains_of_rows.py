"""Chains that CUDA graphs draw at once for several rows; without a GPU the same passes run without capturing."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from families import (
    FAMILIES,
    GRAPHS_DEVICE,
    VOCAB_SIZE,
    assert_near,
    graphs_of,
    random_tokens,
    write_checkpoint,
)
from secondguess.core import Budgets, Row
from secondguess.drafters.model import ModelDrafter
from secondguess.drafters.self import SelfDrafter
from secondguess.sampling import SamplingParams
from secondguess.sampling.noise import KeyedNoise

pytestmark = pytest.mark.gpu
DEVICE = torch.device(GRAPHS_DEVICE)
TOLERANCE = 1e-5 if GRAPHS_DEVICE == "cpu" else 2e-3
"""The kernels round states to the precision of TF32 in products with weights in 4 bits."""
NUM_ROUNDS = 5
SETTINGS = {
    # temperatures of the rows, min-p, whether their tokens are drawn by races
    "greedy": ([0.0, 0.0, 0.0], 0.0, [False, False, False]),
    "sampled": ([1.0, 1.0, 0.7], 0.0, [False, False, False]),
    "mixed": ([1.0, 0.0, 0.7], 0.05, [False, True, False]),
    "races": ([1.3, 0.0, 1.0], 0.0, [True, False, True]),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(FAMILIES["llama"](), tmp_path_factory.mktemp("chains"))


def model(checkpoint):
    return ModelDrafter(graphs_of(checkpoint), "model:draft", VOCAB_SIZE - 3), None


def copy(checkpoint):
    target = graphs_of(checkpoint)
    return SelfDrafter(target, "self:int4"), target


def run_rounds(drafter, target, case, settings, keeps=True, shortest=3):
    """Drafts of some rounds of three rows, with the calls of the controller, after which tokens are accepted at random."""
    rng, (temperatures, min_p, races) = random.Random(case), settings
    rows = [
        Row(
            random_tokens(rng.randrange(shortest, 24), seed=case + index),
            SamplingParams(temperature=temperature, min_p=min_p),
            seed=index,
            coupled=is_race,
        )
        for index, (temperature, is_race) in enumerate(zip(temperatures, races, strict=True))
    ]
    if target is not None:
        target.begin(rows)
    found = []
    for _ in range(NUM_ROUNDS):
        limits = [rng.choice([1, 2, 5, 7] + [0] * keeps) for _ in rows]
        decisions = [[rng.random() < 0.8 for _ in rows] for _ in range(8)]
        calls = []

        def keep(logits, depth, _=None, confidences=None, calls=calls, decisions=decisions):
            calls.append((depth, logits.to("cpu", copy=True), confidences))
            return decisions[depth]

        drafter.prepare(rows, [0] * len(rows))
        noise = KeyedNoise.from_rows(rows, DEVICE)
        draft = drafter.propose(rows, Budgets(limits, keep, keeps), noise)
        lengths = draft.lengths.tolist()
        found.append((draft, calls))
        num_accepted = [rng.choice([0, length]) for length in lengths]
        if target is not None:
            target.score(rows, draft)
            target.keep(rows, [range(number) for number in num_accepted])
        for row, nodes, number in zip(rows, draft.token_lists, num_accepted, strict=True):
            row.tokens += [*nodes[:number], rng.randrange(2, VOCAB_SIZE)]
    for row in rows:
        drafter.release(row)
        if target is not None:
            target.release(row)
    return found


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("make", [model, copy], ids=["model", "self:int4"])
def test_chains_drawn_at_once_are_those_drawn_token_by_token(make, name, checkpoint, monkeypatch):
    (drafter, target), settings = make(checkpoint), SETTINGS[name]
    for case in range(4):
        drawn = run_rounds(drafter, target, case, settings)
        with monkeypatch.context() as patched:
            patched.setattr(KeyedNoise, "of_rows", lambda self: None)
            expected = run_rounds(drafter, target, case, settings)
        for (draft, calls), (other, other_calls) in zip(drawn, expected, strict=True):
            assert draft.token_lists == other.token_lists
            assert torch.equal(draft.lengths, other.lengths)
            if draft.probs is None:
                assert other.probs is None
            else:
                assert_near(
                    draft.probs.cpu()[draft.mask.cpu()], other.probs.cpu()[other.mask.cpu()], TOLERANCE
                )
            assert [depth for depth, *_ in calls] == [depth for depth, *_ in other_calls]
            for (depth, logits, confidences), (_, other_logits, _) in zip(calls, other_calls, strict=True):
                is_drawn = draft.lengths.cpu() > depth
                assert_near(logits[is_drawn], other_logits[is_drawn], TOLERANCE)
                if (
                    confidences is not None
                ):  # rows with more than two uncached tokens are drawn for one by one
                    found = torch.tensor(confidences)[is_drawn]
                    assert_near(found, logits.softmax(-1).amax(-1)[is_drawn], TOLERANCE)


@pytest.mark.parametrize("make", [model, copy], ids=["model", "self:int4"])
def test_chains_are_drawn_at_once(make, checkpoint, monkeypatch):
    """Otherwise the test above compares nothing."""
    drafter, target = make(checkpoint)
    monkeypatch.setattr(drafter, "chain_logits", lambda *_: pytest.fail("a step per token"))
    for settings in SETTINGS.values():
        assert any(
            draft.num_nodes > 4
            for draft, _ in run_rounds(drafter, target, 0, settings, keeps=False, shortest=17)
        )


def test_rows_that_graphs_do_not_draw_for_together_are_drawn_token_by_token(checkpoint, monkeypatch):
    drafter, _ = model(checkpoint)
    called = []
    chain_logits = drafter.chain_logits
    monkeypatch.setattr(
        drafter, "chain_logits", lambda *arguments: called.append(1) or chain_logits(*arguments)
    )
    sampled, truncated = SamplingParams(temperature=1.0), SamplingParams(temperature=1.0, top_k=4)
    cases = [
        ((sampled, sampled), (False, False), 0),
        ((sampled, truncated), (False, False), 3),
        ((sampled, sampled), (True, False), 3),
    ]
    for params, coupled, num_steps in cases:
        called.clear()
        rows = [
            Row(random_tokens(20, seed=1), each, coupled=is_coupled)
            for each, is_coupled in zip(params, coupled, strict=True)
        ]
        drafter.prepare(rows, [0, 0])
        budgets = Budgets([3, 3], lambda *_: [True, True], False)
        draft = drafter.propose(rows, budgets, KeyedNoise.from_rows(rows, DEVICE))
        assert draft.lengths.tolist() == [3, 3]
        assert len(called) == num_steps
