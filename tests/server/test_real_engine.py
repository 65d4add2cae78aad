"""The server with the real engine and the built-in pair: the same texts as `LLM.generate`, over HTTP."""

import threading

import httpx2
import openai
import pytest
import torch

from conftest import metrics_of, openai_client, serving, wait_for
from secondguess import load
from secondguess.checkpoint.loader import reference_module
from secondguess.engine import Engine
from secondguess.sampling import SamplingParams
from secondguess.sampling.text import text_of_token

PROMPT = "def read_lines(path):\n"


@pytest.fixture(scope="module")
def served():
    llm = load(dtype="float32")
    engine = Engine(llm)
    with serving(engine) as url, openai_client(url) as client:
        yield engine, client
    engine.close()


def complete(client, **fields):
    return client.completions.create(**{"model": "builtin", "prompt": PROMPT, "max_tokens": 40, **fields})


@pytest.mark.parametrize(
    "settings", [{"temperature": 0}, {"seed": 3}, {"seed": 3, "temperature": 0.7, "top_p": 0.9}]
)
def test_texts_are_those_of_generate(served, settings):
    engine, client = served
    expected = engine.llm.generate(
        PROMPT, SamplingParams(**{"temperature": 1.0, **settings, "max_tokens": 16})
    )
    assert complete(client, **settings, max_tokens=16).choices[0].text == expected.text
    chunks = list(complete(client, **settings, max_tokens=16, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected.text
    plain = complete(client, **settings, max_tokens=16, extra_body={"speculation": "off", "report": True})
    assert plain.choices[0].text == expected.text
    assert plain.metrics["speculative_decoding"]["num_draft_tokens"] == 0


def test_a_repeated_prompt_is_cached(served):
    _, client = served
    prompt = PROMPT * 8
    complete(client, prompt=prompt)
    usage = complete(client, prompt=prompt).usage
    assert usage.prompt_tokens_details.cached_tokens == usage.prompt_tokens - 1


def _texts(outputs):
    return [output.text for output in (outputs if isinstance(outputs, list) else [outputs])]


def test_samples_and_requests_together_equal_each_alone(served):
    engine, client = served
    fields = [{"seed": seed, "n": 1 + seed % 2, "max_tokens": 16} for seed in range(16)]
    alone = [[choice.text for choice in complete(client, **each).choices] for each in fields]
    params = [SamplingParams(**each, temperature=1.0) for each in fields]
    assert alone == [_texts(engine.llm.generate(PROMPT, each)) for each in params]
    for each in fields[::3]:
        each["extra_body"] = {"speculation": "off"}
    together = [None] * len(fields)

    def run(place):
        together[place] = [choice.text for choice in complete(client, **fields[place]).choices]

    threads = [threading.Thread(target=run, args=(place,)) for place in range(len(fields))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert together == alone


def test_logprobs_are_those_of_a_teacher_forced_pass_of_the_unmodified_module(served):
    """Of tokens that were accepted, sampled in place of rejected ones, and sampled after accepted ones."""
    engine, client = served
    target = engine.llm.target
    text = complete(client, temperature=0).choices[0].text
    prediction = {"type": "content", "content": text[:40] + "?" + text[41:]}
    extra = {"prediction": prediction, "speculation": {"draft_length": 6}, "report": True}
    reply = complete(client, temperature=0, logprobs=2, extra_body=extra)
    found = reply.choices[0].logprobs
    statistics = reply.secondguess["samples"][0]
    assert 0 < statistics["num_accepted"] < statistics["num_drafted"]
    prompt, output = target.encode(PROMPT), engine.llm.generate(PROMPT, max_tokens=40).token_ids
    with torch.inference_mode():
        logits = reference_module(target)(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
    expected = logits.float().log_softmax(-1).gather(1, torch.tensor(output)[:, None])[:, 0].tolist()
    assert found.token_logprobs == pytest.approx(expected, abs=1e-4)
    assert found.tokens == [text_of_token(target.tokenizer, token) for token in output]


@pytest.mark.parametrize("chat", [False, True])
def test_a_stream_with_a_report_has_the_rejected_drafts(served, chat):
    _, client = served
    fields = {"model": "builtin", "max_tokens": 12, "temperature": 0}
    if chat:
        make, fields["messages"] = client.chat.completions.create, [{"role": "user", "content": "x"}]
    else:
        make, fields["prompt"] = client.completions.create, PROMPT
    (choice,) = make(**fields).choices
    text = choice.message.content if chat else choice.text
    prediction = {"type": "content", "content": text[: len(text) // 2] + "?!?!?"}
    extra = {"prediction": prediction, "speculation": {"draft_length": 8}, "report": True}
    chunks = [chunk.model_dump() for chunk in make(**fields, stream=True, extra_body=extra)]
    reported = [
        choice["secondguess"] for chunk in chunks for choice in chunk["choices"] if "secondguess" in choice
    ]
    assert "".join(part for each in reported for part, _ in each["segments"]) == text
    assert "?!" in "".join(each["rejected"] for each in reported)


def test_a_disconnect_leaves_the_batch(served):
    engine, client = served
    body = {"min_tokens": 1500}
    stream = complete(client, max_tokens=1500, stream=True, extra_body=body)
    next(iter(stream))
    assert engine.status().num_requests == 1
    stream.close()
    wait_for(lambda: engine.status().num_requests == 0)
    with pytest.raises(openai.APITimeoutError):
        complete(client.with_options(timeout=0.3), max_tokens=1500, extra_body=body)
    wait_for(lambda: engine.status().num_requests == 0)


def test_counters_grow_with_every_round_and_count_requests_that_are_abandoned(served):
    engine, client = served
    names = [
        ("secondguess:rounds_total",),
        ("vllm:spec_decode_num_drafts_total",),
        ("vllm:spec_decode_num_draft_tokens_total",),
        ("vllm:spec_decode_num_accepted_tokens_total",),
        ("vllm:spec_decode_num_accepted_tokens_per_pos_total", "0"),
        ("secondguess:drafted_tokens_per_pos_total", "0"),
        ("secondguess:draft_length_sum",),
        ("secondguess:phase_seconds_total", "score"),
    ]
    with httpx2.Client(base_url=str(client.base_url).removesuffix("/v1/")) as http:
        complete(client, max_tokens=8)
        before, stats_before = metrics_of(http), engine.totals
        body = {
            "min_tokens": 1500,
            "ignore_eos": True,
            "speculation": {"drafter": "ngram", "draft_length": 4},
        }
        stream = complete(
            client, prompt=PROMPT * 20, temperature=0, max_tokens=1500, stream=True, extra_body=body
        )
        for _ in range(50):
            next(iter(stream))
        running = metrics_of(http)
        assert running["vllm:num_requests_running",] == 1
        assert before["vllm:kv_cache_usage_perc",] == 0 < running["vllm:kv_cache_usage_perc",] <= 1
        assert all(running[name] > before[name] for name in names)
        assert running["secondguess:rounds_total",] >= before["secondguess:rounds_total",] + 50
        stream.close()
        wait_for(lambda: engine.status().num_requests == 0)
        after = metrics_of(http)
        assert after["vllm:kv_cache_usage_perc",] == 0
        assert all(after[name] >= running[name] for name in names)
        assert after["secondguess:rounds_total",] == engine.totals.num_rounds
    assert stats_before.num_rounds == before["secondguess:rounds_total",], "no round changes what was read"


def test_a_chat_and_a_response_have_the_same_text(served):
    _, client = served
    messages = [{"role": "user", "content": "Read a file."}]
    chat = client.chat.completions.create(model="builtin", messages=messages, temperature=0, max_tokens=20)
    response = client.responses.create(
        model="builtin", input="Read a file.", temperature=0, max_output_tokens=20
    )
    assert chat.choices[0].message.content == response.output_text != ""
    assert chat.usage.total_tokens == response.usage.total_tokens


def test_prompts_are_scored(served):
    engine, client = served
    encode = engine.llm.target.encode
    prompts = [PROMPT, "import os\n"]
    fields = {"prompt": prompts, "echo": True, "logprobs": 1, "temperature": 0}
    reply = complete(client, **fields, max_tokens=0)
    texts = [each.text for each in complete(client, prompt=prompts, temperature=0, max_tokens=3).choices]
    longer = complete(client, **fields, max_tokens=3)
    for index, prompt in enumerate(prompts):
        scored = engine.llm.score(prompt, num_alternatives=1).logprobs
        found, choice = reply.choices[index].logprobs, longer.choices[index]
        assert (reply.choices[index].text, choice.text) == (prompt, prompt + texts[index])
        assert "".join(found.tokens) == prompt
        assert found.token_logprobs == [None, *(each.logprob for each in scored)]
        assert found.top_logprobs[0] is None
        assert [min(each.values()) for each in found.top_logprobs[1:]] == [
            each.alternatives[next(iter(each.alternatives))] for each in scored
        ]
        assert [
            prompt[start:][: len(text)] for start, text in zip(found.text_offset, found.tokens, strict=True)
        ] == found.tokens
        assert choice.logprobs.token_logprobs[: len(scored) + 1] == found.token_logprobs
        assert len(choice.logprobs.tokens) == len(encode(prompt)) + 3
    assert reply.usage.completion_tokens == 0


def test_prompt_log_probabilities_are_reported_by_token_as_vllm_does(served):
    engine, client = served
    reply = complete(client, max_tokens=1, extra_body={"prompt_logprobs": 1})
    scored = engine.llm.score(PROMPT, num_alternatives=1).logprobs
    first, *found = reply.choices[0].prompt_logprobs
    assert (first, reply.choices[0].logprobs, len(found)) == (None, None, len(scored))
    for shown, each in zip(found, scored, strict=True):
        assert shown[str(each.token)] == {"logprob": each.logprob, "decoded_token": each.text}
        assert set(shown) == {str(each.token), *map(str, each.alternatives)}


@pytest.mark.parametrize(
    "fields", [{"echo": True, "logprobs": 0}, {"extra_body": {"prompt_logprobs": 0}}], ids=str
)
def test_a_stream_of_prompt_log_probabilities_is_refused(served, fields):
    with pytest.raises(openai.BadRequestError, match="expected no stream"):
        complete(served[1], stream=True, **fields)


def test_a_prompt_is_scored_once(served):
    with pytest.raises(openai.BadRequestError, match="expected n of 1"):
        complete(served[1], echo=True, logprobs=0, n=2)
