"""Verifiers on small drafts, and refusals; output distributions are tested in test_distributions."""

import random

import numpy
import pytest
import torch

from secondguess.core import Draft, Row, Verdict
from secondguess.errors import BadInputError, SecondGuessError
from secondguess.sampling import SamplingParams
from secondguess.sampling.noise import KeyedNoise
from secondguess.sampling.penalties import LogitProcessors
from secondguess.sampling.probs import compute_target_probs
from secondguess.verifiers import VERIFIERS, make_verifier
from secondguess.verifiers.base import Exactness, accept_matching, query_depths, verify_logits
from secondguess.verifiers.block import prefix_weights
from secondguess.verifiers.residuals import next_token_probs
from secondguess.verifiers.shapes import shape_of
from secondguess.verifiers.traversal import traverse

TREE = Draft(
    # pending -> 4 -> 6, pending -> 5 -> {6, 7}
    tokens=torch.tensor([[4, 5, 6, 6, 7]]),
    parents=torch.tensor([[-1, -1, 0, 1, 1]]),
    lengths=torch.tensor([5]),
)


def noise_of(num_rows, temperature=1.0, coupled=False):
    params = SamplingParams(temperature=temperature)
    return KeyedNoise.from_rows([Row([0], params, seed=seed, coupled=coupled) for seed in range(num_rows)])


def certain_dists(chosen, vocab_size=8):
    return torch.nn.functional.one_hot(torch.tensor(chosen), vocab_size).float()


def test_unknown_names_are_refused_with_the_known_ones():
    with pytest.raises(BadInputError, match="auto, greedy, rejection, block, traversal, coupled"):
        make_verifier("typical")


@pytest.mark.parametrize("name", VERIFIERS)
def test_every_name_makes_its_verifier(name):
    assert make_verifier(name).name == name


class WithoutChecks:
    """Rule that accepts all nodes."""

    def verify(self, draft, target_probs, noise):
        return Verdict.from_chain(draft.lengths.tolist(), [0] * draft.num_rows)


def test_a_verifier_of_another_package_is_made_by_its_import_path(monkeypatch):
    monkeypatch.setitem(VERIFIERS, "mine", f"{__name__}:WithoutChecks")
    assert isinstance(make_verifier("mine"), WithoutChecks)


def test_declared_exactness_of_every_verifier():
    assert make_verifier("coupled").exactness == Exactness.DRAFTER_INVARIANT
    others = set(VERIFIERS) - {"coupled"}
    assert {make_verifier(name).exactness for name in others} == {Exactness.LOSSLESS}


@pytest.mark.parametrize("name", ["rejection", "block"])
def test_chain_rules_refuse_trees(name):
    with pytest.raises(BadInputError, match="chain"):
        make_verifier(name).verify(TREE, certain_dists([[4, 6, 6, 0, 0, 0]]), noise_of(1))


def test_supports_trees_is_true_for_tree_verifiers():
    chains_only = {name for name in VERIFIERS if not make_verifier(name).supports_trees}
    assert chains_only == {"rejection", "block"}


@pytest.mark.parametrize("name", ["auto", "traversal"])
def test_sampled_and_deterministic_trees_of_any_shape_are_verified_together(name):
    """pending -> 4 -> 6 and pending -> 5 -> {6, 7}; a chain of two; two siblings; nothing; the rest is padding."""
    parents = torch.tensor([[-1, -1, 0, 1, 1], [-1, 0, -1, -1, -1], [-1] * 5, [-1] * 5])
    tokens = torch.tensor([[4, 5, 6, 6, 7], [4, 6, 0, 0, 0], [4, 5, 6, 6, 7], [4, 5, 6, 6, 7]])
    lengths = torch.tensor([5, 2, 2, 0])
    # The target token after each query; after padding, one that an accepted padding node would give.
    target = certain_dists([[5, 0, 7, 0, 0, 3], [4, 6, 1, 0, 0, 0], [6, 0, 0, 2, 2, 2], [4, 2, 2, 2, 2, 2]])
    dists = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.25, 0.25, 0.25, 0.25]).expand(4, 5, 8)
    for probs in (dists, None):
        verdict = make_verifier(name).verify(Draft(tokens, parents, lengths, probs), target, noise_of(4))
        assert verdict.paths == [[1, 4], [0, 1], [], []]
        assert verdict.next_tokens == [3, 1, 6, 4]


def test_a_sibling_without_remaining_probability_is_never_accepted():
    """The draft distribution has one token; the node that fills the place of a second one has probability 0."""
    drafter = certain_dists([[1, 1]]).expand(200, 2, 8)
    target = torch.tensor([0.5, 0.25, 0.25, 0, 0, 0, 0, 0]).expand(200, 3, 8)
    draft = Draft(
        torch.tensor([[1, 0]]).expand(200, 2),
        torch.tensor([[-1, -1]]).expand(200, 2),
        torch.full((200,), 2),
        drafter,
    )
    verdict = make_verifier("traversal").verify(draft, target, noise_of(200))
    assert {tuple(path) for path in verdict.paths} == {(), (0,)}
    ends = zip(verdict.paths, verdict.next_tokens, strict=True)
    assert {token for path, token in ends if not path} == {0, 2}


def test_rows_with_other_shapes_do_not_affect_a_verdict():
    """A row has the same verdict alone, among equal shapes and among others."""
    parents = torch.tensor([[-1, -1, 0, 0], [-1, 0, 1, 2], [-1, -1, 1, -1]]).repeat(20, 1)
    dists = torch.rand(60, 5, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    dists, target = (each / each.sum(-1, keepdim=True) for each in (dists, dists.roll(1, 2) + 0.1 * dists))
    probs = dists[torch.arange(60)[:, None], parents + 1]
    draft = Draft(probs.argsort(descending=True)[..., 0], parents, torch.tensor([4, 4, 3]).repeat(20), probs)
    noise, rule = noise_of(60), make_verifier("traversal")
    together = rule.verify(draft, target, noise)
    for row in range(60):
        index = torch.tensor([row])
        alone = rule.verify(draft.select(index), target[index], noise.select(index))
        assert alone.paths[0] == together.paths[row]
        assert alone.next_tokens[0] == together.next_tokens[row]
    assert max(together.lengths) > 1


def test_traversal_weights_survive_extreme_ratios():
    """A path whose product of ratios underflows and rises again, as in block verification."""
    num_nodes, small = 24, 1e-30
    unlikely = torch.tensor([small, 1 - small], dtype=torch.float64)
    even = torch.tensor([0.5, 0.5], dtype=torch.float64)
    half = num_nodes // 2
    target = torch.stack([unlikely] * half + [even] * (half + 1))[None]
    probs = torch.stack([even] * half + [unlikely] * half)[None]
    chain = Draft(
        torch.zeros(1, num_nodes, dtype=torch.long),
        torch.arange(-1, num_nodes - 1)[None],
        torch.tensor([num_nodes]),
        probs,
    )
    acceptance_probs, _ = traverse(shape_of(chain.shapes[0]), chain, target)
    assert acceptance_probs[0, -1] == pytest.approx(1.0, abs=1e-9)


@pytest.mark.parametrize("name", ["rejection", "block", "traversal"])
def test_rules_with_fresh_noise_refuse_coupled_rows(name):
    draft = Draft.chains([[1]])
    with pytest.raises(BadInputError, match="coupled"):
        make_verifier(name).verify(draft, certain_dists([[1, 2]]), noise_of(1, coupled=True))


def test_greedy_refuses_rows_that_sample():
    with pytest.raises(BadInputError, match="temperature 0"):
        make_verifier("greedy").verify(Draft.chains([[1]]), certain_dists([[1, 2]]), noise_of(1))


def test_greedy_refuses_a_request_that_samples_and_the_others_take_any():
    sampled, greedy = SamplingParams(temperature=0.5), SamplingParams(temperature=0)
    with pytest.raises(BadInputError, match=r"temperature 0, got 0\.5"):
        make_verifier("greedy").check(sampled)
    make_verifier("greedy").check(greedy)
    for name in set(VERIFIERS) - {"greedy"}:
        make_verifier(name).check(sampled)


@pytest.mark.parametrize("name", VERIFIERS)
def test_ragged_chains_are_accepted_up_to_the_first_mismatch(name):
    draft = Draft.chains([[1, 2, 3], [1, 5], [], [4]])
    dists = certain_dists([[1, 2, 3, 6], [1, 2, 0, 0], [7, 0, 0, 0], [4, 3, 0, 0]])
    temperature = 0.0 if name == "greedy" else 1.0
    verdict = make_verifier(name).verify(draft, dists, noise_of(4, temperature))
    assert verdict.paths == [[0, 1, 2], [0], [], [0]]
    assert verdict.next_tokens == [6, 2, 7, 3]


@pytest.mark.parametrize("name", ["rejection", "block", "traversal"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_draft_from_the_targets_own_distribution_is_always_accepted(name, dtype):
    """p = q, where excess and deficit vanish together, at every width and in single precision too."""
    num_rows, num_nodes, vocab_size = 400, 6, 50
    logits = torch.randn(num_rows, num_nodes + 1, vocab_size, generator=torch.Generator().manual_seed(0))
    dists = (4 * logits).to(dtype).softmax(-1)
    noise = noise_of(num_rows)
    tokens = torch.stack([noise.draft(dists[:, node], node) for node in range(num_nodes)], 1)
    parents = torch.arange(-1, num_nodes - 1).expand(num_rows, num_nodes)
    draft = Draft(tokens, parents, torch.full((num_rows,), num_nodes), dists[:, :-1])
    verdict = make_verifier(name).verify(draft, dists, noise)
    assert set(verdict.lengths) == {num_nodes}
    following = dists[:, -1].gather(1, torch.tensor(verdict.next_tokens)[:, None])
    assert (following > 0).all()


@pytest.mark.parametrize("name", ["rejection", "block", "traversal"])
def test_tokens_of_target_probability_zero_are_never_emitted(name):
    """Disjoint supports: every node is refused and the correction comes from the target's side."""
    target = torch.tensor([0.5, 0.5, 0.0, 0.0]).expand(100, 3, 4)
    drafter = torch.tensor([0.0, 0.0, 0.3, 0.7]).expand(100, 2, 4)
    draft = Draft(
        torch.full((100, 2), 3), torch.tensor([[-1, 0]]).expand(100, 2), torch.full((100,), 2), drafter
    )
    verdict = make_verifier(name).verify(draft, target, noise_of(100))
    assert not any(verdict.lengths)
    assert max(verdict.next_tokens) < 2


def test_the_target_distribution_replaces_empty_residuals():
    """Which rounding may leave where p and q are equal: the second row's residual has no token."""
    draft = Draft.chains([[1], [1]], torch.tensor([[[0.25, 0.75]], [[0.5, 0.5]]]))
    target = torch.tensor([[0.5, 0.5], [0.25, 0.75]]).repeat(2, 1, 1)
    dists = next_token_probs(draft, target, numpy.array([0, 0]), numpy.ones((2, 1)))
    assert dists.tolist() == [[0.25, 0.0], [0.5, 0.5]]


def test_the_accepted_path_follows_the_target_tokens():
    for chosen, path, after in [
        ([5, 0, 7, 0, 0, 3], [1, 4], 3),
        ([5, 0, 0, 0, 0, 0], [1], 0),
        ([4, 6, 1, 2, 1, 1], [0, 2], 2),
        ([7, 6, 6, 6, 6, 6], [], 7),
    ]:
        verdict = accept_matching(TREE, [chosen])
        assert verdict.paths == [path]
        assert verdict.next_tokens == [after]


def test_chains_and_trees_are_matched_in_one_batch():
    chain = Draft.chains([[4, 6]])
    draft = Draft(
        torch.cat([TREE.tokens, torch.nn.functional.pad(chain.tokens, (0, 3))]),
        torch.cat([TREE.parents, torch.nn.functional.pad(chain.parents, (0, 3), value=-1)]),
        torch.tensor([5, 2]),
    )
    verdict = accept_matching(draft, [[5, 0, 6, 0, 2, 0], [4, 6, 1, 0, 0, 0]])
    assert verdict.paths == [[1, 3], [0, 1]]
    assert verdict.next_tokens == [2, 1]


def test_depths_of_queries():
    assert query_depths(TREE).tolist() == [[0, 1, 1, 2, 2, 2]]
    assert query_depths(Draft.chains([[1, 2], [1]]))[0].tolist() == [0, 1, 2]
    assert query_depths(Draft.empty(3)).tolist() == [[0], [0], [0]]


def test_prefix_weights_are_the_capped_running_product():
    ratios = numpy.array([[0.5, 4.0, 0.9, 0.0, 7.0], [1.0, 1.0, 3.0, 0.25, 2.0]])
    expected = [[1.0, 0.5, 1.0, 0.9, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0, 0.25, 0.5]]
    numpy.testing.assert_allclose(prefix_weights(ratios), expected)


def test_prefix_weights_survive_extreme_ratios():
    """Forty nodes of ratio 1e-30, then as many of 1e30: the product would underflow to nothing."""
    weights = prefix_weights(numpy.array([[1e-30] * 40 + [1e30] * 40]))
    assert weights[0, 40] == 0.0
    assert float(weights[0, -1]) == pytest.approx(1.0, abs=1e-9)


def test_prefix_weights_of_extreme_ratios_are_probabilities():
    largest = 1 / numpy.finfo(numpy.float64).tiny
    weights = prefix_weights(numpy.array([[largest, 0.0, largest] + [1e-30] * 40 + [largest]]))
    assert ((weights >= 0) & (weights <= 1)).all()
    assert weights[0, 1] == 1.0
    assert weights[0, 3] == 0.0


SETTINGS = (
    {"temperature": 1.0},
    {"temperature": 0.7, "min_p": 0.05},
    {"temperature": 1.4, "top_k": 5},
    {"temperature": 0.9, "top_p": 0.8},
    {"temperature": 1.0, "repetition_penalty": 1.3},
    {"temperature": 0.0},
)


def mixed_batch(seed, has_probs=True):
    """Return rows with and without seeds, chains of unequal lengths drawn for them, and the target's logits."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    chosen = [SETTINGS[0], *rng.choices(SETTINGS, k=rng.randint(1, 6))]
    rows = [
        Row([rng.randrange(2), 1], SamplingParams(max_tokens=99, **settings), seed=rng.getrandbits(50))
        for settings in chosen
    ]
    lengths = [rng.randint(0, 5) for _ in rows]
    logits = 2 * torch.randn(len(rows), max(lengths) + 1, rng.choice((2, 7, 300)), generator=generator)
    probs = torch.zeros_like(logits[:, 1:])
    chains = []
    for row, length, own, row_probs in zip(rows, lengths, logits, probs, strict=True):
        row.coupled = rng.random() < 0.4
        noise = KeyedNoise.from_rows([row])
        changed = own[None, :length] + 0.3 * torch.randn(length, logits.shape[-1], generator=generator)
        if length:
            row_probs[:length] = compute_target_probs(changed, [row], Draft.empty(1))[0]
        chains.append([int(noise.draft(dist[None], depth)) for depth, dist in enumerate(row_probs[:length])])
    return rows, Draft.chains(chains, probs if has_probs else None), logits


def batches_are_verified_like_single_rows(has_probs=True, num_cases=40):
    """Return whether rows of a batch have the verdicts that the rule for each gives it alone."""
    lengths = set()
    for seed in range(num_cases):
        rows, draft, logits = mixed_batch(seed, has_probs)
        together = verify_logits(make_verifier("auto"), rows, draft, logits, KeyedNoise.from_rows(rows))
        for index, row in enumerate(rows):
            length = int(draft.lengths[index])
            probs = None if draft.probs is None else draft.probs[index : index + 1, :length]
            chain = Draft.chains([draft.token_lists[index][:length]], probs)
            is_matched = row.coupled or probs is None or row.params.temperature == 0
            verifier = make_verifier("coupled" if is_matched else "block")
            own_logits = logits[index : index + 1, : length + 1]
            alone = verify_logits(verifier, [row], chain, own_logits, KeyedNoise.from_rows([row]))
            if (together.lengths[index], together.next_tokens[index]) != (
                alone.lengths[0],
                alone.next_tokens[0],
            ):
                return False
            lengths.add((length, alone.lengths[0]))
    return lengths >= {(length, accepted) for length in range(4) for accepted in range(length + 1)}


@pytest.mark.parametrize("has_probs", [True, False])
def test_rows_of_a_batch_have_the_verdicts_of_single_rows(has_probs):
    """Rows with and without seeds, at all temperatures, with chains of unequal lengths."""
    assert batches_are_verified_like_single_rows(has_probs, 200)


def test_settings_are_applied_once(monkeypatch):
    calls, apply = [], LogitProcessors.apply
    monkeypatch.setattr(LogitProcessors, "apply", lambda *args: calls.append(1) or apply(*args))
    params = SamplingParams(temperature=1.0, repetition_penalty=1.3)
    rows = [Row([0], params), Row([1], params)]
    draft = Draft.chains([[1, 2], [3]], torch.full((2, 2, 8), 1 / 8))
    verify_logits(make_verifier("auto"), rows, draft, torch.zeros(2, 3, 8), KeyedNoise.from_rows(rows))
    assert len(calls) == 1


@pytest.mark.parametrize("name", ["block", "auto"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_are_refused(name, temperature):
    rows = [Row([0], SamplingParams(temperature=temperature)), Row([1], SamplingParams(temperature=1.0))]
    draft = Draft.chains([[1, 2], [3]], torch.full((2, 2, 8), 1 / 8))
    logits = torch.zeros(2, 3, 8)
    logits[0, -1, 0] = torch.nan
    with pytest.raises(SecondGuessError, match="expected finite logits"):
        verify_logits(make_verifier(name), rows, draft, logits, KeyedNoise.from_rows(rows))
