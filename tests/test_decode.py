"""The decoding loop: release of rows after errors and interruptions."""

import math
from dataclasses import replace

import pytest
import torch

from secondguess.controllers import make_controller
from secondguess.core import Draft, Row
from secondguess.decode import Components, decode
from secondguess.drafters.base import Drafter
from secondguess.drafters.combined import CombinedDrafter
from secondguess.drafters.model import ModelDrafter
from secondguess.drafters.ngram import NgramDrafter
from secondguess.drafters.none import NoDrafter
from secondguess.drafters.suffix import SuffixDrafter
from secondguess.errors import BadInputError
from secondguess.proof.fakes import TableModel, random_probs
from secondguess.runtime.modules.tiny import tiny_pair
from secondguess.runtime.modules.transformers import TransformersRuntime
from secondguess.sampling import SamplingParams
from secondguess.verifiers import make_verifier
from secondguess.verifiers.greedy import GreedyVerifier


def table_team(drafter=None, controller="fixed:3"):
    target = TableModel(5, random_probs(5, seed=0))
    return Components(target, drafter or NoDrafter(), make_verifier("auto"), make_controller(controller))


def test_closing_the_iterator_early_releases_every_row():
    draft_model = TableModel(5, random_probs(5, seed=1))
    components = table_team(ModelDrafter(draft_model, "model:table", 5))
    rounds = decode(components, [Row([token], SamplingParams(max_tokens=50)) for token in range(3)])
    next(rounds)
    rounds.close()
    assert components.target.num_live_rows == draft_model.num_live_rows == 0


def test_finished_rows_do_not_change():
    row = Row([1], SamplingParams(max_tokens=4))
    components = table_team()
    for _ in range(2):
        for _ in decode(components, [row]):
            pass
    assert row.num_output == 4


def test_the_error_of_a_refused_row_is_raised():
    model, _ = tiny_pair()
    with TransformersRuntime(model) as target:
        components = Components(target, NoDrafter(), make_verifier("auto"), make_controller("fixed:0"))
        with pytest.raises(ValueError, match="at least one token"):
            list(decode(components, [Row([0], SamplingParams()), Row([], SamplingParams())]))
        assert target.num_live_rows == 0


def padded(lengths, tokens=((1, 2), (1, 2)), parents=((-1, 0), (-1, 0)), probs=None, dtype=torch.int64):
    return Draft(*(torch.tensor(each, dtype=dtype) for each in (tokens, parents, lengths)), probs)


def with_last_node(probs):
    """Return uniform distributions of two rows and nodes, and these numbers for the last node of the last row."""
    dists = torch.full((2, 2, 5), 0.2)
    dists[1, 1] = torch.tensor(probs)
    return dists


@pytest.mark.parametrize(
    ("draft", "message"),
    [
        (None, "a Draft, got NoneType"),
        (padded([2, 3]), r"lengths from 0 to its 2 nodes, got \[2, 3\]"),
        (padded([2, -1]), r"lengths from 0 to its 2 nodes, got \[2, -1\]"),
        (padded([2]), "2 rows"),
        (Draft.chains([[1]] * 3), "2 rows, got 3"),
        (padded([2, 2], dtype=torch.int32), "int64 tokens, parents and lengths, got torch.int32"),
        (padded([2, 2], parents=((-1,), (-1,))), r"of \[row, node\], got \[2, 2\] and \[2, 1\]"),
        (padded([2, 2], parents=((1, 0), (-1, 0))), "parents before their children"),
        (padded([2, 2], tokens=((1, 5), (1, 2))), "token ids from 0 to 4, got 5"),
        (padded([2, 2], tokens=((1, -1), (1, 2))), "token ids from 0 to 4, got -1"),
        (padded([2, 2], probs=torch.full((2, 2, 5), 0.2)), "no Draft.probs"),
    ],
)
def test_a_draft_that_breaks_the_contract_is_refused(draft, message):
    with pytest.raises(BadInputError, match=f"expected the drafter careless to return .*{message}"):
        draft_for_two_rows(Careless(draft))


@pytest.mark.parametrize(
    ("probs", "message"),
    [
        (None, "Draft.probs where a row samples, got none"),
        (torch.full((2, 2, 4), 0.25), r"\[2, 2, 5\], got \[2, 2, 4\]"),
        (torch.full((2, 1, 5), 0.2), r"\[2, 2, 5\], got \[2, 1, 5\]"),
        (torch.full((2, 2, 5), 0.2, dtype=torch.bfloat16), "float32 or float64, got torch.bfloat16"),
        (
            torch.full((2, 2, 5), 0.25),
            "sum to 1 .* got a sum of 1.25 and a minimum of 0.25 at node 0 of row 0",
        ),
        (torch.tensor([0.6, 0.6, -0.2, 0, 0]).expand(2, 2, 5), "at least 0, .* a minimum of -0.2 at node 0"),
        (with_last_node([math.nan, 0.5, 0.5, 0, 0]), "a sum of nan and a minimum of nan at node 1 of row 1"),
        (with_last_node([math.inf, 0, 0, 0, 0]), "a sum of inf and a minimum of 0 at node 1 of row 1"),
    ],
)
def test_reported_distributions_that_break_the_contract_are_refused(probs, message):
    drafter = Careless(padded([2, 2], probs=probs), deterministic=False)
    with pytest.raises(BadInputError, match=f"expected the drafter careless to return .*{message}"):
        draft_for_two_rows(drafter)


def test_a_drafter_that_is_saved_among_those_of_the_package_is_checked():
    """As docs/adding-a-drafter.md advises; it may inherit from one of them."""
    saved = type("Saved", (NgramDrafter,), {"__module__": "secondguess.drafters.saved"})
    assert NgramDrafter.is_of_package
    assert not saved.is_of_package


def test_tokens_may_be_given_as_tensors():
    """A set of end tokens would not contain them: they are hashed by identity."""
    plain = draft_for_two_rows(NoDrafter(), temperature=0.0)
    accepted = [[torch.tensor(plain[0].tokens[1])]] * 2
    rows = draft_for_two_rows(Careless(Draft.chains(accepted)), temperature=0.0)
    assert [row.tokens for row in rows] == [row.tokens for row in plain]
    assert {type(token) for row in rows for token in row.tokens} == {int}


class TensorVerifier(GreedyVerifier):
    def verify_greedy(self, draft, chosen):
        verdict = super().verify_greedy(draft, chosen)
        return replace(verdict, next_tokens=torch.tensor(verdict.next_tokens))


def test_next_tokens_may_be_a_tensor():
    components = replace(table_team(), verifier=TensorVerifier())
    row = Row([0], SamplingParams(temperature=0.0, max_tokens=5))
    list(decode(components, [row]))
    assert row.tokens == draft_for_two_rows(NoDrafter(), temperature=0.0)[0].tokens[:6]
    assert {type(token) for token in row.tokens} == {int}


def test_a_drafter_that_samples_may_report_no_distributions_for_greedy_rows():
    draft_for_two_rows(Careless(Draft.chains([[1], [1]]), deterministic=False), temperature=0.0)


@pytest.mark.parametrize(
    ("draft", "message"),
    [
        (padded([2, 3]), "lengths from 0 to its 2 nodes"),
        (None, "a Draft, got NoneType"),
        (Draft.chains([[1]]), "a draft of 2 rows, got 1"),
    ],
)
def test_a_draft_of_a_part_that_breaks_the_contract_is_refused_by_the_name_of_the_part(draft, message):
    drafter = CombinedDrafter([Careless(draft), NgramDrafter()], 5)
    with pytest.raises(BadInputError, match=f"the drafter careless to return {message}"):
        draft_for_two_rows(drafter)
    assert CombinedDrafter([NgramDrafter(), SuffixDrafter()], 5).is_of_package


def test_probabilities_of_padding_have_no_meaning():
    drafter = Careless(padded([2, 1], probs=with_last_node([0.0] * 5)), deterministic=False)
    rows = [Row([0], SamplingParams(temperature=1.0)) for _ in range(2)]
    next(decode(table_team(drafter), rows))
    assert all(row.num_output for row in rows)


class Careless(Drafter):
    """Drafter that returns the same draft in every round."""

    name = "careless"

    def __init__(self, draft, deterministic=True):
        self.draft = draft
        self.deterministic = deterministic

    def propose(self, rows, budgets, noise):
        return self.draft


def draft_for_two_rows(drafter, temperature=1.0):
    rows = [Row([0], SamplingParams(temperature=temperature)) for _ in range(2)]
    list(decode(table_team(drafter), rows))
    return rows


def test_an_interrupted_prefill_of_a_draft_model_leaves_no_state(monkeypatch):
    model, draft = tiny_pair()
    target, draft_runtime = TransformersRuntime(model), TransformersRuntime(draft)
    components = Components(
        target,
        ModelDrafter(draft_runtime, "model:tiny", 3),
        make_verifier("auto"),
        make_controller("fixed:2"),
    )

    def interrupt(*arguments, **options):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(draft_runtime, "_prefill", interrupt)
        with pytest.raises(KeyboardInterrupt):
            list(decode(components, [Row([0, 1] * 10, SamplingParams())]))
    assert target.num_live_rows == draft_runtime.num_live_rows == 0


def test_a_runtime_works_after_running_out_of_memory(monkeypatch):
    model, _ = tiny_pair()
    target = TransformersRuntime(model)
    components = Components(target, NoDrafter(), make_verifier("auto"), make_controller("fixed:0"))
    rows = lambda count: [Row([0, 1, 2], SamplingParams(max_tokens=3)) for _ in range(count)]  # noqa: E731
    list(decode(components, rows(1)))

    def no_memory(*arguments):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    with monkeypatch.context() as patch:
        patch.setattr("secondguess.runtime.cache._empty", no_memory)
        with pytest.raises(RuntimeError, match="allocate"):
            list(decode(components, rows(8)))
    assert target.num_live_rows == 0
    after = rows(4)
    list(decode(components, after))
    assert all(row.num_output == 3 for row in after)


def test_a_fully_banned_draft_vocabulary_is_not_drafted_from():
    narrow = ModelDrafter(TableModel(3, random_probs(3, seed=1)), "model:narrow", 5)
    params = SamplingParams(max_tokens=6, logit_bias=dict.fromkeys(range(3), -torch.inf))
    drafted, plain = Row([3], params), Row([3], params)
    list(decode(table_team(narrow), [drafted]))
    list(decode(table_team(), [plain]))
    assert drafted.tokens == plain.tokens


def test_the_controller_does_not_shorten_drafts_whose_length_the_request_sets():
    drafter = ModelDrafter(TableModel(5, random_probs(5, seed=1)), "model:table", 5)
    components = table_team(drafter, "confidence:4,threshold=1")
    rows = [Row([1], SamplingParams(max_tokens=8, draft_length=length)) for length in (3, None)]
    next(decode(components, rows))
    assert [components.recorder.of(row).num_drafted for row in rows] == [3, 1]


class FixedDrafter(NoDrafter):
    """Drafter that proposes the same draft in every round."""

    def __init__(self, draft):
        self.draft = draft

    def propose(self, rows, budgets, noise):
        return self.draft


@pytest.mark.parametrize(
    ("tokens", "parents", "expected"),
    [
        ([2, 5, 1], [-1, 0, 1], ([2, 3], 1, [5, 1])),
        ([2, 3], [-1, 0], ([2, 3, 4], 2, [])),
        ([5], [-1], ([2], 0, [5])),
        # Of a tree, the tokens along the first child of each node.
        ([5, 2, 0, 5, 4, 1, 0, 0], [-1, -1, 0, 1, 1, 3, 3, 2], ([2, 3], 1, [5, 1])),
    ],
)
def test_a_commit_has_the_draft_tokens_that_were_rejected(tokens, parents, expected):
    target = TableModel(6, lambda context: torch.eye(6)[(context[-1] + 1) % 6])
    draft = Draft(torch.tensor([tokens]), torch.tensor([parents]), torch.tensor([len(tokens)]))
    components = Components(target, FixedDrafter(draft), make_verifier("auto"), make_controller("fixed:8"))
    (commit,) = next(decode(components, [Row([1], SamplingParams(max_tokens=9))]))
    assert (commit.tokens, commit.num_accepted, list(commit.rejected)) == expected
