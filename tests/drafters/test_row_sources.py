"""Draft sources of a row: forced tokens and predictions, in addition to any drafter."""

import keyword
import re
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from distribution_cases import PAIRS
from grammar_cases import ENDS, tiny_compiler, with_regex
from secondguess.controllers import make_controller
from secondguess.core import Candidate, Draft, Row
from secondguess.decode import Components, decode
from secondguess.drafters.combined import merge_drafts
from secondguess.drafters.none import NoDrafter
from secondguess.drafters.row_sources import (
    FORCED_PART,
    LENGTH_FACTOR,
    PREDICTION_PART,
    ForcedTokens,
    Prediction,
    with_sources,
)
from secondguess.errors import BadInputError
from secondguess.proof.fakes import ScriptedDrafter, TableModel
from secondguess.sampling import SamplingParams
from secondguess.verifiers import make_verifier

GREEDY = SamplingParams(max_tokens=40)


def said(prediction, output, limit=4):
    """Return the draft of a prediction after an output, read token by token, and its candidate."""
    row, source = Row([0], GREEDY), Prediction(prediction)
    for token in output:
        source.candidate(row)
        row.tokens.append(token)
    return source.chain(limit) if (candidate := source.candidate(row)).longest else [], candidate


def candidate_of(kind, longest):
    return Candidate(
        PREDICTION_PART, ("prediction", kind), longest, deterministic=True, length_factor=LENGTH_FACTOR
    )


def test_a_prediction_is_drafted_from_its_beginning():
    assert said([5, 6, 7, 8, 9], [])[0] == [5, 6, 7, 8]
    assert said([5, 6, 7, 8, 9], [5, 6])[0] == [7, 8, 9]
    assert said([5, 6], [5, 6]) == ([], candidate_of(2, 0))


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ([5, 6, 99], [8, 9, 10, 11]),  # one token replaced by a new one
        ([5, 6, 99, 98, 8], [9, 10, 11]),  # by two
        ([5, 6, 9], [10, 11]),  # tokens left out
        ([5, 99, 6], [7, 8, 9, 10]),  # a token inserted
        ([99, 5, 6], [7, 8, 9, 10]),
        ([10, 11, 5], [6, 7, 8, 9]),  # moved
    ],
)
def test_a_prediction_resynchronises(output, expected):
    assert said([5, 6, 7, 8, 9, 10, 11], output)[0] == expected


def test_the_place_behind_is_preferred_among_equals():
    prediction = [1, 9, 2, 1, 9, 3, 1, 9, 4, 7]
    assert said(prediction, [1, 9, 2, 50, 9], 1)[0] == [3]
    assert said(prediction, [1, 9, 2, 1, 9, 3, 50, 9], 1)[0] == [4]
    # A longer match counts more than the distance.
    assert said(prediction, [1, 9, 4, 50, 2, 1, 9], 1)[0] == [3]


def test_tokens_read_together_count_as_one_by_one():
    prediction, output = [5, 6, 7, 8, 9, 10, 11], [5, 99, 6, 9, 10]
    row, source = Row([0], GREEDY), Prediction(prediction)
    row.tokens += output
    assert source.candidate(row) == said(prediction, output)[1]
    assert source.chain(9) == said(prediction, output)[0]


@given(st.lists(st.integers(1, 4), max_size=12), st.lists(st.integers(1, 5), max_size=30))
def test_any_output_can_be_read_at_once_or_token_by_token(prediction, output):
    row, source = Row([0], SamplingParams(max_tokens=40)), Prediction(prediction)
    row.tokens += output
    assert source.candidate(row) == said(prediction, output, 20)[1]
    assert source.chain(20)[:4] == source.chain(4)


def test_resynchronising_takes_bounded_time():
    """Many equal tokens, none of them a match: each token read compares a bounded number of places."""
    compared = 0

    class Counting(Prediction):
        def _match(self, last, place):
            nonlocal compared
            compared += 1
            return super()._match(last, place)

    row, source = Row([0], SamplingParams(max_tokens=1000)), Counting([1, 2] * 5000)
    for _ in range(200):
        row.tokens += [1, 3]
        source.candidate(row)
    assert compared <= 200 * 2 * 64


def test_rows_without_sources_keep_the_drafters_candidates():
    candidates = [(Candidate(),), (Candidate(part=1),)]
    rows = [Row([0], GREEDY), Row([0], GREEDY)]
    assert with_sources(rows, candidates) is candidates
    rows[1].sources = (Prediction([4, 5]),)
    mixed = with_sources(rows, candidates)
    assert mixed[0] == (Candidate(),)
    assert [each.part for each in mixed[1]] == [PREDICTION_PART, 1]


@pytest.mark.parametrize("vocab_size", [None, 6])
def test_chains_join_a_draft(vocab_size):
    probs = None if vocab_size is None else torch.full((3, 1, 6), 1 / 6)
    draft = Draft.chains([[2], [], []], probs)
    joined = merge_drafts([draft, Draft.chains([[], [3, 4], []])], vocab_size)
    assert joined.tokens.tolist() == [[2, 0], [3, 4], [0, 0]]
    assert joined.parents.tolist() == [[-1, -1], [-1, 0], [-1, -1]]
    assert joined.lengths.tolist() == [1, 2, 0]
    assert draft.tokens.tolist() == [[2], [0], [0]]
    if vocab_size is None:
        assert joined.probs is None
    else:
        assert joined.probs[0, 0].tolist() == probs[0, 0].tolist()
        assert joined.probs[1].argmax(-1).tolist() == [3, 4]
        assert joined.probs[1].sum(-1).tolist() == [1, 1]


def run(row, drafter=None, controller="fixed:0", dist=None):
    """Decode one row over a table of four tokens; return its rounds and statistics."""
    target = TableModel(4, dist or (lambda context: torch.tensor([0.1, 0.2, 0.3, 0.4]).double()))
    parts = target, drafter or NoDrafter(), make_verifier("auto"), make_controller(controller)
    components = Components(*parts)
    rounds = sum(1 for _ in decode(components, [row]))
    return rounds, components.recorder.of(row)


def grammar_row(**settings):
    params = with_regex(SamplingParams(max_tokens=30, **settings), "abcab(a|c)bbb")
    matcher = tiny_compiler(4).matcher(params.grammar)
    return Row([0], params, end_tokens=ENDS, grammar=matcher, sources=(ForcedTokens(matcher),))


@pytest.mark.parametrize("controller", ["fixed:0", "fixed:1", "cost", "cost:0"])
@pytest.mark.parametrize("drafter", [NoDrafter(), ScriptedDrafter(lambda row: [3, 3])])
def test_forced_tokens_are_drafted_whatever_the_controller_plans(drafter, controller):
    row = grammar_row()
    rounds, stats = run(row, drafter, controller)
    assert row.output == [0, 1, 2, 0, 1, 2, 1, 1, 1]
    assert rounds <= 3  # abcab and a choice, then bbb
    assert stats.accepted_prediction_tokens == stats.rejected_prediction_tokens == 0


@pytest.mark.parametrize(("settings", "most"), [({"draft_length": 0}, 0), ({"max_draft_length": 2}, 2)])
def test_a_request_limits_its_own_sources(settings, most):
    row = grammar_row(**settings)
    _, stats = run(row)
    assert len(stats.drafted_per_position) == most
    assert row.output == [0, 1, 2, 0, 1, 2, 1, 1, 1]


@pytest.mark.parametrize("most", [0, 1, 3])
def test_the_drafts_of_a_request_are_limited(most):
    row = Row([0], SamplingParams(max_tokens=20, max_draft_length=most))
    _, stats = run(row, ScriptedDrafter(lambda row: [3, 3, 3, 3, 3]), "fixed:5")
    assert len(stats.drafted_per_position) == most


def test_predictions_are_counted_and_nothing_else():
    """Token 3 is the most likely one; the drafter's own drafts do not count."""
    row = Row([0], SamplingParams(max_tokens=4), sources=(Prediction([3, 3, 2]),))
    _, stats = run(row, ScriptedDrafter(lambda row: [3, 1]), "fixed:3")
    assert row.output == [3] * 4
    assert (stats.accepted_prediction_tokens, stats.rejected_prediction_tokens) == (2, 1)
    assert stats.as_dict()["accepted_prediction_tokens"] == 2


def test_a_wrong_token_is_not_drafted_again_and_again():
    row = Row([0], SamplingParams(max_tokens=30), sources=(Prediction([3, 2]),))
    _, stats = run(row, controller="fixed:1")
    assert stats.rejected_prediction_tokens <= 1


def test_rows_with_and_without_sources_share_a_batch():
    pair = PAIRS["ternary"]
    prompts = ([0, 1], [2], [1, 1])

    def decoded(drafter, controller, sources):
        rows = [Row(list(prompt), GREEDY, sources=own) for prompt, own in zip(prompts, sources, strict=True)]
        parts = TableModel(3, pair.target), drafter, make_verifier("auto"), make_controller(controller)
        components = Components(*parts)
        for _ in decode(components, rows):
            pass
        return [row.output for row in rows], [components.recorder.of(row).num_rounds for row in rows]

    plain, _ = decoded(NoDrafter(), "fixed:0", [()] * 3)
    guess = [*plain[1][:10], 0, 0, *plain[1][10:]]
    for controller in ("fixed:3", "cost"):
        sources = [(), (Prediction(guess),), ()]
        texts, num_rounds = decoded(ScriptedDrafter(lambda row: [0, 1]), controller, sources)
        assert texts == plain
        assert controller == "cost" or 2 * num_rounds[1] < min(num_rounds[0], num_rounds[2])


@pytest.mark.parametrize(
    ("value", "message"),
    [(3, "token ids"), ([1, -1], "token ids"), ([0.5], "token ids"), ({"a": 1}, "token ids")],
)
def test_values_that_are_no_prediction_are_refused(value, message):
    with pytest.raises(BadInputError, match=message):
        SamplingParams(prediction=value)


def test_a_prediction_outside_of_the_vocabulary_is_refused():
    SamplingParams(prediction="text").check_vocab(10)
    with pytest.raises(BadInputError, match="prediction"):
        SamplingParams(prediction=[3, 10]).check_vocab(10)


def renamed(text):
    """The text with another name for the identifier that it uses most, and how often it does."""
    names = re.findall(r"[A-Za-z_]{3,}", text)
    name = max(set(names) - set(keyword.kwlist), key=lambda each: (names.count(each), each))
    return re.sub(rf"\b{name}\b", "amount", text), names.count(name)


def test_a_code_edit_takes_a_quarter_of_the_passes():
    """The prediction is the text with one identifier renamed, as the original of an edit is."""
    from secondguess import load

    llm = load(dtype="float32")
    prompt = "def parse(text):\n    lines = text.split()\n    for line in lines:\n        line = line.strip()\n        if"
    num_plain = num_predicted = num_renamed = 0
    for seed in (2, 3):
        settings = {"max_tokens": 200, "temperature": 0.8, "seed": seed}
        plain = llm.generate(prompt, draft_length=0, **settings)
        original, count = renamed(plain.text)
        predicted = llm.generate(prompt, prediction=original, draft_length=16, **settings)
        assert predicted.text == plain.text
        assert predicted.stats.accepted_prediction_tokens > len(plain.token_ids) / 2
        num_renamed += count
        num_plain += plain.stats.num_rounds
        num_predicted += predicted.stats.num_rounds
    assert num_renamed >= 10
    assert num_predicted * 4 <= num_plain


def test_the_part_numbers_are_not_those_of_drafters():
    assert len({FORCED_PART, PREDICTION_PART}) == 2
    assert max(FORCED_PART, PREDICTION_PART) < 0


def test_padding_of_chains_is_dropped_when_they_are_joined():
    padded = Draft.chains([[2, 3, 4, 5], []], torch.full((2, 4, 6), 1 / 6)).select(torch.tensor([0, 1]))
    padded = replace(padded, lengths=torch.tensor([2, 0]), parents=torch.tensor([[-1, 0, -1, -1], [-1] * 4]))
    joined = merge_drafts([padded, Draft.chains([[], [1]])], 6)
    assert joined.tokens.tolist() == [[2, 3], [1, 0]]
    assert joined.probs[0].tolist() == padded.probs[0, :2].tolist()
    assert joined.probs[1].tolist() == [[0, 1, 0, 0, 0, 0], [0] * 6]
