"""`/v1/completions` with OpenAI's client."""

import openai
import pytest
from fake_engine import LOGPROB, REPLY, FakeEngine, fake_target

from checkpoints import read_tokenizer
from conftest import metrics_of, openai_client, serving, wait_for
from secondguess.builtin import builtin_paths

PROMPT = "print("


def complete(client, **fields):
    return client.completions.create(**{"model": "builtin", "prompt": PROMPT, **fields})


def test_a_completion_has_text_finish_reason_and_usage(client, engine):
    reply = complete(client)
    assert reply.object == "text_completion"
    assert [(choice.index, choice.text, choice.finish_reason) for choice in reply.choices] == [
        (0, REPLY, "stop")
    ]
    num_output = len(engine.llm.target.tokenizer(REPLY).input_ids) + 1
    num_prompt = len(engine.last_prompt)
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (num_prompt, num_output)
    assert reply.usage.total_tokens == num_prompt + num_output
    details = reply.usage.completion_tokens_details
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (0, 0)


def test_without_a_limit_the_context_is_the_limit_and_the_temperature_is_one(client, engine):
    complete(client)
    assert engine.last.params.max_tokens == 2048 - len(engine.last_prompt)
    assert engine.last.params.temperature == 1.0


def test_a_stream_gives_the_same_text_in_pieces(client):
    chunks = list(complete(client, stream=True))
    texts = [chunk.choices[0].text for chunk in chunks]
    assert "".join(texts) == REPLY
    assert len([text for text in texts if text]) > 5
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["stop"]
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_stream_ends_with_usage_if_requested_and_done(client, http):
    chunks = list(complete(client, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].choices == []
    assert chunks[-1].usage == complete(client).usage
    assert all(chunk.usage is None for chunk in chunks[:-1])
    raw = http.post("/v1/completions", json={"model": "builtin", "prompt": PROMPT, "stream": True})
    assert raw.headers["content-type"].startswith("text/event-stream")
    assert raw.text.endswith("data: [DONE]\n\n")
    assert "usage" not in raw.text


@pytest.mark.parametrize("include", [True, False])
def test_the_text_can_end_with_the_stop_string(client, include):
    before, stop, _ = REPLY.partition("return")
    more = {"stop": ["\n\n", "return"], "extra_body": {"include_stop_str_in_output": include}}
    expected = before + stop * include
    assert complete(client, **more).choices[0].text == expected
    chunks = list(complete(client, stream=True, **more))
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected


@pytest.mark.parametrize("special", [True, False])
def test_the_text_of_a_special_token_stops_at_this_token(special):
    tokenizer = read_tokenizer(str(builtin_paths().target))
    tokenizer.add_tokens(["<|fim_pad|>"], special_tokens=special)
    (token,) = tokenizer.encode("<|fim_pad|>", add_special_tokens=False)
    engine = FakeEngine(fake_target(tokenizer), "one<|fim_pad|>two")
    with serving(engine) as url, openai_client(url) as client:
        assert complete(client).choices[0].text == ("onetwo" if special else "one<|fim_pad|>two")
        stopped = complete(client, stop="<|fim_pad|>").choices[0]
        assert (stopped.text, stopped.finish_reason) == ("one", "stop")
        assert engine.last.params.stop_token_ids == ((token,) if special else ())
        complete(client, stop=["x", "<|other|>"])
        assert engine.last.params.stop_token_ids == ()


def test_stop_string_and_length_end_the_text(client):
    stopped = complete(client, stop=["return"]).choices[0]
    assert (stopped.text, stopped.finish_reason) == (REPLY.partition("return")[0], "stop")
    short = complete(client, max_tokens=2)
    assert (short.choices[0].finish_reason, short.usage.completion_tokens) == ("length", 2)


def test_several_prompts_and_samples_are_choices_in_order(client, engine):
    reply = complete(client, prompt=["one", "two"], n=2)
    assert [choice.index for choice in reply.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in reply.choices] == [REPLY] * 4
    texts = [""] * 4
    for chunk in complete(client, prompt=["one", "two"], n=2, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [REPLY] * 4


def test_token_ids_are_a_prompt(client, engine):
    complete(client, prompt=[5, 6, 7])
    assert engine.last_prompt == [5, 6, 7]
    complete(client, prompt=[[5, 6], [7]])
    assert engine.last.prompts == [[5, 6], [7]]


@pytest.mark.parametrize("stream", [False, True])
def test_echo_puts_the_prompt_before_the_text(client, stream):
    reply = complete(client, echo=True, stream=stream)
    text = "".join(chunk.choices[0].text for chunk in reply) if stream else reply.choices[0].text
    assert text == PROMPT + REPLY


def test_echo_of_tokens_that_end_inside_a_character(client, engine):
    tokenizer = engine.llm.target.tokenizer
    ids = tokenizer("x = '\N{GRINNING FACE}").input_ids
    shown = tokenizer.decode([*ids[:-1], *tokenizer(REPLY).input_ids], skip_special_tokens=True)
    assert "\ufffd" in tokenizer.decode(ids[:-1])
    assert complete(client, prompt=ids[:-1], echo=True).choices[0].text == shown


def test_logprobs_come_with_tokens_and_offsets(client):
    whole = complete(client, logprobs=2).choices[0].logprobs
    assert "".join(whole.tokens).startswith(REPLY)
    assert set(whole.token_logprobs) == {LOGPROB}
    assert whole.text_offset[:2] == [0, len(whole.tokens[0])]
    assert len(whole.top_logprobs[0]) == 2
    parts = [chunk.choices[0].logprobs for chunk in complete(client, logprobs=2, stream=True)]
    assert [token for part in parts if part for token in part.tokens] == whole.tokens
    assert [offset for part in parts if part for offset in part.text_offset] == whole.text_offset


def test_a_report_has_the_fields_of_vllm(client):
    reply = complete(client, extra_body={"report": True})
    found = reply.metrics["speculative_decoding"]
    assert found["num_spec_steps"] == sum(found["acceptance_histogram"]) > 0
    assert found["mean_acceptance_length"] == 1 + found["num_accepted_draft_tokens"] / found["num_spec_steps"]
    assert found["draft_acceptance_rate"] == 1.0
    assert reply.secondguess["samples"][0]["exactness"] == "lossless"
    *_, last = complete(client, stream=True, extra_body={"report": True})
    assert last.metrics["speculative_decoding"] == found


@pytest.mark.parametrize(("speculation", "length"), [("off", 0), ("auto", None), ({"draft_length": 4}, 4)])
def test_speculation_is_a_setting_of_the_request(client, engine, speculation, length):
    complete(client, extra_body={"speculation": speculation})
    assert engine.last.params.draft_length == length


@pytest.mark.parametrize(
    ("speculation", "shares"), [("auto", True), ("off", True), ({"history": False}, False), ({}, True)]
)
def test_a_request_declines_shared_outputs(client, engine, speculation, shares):
    complete(client, extra_body={"speculation": speculation})
    assert engine.last.params.history is shares


@pytest.mark.parametrize("stream", [False, True])
def test_a_disconnect_cancels_the_request(client, engine, stream):
    engine.hold_after = 2
    with pytest.raises(openai.APITimeoutError):
        for _ in complete(client.with_options(timeout=0.5), stream=stream):
            pass
    wait_for(lambda: engine.requests and engine.last.is_cancelled)


def test_closing_a_stream_cancels_the_request(client, engine, http):
    def num_aborted():
        return metrics_of(http).get(("vllm:request_success_total", "abort"), 0)

    before, engine.hold_after = num_aborted(), 2
    stream = complete(client, stream=True)
    next(iter(stream))
    assert not engine.last.is_cancelled
    assert num_aborted() == before
    stream.close()
    wait_for(lambda: engine.last.is_cancelled)
    wait_for(lambda: num_aborted() == before + 1)
    engine.hold_after = None
    complete(client)
    assert num_aborted() == before + 1


def test_samples_that_were_running_are_counted_as_aborted(client, engine, http):
    def num_aborted():
        return metrics_of(http).get(("vllm:request_success_total", "abort"), 0)

    before, engine.is_full = num_aborted(), True
    with pytest.raises(openai.RateLimitError):
        complete(client.with_options(max_retries=0), prompt=["one", "two"])
    assert num_aborted() == before, "nothing ran"
    engine.is_full, engine.hold_after = False, 2
    stream = complete(client, prompt=["one", "two"], n=3, stream=True)
    next(iter(stream))
    stream.close()
    wait_for(lambda: num_aborted() == before + 6)


def test_a_full_context_is_a_length_and_a_text_that_the_server_cut_an_error(client, engine):
    engine.end_reason = "context"
    assert complete(client).choices[0].finish_reason == "length"
    engine.is_cut = True
    with pytest.raises(openai.APIStatusError) as caught:
        complete(client)
    assert caught.value.status_code == 503
    with pytest.raises(openai.APIError, match="the server is shutting down"):
        list(complete(client, stream=True))


@pytest.mark.parametrize("stream", [False, True])
def test_timings_are_those_of_llama_cpp(client, stream):
    reply = complete(client, n=2, stream=stream, extra_body={"timings_per_token": True})
    timings = (list(reply)[-1] if stream else reply).timings
    tokens = len(
        client.completions.create(model="builtin", prompt="def f(", logprobs=0).choices[0].logprobs.tokens
    )
    assert timings["predicted_n"] == 2 * tokens
    assert timings["prompt_n"] > 0
    assert timings["draft_n_accepted"] <= timings["draft_n"]
