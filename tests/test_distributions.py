"""Exact output distribution of every verifier, drafter and controller: it equals the target's to 1e-12.

The decoding loop runs over all outcomes of all random decisions (`secondguess.proof.enumeration`); nothing is sampled.
"""

import itertools
import math
from dataclasses import replace

import pytest
import torch

from distribution_cases import (
    PAIRS,
    PAIRS_WITH_END,
    PROMPT,
    ROUNDING,
    SAMPLED,
    Pair,
    after_prompt,
    chain_branches,
    coupled_text_dist,
    dist_error,
    expected_accepted,
    make_other_drafter,
    make_pair_drafter,
    make_tree_drafter,
    mean_accepted,
    one_hot_dist,
    plain_dist,
    play,
    sometimes,
    with_observations,
)
from grammar_cases import ENDS, REGEXES, masked_dist, tiny_matcher, with_regex
from secondguess.controllers import make_controller
from secondguess.core import Row
from secondguess.decode import Components, decode
from secondguess.drafters.base import Drafter
from secondguess.drafters.combined import CombinedDrafter
from secondguess.drafters.model import ModelDrafter
from secondguess.drafters.none import NoDrafter
from secondguess.drafters.row_sources import ForcedTokens, Prediction
from secondguess.drafters.spec import make_drafter
from secondguess.drafters.trees import TreeOptions
from secondguess.drafters.vocabulary.drafter import TranslatingDrafter
from secondguess.errors import BadInputError, MismatchWarning
from secondguess.proof.enumeration import (
    enumerate_rounds,
    exact_dist,
    joint_race_probability,
    largest_difference,
)
from secondguess.proof.fakes import TableModel, random_probs
from secondguess.sampling import SamplingParams
from secondguess.verifiers import make_verifier

CONTROLLERS = [
    "fixed:1",
    "fixed:3",
    "confidence:3,threshold=0.5",
    "entropy:3,threshold=0.5",
    "cost:3",
    "learned,length=3,threshold=0.24",
]


def drafters_and_controllers(controllers):
    """Return every drafter with every controller that affects it; `fixed` and `cost` also plan deterministic drafts."""
    return [
        (drafter, controller)
        for drafter in ("sampled", "deterministic", "either")
        for controller in controllers
        if drafter != "deterministic" or controller.startswith(("fixed", "cost"))
    ]


def with_auto(verifiers, length, controllers):
    """Return (verifier, drafter, controller): all combinations, and `auto` where rows use different rules.

    `auto` delegates each row to another verifier. With one kind of draft this is one verifier for all rows, whatever
    the controller, so one controller is enough; with `either` one batch has rows of both kinds.
    """
    pairs = drafters_and_controllers(controllers)
    return [
        *((verifier, *pair) for verifier in verifiers for pair in pairs),
        *(("auto", *pair) for pair in pairs if pair[0] == "either" or pair[1] == f"fixed:{length}"),
    ]


@pytest.mark.parametrize("pair", ["ternary", "zeros", "certain-target"])
@pytest.mark.parametrize("verifier", ["rejection", "block", "auto"])
def test_plain_decoding_has_the_target_distribution(verifier, pair):
    branches = chain_branches(pair, "sampled", verifier, "fixed:0")
    assert dist_error(branches, after_prompt(PAIRS[pair].target), num_tokens=4) < ROUNDING


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize(
    ("verifier", "drafter", "controller"), with_auto(["rejection", "block"], 3, CONTROLLERS)
)
def test_output_distribution_equals_the_targets(verifier, drafter, controller, pair):
    branches = chain_branches(pair, drafter, verifier, controller)
    assert dist_error(branches, after_prompt(PAIRS[pair].target), num_tokens=4) < ROUNDING


COUPLED_CONTROLLERS = [
    "fixed:2",
    "confidence:2,threshold=0.5",
    "entropy:2",
    "cost:2",
    "learned,length=2,threshold=0.24",
]


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize(
    ("verifier", "drafter", "controller"), with_auto(["coupled"], 2, COUPLED_CONTROLLERS)
)
def test_output_distribution_of_coupled_rows_equals_the_targets(verifier, drafter, controller, pair):
    pair = PAIRS[pair]
    branches = play(
        pair, make_pair_drafter(drafter, pair), verifier, with_observations(controller), coupled=True
    )
    assert dist_error(branches, after_prompt(pair.target), num_tokens=3) < ROUNDING


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize(("drafter", "controller"), drafters_and_controllers(COUPLED_CONTROLLERS))
def test_output_distribution_of_coupled_verification_without_shared_noise_equals_the_targets(
    drafter, controller, pair
):
    pair = PAIRS[pair]
    branches = play(pair, make_pair_drafter(drafter, pair), "coupled", with_observations(controller))
    assert dist_error(branches, after_prompt(pair.target), num_tokens=3) < ROUNDING


def test_cost_with_observations_drafts_in_the_first_round():
    """Otherwise its enumerations would cover only plain decoding."""
    for drafter in ("sampled", "deterministic", "either"):
        branches = chain_branches("binary", drafter, "block", "cost:3")
        assert {branch.num_accepted for branch in branches} >= {0, 1, 2}


@pytest.mark.parametrize("length", [0, 1, 2])
@pytest.mark.parametrize(
    "controller", ["fixed:3", "confidence:3,threshold=0.9", "entropy:3", "cost", "cost:0"]
)
def test_the_draft_length_of_a_request_replaces_that_of_the_controller(controller, length):
    pair = PAIRS["binary"]
    params = replace(SAMPLED, draft_length=length)
    branches = play(pair, make_pair_drafter("sampled", pair), "block", controller, params)
    assert max(branch.num_accepted for branch in branches) == length
    assert dist_error(branches, after_prompt(pair.target), num_tokens=3) < ROUNDING


@pytest.mark.parametrize("verifier", ["rejection", "block", "coupled"])
def test_drafts_of_four_tokens_keep_the_distribution(verifier):
    pair = PAIRS["binary"]
    branches = play(pair, make_pair_drafter("sampled", pair), verifier, "fixed:4")
    assert dist_error(branches, after_prompt(pair.target), num_tokens=5) < ROUNDING


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize(
    ("verifier", "tree"), [("rejection", ""), ("block", ""), ("coupled", ""), ("traversal", "2x1")]
)
def test_drafts_end_where_logits_of_the_draft_model_are_not_finite(verifier, tree, value):
    """Nodes are left out by the tokens before them, not by their own."""
    pair = PAIRS["ternary"]
    undefined = torch.full((3,), value, dtype=torch.float64)
    draft_model = TableModel(3, sometimes(lambda context: undefined, pair.drafter))
    drafter = ModelDrafter(draft_model, "model:table", 3, TreeOptions(tree).shape)
    with pytest.warns(MismatchWarning, match="the drafter's logits are NaN or infinite"):
        branches = play(pair, drafter, verifier, "fixed:2" if tree else "fixed:3")
    assert dist_error(branches, after_prompt(pair.target), num_tokens=4) < ROUNDING
    assert mean_accepted(branches) > 0


@pytest.mark.parametrize("verifier", ["rejection", "block"])
def test_a_vocabulary_of_four_tokens_keeps_the_distribution(verifier):
    pair = Pair(4, random_probs(4, 20, zeros=0.2), random_probs(4, 21, zeros=0.2))
    branches = play(pair, make_pair_drafter("sampled", pair), verifier, "fixed:2")
    assert dist_error(branches, after_prompt(pair.target), num_tokens=3) < ROUNDING


@pytest.mark.parametrize("pair", ["binary", "zeros", "equal-at-times", "sharp"])
@pytest.mark.parametrize("verifier", ["coupled", "auto", "traversal"])
def test_deterministic_trees_keep_the_distribution_and_accept_their_probability(verifier, pair):
    pair = PAIRS[pair]
    branches = play(pair, make_pair_drafter("tree", pair), verifier, "fixed:3")
    assert dist_error(branches, after_prompt(pair.target), num_tokens=3) < ROUNDING
    accepted = 0.0
    for path in [(0,), (1,), (0, 1), (1, 0), (1, 1)]:
        accepted += torch.stack(
            [pair.target((*PROMPT, *path[:place]))[token] for place, token in enumerate(path)]
        ).prod()
    assert mean_accepted(branches) == pytest.approx(float(accepted), abs=ROUNDING)


@pytest.mark.parametrize("drafter", ["ngram", "suffix", "grid,width=3"])
@pytest.mark.parametrize("verifier", ["rejection", "block", "coupled", "auto"])
def test_lookup_drafters_keep_the_distribution(verifier, drafter):
    pair = PAIRS["ternary"]
    prompt = [0, 1, 2, 0, 1, 2, 0, 1]
    components = Components(
        TableModel(3, pair.target),
        make_drafter(drafter, target_vocab_size=3, load_draft_model=lambda _: None),
        make_verifier(verifier),
        make_controller("fixed:3"),
    )
    (branches,) = enumerate_rounds(components, lambda: [Row(list(prompt), SAMPLED)])
    assert max(branch.num_accepted for branch in branches) > 0
    assert dist_error(branches, lambda output: pair.target((*prompt, *output)), num_tokens=4) < ROUNDING


@pytest.mark.parametrize("pair", [name for name, each in PAIRS.items() if each.vocab_size < 4])
def test_jacobi_drafts_of_independent_rounds_keep_the_distribution(pair):
    """Rows without a seed under `auto`: the second round drafts what the first one sampled."""
    pair = PAIRS[pair]
    branches = play(pair, make_pair_drafter("jacobi", pair), "auto", "fixed:2", num_rounds=2)
    assert mean_accepted(branches) > 0
    assert dist_error(branches, after_prompt(pair.target), num_tokens=4) < ROUNDING


@pytest.mark.parametrize("drafter", ["jacobi", "sampled"])
@pytest.mark.parametrize("verifier", ["coupled", "auto"])
@pytest.mark.parametrize("target", ["even", "sharp", "zeros"])
def test_jacobi_drafts_of_coupled_noise_keep_the_distribution(target, verifier, drafter):
    """All rounds to the end of the text; rounds share the noise of a position, which the draft depends on."""
    dist = {
        "even": random_probs(2, 1),
        "sharp": random_probs(2, 5, 6.0),
        "zeros": random_probs(2, 6, zeros=0.4),
    }
    pair = Pair(2, dist[target], random_probs(2, 2))
    found = coupled_text_dist(pair, make_pair_drafter(drafter, pair), length=3, verifier=verifier)
    assert largest_difference(found, exact_dist(after_prompt(pair.target), 4)) < ROUNDING


@pytest.mark.parametrize("shared", ["wholly", "partly", "straddling", "none"])
@pytest.mark.parametrize("verifier", ["rejection", "block", "coupled", "auto"])
def test_draft_models_with_another_vocabulary_keep_the_distribution(verifier, shared):
    accepted = 0.0
    for pair in (PAIRS["ternary"], PAIRS["zeros"]):
        branches = play(pair, make_other_drafter(shared), verifier, "fixed:3")
        assert dist_error(branches, after_prompt(pair.target), num_tokens=4) < ROUNDING
        accepted += mean_accepted(branches)
    assert accepted > 0


@pytest.mark.parametrize("shared", ["wholly", "partly", "straddling", "none"])
@pytest.mark.parametrize("verifier", ["coupled", "auto"])
def test_drafts_of_text_that_are_drawn_by_races_change_no_text(verifier, shared):
    """A draft may be drawn by races of later positions, which the enumeration takes as independent of later rounds."""
    pair, params = PAIRS["ternary"], replace(SAMPLED, max_tokens=6)

    def decoded(drafter: Drafter, controller: str) -> tuple[list[list[int]], int]:
        rows = [Row([*PROMPT], params, seed=seed, coupled=True) for seed in range(400)]
        target = TableModel(pair.vocab_size, pair.target)
        components = Components(target, drafter, make_verifier(verifier), make_controller(controller))
        for _ in decode(components, rows):
            pass
        return [row.output for row in rows], sum(components.recorder.of(row).num_accepted for row in rows)

    plain, _ = decoded(NoDrafter(), "fixed:0")
    drafter = make_other_drafter(shared)
    found, num_accepted = decoded(drafter, "fixed:3")
    assert found == plain
    assert num_accepted > 0
    undefined = torch.full((drafter.runtime.vocab_size,), math.nan, dtype=torch.float64)
    drafter.runtime.dist = sometimes(drafter.runtime.dist, lambda context: undefined)
    with pytest.warns(MismatchWarning, match="the drafter's logits are NaN or infinite"):
        found, fewer_accepted = decoded(drafter, "fixed:3")
    assert found == plain
    assert 0 < fewer_accepted < num_accepted
    assert len(set(map(tuple, plain))) > 100


@pytest.mark.parametrize("shared", ["partly", "straddling", "none"])
def test_draft_models_with_another_vocabulary_keep_the_distribution_over_two_rounds(shared):
    """The draft model's view of the text goes on from the first verdict; rows with a seed, too."""
    pair = PAIRS["ternary"]
    for coupled in (False, True):
        drafter = make_other_drafter(shared)
        branches = play(pair, drafter, "auto", "fixed:1", num_rounds=2, coupled=coupled)
        assert dist_error(branches, after_prompt(pair.target), num_tokens=4) < ROUNDING


def test_holding_back_the_last_token_of_a_text_concerns_speed_only(monkeypatch):
    pair = PAIRS["ternary"]
    held_back = play(pair, make_other_drafter("straddling"), "auto", "fixed:3")

    def encoded(self, chain):
        text = b"".join(self.pair.draft.bytes_of(token) for token in chain).decode()
        return self.pair.target.encode(text).ids

    monkeypatch.setattr(TranslatingDrafter, "_encoded", encoded)
    branches = play(pair, make_other_drafter("straddling"), "auto", "fixed:3")
    assert mean_accepted(branches) != mean_accepted(held_back)
    assert dist_error(branches, after_prompt(pair.target), num_tokens=4) < ROUNDING


@pytest.mark.parametrize("setting", ["top-p", "repetition", "bias"])
def test_sampling_settings_apply_to_drafts_of_another_vocabulary(setting):
    pair, params = PAIRS["ternary"], SETTINGS[setting]
    branches = play(pair, make_pair_drafter("text", pair), "auto", "fixed:2", params)
    assert dist_error(branches, plain_dist(pair, params), num_tokens=3) < ROUNDING


@pytest.mark.parametrize(
    ("verifier", "length", "pair"),
    [
        *itertools.product(["rejection", "block", "traversal"], [3], PAIRS),
        *itertools.product(["coupled"], [2], PAIRS),
        ("auto", 2, "ternary"),  # `coupled` for all of these rows
    ],
)
@pytest.mark.parametrize("controller", ["fixed", "cost"])
def test_drafts_from_shared_outputs_keep_the_distribution(verifier, length, controller, pair):
    name, pair = pair, PAIRS[pair]
    drafter, decider = make_pair_drafter("shared", pair), with_observations(f"{controller}:{length}")
    branches = play(pair, drafter, verifier, decider, num_rounds=2, history="")
    assert dist_error(branches, after_prompt(pair.target), num_tokens=4) < ROUNDING
    if name == "ternary":
        alone = play(pair, drafter, verifier, decider, num_rounds=2)
        assert mean_accepted(alone) + 0.2 < mean_accepted(branches)


@pytest.mark.parametrize("drafter", ["sampled", "either"])
def test_drafts_from_shared_outputs_beside_another_drafter_keep_the_distribution(drafter):
    pair = PAIRS["ternary"]
    parts = [make_pair_drafter("shared", pair), make_pair_drafter("sampled", pair)]
    combined = CombinedDrafter(parts if drafter == "either" else parts[::-1], pair.vocab_size)
    branches = play(pair, combined, "auto", "fixed:2", num_rounds=2, history="")
    assert dist_error(branches, after_prompt(pair.target), num_tokens=4) < ROUNDING


@pytest.mark.parametrize(
    "controller",
    ["fixed:1", "confidence:2,threshold=0.6", "entropy:2", "cost:2", "learned,length=2,threshold=0.24"],
)
@pytest.mark.parametrize("verifier", ["rejection", "block", "auto"])
@pytest.mark.parametrize("drafter", ["sampled", "either"])
def test_output_distribution_over_two_rounds_equals_the_targets(verifier, controller, drafter):
    """Caches, drafter and controller continue from the first verdict."""
    pair = PAIRS["binary"]
    branches = play(
        pair, make_pair_drafter(drafter, pair), verifier, with_observations(controller), num_rounds=2
    )
    assert dist_error(branches, after_prompt(pair.target), num_tokens=4) < ROUNDING


@pytest.mark.parametrize("verifier", ["greedy", "auto", "block", "rejection", "coupled", "traversal"])
@pytest.mark.parametrize("drafter", ["sampled", "deterministic"])
def test_temperature_zero_generates_the_most_probable_tokens(drafter, verifier):
    pair = PAIRS["ternary"]
    params = SamplingParams(temperature=0.0, max_tokens=20)
    branches = play(pair, make_pair_drafter(drafter, pair), verifier, "fixed:3", params)
    assert dist_error(branches, after_prompt(one_hot_dist(3, 3)), num_tokens=4) < ROUNDING


SETTINGS = {
    "temperature": SamplingParams(temperature=0.6, max_tokens=20),
    "top-k": SamplingParams(temperature=1.3, top_k=2, max_tokens=20),
    "top-p": SamplingParams(temperature=1.0, top_p=0.7, max_tokens=20),
    "min-p": SamplingParams(temperature=1.0, min_p=0.3, max_tokens=20),
    "frequency": SamplingParams(temperature=1.0, frequency_penalty=1.5, max_tokens=20),
    "presence": SamplingParams(temperature=1.0, presence_penalty=-1.0, max_tokens=20),
    "repetition": SamplingParams(temperature=1.0, repetition_penalty=1.8, max_tokens=20),
    "bias": SamplingParams(temperature=1.0, logit_bias={1: 1.5, 2: -float("inf")}, max_tokens=20),
}


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("drafter", ["sampled", "deterministic"])
@pytest.mark.parametrize("verifier", ["rejection", "block", "auto"])
def test_sampling_settings_apply_inside_a_draft(verifier, drafter, setting):
    pair, params = PAIRS["ternary"], SETTINGS[setting]
    branches = play(pair, make_pair_drafter(drafter, pair), verifier, "fixed:3", params)
    assert dist_error(branches, plain_dist(pair, params), num_tokens=4) < ROUNDING


@pytest.mark.parametrize("regex", REGEXES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("drafter", "verifier", "controller"),
    [
        ("sampled", "auto", "fixed:0"),
        *itertools.product(
            ["sampled", "deterministic"], ["rejection", "block", "auto", "coupled"], ["fixed:2"]
        ),
        *itertools.product(["small-tree"], ["auto", "traversal", "coupled"], ["fixed:2"]),
        *itertools.product(["sampled-tree"], ["auto", "traversal"], ["fixed:1"]),
    ],
)
def test_a_grammar_holds_inside_a_draft(drafter, verifier, controller, temperature, regex):
    """The distribution is plain decoding's with the mask of an oracle, which tries all texts of the grammar."""
    pair, params = PAIRS_WITH_END["four-zeros"], SamplingParams(temperature=temperature, max_tokens=20)
    params = with_regex(params, REGEXES[regex])
    if drafter == "sampled-tree":
        made = make_tree_drafter(pair, [2], without_replacement=True)
    else:
        made = make_pair_drafter(drafter, pair)
    branches = play(pair, made, verifier, controller, params, end_tokens=ENDS)
    expected = masked_dist(pair.target, REGEXES[regex], PROMPT, greedy=temperature == 0)
    assert dist_error(branches, expected, 5, ENDS) < ROUNDING


@pytest.mark.parametrize("regex", REGEXES)
@pytest.mark.parametrize("verifier", ["rejection", "block", "auto"])
def test_a_grammar_holds_in_a_second_round(verifier, regex):
    pair, params = PAIRS_WITH_END["four"], with_regex(SAMPLED, REGEXES[regex])
    branches = play(
        pair, make_pair_drafter("sampled", pair), verifier, "fixed:1", params, num_rounds=2, end_tokens=ENDS
    )
    assert dist_error(branches, masked_dist(pair.target, REGEXES[regex], PROMPT), 5, ENDS) < ROUNDING


@pytest.mark.parametrize("controller", ["fixed:2", "cost:2"])
@pytest.mark.parametrize("regex", REGEXES)
def test_a_rows_own_sources_keep_the_distribution(regex, controller):
    """Forced tokens, always drafted, and a prediction in addition to the drafter; two rounds."""
    pair, params = PAIRS_WITH_END["four"], with_regex(SAMPLED, REGEXES[regex])

    def make_rows():
        matcher = tiny_matcher(params, 4)
        sources = (ForcedTokens(matcher), Prediction([0, 1, 2, 0]))
        return [Row(list(PROMPT), params, grammar=matcher, sources=sources, end_tokens=ENDS)]

    parts = TableModel(4, pair.target), make_pair_drafter("sampled", pair), make_verifier("auto")
    components = Components(*parts, with_observations(controller))
    (branches,) = enumerate_rounds(components, make_rows, num_rounds=2)
    assert dist_error(branches, masked_dist(pair.target, REGEXES[regex], PROMPT), 5, ENDS) < ROUNDING
    assert mean_accepted(branches) > 0


def test_a_prediction_that_is_resumed_after_mismatches_keeps_the_distribution():
    """In the second and third round it is resumed where the output so far matches it, or a token later."""
    pair, predictions = PAIRS_WITH_END["four"], []

    class Recorded(Prediction):
        def chain(self, limit):
            predictions.append(super().chain(limit))
            return predictions[-1]

    def make_rows():
        return [Row(list(PROMPT), SAMPLED, sources=(Recorded([0, 1, 2, 0, 1, 0]),))]

    parts = TableModel(4, pair.target), make_pair_drafter("deterministic", pair), make_verifier("auto")
    components = Components(*parts, with_observations("fixed:1"))
    (branches,) = enumerate_rounds(components, make_rows, num_rounds=3)
    assert dist_error(branches, plain_dist(pair, SAMPLED), num_tokens=5) < ROUNDING
    assert {(0,), (1,), (2,)} <= set(map(tuple, predictions))


@pytest.mark.parametrize("drafter", ["sampled", "deterministic", "small-tree", "either"])
@pytest.mark.parametrize("regex", REGEXES)
def test_a_seed_gives_one_text_with_a_grammar(regex, drafter):
    pair, params = PAIRS_WITH_END["four"], with_regex(SAMPLED, REGEXES[regex])

    def texts(controller):
        rows = [
            Row(
                list(PROMPT),
                params,
                seed=seed,
                coupled=True,
                end_tokens=ENDS,
                grammar=tiny_matcher(params, 4),
            )
            for seed in range(30)
        ]
        verifier = make_verifier("auto")
        parts = TableModel(4, pair.target), make_pair_drafter(drafter, pair), verifier
        for _ in decode(Components(*parts, make_controller(controller)), rows):
            pass
        return [row.output for row in rows]

    plain = texts("fixed:0")
    assert texts("fixed:3") == plain
    assert len(set(map(tuple, plain))) > 1


@pytest.mark.parametrize("drafter", ["sampled", "deterministic"])
@pytest.mark.parametrize("verifier", ["rejection", "block", "auto"])
def test_an_end_token_inside_a_draft_ends_the_row(verifier, drafter):
    pair, ends = PAIRS["ternary"], frozenset({1})
    branches = play(pair, make_pair_drafter(drafter, pair), verifier, "fixed:3", end_tokens=ends)
    assert dist_error(branches, after_prompt(pair.target), 4, ends) < ROUNDING


@pytest.mark.parametrize("verifier", ["rejection", "block", "auto"])
def test_the_last_position_is_sampled_by_the_target(verifier):
    pair = PAIRS["ternary"]
    params = SamplingParams(temperature=1.0, max_tokens=2)
    branches = play(pair, make_pair_drafter("sampled", pair), verifier, "fixed:3", params)
    assert {len(branch.tokens) for branch in branches} == {1, 2}
    assert dist_error(branches, after_prompt(pair.target), num_tokens=2) < ROUNDING


def test_rows_of_one_batch_use_different_verifiers():
    """Greedy, sampled and coupled rows under `auto` each have the distribution that they have alone."""
    pair = PAIRS["binary"]
    greedy = SamplingParams(temperature=0.0, max_tokens=20)

    def make_rows():
        return [Row(list(PROMPT), SAMPLED), Row([1], SAMPLED, coupled=True), Row(list(PROMPT), greedy)]

    drafter = make_pair_drafter("sampled", pair)
    verifier = make_verifier("auto")
    components = Components(TableModel(2, pair.target), drafter, verifier, make_controller("fixed:2"))
    sampled, coupled, deterministic = enumerate_rounds(components, make_rows)
    assert dist_error(sampled, after_prompt(pair.target), 3) < ROUNDING
    assert dist_error(coupled, lambda output: pair.target((1, *output)), 3) < ROUNDING
    assert dist_error(deterministic, after_prompt(one_hot_dist(2, 1)), 3) < ROUNDING
    assert mean_accepted(sampled) == pytest.approx(expected_accepted(pair, 2, "block"), abs=ROUNDING)


@pytest.mark.parametrize("pair", PAIRS)
def test_acceptance_equals_the_formula(pair):
    """And block verification never accepts less than token-level rejection."""
    accepted = {
        rule: mean_accepted(chain_branches(pair, "sampled", rule, "fixed:3"))
        for rule in ("rejection", "block")
    }
    expected = {rule: expected_accepted(PAIRS[pair], 3, rule) for rule in accepted}
    assert accepted == pytest.approx(expected, abs=ROUNDING)
    assert accepted["block"] >= accepted["rejection"] - ROUNDING


def test_block_verification_accepts_more_than_rejection_on_an_example():
    pair = PAIRS["ternary"]
    assert expected_accepted(pair, 3, "block") > expected_accepted(pair, 3, "rejection") + 0.01


@pytest.mark.parametrize("pair", PAIRS)
def test_acceptance_of_coupled_drafts_equals_the_formula(pair):
    pair = PAIRS[pair]
    branches = play(pair, make_pair_drafter("sampled", pair), "coupled", "fixed:1", coupled=True)
    p, q = pair.target(PROMPT), pair.drafter(PROMPT)
    match = 0.0
    for token in range(pair.vocab_size):
        if p[token] > 0 and q[token] > 0:
            match += float(1 / torch.maximum(p / p[token], q / q[token]).sum())
    distance = float((p - q).abs().sum()) / 2
    assert mean_accepted(branches) == pytest.approx(match, abs=ROUNDING)
    assert match >= (1 - distance) / (1 + distance) - ROUNDING


@pytest.mark.parametrize("seed", range(5))
def test_the_joint_distribution_of_two_races_has_the_marginals_p_and_q(seed):
    size = 5
    q, p = random_probs(size, seed, zeros=0.3)(()), random_probs(size, seed + 100, zeros=0.3)(())
    x, y = (torch.tensor(side) for side in zip(*itertools.product(range(size), repeat=2), strict=True))
    joint = joint_race_probability(q.expand(len(x), size), p.expand(len(x), size), x, y).reshape(size, size)
    torch.testing.assert_close(joint.sum(1), q, atol=ROUNDING, rtol=0)
    torch.testing.assert_close(joint.sum(0), p, atol=ROUNDING, rtol=0)


def test_enumeration_of_too_many_branches_is_refused():
    pair = Pair(4, random_probs(4, 1), random_probs(4, 2))
    drafter = ModelDrafter(TableModel(4, pair.drafter), "model:table", 4)
    with pytest.raises(BadInputError, match="branches"):
        play(pair, drafter, "block", "fixed:10")
