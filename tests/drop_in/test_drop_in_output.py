"""Streamers, stop strings and results, compared with Transformers."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Thread

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    MaxLengthCriteria,
    StopStringCriteria,
    TextIteratorStreamer,
    TextStreamer,
)
from transformers.generation.streamers import BaseStreamer

import secondguess
from drop_in_cases import BATCH, END, LENGTH, PROMPT, ours, theirs


class Steps(BaseStreamer):
    """Keeps what it gets."""

    def __init__(self):
        self.steps = []

    def put(self, value):
        self.steps.append(value)

    def end(self):
        self.steps.append("end")


@pytest.mark.parametrize("prompt", [PROMPT, BATCH], ids=["one row", "two rows"])
@pytest.mark.parametrize("settings", [{}, {"eos_token_id": END}], ids=["", "with an end token"])
def test_a_streamer_receives_the_same_as_from_transformers(model, prompt, settings):
    steps = []
    for generate in (theirs, ours):
        streamer = Steps()
        generate(model, prompt, streamer=streamer, **settings, **LENGTH)
        steps.append(
            [step if isinstance(step, str) else (step.dtype, step.tolist()) for step in streamer.steps]
        )
    assert len(steps[0]) > 4
    assert steps[1] == steps[0]


def test_a_streamer_can_be_an_argument_of_custom_generate(model):
    streamer = Steps()
    config = GenerationConfig(do_sample=False)
    sequences = secondguess.custom_generate(
        model, PROMPT, [], [MaxLengthCriteria(13)], config, drafter="none", streamer=streamer
    )
    assert streamer.steps[-1] == "end"
    assert torch.cat(streamer.steps[:-1]).tolist() == sequences[0, 10:].tolist()


def test_a_streamer_reaches_a_partial_custom_generate(model):
    streamer = Steps()
    decode = partial(secondguess.custom_generate, drafter="none")
    model.generate(PROMPT, custom_generate=decode, streamer=streamer, **LENGTH)
    assert len(streamer.steps) == 14


def test_a_streamer_is_called_during_decoding(model):
    """Each token is put before the target is asked for the next ones."""

    class Counting(Steps):
        def put(self, value):
            super().put(passes.count("pass"))

    passes = []
    handle = model.register_forward_hook(lambda *_: passes.append("pass"))
    try:
        streamer = Counting()
        ours(model, PROMPT, streamer=streamer, drafter="none", **LENGTH)
    finally:
        handle.remove()
    new = streamer.steps[1:-1]
    assert len(new) == LENGTH["max_new_tokens"]
    assert new == sorted(set(new)), "no two tokens of plain decoding come from one pass"


def test_a_failing_streamer_leaves_the_model_unchanged(model):
    class Failing(Steps):
        def put(self, value):
            if self.steps:
                raise RuntimeError("reader is gone")
            super().put(value)

    before = model.config._attn_implementation
    with pytest.raises(RuntimeError, match="reader is gone"):
        ours(model, PROMPT, streamer=Failing(), **LENGTH)
    assert model.config._attn_implementation == before
    assert torch.equal(ours(model, PROMPT, **LENGTH), theirs(model, PROMPT, **LENGTH))


@pytest.fixture(scope="module")
def text_model(tiny_checkpoint):
    return AutoModelForCausalLM.from_pretrained(tiny_checkpoint, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer(tiny_checkpoint):
    return AutoTokenizer.from_pretrained(tiny_checkpoint)


@pytest.fixture(scope="module")
def text_prompt(tokenizer):
    return tokenizer("def quicksort(items):\n", return_tensors="pt")["input_ids"]


def test_text_streamers_print_the_same_as_with_transformers(text_model, tokenizer, text_prompt, capsys):
    printed = []
    for generate in (theirs, ours):
        generate(text_model, text_prompt, streamer=TextStreamer(tokenizer, skip_prompt=True), **LENGTH)
        printed.append(capsys.readouterr().out)
        pieces = TextIteratorStreamer(tokenizer, timeout=30)
        thread = Thread(
            target=generate, args=(text_model, text_prompt), kwargs={"streamer": pieces, **LENGTH}
        )
        thread.start()
        printed.append(list(pieces))
        thread.join()
    assert printed[0].strip()
    assert printed[2:] == printed[:2]


def continuation(text_model, tokenizer, text_prompt):
    output = theirs(text_model, text_prompt, max_new_tokens=30)
    return tokenizer.decode(output[0, text_prompt.shape[1] :])


@pytest.mark.parametrize("place", ["inside", "from the prompt on", "two strings", "nowhere"])
def test_stop_strings_end_the_text_where_transformers_ends_it(text_model, tokenizer, text_prompt, place):
    text = continuation(text_model, tokenizer, text_prompt)
    strings = {
        "inside": text[7:10],
        "from the prompt on": f":\n{text[:2]}",
        "two strings": ["never written", text[12:14]],
        "nowhere": "never written",
    }[place]
    settings = {"stop_strings": strings, "tokenizer": tokenizer, "max_new_tokens": 30}
    plain = theirs(text_model, text_prompt, **settings)
    assert (plain.shape[1] == text_prompt.shape[1] + 30) == (place == "nowhere")
    for drafter in ("none", "ngram"):
        assert torch.equal(ours(text_model, text_prompt, drafter=drafter, **settings), plain)
    criterion = StopStringCriteria(tokenizer, strings)
    given = ours(text_model, text_prompt, stopping_criteria=[criterion], max_new_tokens=30)
    assert torch.equal(given, plain)


def test_rows_end_independently_at_their_stop_strings(text_model, tokenizer, text_prompt):
    batch = torch.cat([text_prompt, text_prompt.roll(2, -1)])
    batch = torch.cat([batch.new_zeros(2, 2), batch], 1)
    mask = (torch.arange(batch.shape[1]) >= 2).long().expand_as(batch)
    settings = {
        "stop_strings": continuation(text_model, tokenizer, text_prompt)[7:10],
        "tokenizer": tokenizer,
        "attention_mask": mask,
        "pad_token_id": 3,
        "max_new_tokens": 30,
    }
    plain = theirs(text_model, batch, **settings)
    assert (plain[:, -1] == 3).tolist() == [True, False]
    assert torch.equal(ours(text_model, batch, **settings), plain)
    endless = {"eos_token_id": None, "generation_config": GenerationConfig(eos_token_id=None)}
    text_model.generation_config.eos_token_id, kept = None, text_model.generation_config.eos_token_id
    try:
        with pytest.raises(secondguess.BadInputError, match="cannot end rows at stop strings"):
            ours(text_model, batch, **settings | endless)
    finally:
        text_model.generation_config.eos_token_id = kept


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"tokenizer": None}, "tokenizer for stop_strings"),
        ({"min_new_tokens": 3}, "min_new_tokens"),
        ({"stop_strings": [""]}, "at least one character"),
        ({"stop_strings": 5}, "at least one character"),
    ],
)
def test_stop_strings_that_cannot_be_matched_exactly_are_refused(
    text_model, tokenizer, text_prompt, settings, named
):
    with pytest.raises(secondguess.BadInputError, match=named):
        ours(text_model, text_prompt, **{"stop_strings": "x", "tokenizer": tokenizer} | settings | LENGTH)


def test_a_dictionary_is_returned_on_request(model):
    result = ours(model, PROMPT, return_dict_in_generate=True, **LENGTH)
    plain = theirs(model, PROMPT, return_dict_in_generate=True, **LENGTH)
    assert type(result) is type(plain)
    assert torch.equal(result.sequences, plain.sequences)


def test_the_result_has_the_dtype_that_transformers_gives_it(model):
    assert ours(model, PROMPT.int(), **LENGTH).dtype == theirs(model, PROMPT.int(), **LENGTH).dtype


def test_calls_from_two_threads_are_serialised(tiny_checkpoint, tiny_draft_checkpoint):
    """They share the draft model and the controller of earlier calls."""
    model = AutoModelForCausalLM.from_pretrained(tiny_checkpoint, dtype=torch.float32).eval()
    prompts = [PROMPT + offset for offset in range(4)]
    expected = [theirs(model, prompt, do_sample=False, **LENGTH).tolist() for prompt in prompts]

    def call(number):
        prompt = prompts[number % len(prompts)]
        return ours(
            model, prompt, drafter=f"model:{tiny_draft_checkpoint}", do_sample=False, **LENGTH
        ).tolist()

    with ThreadPoolExecutor(2) as threads:
        texts = list(threads.map(call, range(40)))
    assert texts == expected * 10
