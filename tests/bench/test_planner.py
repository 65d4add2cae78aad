"""Predictions against arithmetic done by hand, and what is recommended from them."""

from __future__ import annotations

import pytest

from secondguess.bench.planner import (
    PLAIN,
    Batches,
    Choice,
    Evidence,
    Part,
    Speed,
    acceptance_by_position,
    choices_of,
    controllers_for,
    coverage,
    group,
    losing_sizes,
    one_for_all,
    predict,
    recommend,
    split_drafter,
)
from secondguess.bench.replay import ReplayRow
from secondguess.bench.round_costs import PartCosts, RoundCosts
from secondguess.bench.traces import Guess, NodeLaw, Trace
from secondguess.core import Prospect
from secondguess.errors import BadInputError

NOTHING = Guess(Prospect(longest=0, certain=True), (), ())
PLAIN_ROUND, STEP, ASKED, START, UPKEEP, READING = 1.0, 0.1, 0.15, 0.05, 0.01, 0.002
SURE = NodeLaw(1.0, 0.0, 0.0)


def rest(width: int) -> float:
    """Of a round over one row; two rows take half as much again."""
    return PLAIN_ROUND + 0.2 * width


PART = PartCosts(
    {1: STEP, 2: 1.5 * STEP},
    {1: ASKED, 2: 1.5 * ASKED},
    {1: {1: rest(1), 2: rest(2)}, 2: {1: 1.5 * rest(1), 2: 1.5 * rest(2)}},
    {1: START, 2: START},
)
COSTS = RoundCosts({1: PLAIN_ROUND, 2: 1.5 * PLAIN_ROUND}, [PART])


def guess(num_accepted: int, depth: int = 8, certain: bool = False, part: int = 0) -> Guess:
    accepted = tuple(min(cut, num_accepted) for cut in range(1, depth + 1))
    return Guess(Prospect(part, certain=certain), () if certain else (SURE,) * depth, accepted)


def evidence(
    num_tokens: int, accepted: int, num_prompts: int = 1, costs: RoundCosts = COSTS, certain: bool = False
) -> Evidence:
    """Texts of equal length along which every guess is accepted so far."""
    parts = {"model:x": Part([[guess(accepted, certain=certain)] * num_tokens] * num_prompts, certain)}
    bare = [Trace("", 7, 0.0, [[NOTHING] * num_tokens], num_tokens)] * num_prompts
    batches = {
        size: Batches(
            group(num_prompts, size),
            [0.5] * len(group(num_prompts, size)),
            {"model:x": [0.3] * len(group(num_prompts, size))},
        )
        for size in (1, 2)
    }
    return Evidence(bare, parts, lambda names: costs if names else RoundCosts(costs.plain, []), batches)


@pytest.mark.parametrize("length", [1, 2, 4])
@pytest.mark.parametrize("accepted", [0, 1])
def test_a_constant_length_takes_what_the_closed_form_says(length, accepted):
    """Rounds of accepted + 1 tokens; the text's length is a multiple, and the last round has room for all of it but one."""
    num_tokens = 20 * (accepted + 1) + 1
    speed = predict(Choice("model:x", f"fixed:{length}"), evidence(num_tokens, accepted), 1)
    seconds, left = 0.5 + 0.3, num_tokens
    while left:
        drafted = min(length, left - 1)
        seconds += rest(drafted) + (START + drafted * STEP if drafted else 0.0)
        left -= min(accepted, drafted) + 1
    assert speed.tokens == (num_tokens,)
    assert speed.seconds[0] == pytest.approx(seconds)


def test_a_long_text_tends_to_tokens_over_cost_per_round():
    speed = predict(Choice("model:x", "fixed:4"), evidence(5000, 2), 1)
    assert speed.tokens_per_second == pytest.approx(3 / (START + 4 * STEP + rest(4)), rel=0.01)
    assert speed.draft_length == pytest.approx(4, rel=0.01)
    assert speed.acceptance_rate == pytest.approx(0.5, rel=0.01)


def test_plain_decoding_takes_plain_rounds_and_no_prefill_of_a_draft_model():
    speed = predict(PLAIN, evidence(10, 1), 1)
    assert speed.seconds == (pytest.approx(0.5 + 10 * PLAIN_ROUND),)
    assert (speed.draft_length, speed.acceptance_rate) == (0, None)


def test_a_controller_that_never_drafts_does_not_let_the_draft_model_read():
    speed = predict(Choice("model:x", "fixed:0"), evidence(10, 1), 1)
    assert speed.seconds == (pytest.approx(0.5 + 10 * PLAIN_ROUND),)


def test_a_look_up_is_made_ready_before_the_first_round_and_kept_up_in_every_round():
    kept_up = RoundCosts(COSTS.plain, [PartCosts(PART.step, PART.asked_step, PART.rest, PART.start, UPKEEP)])
    speed = predict(Choice("model:x", "fixed:0"), evidence(10, 1, costs=kept_up, certain=True), 1)
    assert speed.seconds == (pytest.approx(0.5 + 0.3 + 10 * (PLAIN_ROUND + UPKEEP)),)


def test_two_rows_share_rounds():
    speed = predict(Choice("model:x", "fixed:1"), evidence(11, 0, num_prompts=2), 2)
    last = 1.5 * PLAIN_ROUND
    assert speed.tokens == (22,)
    assert speed.seconds[0] == pytest.approx(0.8 + 10 * (START + 1.5 * STEP + 1.5 * rest(1)) + last)


def test_rows_out_of_order_cost_what_was_measured_for_them():
    dear = RoundCosts({1: 10.0, 2: 10.0}, [])
    costs = RoundCosts(COSTS.plain, [], dear)
    texts = [Trace("", 7, 0.0, [[NOTHING] * length], 9) for length in (1, 3, 3)]
    batches = {3: Batches([(0, 1, 2)], [0.0])}
    speed = predict(PLAIN, Evidence(texts, {}, lambda names: costs, batches), 3)
    assert speed.seconds[0] == pytest.approx(2.0 * PLAIN_ROUND + 2 * 10.0)
    # The last of three leaves: the others still lie as they came.
    texts.reverse()
    speed = predict(PLAIN, Evidence(texts, {}, lambda names: costs, batches), 3)
    assert speed.seconds[0] == pytest.approx(2.0 * PLAIN_ROUND + 2 * 1.5 * PLAIN_ROUND)


def test_a_question_that_ends_a_draft_costs_as_much_as_one_that_does_not():
    unsure = NodeLaw(0.1, 1.0, 0.1)
    places = [Guess(Prospect(), (unsure,) * 8, (0,) * 8)] * 11
    told = evidence(11, 0)
    told = Evidence(told.bare, {"model:x": Part([places], False)}, told.costs, told.batches)
    speed = predict(Choice("model:x", "confidence"), told, 1)
    # Nobody is asked where there is room for one node only.
    asked, unasked = START + ASKED + (ASKED - STEP) + rest(1), START + ASKED + rest(1)
    assert speed.seconds[0] == pytest.approx(0.8 + 9 * asked + unasked + PLAIN_ROUND)


def test_a_draft_model_reads_what_others_wrote_before_it_guesses_again():
    reading = PartCosts(PART.step, PART.asked_step, PART.rest, reading=READING)
    silent = PartCosts({1: 0.0}, {1: 0.0}, PART.rest)
    # The look-up writes eight tokens at the second place, and has nothing to say elsewhere.
    looked_up = [NOTHING, guess(7, 7, certain=True), *[NOTHING] * 12]
    told = Evidence(
        [Trace("", 7, 0.0, [[NOTHING] * 14])],
        {"suffix": Part([looked_up], True), "model:x": Part([[guess(0)] * 14], False)},
        lambda names: RoundCosts(COSTS.plain, [silent, reading]),
        {1: Batches([(0,)], [0.0], {"suffix": [0.0], "model:x": [0.0]})},
    )
    speed = predict(Choice("suffix+model:x", "fixed:1"), told, 1)
    # Places 0, 1 (look-up, 1 of its 1 node), 3 ... 12 by the model, 13 plain.
    model_rounds, look_up_rounds = 11, 1
    seconds = model_rounds * (STEP + rest(1)) + look_up_rounds * rest(1) + PLAIN_ROUND
    # After the look-up's two tokens the model has three to read, one more than its first step holds.
    assert speed.seconds[0] == pytest.approx(seconds + READING)


def test_the_controllers_own_time_counts():
    ticks = iter(range(10_000))
    free = predict(Choice("model:x", "fixed:2"), evidence(10, 0), 1)
    timed = predict(Choice("model:x", "fixed:2"), evidence(10, 0), 1, clock=lambda: float(next(ticks)))
    # Ten rounds with one `plan` and one `learn` each, a tick long.
    assert timed.seconds[0] == pytest.approx(free.seconds[0] + 20)


def speed(value: float) -> Speed:
    return Speed((100,), (100 / value,))


FAST, FASTER = Choice("suffix", "fixed:3"), Choice("model:x", "fixed:5")


def test_nothing_is_recommended_that_is_not_faster_by_more_than_two_percent():
    assert recommend({1: {PLAIN: speed(100), FAST: speed(101.9)}}) == {1: PLAIN}
    assert recommend({1: {PLAIN: speed(100), FAST: speed(102.1)}}) == {1: FAST}
    assert (
        one_for_all({1: {PLAIN: speed(100), FAST: speed(101)}, 4: {PLAIN: speed(9), FAST: speed(90)}})
        == PLAIN
    )


def test_what_the_configuration_holds_is_best_everywhere_among_the_best_alone():
    alone = {PLAIN: speed(100), FAST: speed(200), FASTER: speed(203)}
    together = {PLAIN: speed(100), FAST: speed(150), FASTER: speed(110)}
    assert one_for_all({1: alone, 16: together}) == FAST
    assert one_for_all({1: alone | {FAST: speed(190)}, 16: together}) == FASTER


def test_what_the_configuration_holds_loses_nowhere():
    alone = {PLAIN: speed(100), FAST: speed(200), FASTER: speed(230)}
    together = {PLAIN: speed(100), FAST: speed(101), FASTER: speed(80)}
    assert one_for_all({1: alone, 16: together}) == FAST
    assert losing_sizes(FASTER, {1: alone, 16: together}) == [16]
    unknown = {PLAIN: speed(100), FAST: speed(101)}
    assert one_for_all({1: alone, 16: unknown}) == FAST, "what was not looked at may lose"


def test_where_all_lose_somewhere_the_configuration_serves_as_many_batch_sizes_as_can_be():
    speeds = {
        1: {PLAIN: speed(100), FAST: speed(250), FASTER: speed(230)},
        4: {PLAIN: speed(100), FAST: speed(90), FASTER: speed(120)},
        16: {PLAIN: speed(100), FAST: speed(60), FASTER: speed(80)},
    }
    assert one_for_all(speeds) == FASTER
    assert losing_sizes(FASTER, speeds) == [16]
    assert losing_sizes(PLAIN, speeds) == []


def test_costs_decide_whether_plain_decoding_wins():
    dear = PartCosts({1: 2.0}, {1: 2.0}, {1: {1: 3.0, 2: 5.0}})
    for costs, expected in ((COSTS, True), (RoundCosts(COSTS.plain, [dear]), False)):
        told = evidence(100, 3, costs=costs)
        speeds = {choice: predict(choice, told, 1) for choice in choices_of({"model:x": False})}
        assert recommend({1: speeds})[1].speculates is expected


def test_the_worst_batch_is_named():
    ours, plain = Speed((10, 10), (1.0, 4.0)), Speed((10, 10), (2.0, 2.0))
    assert ours.worst_over(plain) == (0.5, 1)
    assert ours.over(plain) == pytest.approx(0.8)


def test_speeds_of_nothing_are_refused():
    with pytest.raises(BadInputError, match="at least one"):
        Speed((), ())


def test_controllers_that_need_laws_are_not_tried_with_a_look_up():
    assert "confidence" in controllers_for(certain=False)
    assert "confidence" not in controllers_for(certain=True)
    assert "fixed:5" in controllers_for(certain=True)


def test_a_drafter_of_several_is_split_with_options_and_paths():
    assert split_drafter("suffix,min=3+model:a+b/c") == ["suffix,min=3", "model:a+b/c"]


def test_acceptance_by_position_counts_only_what_was_guessed():
    guesses = [[guess(2, 3), guess(0, 1), NOTHING], [guess(3, 3)]]
    assert acceptance_by_position(guesses) == pytest.approx([2 / 3, 1.0, 0.5])
    assert coverage(guesses) == 0.75


def test_a_step_that_few_rows_take_costs_what_was_measured_for_one_of_so_many():
    costs = PartCosts({1: 1.0, 5: 3.0}, {1: 1.5, 5: 4.0}, {}, lone_step={5: 2.0})
    assert costs.step_of(5, 5, asks=False) == 3.0
    assert costs.step_of(1, 5, asks=False) == 2.0
    assert costs.step_of(3, 5, asks=False) == 2.5
    assert costs.step_of(3, 5, asks=True) == 3.5
    assert PartCosts({1: 1.0, 5: 3.0}, {1: 1.5}, {}).step_of(1, 5, asks=False) == 1.0
    part = PartCosts({1: 1.0, 5: 3.0}, {1: 1.5}, {}, {1: 0.5, 5: 0.5}, lone_step={5: 2.0})
    assert RoundCosts({1: 1.0}, [part]).drafting([(0, 1), (0, 1)], False, 5) == 4.5


def test_two_tokens_are_new_to_a_draft_model_whose_guesses_were_all_accepted():
    row = ReplayRow(Trace("", 7, 0.0, [[guess(3)] * 20]))
    row.advance(2, part=1, length=2)
    assert row.unread == {1: 2}
    row.advance(1, part=1, length=2)
    assert row.unread == {1: 1}
    row.advance(0, part=0, length=0)
    assert row.unread == {1: 2}
