"""Outputs of interrupted generations."""

from __future__ import annotations

from typing import Any

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
