"""Keyed noise: uniform, independent where it should be and shared where it should be, the same in any batch.

Statistical tests have fixed seeds, so that they pass or fail the same way every time.
"""

import math
from functools import cache

import numpy
import pytest
import torch

from noise_cases import ONE_SIDED, TREE, chained_text_p_value, chained_texts
from secondguess.core import Row
from secondguess.proof.certificate import g_test
from secondguess.proof.enumeration import joint_race_probability
from secondguess.proof.fakes import random_probs
from secondguess.runtime.hashes import GOLDEN, Purpose, mix_integer, uniform_per_token_on_device
from secondguess.sampling import SamplingParams
from secondguess.sampling import noise as noise_module
from secondguess.sampling.kernels import draw_by_inversion
from secondguess.sampling.noise import KeyedNoise

SAMPLED = SamplingParams(temperature=1.0)
NUM_ROWS = 20_000
MIN_P_VALUE = 1e-6


@cache
def noise_of(num_rows=NUM_ROWS, seed=0, position=7, coupled=False, first_sample=0):
    rows = [
        Row([0] * position, SAMPLED, seed=seed, sample_index=first_sample + sample, coupled=coupled)
        for sample in range(num_rows)
    ]
    return KeyedNoise.from_rows(rows)


def evenly(num_outcomes, num_rows=NUM_ROWS):
    return torch.full((num_rows, num_outcomes), 1 / num_outcomes, dtype=torch.float64)


def depths(depth, num_rows=NUM_ROWS):
    return torch.full((num_rows,), depth)


def draws_of(noise, purpose, depth, num_outcomes=10):
    """Return which of ten equal outcomes each row gets for a purpose at a depth."""
    dists = evenly(num_outcomes, len(noise.positions))
    if purpose == "draft":
        return noise.draft(dists, depth)
    if purpose == "draw":
        return noise.draw(dists, depths(depth, len(dists)))
    if purpose == "coupled race":
        noise = KeyedNoise(noise.keys, noise.positions, torch.ones_like(noise.coupled), noise.greedy)
    if purpose.endswith("race"):
        return noise.race(dists[:, None], depths(depth, len(dists))[:, None])[:, 0]
    # Acceptance at every tenth shows which tenth contains the number.
    steps = numpy.arange(1, num_outcomes) / num_outcomes
    accepted = [noise.accept(numpy.full((len(dists), depth + 1), step))[:, depth] for step in steps]
    return torch.from_numpy(num_outcomes - 1 - numpy.stack(accepted).sum(0))


def p_value_of_pairs(one, other, num_outcomes=10):
    """Return the p-value of these pairs if both sides are uniform and independent."""
    counts = torch.bincount(one * num_outcomes + other, minlength=num_outcomes**2).tolist()
    return g_test(counts, [len(one) / num_outcomes**2] * num_outcomes**2)


PURPOSES = ["draft", "accept", "draw", "race", "coupled race"]


@pytest.mark.parametrize("purpose", PURPOSES)
@pytest.mark.parametrize("depth", [0, 3])
def test_every_outcome_is_equally_likely(purpose, depth):
    counts = torch.bincount(draws_of(noise_of(), purpose, depth), minlength=10).tolist()
    assert g_test(counts, [NUM_ROWS / 10] * 10) > MIN_P_VALUE


@pytest.mark.parametrize(
    ("one", "other"), [(one, other) for i, one in enumerate(PURPOSES) for other in PURPOSES[i + 1 :]]
)
def test_purposes_are_independent(one, other):
    noise = noise_of()
    assert p_value_of_pairs(draws_of(noise, one, 1), draws_of(noise, other, 1)) > MIN_P_VALUE


@pytest.mark.parametrize("purpose", PURPOSES)
def test_positions_rounds_samples_and_seeds_are_independent(purpose):
    here = draws_of(noise_of(), purpose, 1)
    others = {
        "next place": draws_of(noise_of(), purpose, 2),
        "a later round": draws_of(noise_of(position=9), purpose, 1),
        "other samples": draws_of(noise_of(first_sample=NUM_ROWS), purpose, 1),
        "neighbouring samples": here.roll(1),
        "another seed": draws_of(noise_of(seed=1), purpose, 1),
        "a seed with another sign": draws_of(noise_of(seed=2**64 - 1), purpose, 1),
    }
    for name, there in others.items():
        assert p_value_of_pairs(here, there) > MIN_P_VALUE, name


@pytest.mark.parametrize("purpose", ["draft", "accept", "draw", "race"])
def test_an_absolute_position_has_new_numbers_in_every_round(purpose):
    """Round one at position 7, depth 2 and round two at position 9, depth 0 mean the same token."""
    first, second = draws_of(noise_of(position=7), purpose, 2), draws_of(noise_of(position=9), purpose, 0)
    assert p_value_of_pairs(first, second) > MIN_P_VALUE


def test_the_race_of_coupled_rows_is_the_same_in_every_round():
    first, second = (
        draws_of(noise_of(position=position), "coupled race", depth) for position, depth in ((7, 2), (9, 0))
    )
    assert torch.equal(first, second)


def test_a_rows_race_does_not_depend_on_whether_its_neighbours_are_coupled():
    dists = torch.full((NUM_ROWS, 2, 5), 0.2, dtype=torch.float64)
    places = torch.tensor([0, 1]).expand(NUM_ROWS, 2)
    alone = {coupled: noise_of(coupled=coupled).race(dists, places) for coupled in (False, True)}
    noise = noise_of()
    coupled = torch.arange(NUM_ROWS) % 3 == 0
    mixed = KeyedNoise(noise.keys, noise.positions, coupled, noise.greedy).race(dists, places)
    assert torch.equal(mixed, torch.where(coupled[:, None], alone[True], alone[False]))


@pytest.mark.parametrize("verifier", ["rejection", "block", "coupled"])
def test_several_rounds_keep_the_distribution(verifier):
    """The joint distribution of five tokens over several rounds; reused numbers gave p below 1e-18 here."""
    assert chained_text_p_value(verifier) > MIN_P_VALUE


def test_several_rounds_of_coupled_rows_keep_the_distribution():
    assert chained_text_p_value("coupled", coupled=True) > MIN_P_VALUE


@pytest.mark.parametrize("without_replacement", [True, False])
def test_several_rounds_of_trees_keep_the_distribution(without_replacement):
    assert (
        chained_text_p_value("traversal", parents=TREE, without_replacement=without_replacement) > MIN_P_VALUE
    )


def test_traversal_equals_block_verification_on_chains():
    """Number for number: both ask the same questions of the noise."""
    assert torch.equal(chained_texts("traversal", 2000), chained_texts("block", 2000))


def test_coupled_text_depends_only_on_the_seed():
    crude = chained_texts("coupled", 500, seed=3, coupled=True)
    assert torch.equal(crude, chained_texts("coupled", 500, seed=3, coupled=True, drafter=ONE_SIDED))
    assert not torch.equal(crude, chained_texts("coupled", 500, seed=4, coupled=True))
    for without_replacement in (True, False):
        assert torch.equal(
            crude,
            chained_texts(
                "coupled", 500, seed=3, coupled=True, parents=TREE, without_replacement=without_replacement
            ),
        )


def test_nodes_of_one_depth_have_independent_numbers_unless_coupled():
    dists = evenly(10)
    noise = noise_of()
    first, second = noise.draft(dists, 1, node=1), noise.draft(dists, 1, node=2)
    assert p_value_of_pairs(first, second) > MIN_P_VALUE
    assert torch.equal(first, noise.draft(dists, 1))  # a chain's node is its depth
    coupled = noise_of(coupled=True)
    assert torch.equal(coupled.draft(dists, 1, node=1), coupled.draft(dists, 1, node=2))


@pytest.mark.parametrize("purpose", ["draft", "draw", "race"])
def test_draws_follow_their_distribution(purpose):
    dist = random_probs(6, seed=1, zeros=0.3)(())
    noise = noise_of()
    dists = dist.expand(NUM_ROWS, -1)
    drawn = {
        "draft": lambda: noise.draft(dists, 0),
        "draw": lambda: noise.draw(3 * dists, depths(0)),  # any positive total
        "race": lambda: noise.race(dists[:, None], depths(0)[:, None])[:, 0],
    }[purpose]()
    assert g_test(torch.bincount(drawn, minlength=6).tolist(), (NUM_ROWS * dist).tolist()) > MIN_P_VALUE


def test_coupled_draft_and_race_share_their_exponentials():
    q, p = random_probs(3, seed=1)(()), random_probs(3, seed=2)(())
    noise = noise_of(coupled=True)
    drafted = noise.draft(q.expand(NUM_ROWS, -1), 2)
    said = noise.race(p.expand(NUM_ROWS, 1, -1), depths(2)[:, None])[:, 0]
    counts = torch.bincount(3 * drafted + said, minlength=9).tolist()
    x, y = torch.arange(9) // 3, torch.arange(9) % 3
    expected = NUM_ROWS * joint_race_probability(q.expand(9, -1), p.expand(9, -1), x, y)
    assert g_test(counts, expected.tolist()) > MIN_P_VALUE


def test_only_queries_of_one_depth_share_a_race():
    noise = noise_of()
    drawn = noise.race(evenly(10)[:, None].expand(-1, 3, -1), torch.tensor([1, 1, 2]).expand(NUM_ROWS, 3))
    assert torch.equal(drawn[:, 0], drawn[:, 1])
    assert p_value_of_pairs(drawn[:, 0], drawn[:, 2]) > MIN_P_VALUE


@pytest.mark.parametrize("purpose", PURPOSES)
def test_a_row_has_the_same_noise_in_any_batch(purpose):
    whole = draws_of(noise_of(num_rows=50), purpose, 1)
    order = torch.randperm(50, generator=torch.Generator().manual_seed(0))
    assert torch.equal(draws_of(noise_of(num_rows=50).select(order), purpose, 1), whole[order])
    alone = [draws_of(noise_of(num_rows=1, first_sample=sample), purpose, 1) for sample in range(50)]
    assert torch.equal(torch.cat(alone), whole)


@pytest.mark.parametrize("places", [[range(20)] * 4, [range(row, row + 20) for row in range(4)]])
@pytest.mark.parametrize("seed", [0, 5, 2**64 - 1])
def test_numbers_hashed_together_equal_those_hashed_one_by_one(seed, places, monkeypatch):
    params = SamplingParams(temperature=1.0)
    rows = [Row([0] * (3 + 90 * sample), params, seed=seed, sample_index=sample) for sample in range(4)]
    found = []
    for few in (0, 10**6):
        monkeypatch.setattr(noise_module, "_MAX_SCALAR_HASHES", few)
        noise = KeyedNoise.from_rows(rows)
        found.append([noise.uniforms(places, purpose) for purpose in Purpose])
    for one, other in zip(*found, strict=True):
        numpy.testing.assert_array_equal(one, other)
        assert ((one > 0) & (one < 1)).all()


def test_mixed_batches_draw_each_row_by_its_own_rule():
    params = [SAMPLED, SAMPLED, SamplingParams(temperature=0.0)]
    rows = [
        Row([0], settings, coupled=coupled)
        for settings, coupled in zip(params, (False, True, False), strict=True)
    ]
    dists = torch.tensor([[0.5, 0.3, 0.2], [0.5, 0.3, 0.2], [0.0, 0.0, 1.0]])
    together = KeyedNoise.from_rows(rows).draft(dists, 0)
    alone = [KeyedNoise.from_rows([row]).draft(dist[None], 0) for row, dist in zip(rows, dists, strict=True)]
    assert torch.equal(together, torch.cat(alone))


def test_inversion_is_exact_on_a_grid():
    dist = torch.tensor([0.25, 0.0, 0.5, 0.0, 0.25, 0.0])
    drawn = draw_by_inversion(dist.expand(16, -1), (numpy.arange(16) + 0.5) / 16)
    assert drawn.tolist() == [0] * 4 + [2] * 8 + [4] * 4


@pytest.mark.parametrize("uniform", [2.0**-53, 0.5, 1 - 2.0**-53, math.nextafter(1, 0)])
def test_inversion_never_draws_tokens_of_probability_zero(uniform):
    dists = torch.tensor(
        [[0.0, 0.1, 0.0, 0.9, 0.0], [0.0, 0.0, 1e-30, 0.0, 0.0], [1 / 3, 1 / 3, 1 / 3, 0, 0]]
    )
    drawn = draw_by_inversion(dists, numpy.full(3, uniform))
    assert (dists.gather(1, drawn[:, None]) > 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_races_never_draw_tokens_of_probability_zero(dtype):
    dists = torch.zeros(NUM_ROWS, 1, 5, dtype=dtype)
    dists[..., 1], dists[..., 3] = 1e-30, 1.0
    drawn = noise_of().race(dists, depths(0)[:, None])
    assert torch.isin(drawn, torch.tensor([1, 3])).all()


def test_acceptance_probabilities_of_zero_and_one_are_exact():
    noise = noise_of()
    assert not noise.accept(numpy.zeros((NUM_ROWS, 2))).any()
    assert noise.accept(numpy.ones((NUM_ROWS, 2))).all()


def test_rows_at_temperature_zero_take_the_most_probable_token():
    rows = [Row([0], SamplingParams(temperature=0.0), seed=seed) for seed in range(3)]
    noise = KeyedNoise.from_rows(rows)
    dists = torch.tensor([0.0, 1.0, 0.0]).expand(3, -1)
    assert noise.draft(dists, 0).tolist() == noise.draw(dists, depths(0, 3)).tolist() == [1, 1, 1]


def test_no_global_generator_is_used():
    before = torch.get_rng_state()
    for purpose in PURPOSES:
        draws_of(noise_of(num_rows=4), purpose, 1)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_numbers_of_a_race_are_those_of_its_hash_by_integers():
    """A text may not depend on where its noise was made."""
    hashes = torch.randint(-(2**63), 2**63 - 1, (3, 2), generator=torch.Generator().manual_seed(0))
    found = uniform_per_token_on_device(hashes, 777)
    for place, number in [((0, 0), 0), ((2, 1), 776), ((1, 0), 300)]:
        mixed = mix_integer(int(hashes[place]) + number * GOLDEN)
        assert found[*place, number] == ((mixed >> 12) + 0.5) * 2.0**-52
    assert found.min() > 0
    assert found.max() < 1
