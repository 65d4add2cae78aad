"""Recommendations from measured speeds."""

from __future__ import annotations

import pytest

from secondguess.bench.choices import (
    PLAIN,
    Choice,
    Speed,
    controllers_for,
    losing_sizes,
    one_for_all,
    recommend,
)
from secondguess.bench.systems import Run
from secondguess.stats import Stats


def speed(value: float) -> Speed:
    return Speed((100,), (100 / value,), Stats())


FAST, FASTER = Choice("suffix", "fixed:3"), Choice("model:x", "fixed:5")


def test_only_choices_faster_by_more_than_two_percent_are_recommended():
    assert recommend({1: {PLAIN: speed(100), FAST: speed(101.9)}}) == {1: PLAIN}
    assert recommend({1: {PLAIN: speed(100), FAST: speed(102.1)}}) == {1: FAST}
    assert (
        one_for_all({1: {PLAIN: speed(100), FAST: speed(101)}, 4: {PLAIN: speed(9), FAST: speed(90)}})
        == PLAIN
    )


def test_the_configuration_is_the_best_over_all_sizes_among_the_best_at_one():
    alone = {PLAIN: speed(100), FAST: speed(200), FASTER: speed(203)}
    together = {PLAIN: speed(100), FAST: speed(150), FASTER: speed(110)}
    assert one_for_all({1: alone, 16: together}) == FAST
    assert one_for_all({1: alone | {FAST: speed(190)}, 16: together}) == FASTER


def test_the_configuration_is_slower_at_no_batch_size():
    alone = {PLAIN: speed(100), FAST: speed(200), FASTER: speed(230)}
    together = {PLAIN: speed(100), FAST: speed(101), FASTER: speed(80)}
    assert one_for_all({1: alone, 16: together}) == FAST
    assert losing_sizes(FASTER, {1: alone, 16: together}) == [16]
    unknown = {PLAIN: speed(100), FAST: speed(101)}
    assert one_for_all({1: alone, 16: unknown}) == FAST, "what was not measured may lose"


def test_the_configuration_is_slower_at_as_few_batch_sizes_as_possible():
    speeds = {
        1: {PLAIN: speed(100), FAST: speed(250), FASTER: speed(230)},
        4: {PLAIN: speed(100), FAST: speed(90), FASTER: speed(120)},
        16: {PLAIN: speed(100), FAST: speed(60), FASTER: speed(80)},
    }
    assert one_for_all(speeds) == FASTER
    assert losing_sizes(FASTER, speeds) == [16]
    assert losing_sizes(PLAIN, speeds) == []


def test_the_worst_batch_has_the_smallest_ratio():
    ours, plain = Speed((10, 10), (1.0, 4.0), Stats()), Speed((10, 10), (2.0, 2.0), Stats())
    assert ours.worst_over(plain) == 0.5
    assert ours.over(plain) == pytest.approx(0.8)


def test_controllers_that_need_probs_are_not_tried_with_a_lookup():
    assert "confidence" in controllers_for(deterministic=False)
    assert "confidence" not in controllers_for(deterministic=True)
    assert "fixed:5" in controllers_for(deterministic=True)


def test_the_time_of_a_batch_is_the_median_of_its_runs() -> None:
    runs = [[Run([1] * 10, seconds, Stats(num_rounds=5, num_drafted=10)) for seconds in (9.0, 1.0, 2.0)]]
    measured = Speed.of_runs([*runs, [Run([1] * 30, 3.0, Stats(num_rounds=5))]])
    assert (measured.tokens, measured.seconds) == ((10, 30), (2.0, 3.0))
    assert measured.tokens_per_second == 8.0
    assert measured.draft_length == 1.5
