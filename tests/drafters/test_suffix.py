"""The suffix automaton against a full search, and the rules of its drafts."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from itertools import count, islice

import pytest
import torch

from drafter_cases import TARGET_DIST, VOCAB_SIZE, never_called, run
from interruptions import interrupted_at
from secondguess.core import Budgets, Draft, Row
from secondguess.drafters.automaton import MAX_COUNTED_CONTEXTS, SuffixAutomaton
from secondguess.drafters.suffix import SuffixDrafter, SuffixOptions
from secondguess.errors import BadInputError
from secondguess.sampling import SamplingParams
from secondguess.sampling.noise import KeyedNoise

TEXTS = {
    "one letter": lambda length: [0] * length,
    "two letters": lambda length: random.Random(2).choices([0, 1], k=length),
    "many letters": lambda length: random.Random(3).choices(range(50), k=length),
    "Fibonacci word": lambda length: fibonacci_word(length),
    "a period with faults": lambda length: [
        position % 7 if position % 31 else 9 for position in range(length)
    ],
    "a square": lambda length: random.Random(4).choices(range(length), k=length // 2) * 2,
}


def fibonacci_word(length: int) -> list[int]:
    before, word = [0], [0, 1]
    while len(word) < length:
        before, word = word, word + before
    return word[:length]


MODULES = [
    import_module(f"secondguess.drafters.{name}") for name in ("automaton", "history", "lookup", "suffix")
]


@pytest.mark.parametrize("owner", [None, "a"])
def test_texts_are_indexed_after_any_interruption(owner: str | None) -> None:
    """Also those that are added to a history, which other rows read."""
    expected = None
    for line in count(1):
        drafter = SuffixDrafter()
        first, row, other = (
            Row([*prompt], SamplingParams(), history=owner) for prompt in ([1, 2, 3, 4], [1, 2, 3, 1], [3, 4])
        )
        drafter.begin([first, row])
        first.tokens += [5, 6, 7]
        first.finish_reason = "stop"
        row.tokens += [2, 3, 1, 2]
        interruptions = [
            interrupted_at(line, MODULES, call)
            for call in (partial(drafter.candidates, [row]), partial(drafter.release, first))
        ]
        drafter.release(first)
        drafter.begin([other])
        drafter.candidates([other])
        drafted = drafter.propose([row], Budgets([4], never_called), KeyedNoise.from_rows([row]))
        found = drafted.token_lists
        expected = expected or found
        assert found == expected
        if not any(interruptions):
            break
    assert line > 30


def automaton_of(text: list[int]) -> SuffixAutomaton:
    automaton = SuffixAutomaton()
    for token in text:
        automaton.extend([token])
    return automaton


def continuation(automaton: SuffixAutomaton, min_length: int) -> Iterator[tuple[int, float]]:
    """Return the continuation of the longest suffix that occurred before."""
    return automaton.continuation(automaton.match, min_length)


def followers(text: list[int], context: list[int]) -> list[int]:
    """Return the token after each occurrence of a context, in order."""
    width = len(context)
    return [text[end] for end in range(width, len(text)) if text[end - width : end] == context]


def longest_followed_suffix(text: list[int], context: list[int]) -> list[int]:
    """Return the longest suffix of `context` that occurs in the text with a token after it."""
    return next(context[start:] for start in range(len(context) + 1) if followers(text, context[start:]))


def slow_continuation(text: list[int], min_length: int, limit: int) -> list[tuple[int, float]]:
    """The most frequent continuation of the longest repeated suffix, by counting over the whole text."""
    result: list[tuple[int, float]] = []
    context = text
    while len(result) < limit:
        context = longest_followed_suffix(text, context)
        if len(context) < min_length:
            break
        seen = followers(text, context)
        latest_first = Counter(reversed(seen))
        token, count = latest_first.most_common(1)[0]
        result.append((token, count / len(seen)))
        context = [*context, token]
    return result


@pytest.mark.parametrize("seed", range(10))
def test_the_match_is_the_longest_suffix_that_occurred_before(seed: int) -> None:
    source = random.Random(seed)
    num_letters = source.choice([1, 2, 3, 6])
    automaton, text = SuffixAutomaton(), []
    for _ in range(70):
        token = source.randrange(num_letters)
        automaton.extend([token])
        text.append(token)
        repeated = [
            length
            for length in range(len(text))
            if any(text[end - length : end] == text[len(text) - length :] for end in range(length, len(text)))
        ]
        assert automaton.match.length == max(repeated)


@pytest.mark.parametrize("seed", range(16))
def test_the_draft_follows_the_most_frequent_continuation(seed: int) -> None:
    """Exactly: in texts whose contexts are never deeper than what is counted."""
    source = random.Random(seed)
    num_letters = source.choice([2, 3, 6])
    min_length = source.randint(1, 3)
    automaton, text = SuffixAutomaton(), []
    for _ in range(45):
        token = source.randrange(num_letters)
        automaton.extend([token])
        text.append(token)
        found = list(islice(continuation(automaton, min_length), 8))
        assert found == slow_continuation(text, min_length, 8)


def test_ties_are_resolved_by_the_latest_occurrence() -> None:
    assert next(continuation(automaton_of([1, 2, 3, 1, 2, 4, 1, 2]), 2)) == (4, 0.5)
    assert next(continuation(automaton_of([1, 2, 3, 1, 2, 3, 1, 2, 4, 1, 2]), 2)) == (3, 2 / 3)


def test_deep_repetition_is_drafted() -> None:
    """A text of one token has as many contexts as tokens: far more than are counted."""
    automaton = automaton_of([7] * (4 * MAX_COUNTED_CONTEXTS))
    assert automaton.match.length == 4 * MAX_COUNTED_CONTEXTS - 1
    assert list(islice(continuation(automaton, 2), 20)) == [(7, 1.0)] * 20


def test_truncated_counts_give_valid_shares() -> None:
    automaton = automaton_of([*[7] * 100, 1] * 3)
    for context in automaton.contexts:
        assert context.total == sum(context.counts.values())
        assert context.most_frequent is None or context.counts[context.most_frequent] == max(
            context.counts.values()
        )


@pytest.mark.parametrize("text", TEXTS)
def test_work_and_memory_grow_linearly(text: str) -> None:
    for length in (200, 2000):
        automaton = automaton_of(TEXTS[text](length))
        assert len(automaton.contexts) <= 2 * length
        assert sum(len(context.next) for context in automaton.contexts) <= 3 * length
        assert sum(context.total for context in automaton.contexts) <= MAX_COUNTED_CONTEXTS * length


def propose(drafter: SuffixDrafter, prompt: list[int], budget: int) -> list[int]:
    row = Row(list(prompt), SamplingParams())
    drafter.begin([row])
    draft: Draft = drafter.propose([row], Budgets([budget], never_called), KeyedNoise.from_rows([row]))
    assert draft.probs is None
    return draft.tokens[0].tolist()


REPEATED = [*range(10), *range(10), 0, 1, 2, 3]


@pytest.mark.parametrize(
    ("options", "budget", "expected"),
    [
        (SuffixOptions(), 64, [4, 5, 6, 7, 8, 9, 0]),
        (SuffixOptions(), 2, [4, 5]),
        (SuffixOptions(factor=0.5, offset=1), 64, [4, 5, 6]),
        (SuffixOptions(factor=1.5, offset=2), 64, [4, 5, 6, 7, 8, 9, 0, 1]),
        (SuffixOptions(min=4, offset=0), 64, [4, 5, 6, 7]),
        (SuffixOptions(min=5), 64, []),
    ],
)
def test_the_draft_length_depends_on_match_and_budget(
    options: SuffixOptions, budget: int, expected: list[int]
) -> None:
    assert propose(SuffixDrafter(options), REPEATED[:10] + REPEATED[20:], budget) == expected


def test_candidates_are_grouped_by_match_length_and_frequency_of_the_follower() -> None:
    drafter, expected = SuffixDrafter(), []
    for text, kind in (
        ([1, 2, 3, 9, 2, 4, 2], ("suffix", 1, "sometimes")),
        ([1, 2, 1], ("suffix", 1, "once")),
        ([1, 2, 7, 1, 2, 8, 1], ("suffix", 1, "always")),
        ([1, 2, 3, 1, 2], ("suffix", 2, "once")),
    ):
        row = Row(text, SamplingParams(max_tokens=8))
        drafter.begin([row])
        ((candidate,),) = drafter.candidates([row])
        assert candidate.kind == kind
        expected.append(candidate.expected)
    assert expected == sorted(set(expected))


def test_the_draft_stops_at_an_improbable_path() -> None:
    # After (1, 2) came 3 in half of all cases, and after (1, 2, 3) came 4 in half of those.
    text = [1, 2, 3, 4, 0, 1, 2, 3, 5, 0, 1, 2, 6, 0, 1, 2, 7, 9, 1, 2]
    for threshold, expected in ((0.6, []), (0.3, [3]), (0.2, [3, 5])):
        drafter = SuffixDrafter(SuffixOptions(threshold=threshold, factor=1.0))
        assert propose(drafter, text, 2) == expected


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_repetitive_text_is_accepted(temperature: float) -> None:
    def circle(context: tuple[int, ...]) -> torch.Tensor:
        return torch.nn.functional.one_hot(torch.tensor((context[-1] + 1) % VOCAB_SIZE), VOCAB_SIZE).double()

    params = SamplingParams(max_tokens=30, temperature=temperature)
    result = run(SuffixDrafter(), [[0, 1]], params, dist=circle, controller="fixed:5")
    assert result.stats[0].acceptance_rate == 1.0
    assert result.stats[0].num_accepted > 15


def test_text_without_repetition_is_not_drafted() -> None:
    result = run(SuffixDrafter(SuffixOptions(min=64)), dist=TARGET_DIST)
    assert [stats.num_drafted for stats in result.stats] == [0] * len(result.stats)


@pytest.mark.parametrize(
    "options", [{"min": 0}, {"factor": -1.0}, {"factor": float("nan")}, {"offset": 65}, {"threshold": 1.5}]
)
def test_invalid_options_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(BadInputError, match="of the drafter suffix between"):
        SuffixOptions(**options)  # type: ignore[arg-type]
