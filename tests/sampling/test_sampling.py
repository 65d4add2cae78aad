"""Validation of settings, and distributions inside a draft, which equal those of plain decoding after the same prefix."""

import copy
import dataclasses
import math
import pickle
import random
from collections import Counter

import pytest
import torch
from torch import Tensor
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from secondguess.core import Draft, Row
from secondguess.errors import BadInputError, SecondGuessError
from secondguess.sampling import SamplingParams
from secondguess.sampling.probs import commit_logprobs, compute_draft_probs, compute_target_probs
from secondguess.sampling.truncation import greedy_dists, most_likely

VOCAB = 12
EVERYTHING = SamplingParams(
    temperature=0.8,
    top_k=7,
    top_p=0.9,
    min_p=0.02,
    repetition_penalty=1.4,
    frequency_penalty=0.3,
    presence_penalty=-0.2,
    min_tokens=4,
    logit_bias={2: 1.5, 5: -math.inf, 99: 3.0},
)
SETTINGS = {
    "greedy": SamplingParams(),
    "greedy with penalties": SamplingParams(repetition_penalty=1.7, frequency_penalty=1.0),
    "model's own": SamplingParams(temperature=1.0),
    "temperature": SamplingParams(temperature=0.6),
    "top-k": SamplingParams(temperature=1.0, top_k=3),
    "top-p": SamplingParams(temperature=1.3, top_p=0.7),
    "top-k, top-p": SamplingParams(temperature=1.3, top_k=6, top_p=0.7),
    "top-p, min-p": SamplingParams(temperature=1.3, top_p=0.9, min_p=0.2),
    "min-p": SamplingParams(temperature=0.9, min_p=0.3),
    "bias": SamplingParams(temperature=1.0, logit_bias={0: 2.0, 11: -math.inf}),
    "repetition below 1": SamplingParams(temperature=1.0, repetition_penalty=0.6),
    "frequency": SamplingParams(temperature=1.0, frequency_penalty=0.7),
    "presence": SamplingParams(temperature=1.0, presence_penalty=0.7),
    "min_tokens": SamplingParams(temperature=1.0, min_tokens=5, stop_token_ids=(3,)),
    "everything": EVERYTHING,
}


def reference_dist(logits: Tensor, row: Row, path: list[int]) -> Tensor:
    """The documented order, token by token and in the plainest words, after `row.tokens + path`."""
    params = row.params
    output = Counter([*row.output, *path])
    seen = {*row.tokens, *path}
    values = []
    for token, value in enumerate(logits.tolist()):
        value += params.logit_bias.get(token, 0.0)
        if token in seen:
            value = value * params.repetition_penalty if value < 0 else value / params.repetition_penalty
        value -= params.frequency_penalty * output[token] + params.presence_penalty * (output[token] > 0)
        ends = token in row.end_tokens or token in params.stop_token_ids
        if ends and output.total() < params.min_tokens:
            value = -math.inf
        values.append(value)
    ranking = sorted(range(len(values)), key=lambda token: (-values[token], token))
    if params.temperature == 0:
        return torch.eye(len(values), dtype=torch.float64)[ranking[0]]
    values = [value / params.temperature for value in values]
    kept = [token for token in ranking if values[token] > -math.inf]
    if params.top_k:
        kept = [token for token in kept if values[token] >= values[kept[min(params.top_k, len(kept)) - 1]]]
    total = sum(math.exp(values[token]) for token in kept)
    mass, nucleus = 0.0, []
    for token in kept:
        if params.top_p < 1 and mass >= params.top_p:
            break
        nucleus.append(token)
        mass += math.exp(values[token]) / total
    best = math.exp(values[nucleus[0]])
    weights = {token: math.exp(values[token]) for token in nucleus}
    weights = {token: weight for token, weight in weights.items() if weight >= params.min_p * best}
    dist = torch.zeros(len(values), dtype=torch.float64)
    for token, weight in weights.items():
        dist[token] = weight / sum(weights.values())
    return dist


def random_row(params: SamplingParams, chooser: random.Random) -> Row:
    prompt = [chooser.randrange(VOCAB) for _ in range(chooser.randint(1, 6))]
    row = Row(prompt, params, end_tokens=frozenset({1}))
    row.tokens += [chooser.randrange(VOCAB) for _ in range(chooser.randint(0, 4))]
    return row


def random_tree(num_rows: int, num_nodes: int, chooser: random.Random) -> Draft:
    tokens = [[chooser.randrange(VOCAB) for _ in range(num_nodes)] for _ in range(num_rows)]
    parents = [[chooser.randrange(-1, node) for node in range(num_nodes)] for _ in range(num_rows)]
    return Draft(torch.tensor(tokens), torch.tensor(parents), torch.full((num_rows,), num_nodes))


def path_of(draft: Draft, row: int, query: int) -> list[int]:
    """The drafted tokens that lie before a query."""
    node, path = query - 1, []
    while node >= 0:
        path.insert(0, int(draft.tokens[row, node]))
        node = int(draft.parents[row, node])
    return path


def random_logits(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return 2 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def one_dist(logits: Tensor, params: SamplingParams) -> Tensor:
    """Return the distribution after a prompt of one token."""
    return compute_target_probs(logits[None, None], [Row([0], params)], Draft.empty(1))[0, 0]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", SETTINGS)
def test_every_node_of_a_tree_has_the_distribution_of_its_own_prefix(name, seed):
    chooser = random.Random(f"{name} {seed}")
    rows = [random_row(SETTINGS[name], chooser) for _ in range(2)]
    draft = random_tree(2, 6, chooser)
    logits = random_logits(2, 7, VOCAB, seed=seed)
    dists = compute_target_probs(logits, rows, draft)
    for index, row in enumerate(rows):
        for query in range(7):
            expected = reference_dist(logits[index, query], row, path_of(draft, index, query))
            torch.testing.assert_close(dists[index, query], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", SETTINGS)
def test_a_drafted_prefix_and_a_committed_one_give_the_same_distribution(name):
    chooser = random.Random(name)
    row = random_row(SETTINGS[name], chooser)
    draft = random_tree(1, 5, chooser)
    logits = random_logits(1, 6, VOCAB, seed=1)
    dists = compute_target_probs(logits, [row], draft)
    for query in range(6):
        path = path_of(draft, 0, query)
        committed = Row(row.tokens[: row.num_prompt], row.params, end_tokens=row.end_tokens)
        committed.tokens += [*row.output, *path]
        alone = compute_target_probs(logits[:, query : query + 1], [committed], Draft.empty(1))
        assert torch.equal(dists[:, query], alone[:, 0])
        chain, _ = compute_draft_probs(logits[:, query], [row], torch.tensor([path], dtype=torch.long))
        assert torch.equal(dists[:, query], chain)


def test_rows_with_different_settings_are_independent():
    chooser = random.Random(3)
    rows = [random_row(params, chooser) for params in SETTINGS.values()]
    draft = random_tree(len(rows), 4, chooser)
    logits = random_logits(len(rows), 5, VOCAB, dtype=torch.float32)
    together = compute_target_probs(logits, rows, draft)
    for index, row in enumerate(rows):
        alone = compute_target_probs(logits[index : index + 1], [row], draft.select(torch.tensor([index])))
        assert torch.equal(together[index], alone[0]), row.params


@pytest.mark.parametrize("seed", range(8))
def test_distributions_agree_with_transformers(seed):
    """Our order is that of Transformers, whose warpers see a plain row."""
    params = dataclasses.replace(EVERYTHING, frequency_penalty=0, presence_penalty=0, logit_bias={})
    row = random_row(params, random.Random(seed))
    ids = torch.tensor([row.tokens])
    expected = logits = random_logits(1, VOCAB, seed=seed)
    for processor in (
        RepetitionPenaltyLogitsProcessor(params.repetition_penalty),
        MinNewTokensLengthLogitsProcessor(row.num_prompt, params.min_tokens, [1]),
        TemperatureLogitsWarper(params.temperature),
        TopKLogitsWarper(params.top_k),
        TopPLogitsWarper(params.top_p),
        MinPLogitsWarper(params.min_p),
    ):
        expected = processor(ids, expected)
    dist = compute_target_probs(logits[:, None], [row], Draft.empty(1))[0]
    torch.testing.assert_close(dist, expected.softmax(-1), rtol=0, atol=1e-12)


@pytest.mark.parametrize("vocab_size", [40, 700, 20_011])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0, top_k=5),
        SamplingParams(temperature=0.7, top_k=30, top_p=0.8),
        SamplingParams(temperature=2.0, top_p=0.95),
        SamplingParams(temperature=1.0, top_p=0.3, min_p=0.05),
    ],
)
def test_truncation_by_candidates_equals_sorting(vocab_size, params):
    """Coarse logits, as of a bfloat16 model: ties everywhere, and wide nuclei."""
    logits = random_logits(vocab_size, seed=vocab_size).bfloat16().double()
    expected = reference_dist(logits, Row([0], params), [])
    torch.testing.assert_close(one_dist(logits, params), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("vocab_size", [7, 5000])
def test_greedy_takes_the_lowest_id_among_equals(vocab_size):
    logits = torch.zeros(vocab_size)
    logits[[3, 5]] = 4.0
    assert one_dist(logits, SamplingParams()).nonzero().tolist() == [[3]]
    assert one_dist(logits, SamplingParams(logit_bias={5: 0.5})).nonzero().tolist() == [[5]]
    assert one_dist(logits, SamplingParams(logit_bias={6: 4.0, 3: -1})).nonzero().tolist() == [[5]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_ties_take_the_lowest_id_in_every_dtype(dtype):
    values = torch.tensor(
        [[[0.5, 2.0, 2.0], [3.0, -1.0, 3.0]], [[-math.inf, -math.inf, 0.0], [1.0, 1.0, 1.0]]]
    )
    found = most_likely(values.to(dtype))
    assert found.tolist() == [[1, 0], [2, 0]]
    assert found.dtype == torch.long
    assert most_likely(values.to(dtype)[0, 0]).item() == 1


def test_nan_logits_make_a_greedy_distribution_undefined():
    logits = torch.tensor([[[1.0, math.nan, 2.0]], [[1.0, math.inf, 2.0]], [[0.0, 1.0, -math.inf]]])
    dists = greedy_dists(logits)
    assert dists.isnan().all(-1).tolist() == [[True], [True], [False]]
    assert dists[2, 0].tolist() == [0.0, 1.0, 0.0]


def test_top_k_keeps_all_that_are_tied_and_top_p_the_lower_ids():
    logits = torch.tensor([0.0, 2.0, 1.0, 1.0, 1.0])
    assert one_dist(logits, SamplingParams(temperature=1, top_k=2)).nonzero().flatten().tolist() == [
        1,
        2,
        3,
        4,
    ]
    dist = one_dist(torch.zeros(8), SamplingParams(temperature=1, top_p=0.3))
    assert dist.nonzero().flatten().tolist() == [0, 1, 2]


def test_top_p_keeps_the_token_that_crosses_it_and_at_least_one():
    logits = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64).log()
    dist = one_dist(logits, SamplingParams(temperature=1, top_p=0.6))
    assert dist.tolist() == pytest.approx([0.625, 0.375, 0])
    assert one_dist(logits, SamplingParams(temperature=1, top_p=1e-9)).tolist() == [1, 0, 0]


def test_a_flat_distribution_is_truncated_beyond_the_first_candidates():
    dist = one_dist(torch.zeros(5000, dtype=torch.float64), SamplingParams(temperature=1, top_p=0.50005))
    assert int((dist > 0).sum()) == 2501
    assert bool((dist[:2501] > 0).all())


def test_top_p_is_relative_to_all_tokens_kept_by_top_k():
    logits = torch.zeros(5000, dtype=torch.float64)
    logits[7] = 2.0
    params = SamplingParams(temperature=1, top_k=5, top_p=0.1)
    expected = reference_dist(logits, Row([0], params), [])
    torch.testing.assert_close(one_dist(logits, params), expected, rtol=0, atol=1e-12)


def test_top_p_1_keeps_improbable_tokens():
    logits = torch.tensor([0.0, -50.0, -90.0], dtype=torch.float64)
    dist = one_dist(logits, SamplingParams(temperature=1, top_k=2))
    assert dist.tolist() == pytest.approx([1, math.exp(-50), 0], rel=1e-9, abs=0)


def test_counts_distinguish_prompt_and_output():
    """Repetition counts the prompt; frequency and presence count only the output, as in OpenAI's API."""
    row = Row([1, 1, 2], SamplingParams(temperature=1, frequency_penalty=1, presence_penalty=0.5), seed=0)
    row.tokens += [2, 3, 3]
    logits = torch.zeros(1, 1, 5, dtype=torch.float64)
    changes = compute_target_probs(logits, [row], Draft.empty(1))[0, 0].log()
    assert (changes - changes[0]).tolist() == pytest.approx([0, 0, -1.5, -2.5, 0])


def test_end_tokens_are_banned_before_min_tokens_at_any_depth():
    row = Row([4], SamplingParams(temperature=1, min_tokens=3, stop_token_ids=[2]), end_tokens=frozenset({1}))
    row.tokens.append(5)
    dists = compute_target_probs(torch.zeros(1, 4, 6), [row], Draft.chains([[3, 3, 3]]))[0]
    assert (dists[:, 1] == 0).tolist() == (dists[:, 2] == 0).tolist() == [True, True, False, False]


def test_end_tokens_are_banned_for_the_rows_that_have_too_few_tokens():
    params = SamplingParams(temperature=1, min_tokens=1, stop_token_ids=[2])
    rows = [Row([4], params), Row([4], params)]
    rows[1].tokens.append(5)
    dists = compute_target_probs(torch.zeros(2, 1, 4), rows, Draft.empty(2))
    assert dists[:, 0, 2].tolist() == [0, 0.25]


@pytest.mark.parametrize("missing", [5, 8])
def test_a_drafter_may_have_another_vocabulary(missing):
    bias = {1: 1.0, missing: 5.0}
    params = SamplingParams(temperature=1, repetition_penalty=2.0, logit_bias=bias, min_tokens=3)
    row = Row([0, 2, missing], params, end_tokens=frozenset({3, missing}))
    drafted = torch.tensor([[missing, 4]])
    dist = compute_draft_probs(torch.ones(1, 5, dtype=torch.float64), [row], drafted)[0][0]
    changes = dist.log() - dist[1].log()
    assert changes.tolist() == pytest.approx([-1.5, 0, -1.5, -math.inf, -1.5])


def test_a_drafter_may_lack_all_possible_tokens():
    rows = [
        Row([0], SamplingParams(temperature=1, logit_bias=bias))
        for bias in ({}, {0: -math.inf, 1: -math.inf})
    ]
    drafted = torch.empty(2, 0, dtype=torch.long)
    dists, banned = compute_draft_probs(torch.zeros(2, 2), rows, drafted)
    assert dists.tolist() == [[0.5, 0.5], [1, 0]]
    assert banned == [False, True]


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_distributions_are_normalised_in_every_dtype_and_do_not_change_the_logits(name, dtype):
    logits = random_logits(1, 4, VOCAB).to(dtype)
    logits[0, 2, 3:9] = -math.inf
    before = logits.clone()
    dists = compute_target_probs(logits, [Row([1, 2], SETTINGS[name])], Draft.chains([[3, 4, 5]]))
    assert dists.dtype == (dtype if dtype.itemsize >= 4 else torch.float32)
    assert bool((dists >= 0).all())
    torch.testing.assert_close(dists.sum(-1), torch.ones(1, 4, dtype=dists.dtype), rtol=0, atol=1e-6)
    assert torch.equal(logits, before)


@pytest.mark.parametrize(
    "settings", [{}, {"temperature": 1}, {"temperature": 1, "top_k": 1}, {"temperature": 1, "min_p": 0.5}]
)
class TestUndefinedLaws:
    def test_banning_everything_is_refused(self, settings):
        params = SamplingParams(**settings, logit_bias=dict.fromkeys(range(4), -math.inf))
        with pytest.raises(BadInputError, match=r"ban every token.*relax logit_bias, min_tokens or grammar"):
            one_dist(torch.zeros(4), params)

    @pytest.mark.parametrize("value", [math.nan, math.inf])
    def test_nan_logits_are_distinguished_from_banned_tokens(self, settings, value):
        logits = torch.arange(5000) / 1000
        logits[4000] = value
        with pytest.raises(SecondGuessError, match="expected finite logits") as refusal:
            one_dist(logits, SamplingParams(**settings))
        assert not isinstance(refusal.value, BadInputError)

    def test_one_undefined_query_among_good_ones_is_found(self, settings):
        logits = torch.zeros(2, 3, 4)
        logits[1, 2] = -math.inf
        rows = [Row([0], SamplingParams(**settings)), Row([0], SamplingParams(**settings))]
        with pytest.raises(BadInputError):
            compute_target_probs(logits, rows, Draft.chains([[1, 2], [1, 2]]))


class TestLogprobs:
    logits = random_logits(4, VOCAB, seed=5)

    def commit(self, logprobs, path, next_token=6, **settings):
        row = Row([1], SamplingParams(logprobs=logprobs, temperature=0.3, logit_bias={6: 50}, **settings))
        commit = row.commit([[7, 8, 9][node] for node in path], next_token)
        return commit, commit_logprobs(commit, self.logits[None], 0, path)

    def test_logprobs_are_not_computed_unless_requested(self):
        commit, reported = self.commit(None, [0])
        assert reported is commit

    def test_logprobs_are_those_of_the_model_after_the_parent(self):
        _, reported = self.commit(3, [0, 2])
        dist = self.logits.log_softmax(-1)
        assert [each.token for each in reported.logprobs] == [7, 9, 6]
        own = [float(dist[0, 7]), float(dist[1, 9]), float(dist[3, 6])]
        assert [each.logprob for each in reported.logprobs] == pytest.approx(own)
        for each, query in zip(reported.logprobs, [0, 1, 3], strict=True):
            top = dist[query].topk(3)
            assert list(each.alternatives) == top.indices.tolist()
            assert list(each.alternatives.values()) == pytest.approx(top.values.tolist())

    def test_zero_alternatives_gives_only_the_token(self):
        _, reported = self.commit(0, [])
        assert [each.alternatives for each in reported.logprobs] == [{}]

    def test_a_truncated_commit_reports_only_kept_tokens(self):
        _, reported = self.commit(1, [0, 1, 2], max_tokens=2)
        assert [each.token for each in reported.logprobs] == [7, 8]


class TestSettings:
    @pytest.mark.parametrize(
        ("setting", "value"),
        [
            ("max_tokens", -1),
            ("max_tokens", 2.5),
            ("max_tokens", True),
            ("max_tokens", 10**12),
            ("min_tokens", -1),
            ("min_tokens", 129),
            ("temperature", -0.1),
            ("temperature", math.nan),
            ("temperature", math.inf),
            ("temperature", 1e-30),
            ("temperature", 1000),
            ("temperature", "hot"),
            ("temperature", None),
            ("top_k", -1),
            ("top_k", 1.0),
            ("top_p", 0),
            ("top_p", 1.01),
            ("top_p", math.nan),
            ("min_p", -0.1),
            ("min_p", 1.1),
            ("repetition_penalty", 0),
            ("repetition_penalty", math.inf),
            ("frequency_penalty", 2.1),
            ("presence_penalty", -2.1),
            ("logit_bias", [1, 2]),
            ("logit_bias", {"1": 1.0}),
            ("logit_bias", {-1: 1.0}),
            ("logit_bias", {1: 101}),
            ("logit_bias", {1: math.inf}),
            ("logit_bias", {1: math.nan}),
            ("stop", ""),
            ("stop", ["a", ""]),
            ("stop", [1]),
            ("stop", 1),
            ("stop_token_ids", "12"),
            ("stop_token_ids", 2),
            ("stop_token_ids", [-2]),
            ("stop_token_ids", [1.5]),
            ("ignore_eos", 1),
            ("seed", -1),
            ("seed", 1.5),
            ("seed", 2**64),
            ("logprobs", -1),
            ("logprobs", 21),
            ("prompt_logprobs", 21),
        ],
    )
    def test_invalid_values_are_refused_by_name(self, setting, value):
        with pytest.raises(BadInputError, match=rf"expected {setting}.* to be .*, got "):
            SamplingParams(**{setting: value})

    def test_values_are_normalised(self):
        params = SamplingParams(stop="\n", stop_token_ids=[3, 4], temperature=1, logit_bias={7: 2})
        assert params.stop == ("\n",)
        assert params.stop_token_ids == (3, 4)
        assert isinstance(params.temperature, float)
        assert dict(params.logit_bias) == {7: 2.0}

    def test_settings_are_immutable(self):
        bias = {7: 2.0}
        params = SamplingParams(logit_bias=bias)
        bias[7] = 3.0
        assert params.logit_bias[7] == 2.0
        with pytest.raises(TypeError):
            params.logit_bias[7] = 3.0
        with pytest.raises(dataclasses.FrozenInstanceError):
            params.top_k = 5

    def test_equal_settings_are_interchangeable(self):
        params = SamplingParams(logit_bias={7: 2, 1: 1}, stop=["a"])
        for other in (
            SamplingParams(logit_bias={1: 1.0, 7: 2.0}, stop="a"),
            copy.deepcopy(params),
            pickle.loads(pickle.dumps(params)),
            dataclasses.replace(params),
        ):
            assert other == params
            assert hash(other) == hash(params)
        assert dataclasses.replace(params, logit_bias={7: 1}) != params

    def test_settings_are_pickled_without_their_hash_which_differs_between_processes(self):
        params = SamplingParams(stop="a")
        hash(params)
        vars(params)["_hash"] += 1  # as if another process had computed it
        assert hash(pickle.loads(pickle.dumps(params))) == hash(SamplingParams(stop="a"))

    def test_tokens_outside_the_vocabulary_are_refused(self):
        SamplingParams(logit_bias={9: 1}, stop_token_ids=[9]).check_vocab(10)
        with pytest.raises(BadInputError, match="expected logit_bias to be token ids below 10, got 10"):
            SamplingParams(logit_bias={10: 1}).check_vocab(10)
        with pytest.raises(BadInputError, match="expected stop_token_ids"):
            SamplingParams(stop_token_ids=[10]).check_vocab(10)
