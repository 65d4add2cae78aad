"""Log-probabilities of prompts and texts: those of the module, with any drafter, and without an effect on the output."""

from __future__ import annotations

import math

import pytest
import torch

import secondguess
from builtin_cases import with_drafter
from secondguess import BadInputError, load
from secondguess.checkpoint.loader import module_of
from secondguess.core import Row
from secondguess.decode import LOGITS_BYTES, Batch, Components
from secondguess.sampling import SamplingParams

PROMPT = "def read_lines(path):\n    with open(path) as file:\n        return file.read()"
DRAFTERS = (
    "none",
    "suffix",
    "jacobi",
    "model:builtin-draft",
    "medusa",
    "eagle",
    "dspark",
    "early-exit",
    "suffix+eagle",
)


@pytest.fixture(scope="module")
def llm():
    return load(dtype="float64", drafter="suffix")


@pytest.fixture(scope="module")
def pair():
    return load(dtype="float32", drafter="model:builtin-draft")


def expected_logprobs(llm, ids):
    with torch.inference_mode():
        logits = module_of(llm.target.checkpoint)(torch.tensor([ids])).logits[0]
    return logits.log_softmax(-1)


@pytest.mark.parametrize("draft_length", [None, 0, 3])
def test_log_probabilities_are_those_of_the_module(llm, draft_length):
    ids = llm.target.encode(PROMPT)
    output = llm.generate(ids, max_tokens=4, prompt_logprobs=2, logprobs=2, draft_length=draft_length)
    tokens = [*ids, *output.token_ids]
    expected = expected_logprobs(llm, tokens)
    found = [*output.prompt_logprobs, *output.logprobs]
    assert [each.token for each in found] == tokens[1:]
    for position, each in enumerate(found):
        assert each.logprob == pytest.approx(expected[position, each.token].item(), abs=1e-5)
        top = expected[position].topk(2)
        assert list(each.alternatives) == top.indices.tolist()
        assert list(each.alternatives.values()) == pytest.approx(top.values.tolist(), abs=1e-5)
        assert each.text == llm.target.tokenizer.decode([each.token])


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0, "seed": 3, "n": 2}], ids=str)
def test_the_output_is_the_same_with_any_drafter(pair, drafter, settings):
    llm = with_drafter(pair, drafter, None if drafter == "none" else "fixed:3")
    params = SamplingParams(max_tokens=24, **settings)
    prompts = [PROMPT, "import os\n", PROMPT]
    plain = llm.generate(prompts, params)
    scored = llm.generate(prompts, params, prompt_logprobs=0)
    in_lists = [found if isinstance(found, list) else [found] for found in (*plain, *scored)]
    expected, found = in_lists[:3], in_lists[3:]
    assert [[each.text for each in samples] for samples in found] == [
        [each.text for each in samples] for samples in expected
    ]
    if drafter != "none":  # the drafter has the prompt, too
        assert [[each.stats.num_accepted for each in samples] for samples in found] == [
            [each.stats.num_accepted for each in samples] for samples in expected
        ]
    for samples, prompt in zip(found, prompts, strict=True):
        for each in samples:
            assert len(each.prompt_logprobs) == len(llm.target.encode(prompt)) - 1
    assert not any(each.prompt_logprobs for samples in expected for each in samples)


def test_a_prompt_may_only_be_scored(llm):
    ids = llm.target.encode(PROMPT)
    output = llm.generate(ids, max_tokens=0, prompt_logprobs=0)
    assert (output.text, output.token_ids, output.finish_reason) == ("", [], "length")
    assert len(output.prompt_logprobs) == len(ids) - 1
    assert llm.generate(ids, max_tokens=0).finish_reason == "length"
    assert list(llm.stream(ids, max_tokens=0)) == []
    assert not len(llm.target.runtime.slots)
    longest = ids * (llm.target.runtime.context_length // len(ids) + 1)
    longest = longest[: llm.target.runtime.context_length]
    assert len(llm.generate(longest, max_tokens=0, prompt_logprobs=0).prompt_logprobs) == len(longest) - 1
    with pytest.raises(BadInputError, match="expected a prompt of at most"):
        llm.generate([*longest, 5], max_tokens=0, prompt_logprobs=0)
    with pytest.raises(BadInputError, match="one position must stay free"):
        llm.generate(longest, max_tokens=1, prompt_logprobs=0)


def test_passes_are_limited_in_size(llm, monkeypatch):
    ids = llm.target.encode(PROMPT)
    whole = llm.generate(ids, max_tokens=0, prompt_logprobs=0)
    sizes = []
    score = llm.target.runtime.score

    def watch(rows, draft):
        sizes.append(draft.num_nodes + 1)
        return score(rows, draft)

    monkeypatch.setattr(llm.target.runtime, "score", watch)
    monkeypatch.setattr("secondguess.decode.LOGITS_BYTES", 4 * 5 * llm.target.runtime.vocab_size)
    assert 4 * 5 * llm.target.runtime.vocab_size < LOGITS_BYTES
    parts = llm.generate(ids, max_tokens=0, prompt_logprobs=0)
    assert max(sizes) == 5
    assert sum(sizes) == len(ids) - 1
    for one, other in zip(whole.prompt_logprobs, parts.prompt_logprobs, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-5)


def test_a_prompt_is_scored_within_the_limit_of_a_step(llm):
    components = Components(llm.target.runtime, llm.drafter, llm.verifier, llm.controller)
    params = SamplingParams(max_tokens=2, prompt_logprobs=0)
    scored, other = Row([5, 6, 7, 8, 9, 10, 11, 12], params), Row([5, 6, 7], SamplingParams(max_tokens=2))
    scored.prompt_logprobs = []
    batch = Batch(components, max_prefill_tokens=4)
    batch.add([scored, other])
    batch.prefill(batch.prefilling)
    # The shorter prompt does not wait for the end of the longer one.
    assert (len(scored.prompt_logprobs), batch.decoding) == (2, [other])
    batch.prefill(batch.prefilling)
    assert (len(scored.prompt_logprobs), batch.decoding) == (6, [other])
    batch.prefill(batch.prefilling)
    assert (len(scored.prompt_logprobs), batch.decoding) == (7, [other, scored])
    batch.close()


def test_a_failed_prefill_is_repeated_from_the_start(llm, monkeypatch):
    components = Components(llm.target.runtime, llm.drafter, llm.verifier, llm.controller)
    tokens = list(range(45, 65))  # no other test has them cached, nor begins with them
    row = Row(list(tokens), SamplingParams(max_tokens=0, prompt_logprobs=0, draft_length=3))
    row.prompt_logprobs = []
    batch = Batch(components)
    batch.add([row])
    score, passes = llm.target.runtime.score, []

    def fail_once(rows, draft):
        passes.append(draft)
        if len(passes) == 3:
            raise MemoryError
        return score(rows, draft)

    monkeypatch.setattr(llm.target.runtime, "score", fail_once)
    with pytest.raises(MemoryError):
        batch.prefill([row])
    assert row.tokens == tokens
    (commit,) = batch.prefill([row])
    assert (commit.tokens, row.finish_reason) == ([], "length")
    expected = expected_logprobs(llm, row.tokens)
    for position, each in enumerate(row.prompt_logprobs):
        assert each.logprob == pytest.approx(expected[position, row.tokens[position + 1]].item(), abs=1e-5)


def test_a_text_is_scored_in_windows(llm):
    ids = llm.target.encode(PROMPT)
    whole = llm.score(PROMPT)
    assert isinstance(whole, secondguess.TextScore)
    assert whole.token_ids == ids
    expected = expected_logprobs(llm, ids)
    own = [expected[position, token].item() for position, token in enumerate(ids[1:])]
    assert whole.logprob == pytest.approx(sum(own), abs=1e-5)
    assert whole.perplexity == pytest.approx(math.exp(-sum(own) / len(own)), rel=1e-5)
    first, second = llm.score([PROMPT, PROMPT], window=9, num_alternatives=1)
    assert first == second
    assert [each.token for each in first.logprobs] == ids[1:]
    assert [len(each.alternatives) for each in first.logprobs] == [1] * len(own)
    # The second window begins with the last token of the first.
    again = expected_logprobs(llm, ids[8:17])
    for position, each in enumerate(first.logprobs[8:16]):
        assert each.logprob == pytest.approx(again[position, each.token].item(), abs=1e-5)
    assert llm.score(PROMPT, draft_length=0).logprob == pytest.approx(whole.logprob, abs=1e-5)


@pytest.mark.parametrize(
    ("text", "settings", "message"),
    [
        ([5], {}, "at least 2 tokens"),
        (PROMPT, {"window": 1}, "window of at least 2"),
        (PROMPT, {"num_alternatives": 99}, "20"),
    ],
)
def test_texts_that_cannot_be_scored_are_refused(llm, text, settings, message):
    with pytest.raises(BadInputError, match=message):
        llm.score(text, **settings)


def test_a_guided_prompt_is_refused(llm):
    with pytest.raises(BadInputError, match="prompt_logprobs"):
        llm.generate(secondguess.GuidedPrompt([5, 6], [7], 2.0), max_tokens=1, prompt_logprobs=0)
