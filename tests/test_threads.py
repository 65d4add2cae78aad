"""Calls from several threads on one `LLM`, and streams that are abandoned."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor

import pytest

import secondguess

PROMPTS = (
    "def add(a, b):",
    "for i in range(3):\n    print(i)\nfor i in range(3):\n",
    "class Stack:\n    def push(self, item):\n",
    "import os\nimport sys\n",
    "x = 1\ny = 2\nx = 1\ny =",
)
DRAFTERS = (
    "none", "ngram", "suffix", "model:builtin-draft", "suffix+model:builtin-draft", "early-exit", "medusa",
    "mtp", "eagle", "dspark", "model:builtin-draft,tree=2x2x1", "model:builtin-draft,tree=dynamic,nodes=6",
    "eagle,tree=2x2x1",
)  # fmt: skip
NUM_TOKENS, NUM_CALLS = 6, 100


@pytest.fixture(scope="module")
def plain_texts() -> list[list[int]]:
    llm = secondguess.load("builtin", "none")
    return [llm.generate(prompt, max_tokens=NUM_TOKENS).token_ids for prompt in PROMPTS]


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_two_threads_get_the_texts_that_one_gets(drafter: str, plain_texts: list[list[int]]) -> None:
    llm = secondguess.load("builtin", drafter)

    def call(number: int) -> bool:
        index = number % len(PROMPTS)
        if number % 10 == 9:
            tokens = [
                token for piece in llm.stream(PROMPTS[index], max_tokens=NUM_TOKENS) for token in piece.tokens
            ]
        else:
            tokens = llm.generate(PROMPTS[index], max_tokens=NUM_TOKENS).token_ids
        return tokens == plain_texts[index]

    with ThreadPoolExecutor(2) as threads:
        right = list(threads.map(call, range(2 * NUM_CALLS)))
    assert right.count(True) == 2 * NUM_CALLS


def test_streams_in_one_thread_take_turns(plain_texts: list[list[int]]) -> None:
    llm = secondguess.load("builtin", "suffix+model:builtin-draft")
    streams = [llm.stream(prompt, max_tokens=NUM_TOKENS) for prompt in PROMPTS]
    tokens: list[list[int]] = [[] for _ in PROMPTS]
    for _ in range(NUM_TOKENS):
        for index, stream in enumerate(streams):
            piece = next(stream, None)
            tokens[index] += piece.tokens if piece else []
    assert tokens == plain_texts


def test_an_abandoned_stream_holds_nothing(plain_texts: list[list[int]]) -> None:
    llm = secondguess.load("builtin", "model:builtin-draft")
    stream = llm.stream(PROMPTS[0], max_tokens=NUM_TOKENS)
    next(stream)
    assert llm.target.runtime.num_live_rows
    del stream
    gc.collect()
    assert not llm.target.runtime.num_live_rows
