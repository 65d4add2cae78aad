"""Recommendations from measured speed-ups."""

from __future__ import annotations

from secondguess.bench.recommendation import PLAIN, fastest, losing_sizes, one_for_all, recommend

FAST, FASTER = "secondguess suffix fixed:3", "secondguess model:x fixed:5"


def test_only_speed_ups_of_more_than_two_percent_are_recommended():
    assert fastest({PLAIN: 1.0, FAST: 1.019}) == PLAIN
    assert fastest({PLAIN: 1.0, FAST: 1.021}) == FAST
    assert one_for_all({1: {PLAIN: 1.0, FAST: 1.01}, 4: {PLAIN: 1.0, FAST: 9.0}}) == PLAIN


def test_the_configuration_is_the_best_over_all_sizes_among_the_best_at_one():
    alone, together = {PLAIN: 1.0, FAST: 2.0, FASTER: 2.03}, {PLAIN: 1.0, FAST: 1.5, FASTER: 1.1}
    assert one_for_all({1: alone, 16: together}) == FAST
    assert one_for_all({1: alone | {FAST: 1.9}, 16: together}) == FASTER


def test_the_configuration_is_slower_at_no_batch_size():
    alone, together = {PLAIN: 1.0, FAST: 2.0, FASTER: 2.3}, {PLAIN: 1.0, FAST: 1.01, FASTER: 0.8}
    assert one_for_all({1: alone, 16: together}) == FAST
    assert losing_sizes(FASTER, {1: alone, 16: together}) == [16]
    unknown = {PLAIN: 1.0, FAST: 1.01}
    assert one_for_all({1: alone, 16: unknown}) == FAST, "what was not measured may lose"


def test_the_configuration_is_slower_at_as_few_batch_sizes_as_possible():
    speedups = {
        1: {PLAIN: 1.0, FAST: 2.5, FASTER: 2.3},
        4: {PLAIN: 1.0, FAST: 0.9, FASTER: 1.2},
        16: {PLAIN: 1.0, FAST: 0.6, FASTER: 0.8},
    }
    assert one_for_all(speedups) == FASTER
    assert losing_sizes(FASTER, speedups) == [16]
    assert losing_sizes(PLAIN, speedups) == []


def test_the_recommendation_states_speeds_and_what_one_choice_for_all_sizes_costs():
    assert recommend({1: {PLAIN: 1.0, FAST: 1.5, FASTER: 2.3}, 2: {PLAIN: 1.0, FAST: 1.1, FASTER: 0.8}}) == [
        "Configuration: drafter suffix, controller fixed:3. Its speed relative to plain decoding:",
        "- batch size 1: 1.50x; the fastest is drafter model:x, controller fixed:5, with 2.30x.",
        "- batch size 2: 1.10x; nothing is faster.",
    ]
    assert recommend({1: {PLAIN: 1.0, FAST: 2.3}, 2: {PLAIN: 1.0, FAST: 0.8}})[2] == (
        "- batch size 2: 0.80x; nothing is faster than plain decoding (--drafter none) by more than 2%."
    )
    assert recommend({1: {PLAIN: 1.0, FAST: 1.01}}) == [
        "Configuration: plain decoding (--drafter none). Its speed relative to plain decoding:",
        "- batch size 1: 1.00x; nothing is faster by more than 2%.",
    ]
