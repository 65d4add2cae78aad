"""Comparison with llama.cpp's best mode: its options, and which prompts and modes count."""

from __future__ import annotations

from typing import Any

import pytest
from best_mode import summarise
from server_process import mode_options


@pytest.mark.parametrize(
    ("mode", "options"),
    [
        ("plain", ""),
        ("draft-simple:5", "--spec-type draft-simple --spec-draft-n-max 5"),
        ("ngram-mod", "--spec-type ngram-mod"),
        (
            "ngram-map-k:4:8",
            "--spec-type ngram-map-k --spec-ngram-map-k-size-n 4 --spec-ngram-map-k-size-m 8",
        ),
    ],
)
def test_a_mode_has_the_options_of_llama_server(mode: str, options: str) -> None:
    assert " ".join(mode_options(mode)) == options


def record(
    plain: float, ours: float, others: dict[str, float], tokens: int = 64, again: tuple[float, ...] = ()
) -> Any:
    speeds = {"plain": plain, "ours": ours, **{f"llama.cpp {mode}": speed for mode, speed in others.items()}}
    return {
        "kind": "code",
        "temperature": 0.0,
        "systems": {
            name: {"tokens": tokens, "speed": speed, "decode_speed": 2 * speed, "tokens_per_pass": 1.0}
            for name, speed in speeds.items()
        },
        "repeats": [ours / plain, *again],
    }


def test_the_best_mode_is_the_one_that_is_hardest_to_beat() -> None:
    """The median prompt decides, not one prompt that a mode repeats."""
    slow = [record(10, 12, {"plain": 8, "ngram": 6})] * 2
    (row,) = summarise([*slow, record(10, 12, {"plain": 8, "ngram": 60})])
    assert row["speed"]["best"] == "llama.cpp plain"
    assert row["speed"]["over_best"] == {"median": 1.5, "least": 1.5, "largest": 1.5}
    assert row["speed"]["plain_over_plain"]["median"] == 1.25


def test_a_slow_prompt_counts_by_the_median_of_its_runs() -> None:
    (noisy,) = summarise([record(10, 9, {}, again=(1.0, 1.01))])
    (slow,) = summarise([record(10, 9, {}, again=(0.94, 0.93))])
    assert (noisy["below"], slow["below"]) == (0, 1)


def test_texts_that_ended_early_do_not_count() -> None:
    (row,) = summarise([record(10, 12, {}), record(10, 1, {}, tokens=3)])
    assert row["prompts"] == 1
