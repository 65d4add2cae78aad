"""Shared outputs of one owner: matches against a full search, the limit of the memory, and isolation of owners."""

from __future__ import annotations

import random
from itertools import islice

import pytest

from drafter_cases import VOCAB_SIZE, model_drafter, run
from secondguess.core import Row
from secondguess.drafters.automaton import SuffixAutomaton, SuffixMatch
from secondguess.drafters.combined import CombinedDrafter
from secondguess.drafters.history import NUM_PROMPT_TOKENS, Histories, HistoryReader
from secondguess.drafters.suffix import SuffixDrafter, SuffixOptions
from secondguess.proof.fakes import random_probs
from secondguess.sampling import SamplingParams

GREEDY = SamplingParams(max_tokens=40)


def occurrences(texts: list[list[int]], context: list[int]) -> list[int]:
    """Return the token after each occurrence of a context in any of the texts, -1 at the end of one."""
    width = len(context)
    return [
        text[end] if end < len(text) else -1
        for text in texts
        for end in range(width, len(text) + 1)
        if text[end - width : end] == context
    ]


def longest_suffix(texts: list[list[int]], text: list[int]) -> list[int]:
    """Return the longest suffix of a text that occurs in the others."""
    return next(text[start:] for start in range(len(text) + 1) if occurrences(texts, text[start:]))


def finished(owner: str | None, prompt: list[int], output: list[int]) -> Row:
    """Return a finished row with this output."""
    row = Row(list(prompt), SamplingParams(max_tokens=len(output)), history=owner)
    for token in output:
        row.commit([], token)
    return row


def random_texts(source: random.Random, num_letters: int) -> list[list[int]]:
    """Return texts of which some begin alike, or are equal."""
    texts: list[list[int]] = []
    for _ in range(source.randint(1, 8)):
        begin = source.choice(texts)[: source.randint(0, 30)] if texts else []
        texts.append(begin + source.choices(range(num_letters), k=source.randint(0, 20)))
    return texts


@pytest.mark.parametrize("seed", range(40))
def test_an_automaton_of_several_texts_has_their_substrings_and_counts(seed: int) -> None:
    source = random.Random(seed)
    num_letters = source.choice([1, 2, 3, 6])
    texts = random_texts(source, num_letters)
    automaton = SuffixAutomaton()
    for text in texts:
        automaton.begin_text()
        automaton.extend(text)
    assert automaton.num_tokens == sum(map(len, texts))
    assert len(automaton.contexts) <= 2 * automaton.num_tokens + 1
    match, read = SuffixMatch(automaton), []
    for token in source.choices(range(num_letters), k=60):
        match.read([token])
        read.append(token)
        suffix = longest_suffix(texts, read)
        assert match.num_matched == len(suffix)
        seen = [each for each in occurrences(texts, suffix) if each >= 0]
        if suffix and seen:
            token, prob = next(automaton.continuation(match.context, 1))
            assert prob == max(map(seen.count, seen)) / len(seen) == seen.count(token) / len(seen)


@pytest.mark.parametrize("seed", range(20))
def test_a_place_stays_right_while_texts_are_added(seed: int) -> None:
    """States are split under it."""
    source = random.Random(seed)
    automaton, texts, read = SuffixAutomaton(), [], []
    match = SuffixMatch(automaton)
    for _ in range(40):
        text = source.choices(range(2), k=source.randint(1, 5))
        automaton.begin_text()
        automaton.extend(text)
        texts.append(text)
        seen = [each for each in occurrences(texts, read[len(read) - match.num_matched :]) if each >= 0]
        if seen:
            token, prob = next(automaton.continuation(match.context, min(match.num_matched, 1)))
            assert prob == max(map(seen.count, seen)) / len(seen) == seen.count(token) / len(seen)
        token = source.randrange(2)
        match.read([token])
        read.append(token)
        assert len(longest_suffix([*texts], read)) >= match.num_matched
        assert occurrences(texts, read[len(read) - match.num_matched :])


def test_an_output_is_shared_with_the_end_of_its_prompt() -> None:
    histories = Histories()
    prompt = list(range(100, 140))
    histories.add(finished("", prompt, [1, 2, 3]))
    assert histories.num_tokens == NUM_PROMPT_TOKENS + 3
    reader = HistoryReader(histories.of(""))
    reader.extend([7, *prompt])
    match = reader.longest()
    assert match is not None
    assert match.num_matched == NUM_PROMPT_TOKENS
    assert list(islice(match.automaton.continuation(match.context, 1), 3)) == [(1, 1.0), (2, 1.0), (3, 1.0)]


def test_a_reader_follows_texts_that_are_added_and_dropped() -> None:
    histories = Histories(max_tokens=40)
    reader = HistoryReader(histories.of(""))
    reader.extend([5, 6])
    assert reader.longest() is None
    for text in ([5, 6, 7], [9] * 18, [8] * 18):
        histories.add(finished("", [0], text))
        match = reader.longest()
        assert match is not None
        assert match.num_matched == (0 if text[0] == 8 else 2), "the first text is dropped with the third"


def test_memory_is_bounded_over_ten_thousand_requests() -> None:
    """In tokens, and so in states; of whole texts, the newest are kept."""
    source, histories = random.Random(0), Histories(max_tokens=2000)
    readers = [HistoryReader(histories.of(str(owner))) for owner in range(7)]
    for number in range(10_000):
        owner = source.randrange(7)
        output = [number, *source.choices(range(50), k=source.randint(1, 120))]
        histories.add(finished(str(owner), [1, 2, 3], output))
        readers[owner].extend(output[-3:])
        match = readers[owner].longest()
        assert match is not None
        assert match.num_matched >= min(3, len(output))
        assert histories.num_tokens <= 2000
        assert len(histories.of(str(owner)).automata) <= 2
        if number % 100 == 0:
            automata = [each for owner in range(7) for each in histories.of(str(owner)).automata]
            assert sum(len(each.contexts) for each in automata) <= 2 * 2000 + len(automata)
            for automaton in automata:  # whole: each begins with its number after the prompt
                assert automaton.num_tokens == 0 or 1 in automaton.contexts[0].next


def test_only_the_older_texts_of_an_owner_are_dropped_for_another() -> None:
    histories = Histories(max_tokens=40)
    for owner, token in (("a", 1), ("a", 2), ("b", 3)):
        histories.add(finished(owner, [0], [token] * 15))
    (automaton,) = histories.of("a").automata
    assert automaton.num_tokens == 16
    assert 2 in automaton.contexts[0].next


def test_a_text_of_more_than_half_the_limit_is_left_out() -> None:
    histories = Histories(max_tokens=40)
    histories.add(finished("", [0], [1] * 15))
    histories.add(finished("", [0], [2] * 20))
    assert histories.num_tokens == 16


def num_accepted(drafter: SuffixDrafter, owner: str | None, prompt: list[int]) -> int:
    """Return the number of draft tokens of a request of this owner that are accepted; its text stays the same."""
    result = run(drafter, [prompt], GREEDY, controller="fixed:4", history=owner)
    assert result.outputs == run(SuffixDrafter(), [prompt], GREEDY, controller="fixed:0").outputs
    return result.stats[0].num_accepted


@pytest.mark.parametrize("other", ["mallory", None])
def test_outputs_are_shared_within_one_owner_alone(other: str | None) -> None:
    options, prompt = SuffixOptions(), [1, 2, 3]
    alone = num_accepted(SuffixDrafter(options), None, prompt)
    drafter = SuffixDrafter(options)
    assert num_accepted(drafter, "alice", prompt) == alone
    assert num_accepted(drafter, other, prompt) == alone
    assert num_accepted(drafter, "alice", prompt) > alone


def test_a_part_of_a_combined_drafter_shares() -> None:
    model = model_drafter(random_probs(VOCAB_SIZE, seed=5))
    drafter = CombinedDrafter([SuffixDrafter(), model], VOCAB_SIZE)
    assert drafter.shares_history
    assert not CombinedDrafter([model], VOCAB_SIZE).shares_history
    first, again = (run(drafter, [[1, 2, 3]], GREEDY, history="").stats[0] for _ in range(2))
    assert again.num_accepted > first.num_accepted


def test_the_end_of_a_text_that_is_shared_hides_no_match_of_the_row() -> None:
    drafter = SuffixDrafter()
    drafter.histories.add(finished("", [0], [1, 2, 3, 4]))
    row = Row([4, 9, 1, 2, 3, 4], GREEDY, history="")
    drafter.begin([row])
    ((candidate,),) = drafter.candidates([row])
    assert candidate.kind == ("suffix", 1, "once")


def test_outputs_of_unfinished_rows_are_not_shared() -> None:
    drafter, row = SuffixDrafter(), Row([1], GREEDY, history="")
    drafter.begin([row])
    row.commit([], 2)
    drafter.release(row)
    assert drafter.histories.num_tokens == 0


def test_counting_stays_bounded() -> None:
    """The work per token of many equal texts is that of one text."""
    histories = Histories()
    for _ in range(20):
        histories.add(finished("", [0], [7] * 100))
    (automaton,) = histories.of("").automata
    assert sum(context.total for context in automaton.contexts) <= 32 * histories.num_tokens
    assert len(automaton.contexts) <= 2 * 101
