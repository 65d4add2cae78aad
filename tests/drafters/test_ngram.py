"""Prompt lookup against a full search."""

from __future__ import annotations

import random

import pytest
import torch

from drafter_cases import VOCAB_SIZE, run
from secondguess.core import Row
from secondguess.drafters.ngram import NgramDrafter, NgramIndex, NgramOptions, NgramSource
from secondguess.errors import BadInputError
from secondguess.sampling import SamplingParams


def slow_continuation(text: list[int], options: NgramOptions, limit: int) -> list[int]:
    """Scan the whole text for the latest earlier occurrence of the longest n-gram it ends with."""
    for length in range(min(options.max, len(text)), options.min - 1, -1):
        for start in range(len(text) - length - 1, -1, -1):
            if text[start : start + length] == text[-length:]:
                copied = list(text)
                for offset in range(limit):
                    copied.append(copied[start + length + offset])
                return copied[len(text) :]
    return []


@pytest.mark.parametrize("seed", range(12))
def test_the_match_equals_that_of_a_full_scan(seed: int) -> None:
    source = random.Random(seed)
    smallest = source.randint(1, 3)
    options = NgramOptions(max=source.randint(smallest, 6), min=smallest)
    num_letters = source.choice([1, 2, 3, 8])
    index, text = NgramIndex(options), []
    for _ in range(60):
        piece = [source.randrange(num_letters) for _ in range(source.randint(0, 4))]
        text += piece
        index.extend(piece)
        limit = source.randint(0, 9)
        assert index.continuation(limit) == slow_continuation(text, options, limit)


def test_the_longest_match_wins_over_a_later_shorter_one() -> None:
    index = NgramIndex(NgramOptions(max=3, min=1))
    index.extend([1, 2, 3, 9, 3, 8, 1, 2, 3])
    assert index.continuation(1) == [9]


def test_the_latest_match_wins_among_equally_long_ones() -> None:
    index = NgramIndex(NgramOptions(max=2, min=1))
    index.extend([1, 2, 7, 1, 2, 8, 1, 2])
    assert index.continuation(1) == [8]


def test_each_token_is_indexed_once() -> None:
    index = NgramIndex(NgramOptions(max=4, min=2))
    index.extend(list(range(500)))
    assert sum(len(followers) for _, followers in index._followers) == 498 + 497 + 496


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_periodic_text_is_drafted_up_to_the_draft_length(temperature: float) -> None:
    def circle(context: tuple[int, ...]) -> torch.Tensor:
        return torch.nn.functional.one_hot(torch.tensor((context[-1] + 1) % VOCAB_SIZE), VOCAB_SIZE).double()

    params = SamplingParams(max_tokens=30, temperature=temperature)
    result = run(NgramDrafter(), [[0, 1]], params, dist=circle, controller="fixed:5")
    # Nothing is known until the circle closes after 6 tokens and the bigram (0, 1) comes again; then all is.
    assert result.stats[0].acceptance_rate == 1.0
    assert result.stats[0].num_rounds == 6 + 24 // 6


def test_rows_whose_text_does_not_repeat_have_no_candidate() -> None:
    drafter, rows = NgramDrafter(), [Row([1, 2, 3, 1, 2], SamplingParams()), Row([1, 2, 3], SamplingParams())]
    drafter.begin(rows)
    assert [choice.longest > 0 for (choice,) in drafter.candidates(rows)] == [True, False]
    assert [NgramSource().candidate(row).longest > 0 for row in rows] == [True, False]


@pytest.mark.parametrize("options", [{"max": 0}, {"min": 0}, {"max": 2, "min": 3}, {"max": 33}])
def test_invalid_options_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(BadInputError, match="expected m"):
        NgramOptions(**options)
