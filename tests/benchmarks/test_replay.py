"""Replays of controllers over recorded drafts, against values computed by hand."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

import pytest
from replay import Replayed, ReplayRow, replay
from round_costs import Cell, PartCosts, RoundCosts, Stage, fit_line, measure_round_costs, part_costs
from traces import NodeProbs, RecordedDraft, Trace, record

from secondguess.controllers import make_controller
from secondguess.core import Candidate, Row
from secondguess.decode import Components, decode
from secondguess.drafters.combined import CombinedDrafter
from secondguess.drafters.model import ModelDrafter
from secondguess.drafters.suffix import SuffixDrafter
from secondguess.drafters.trees import StaticTree
from secondguess.errors import BadInputError
from secondguess.proof.fakes import ScriptedDrafter, TableModel, random_probs
from secondguess.sampling import SamplingParams
from secondguess.verifiers import make_verifier

NOTHING = RecordedDraft(Candidate(longest=0, deterministic=True), (), ())
PLAIN_ROUND, STEP, ASKED, START = 1.0, 0.1, 0.15, 0.05
SURE = NodeProbs(1.0, 0.0, 0.0)


def rest(width: int) -> float:
    """Seconds of a round without drafting."""
    return PLAIN_ROUND + 0.2 * width


PART = PartCosts(START, STEP, ASKED, {1: rest(1), 2: rest(2)})
COSTS = RoundCosts(PLAIN_ROUND, [PART])


def recorded_draft(
    num_accepted: int, depth: int = 8, deterministic: bool = False, part: int = 0
) -> RecordedDraft:
    accepted = tuple(min(cut, num_accepted) for cut in range(1, depth + 1))
    return RecordedDraft(
        Candidate(part, deterministic=deterministic), () if deterministic else (SURE,) * depth, accepted
    )


def text(num_tokens: int, *drafts: RecordedDraft) -> Trace:
    """A text at each of whose places the parts draft alike."""
    return Trace("", 7, 0.0, [[each] * num_tokens for each in drafts or (NOTHING,)])


def run(controller: str, trace: Trace, costs: RoundCosts = COSTS) -> Replayed:
    (done,) = replay(make_controller(controller), [trace], costs)
    return done


@pytest.mark.parametrize("length", [1, 2, 4])
@pytest.mark.parametrize("accepted", [0, 1])
def test_the_time_of_a_constant_length_equals_the_closed_form(length: int, accepted: int) -> None:
    """Rounds of accepted + 1 tokens; the text's length is a multiple, and the last round has room for all of it but one."""
    num_tokens = 20 * (accepted + 1) + 1
    done = run(f"fixed:{length}", text(num_tokens, recorded_draft(accepted)))
    seconds, left = 0.0, num_tokens
    while left:
        drafted = min(length, left - 1)
        seconds += rest(drafted) + (START + drafted * STEP if drafted else 0.0)
        left -= min(accepted, drafted) + 1
    assert done.num_tokens == num_tokens
    assert done.seconds == pytest.approx(seconds)


def test_the_speed_of_a_long_text_tends_to_tokens_over_cost_per_round() -> None:
    done = run("fixed:4", text(5000, recorded_draft(2)))
    assert done.num_tokens / done.seconds == pytest.approx(3 / (START + 4 * STEP + rest(4)), rel=0.01)
    assert done.num_drafted / done.num_rounds == pytest.approx(4, rel=0.01)
    assert done.num_accepted / done.num_drafted == pytest.approx(0.5, rel=0.01)


def test_a_call_of_keep_drafting_that_ends_a_draft_costs_as_much_as_others() -> None:
    unsure = NodeProbs(0.1, 1.0, 0.1)
    done = run("confidence", text(11, RecordedDraft(Candidate(), (unsure,) * 8, (0,) * 8)))
    # The controller is not asked where there is room for one node only.
    asked, unasked = START + ASKED + (ASKED - STEP) + rest(1), START + ASKED + rest(1)
    assert done.seconds == pytest.approx(9 * asked + unasked + PLAIN_ROUND)


def test_a_draft_model_far_behind_catches_up_in_a_pass_of_its_own() -> None:
    # The lookup drafts from the second position to the twentieth, and the model before and after.
    looked_up = [NOTHING, *[recorded_draft(0, deterministic=True)] * 19, *[NOTHING] * 10]
    trace = Trace("", 7, 0.0, [looked_up, [recorded_draft(0, part=1)] * 30])
    done = run("fixed:1", trace, costs=RoundCosts(PLAIN_ROUND, [PART, PART]))
    rounds = 29 * (START + STEP + rest(1)) + PLAIN_ROUND
    assert done.seconds == pytest.approx(rounds + STEP)


def test_two_tokens_are_new_to_a_draft_model_whose_drafts_were_all_accepted() -> None:
    row = ReplayRow(text(20, recorded_draft(3)))
    row.advance(2, part=1, length=2)
    assert row.num_uncached == {1: 2}
    row.advance(1, part=1, length=2)
    assert row.num_uncached == {1: 1}
    row.advance(0, part=0, length=0)
    assert row.num_uncached == {1: 2}


@pytest.mark.parametrize("coupled", [False, True])
def test_a_replayed_row_is_coupled_as_it_was(coupled: bool) -> None:
    trace = replace(text(2), temperature=1.0, coupled=coupled)
    assert ReplayRow(trace).row.coupled is coupled


@pytest.mark.parametrize("coupled", [False, True])
def test_a_replay_has_the_rounds_of_the_recorded_decoding(coupled: bool) -> None:
    """The text is decided before the drafts, here of a lookup in addition to a draft model."""
    target = TableModel(8, random_probs(8, seed=1))

    def row_of(max_tokens: int) -> Row:
        params = SamplingParams(max_tokens=max_tokens, temperature=float(coupled))
        return Row([1, 2, 1, 2, 1], params, seed=1, coupled=coupled)

    def drafter() -> CombinedDrafter:
        model = ModelDrafter(TableModel(8, random_probs(8, seed=2)), "model:table", 8)
        return CombinedDrafter([SuffixDrafter(), model], 8)

    trace = record(target, drafter(), make_verifier("auto"), row_of(60), 40, 6)
    assert [part[0].candidate.part for part in trace.drafts] == [0, 1]
    assert all(draft.num_nodes == len(draft.dists) == 6 for draft in trace.drafts[1])
    assert not any(draft.dists for draft in trace.drafts[0])
    components = Components(target, drafter(), make_verifier("auto"), make_controller("fixed:3"))
    commits = [commit for (commit,) in decode(components, [row_of(40)])]
    done = run("fixed:3", trace, RoundCosts(COSTS.plain, [PART, PART]))
    assert (done.num_tokens, done.num_rounds) == (40, len(commits))
    assert done.num_accepted == sum(commit.num_accepted for commit in commits) > 0


def test_traces_of_trees_are_refused() -> None:
    """Cut to its first nodes a tree is not the draft of a shorter length."""
    table = TableModel(8, random_probs(8, seed=1))
    trees = ModelDrafter(table, "model:table,tree=2", 8, StaticTree((2,)))
    with pytest.raises(BadInputError, match="expected a drafter of chains"):
        record(table, trees, make_verifier("auto"), Row([1], SamplingParams(max_tokens=20)), 4)


def test_rounds_are_timed_by_length_in_turns_and_the_first_ones_are_left_out() -> None:
    target = TableModel(8, random_probs(8, seed=1))
    params = SamplingParams(max_tokens=10**6, temperature=0)
    stage = Stage(
        target,
        ScriptedDrafter(lambda row: [1] * 9),
        make_verifier("auto"),
        lambda: Row([1, 2, 3], params),
        count(1.0).__next__,
    )
    cell = Cell(stage, Candidate(deterministic=True), False, (0, 1, 3))
    for _ in range(3):
        cell.run(2)
    assert {length: len(times) for length, times in cell.sweep.rest.items()} == {0: 6, 1: 6, 3: 6}
    costs = part_costs([cell])
    assert set(costs.rest) == {1, 3}
    assert costs.step == costs.asked_step == 0.0, "on this clock a draft takes as long whatever its length"
    assert costs.start > 0
    whole = measure_round_costs(stage, (0, 1, 3), num_cycles=4)
    assert whole.plain > 0
    assert [part.start for part in whole.parts] == [costs.start]


def test_one_outlier_does_not_change_the_fitted_line() -> None:
    assert fit_line({1: 3.0, 2: 5.0, 3: 7.0, 4: 9.0, 6: 99.0}) == pytest.approx((1.0, 2.0))
    assert fit_line({3: 6.0}) == (0.0, 2.0)
