"""Calls from several threads on one `LLM`, and abandoned streams."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor
from itertools import zip_longest

import pytest

import secondguess
from builtin_cases import with_drafter
from secondguess.api import LLM

PROMPTS = ([5, 7, 5, 7, 5], [9, 9], [20, 31, 20, 31], [4, 8, 15], [11, 300])
DRAFTERS = (
    "none", "ngram", "suffix", "model:builtin-draft", "suffix+model:builtin-draft", "self:int4", "early-exit",
    "medusa", "mtp", "eagle", "dspark", "model:builtin-draft,tree=dynamic,nodes=6", "eagle,tree=2x2x1",
)  # fmt: skip
CONTROLLER = "fixed:2"
"""Drafts in every call; the default controller drafts little in so few tokens."""
NUM_TOKENS, NUM_CALLS = 3, 200


@pytest.fixture(scope="module")
def pair() -> LLM:
    """The built-in target and draft model, loaded once."""
    return secondguess.load("builtin", "model:builtin-draft")


@pytest.fixture(scope="module")
def plain_texts(pair: LLM) -> list[list[int]]:
    llm = with_drafter(pair, "none")
    return [llm.generate(prompt, max_tokens=NUM_TOKENS).token_ids for prompt in PROMPTS]


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_two_threads_generate_the_same_texts_as_one(
    drafter: str, pair: LLM, plain_texts: list[list[int]]
) -> None:
    """100 calls per thread, some of them streams."""
    llm = with_drafter(pair, drafter, None if drafter == "none" else CONTROLLER)
    num_drafted = 0

    def call(number: int) -> bool:
        nonlocal num_drafted
        index = number % len(PROMPTS)
        if number % 9 == 8:
            pieces = llm.stream(PROMPTS[index], max_tokens=NUM_TOKENS)
            return [token for piece in pieces for token in piece.tokens] == plain_texts[index]
        output = llm.generate(PROMPTS[index], max_tokens=NUM_TOKENS)
        num_drafted += output.stats.num_drafted
        return output.token_ids == plain_texts[index]

    with ThreadPoolExecutor(2) as threads:
        equal = list(threads.map(call, range(NUM_CALLS)))
    assert equal.count(True) == NUM_CALLS
    assert (num_drafted > 0) == (drafter != "none")


def test_streams_in_one_thread_alternate(pair: LLM, plain_texts: list[list[int]]) -> None:
    llm = with_drafter(pair, "suffix+model:builtin-draft", CONTROLLER)
    streams = [llm.stream(prompt, max_tokens=NUM_TOKENS) for prompt in PROMPTS]
    tokens: list[list[int]] = [[] for _ in PROMPTS]
    for _ in range(NUM_TOKENS):
        for index, stream in enumerate(streams):
            piece = next(stream, None)
            tokens[index] += piece.tokens if piece else []
    assert tokens == plain_texts


def test_llms_with_one_target_and_different_drafters_alternate(pair: LLM) -> None:
    llms = [with_drafter(pair, drafter, CONTROLLER) for drafter in ("eagle", "ngram", "medusa", "early-exit")]
    plain = with_drafter(pair, "none").generate(PROMPTS[0], max_tokens=12).token_ids
    streams = [llm.stream(PROMPTS[0], max_tokens=12) for llm in llms]
    tokens: list[list[int]] = [[] for _ in llms]
    for pieces in zip_longest(*streams):
        for index, piece in enumerate(pieces):
            tokens[index] += piece.tokens if piece else []
    assert tokens == [plain] * len(llms)

    def call(number: int) -> bool:
        return llms[number % len(llms)].generate(PROMPTS[0], max_tokens=12).token_ids == plain

    with ThreadPoolExecutor(2) as threads:
        assert all(threads.map(call, range(40)))


def test_an_abandoned_stream_releases_its_row(pair: LLM) -> None:
    llm = with_drafter(pair, "model:builtin-draft", CONTROLLER)
    stream = llm.stream(PROMPTS[0], max_tokens=NUM_TOKENS)
    next(stream)
    assert llm.target.runtime.num_live_rows
    del stream
    gc.collect()
    assert not llm.target.runtime.num_live_rows
