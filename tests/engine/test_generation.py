"""Outputs of generations: interrupted ones, and those whose text is decoded at their end."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any
from weakref import ref

import pytest

from secondguess import load
from secondguess.api import Generation
from secondguess.sampling import SamplingParams

PROMPT = [5, 6, 7, 5, 6, 7, 5]


@pytest.mark.parametrize("ends_by_stop", [False, True])
def test_the_text_of_a_row_finished_in_an_interrupted_round_is_whole(
    tiny_checkpoint: str, monkeypatch: pytest.MonkeyPatch, ends_by_stop: bool
) -> None:
    llm = load(tiny_checkpoint, "none", dtype="float32")
    params = SamplingParams(max_tokens=12, min_tokens=12)
    if ends_by_stop:
        text = llm.generate(PROMPT, params).text
        params = SamplingParams(max_tokens=12, stop=(text[-6:-2],))
    expected = llm.generate(PROMPT, params)
    assert expected.finish_reason == ("stop" if ends_by_stop else "length")
    generation = Generation(llm, [PROMPT], [params])
    (row,), learn = generation.group.rows, llm.controller.learn

    def interrupt_at_the_end(*given: Any) -> None:
        if row.finished:
            raise KeyboardInterrupt
        learn(*given)

    monkeypatch.setattr(llm.controller, "learn", interrupt_at_the_end)
    with pytest.raises(KeyboardInterrupt):
        generation.run()
    for _ in range(2):
        (output,) = generation.outputs()
        assert (output.text, output.token_ids) == (expected.text, expected.token_ids)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 1.0, "seed": 3, "logprobs": 1},
        {"temperature": 1.0, "seed": 4, "stop": ("e", "\ufffd")},
        {"temperature": 1.0, "seed": 5, "stop": ("e", "a", "o"), "min_tokens": 20},
    ],
)
def test_a_text_decoded_at_its_end_is_that_of_a_stream(settings: dict[str, Any]) -> None:
    llm = load(dtype="float32", controller="fixed:3")
    for prompt in ("def f(", "# 日本語 €", [*"é".encode()]):
        params = SamplingParams(max_tokens=40, **settings)
        generation = Generation(llm, [prompt], [params])
        pieces = [piece for _, piece in generation]
        (streamed,), output = generation.outputs(), llm.generate(prompt, params)
        assert output.text == streamed.text == "".join([piece.text for piece in pieces])
        assert output.token_ids == streamed.token_ids
        assert output.drafted == [drafted for piece in pieces for drafted in piece.drafted] != []
        assert len(output.logprobs) == (len(output.token_ids) if params.logprobs else 0)
        assert output.logprobs == streamed.logprobs


def test_an_output_does_not_change_with_the_text() -> None:
    generation = Generation(load(), ["def f("], [SamplingParams(max_tokens=20, logprobs=0)])
    pieces = iter(generation)
    next(pieces)
    (output,) = generation.outputs()
    num_tokens = len(output.token_ids)
    assert sum(1 for _ in pieces)
    assert len(output.drafted) == len(output.logprobs) == num_tokens


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("call", ["generate", "stream", "closed stream", "abandoned stream"])
def test_the_models_are_freed_with_their_llm(tiny_checkpoint: str, call: str) -> None:
    llm = load(tiny_checkpoint, f"model:{tiny_checkpoint}", dtype="float32")
    models = [ref(llm.target.runtime), ref(llm.drafter)]
    if call == "generate":
        llm.generate(PROMPT, max_tokens=4)
    else:
        pieces = llm.stream(PROMPT, max_tokens=4)
        next(pieces)
        if call == "stream":
            assert list(pieces)
        elif call == "closed stream":
            pieces.close()  # type: ignore[attr-defined]
        del pieces
    del llm
    assert [model() for model in models] == [None, None]
