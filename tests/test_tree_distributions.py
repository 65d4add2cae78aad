"""Exact output distribution with sampled trees: with and without replacement, static and growing.

As in test_distributions nothing is sampled: the decoding loop runs over all outcomes of all random decisions.
"""

import pytest

from distribution_cases import (
    PAIRS,
    PROMPT,
    ROUNDING,
    SAMPLED,
    SometimesScripted,
    TreeDrafter,
    after_prompt,
    dist_error,
    make_grown_drafter,
    make_pair_drafter,
    make_tree_drafter,
    mean_accepted,
    one_hot_dist,
    outcome_dist,
    plain_dist,
    play,
    script,
    tree_branches,
    tree_gains,
    with_observations,
)
from secondguess.controllers import make_controller
from secondguess.core import Budgets, Row
from secondguess.decode import Components, decode
from secondguess.drafters.combined import CombinedDrafter
from secondguess.drafters.none import NoDrafter
from secondguess.errors import BadInputError
from secondguess.proof.enumeration import enumerate_rounds, largest_difference
from secondguess.proof.fakes import TableModel
from secondguess.runtime.decoder.fused import FusedRuntime
from secondguess.runtime.decoder.fused_decoder import FusedDecoder
from secondguess.runtime.modules.tiny import tiny_pair
from secondguess.runtime.modules.transformers import TransformersRuntime
from secondguess.sampling import SamplingParams
from secondguess.sampling.noise import KeyedNoise
from secondguess.verifiers import make_verifier
from secondguess.verifiers.traversal import TraversalVerifier
from test_distributions import SETTINGS

DISTINCT = pytest.mark.parametrize("without_replacement", [True, False], ids=["distinct", "independent"])
HARD_PAIRS = ["binary", "ternary", "zeros", "equal-at-times", "rare", "sharp"]
ROOMY = "fixed:9"
"""More nodes than any tree here has."""


def tree_error(pair, verifier, widths, without_replacement, min_prob=0.0, num_rounds=1, num_tokens=3):
    drafter = make_tree_drafter(pair, widths, without_replacement, min_prob)
    branches = play(pair, drafter, verifier, ROOMY, num_rounds=num_rounds)
    return dist_error(branches, after_prompt(pair.target), num_tokens)


TREES = [
    *[((2,), pair) for pair in PAIRS],
    *[(widths, pair) for widths in [(1, 2), (2, 1)] for pair in HARD_PAIRS],
    ((3,), "zeros"),
    ((2, 2), "binary"),
    ((1, 1, 2), "binary"),
]


@pytest.mark.parametrize(("widths", "pair"), TREES)
@DISTINCT
def test_output_distribution_equals_the_targets(widths, pair, without_replacement):
    """And traversal accepts no less than the reference or a chain of the tree's depth."""
    for verifier in ("traversal", "recursive"):
        branches = tree_branches(pair, widths, without_replacement, verifier)
        assert dist_error(branches, after_prompt(PAIRS[pair].target), num_tokens=3) < ROUNDING, verifier
    gains = tree_gains(pair, widths, without_replacement)
    assert gains.traversal >= max(gains.recursive, gains.chain) - ROUNDING


@pytest.mark.parametrize(
    ("pair", "without_replacement", "expected"),
    [
        ("ternary", True, (1.648, 1.627, 0.778)),
        ("ternary", False, (1.132, 1.117, 0.778)),
        ("rare", True, (1.730, 1.700, 1.220)),
        ("rare", False, (1.271, 1.241, 1.220)),
    ],
)
def test_mean_accepted_nodes_equal_the_table_in_the_documentation(pair, without_replacement, expected):
    gains = tree_gains(pair, (2, 1), without_replacement)
    assert (gains.traversal, gains.recursive, gains.chain) == pytest.approx(expected, abs=6e-4)


@pytest.mark.parametrize("pair", ["ternary", "zeros", "certain-target"])
@DISTINCT
def test_auto_verifies_trees_by_traversal(pair, without_replacement):
    pair = PAIRS[pair]
    drafter = make_tree_drafter(pair, (2,), without_replacement)
    by_rule = [outcome_dist(play(pair, drafter, rule, ROOMY)) for rule in ("auto", "traversal")]
    assert largest_difference(*by_rule) < ROUNDING
    assert tree_error(pair, "auto", (1, 2), without_replacement) < ROUNDING


@pytest.mark.parametrize(
    ("widths", "pair"),
    [*[((1, 2), pair) for pair in HARD_PAIRS], *[((2, 1), pair) for pair in ("binary", "zeros")]],
)
@DISTINCT
def test_growing_trees_keep_the_distribution(widths, pair, without_replacement):
    """The nodes that get children depend on the tokens drawn; rows of one batch have trees of different shapes."""
    assert tree_error(PAIRS[pair], "traversal", widths, without_replacement, min_prob=0.3) < ROUNDING


@DISTINCT
def test_growing_trees_under_auto_keep_the_distribution(without_replacement):
    assert tree_error(PAIRS["ternary"], "auto", (2, 1), without_replacement, min_prob=0.3) < ROUNDING


@pytest.mark.parametrize("controller", ["cost:2", "confidence:2,threshold=0.5", "entropy:2,threshold=0.4"])
@pytest.mark.parametrize(("pair", "tree"), [("binary", "2x1"), ("zeros", "1x2")])
def test_trees_of_a_draft_model_under_controllers_keep_the_distribution(pair, tree, controller):
    """Whether a level is drawn depends on the distributions above it, which differ from branch to branch."""
    pair = PAIRS[pair]
    branches = play(pair, make_grown_drafter(pair, tree), "auto", with_observations(controller))
    assert max(branch.num_accepted for branch in branches) > 0
    assert dist_error(branches, after_prompt(pair.target), num_tokens=3) < ROUNDING


@DISTINCT
def test_a_tree_drafter_combined_with_a_lookup_keeps_the_distribution(without_replacement):
    """In one batch: after the prompt the lookup has a chain, after the other row's text it has none."""
    pair = PAIRS["binary"]
    parts = [SometimesScripted(script), make_tree_drafter(pair, (1, 2), without_replacement)]
    components = Components(
        TableModel(2, pair.target),
        CombinedDrafter(parts, 2),
        make_verifier("auto"),
        make_controller("fixed:3"),
    )
    texts = [list(PROMPT), [1, 1]]
    by_row = enumerate_rounds(components, lambda: [Row(list(text), SAMPLED) for text in texts])
    for text, branches in zip(texts, by_row, strict=True):
        assert dist_error(branches, lambda output, text=text: pair.target((*text, *output)), 3) < ROUNDING


def test_parts_that_draw_siblings_differently_are_refused():
    pair = PAIRS["binary"]
    parts = [make_tree_drafter(pair, (2,), without_replacement) for without_replacement in (True, False)]
    rows, budgets = (
        [Row([0], SAMPLED), Row([1], SAMPLED)],
        Budgets([1, 1], lambda *_: [True] * 2, parts=[0, 1]),
    )
    with pytest.raises(BadInputError, match="draw siblings alike"):
        CombinedDrafter(parts, 2).propose(rows, budgets, KeyedNoise.from_rows(rows))


def test_dynamic_trees_of_a_draft_model_keep_the_distribution():
    pair = PAIRS["binary"]
    drafter = make_grown_drafter(pair, "dynamic", nodes=4, width=2, depth=2)
    assert dist_error(play(pair, drafter, "auto", ROOMY), after_prompt(pair.target), 3) < ROUNDING


def test_growing_trees_have_different_forms(monkeypatch):
    """Otherwise their tests would be those of static trees."""
    forms = set()
    original = TraversalVerifier.verify_shape

    def verify_shape(self, shape, *others):
        forms.add(shape.parents)
        return original(self, shape, *others)

    monkeypatch.setattr(TraversalVerifier, "verify_shape", verify_shape)
    assert tree_error(PAIRS["zeros"], "traversal", (2, 1), False, min_prob=0.3) < ROUNDING
    assert forms == {(-1, -1), (-1, -1, 0), (-1, -1, 1), (-1, -1, 0, 1)}


@pytest.mark.parametrize("verifier", ["traversal", "auto"])
@DISTINCT
def test_output_distribution_over_two_rounds_equals_the_targets(verifier, without_replacement):
    assert (
        tree_error(PAIRS["binary"], verifier, (2,), without_replacement, num_rounds=2, num_tokens=4)
        < ROUNDING
    )


def test_output_distribution_over_two_rounds_of_growing_trees_equals_the_targets():
    """The text ends after four tokens, so that the second round drafts two nodes at most."""
    pair, params = PAIRS["binary"], SamplingParams(temperature=1.0, max_tokens=4)
    drafter = make_tree_drafter(pair, (1, 2), True, min_prob=0.3)
    branches = play(pair, drafter, "traversal", ROOMY, params, num_rounds=2)
    assert dist_error(branches, after_prompt(pair.target), num_tokens=4) < ROUNDING


@pytest.mark.parametrize("pair", ["ternary", "zeros", "equal-at-times", "certain-drafter"])
@pytest.mark.parametrize(("tree_rule", "chain_rule"), [("traversal", "block"), ("recursive", "rejection")])
@pytest.mark.parametrize("drafter", ["sampled", "deterministic"])
def test_tree_verifiers_equal_chain_verifiers_on_chains(drafter, tree_rule, chain_rule, pair):
    """The joint distribution of accepted nodes and text is equal, branch for branch."""
    pair = PAIRS[pair]
    outcomes = [
        outcome_dist(play(pair, make_pair_drafter(drafter, pair), rule, "fixed:3"))
        for rule in (tree_rule, chain_rule)
    ]
    assert largest_difference(*outcomes) < ROUNDING


@pytest.mark.parametrize("setting", ["top-p", "frequency"])
def test_sampling_settings_apply_inside_a_tree(setting):
    pair, params = PAIRS["ternary"], SETTINGS[setting]
    branches = play(pair, make_tree_drafter(pair, (1, 2), True), "traversal", ROOMY, params)
    assert dist_error(branches, plain_dist(pair, params), num_tokens=3) < ROUNDING


def test_an_end_token_inside_a_tree_ends_the_row():
    pair, ends = PAIRS["ternary"], frozenset({1})
    branches = play(pair, make_tree_drafter(pair, (1, 2), True), "traversal", ROOMY, end_tokens=ends)
    assert dist_error(branches, after_prompt(pair.target), 3, ends) < ROUNDING


def test_equal_deterministic_siblings_are_accepted_once():
    """The second of two equal deterministic siblings has no probability left, nor have its descendants."""
    pair = PAIRS["ternary"]
    branches = play(pair, TreeDrafter([1, 1, 0], [-1, -1, 1]), "traversal", ROOMY)
    assert dist_error(branches, after_prompt(pair.target), num_tokens=3) < ROUNDING
    assert mean_accepted(branches) == pytest.approx(float(pair.target(PROMPT)[1]), abs=ROUNDING)


def test_a_greedy_row_beside_sampled_trees_generates_the_most_probable_tokens():
    pair, greedy = PAIRS["binary"], SamplingParams(temperature=0.0, max_tokens=20)
    components = Components(
        TableModel(2, pair.target),
        make_tree_drafter(pair, (2,), True),
        make_verifier("auto"),
        make_controller(ROOMY),
    )
    rows = lambda: [Row(list(PROMPT), SAMPLED), Row(list(PROMPT), greedy)]  # noqa: E731
    sampled, deterministic = enumerate_rounds(components, rows)
    assert dist_error(sampled, after_prompt(pair.target), 3) < ROUNDING
    assert dist_error(deterministic, after_prompt(one_hot_dist(2, 1)), 3) < ROUNDING


def test_enumeration_refuses_trees_of_coupled_rows():
    pair = PAIRS["binary"]
    with pytest.raises(BadInputError, match="one draft per depth"):
        play(pair, make_tree_drafter(pair, (2,), True), "coupled", ROOMY, coupled=True)


def runtime_of(kind):
    if kind == "table":
        return TableModel(3, PAIRS["ternary"].target)
    model, _ = (each.double() for each in tiny_pair(vocab_size=3))
    return FusedRuntime(FusedDecoder(model, packed=False)) if kind == "fused" else TransformersRuntime(model)


@pytest.mark.parametrize("kind", ["table", "module", "fused"])
@DISTINCT
def test_coupled_text_with_trees_equals_plain_decoding(without_replacement, kind):
    """Bit for bit, since coupled trees have no joint distribution in closed form: the same seeds with and without drafts."""
    params = SamplingParams(temperature=1.0, max_tokens=10)

    def texts(drafter):
        rows = [Row([0, 1 + seed % 2], params, seed=seed, coupled=True) for seed in range(12)]
        components = Components(runtime_of(kind), drafter, make_verifier("auto"), make_controller(ROOMY))
        accepted = sum(commit.num_accepted for commits in decode(components, rows) for commit in commits)
        return [row.output for row in rows], accepted

    plain, _ = texts(NoDrafter())
    pair = PAIRS["ternary"]
    found, accepted = texts(make_tree_drafter(pair, (2, 2), without_replacement, min_prob=0.3))
    assert accepted > 12
    assert found == plain
    assert len(set(map(tuple, plain))) > 6
