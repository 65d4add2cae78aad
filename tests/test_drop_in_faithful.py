"""The drop-in beside Transformers' own loop: end tokens, padding, processors, streamers, stop strings, seeds."""

import numpy
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    EosTokenCriteria,
    GenerationConfig,
    MaxLengthCriteria,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    StopStringCriteria,
    TemperatureLogitsWarper,
    TextIteratorStreamer,
    TextStreamer,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation.streamers import BaseStreamer

import secondguess
from drop_in_cases import PROMPT, ours, theirs, tiny_model

LENGTH = {"max_new_tokens": 12}
END = 9
"""A token that the model's greedy text has early."""
BATCH = torch.tensor([[2, 2, 2, 2, 5, 6, 7, 8, 5, 6], [9, 8, 7, 6, 5, 9, 8, 7, 6, 5]])
BATCH_MASK = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1, 1, 1], [1] * 10])


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture(scope="module")
def model_without_padding():
    return tiny_model(pad_token_id=None)


# End tokens and padding


@pytest.mark.parametrize(
    "ends",
    [
        END,
        [39, END],
        torch.tensor(END),
        torch.tensor([39, END]),
        numpy.int64(END),
        numpy.array(END),
        numpy.array([39, END]),
        torch.tensor([END], dtype=torch.int32),
        -1,
        [-1, END],
    ],
    ids=repr,
)
def test_end_tokens_in_every_form_that_transformers_takes(model, ends):
    settings = {"eos_token_id": ends, "min_new_tokens": 2, **LENGTH}
    plain = theirs(model, PROMPT, **settings)
    assert plain.shape[1] == (14 if END in numpy.atleast_1d(ends) else 22)
    assert torch.equal(ours(model, PROMPT, **settings), plain)


def test_end_tokens_that_are_no_whole_numbers_are_refused(model):
    with pytest.raises(secondguess.BadInputError, match="expected eos_token_id to be whole numbers"):
        ours(model, PROMPT, eos_token_id=torch.tensor([1.5]), **LENGTH)


@pytest.mark.parametrize("ends", [[30, END], torch.tensor([30, END])], ids=repr)
def test_padding_is_the_first_end_token_unless_it_is_given(model_without_padding, ends):
    for settings in ({"eos_token_id": ends}, {"eos_token_id": ends, "pad_token_id": 4}):
        settings |= {"attention_mask": BATCH_MASK, **LENGTH}
        plain = theirs(model_without_padding, BATCH, **settings)
        assert (plain[:, -1] == settings.get("pad_token_id", int(ends[0]))).any(), "a row is padded"
        assert torch.equal(ours(model_without_padding, BATCH, **settings), plain)


def test_rows_that_end_apart_without_padding_are_refused():
    nameless = tiny_model(pad_token_id=None, eos_token_id=None)
    stop = {"stopping_criteria": [EosTokenCriteria(END)]}
    with pytest.raises(secondguess.BadInputError, match="pad_token_id"):
        ours(nameless, BATCH, attention_mask=BATCH_MASK, **stop, **LENGTH)
    assert ours(nameless, PROMPT, **stop, **LENGTH).shape[1] == 14


@pytest.mark.parametrize(
    "mask",
    [[1] * 9 + [0], [0, 0, 1, 1, 0, 1, 1, 1, 1, 1], [0] * 10],
    ids=["right", "hole", "everything"],
)
def test_padding_that_is_not_on_the_left_is_refused(model, mask):
    with pytest.raises(secondguess.BadInputError, match="padding_side='left'"):
        ours(model, PROMPT, attention_mask=torch.tensor([mask]), **LENGTH)


def test_a_mask_that_transformers_infers_from_a_padding_token_inside_the_prompt_is_refused(model):
    prompt = PROMPT.clone()
    prompt[0, 4] = 2
    with pytest.raises(secondguess.BadInputError, match="ones_like"):
        ours(model, prompt, **LENGTH)
    mask = torch.ones_like(prompt)
    plain = theirs(model, prompt, attention_mask=mask, **LENGTH)
    assert torch.equal(ours(model, prompt, attention_mask=mask, **LENGTH), plain)


@pytest.mark.parametrize(
    ("mask", "named"),
    [(torch.arange(12)[None].clamp(max=1), "shape"), (torch.full((1, 10), 2), "zeros and ones")],
)
def test_a_mask_of_another_shape_or_with_other_values_is_refused(model, mask, named):
    positions = torch.arange(10)[None]
    with pytest.raises(secondguess.BadInputError, match=named):
        ours(model, PROMPT, attention_mask=mask, position_ids=positions, **LENGTH)


def test_an_empty_prompt_is_refused(model):
    with pytest.raises(secondguess.BadInputError, match="at least one token"):
        ours(model, PROMPT[:, :0], attention_mask=PROMPT[:, :0], **LENGTH)


def test_without_a_prompt_generation_begins_with_the_bos_token(model):
    plain = theirs(model, bos_token_id=7, **LENGTH)
    assert plain[0, 0] == 7
    assert torch.equal(ours(model, bos_token_id=7, **LENGTH), plain)


# Logits processors and stopping criteria


@pytest.mark.parametrize(
    "criterion",
    [MaxLengthCriteria(13), MaxLengthCriteria(4), EosTokenCriteria(END), EosTokenCriteria([39, END])],
    ids=["length", "shorter than the prompt", "end", "ends"],
)
def test_a_criterion_of_the_user_replaces_that_of_the_config(model, criterion):
    plain = theirs(model, PROMPT, stopping_criteria=[criterion], **LENGTH)
    assert plain.shape[1] < 22
    assert torch.equal(ours(model, PROMPT, stopping_criteria=[criterion], **LENGTH), plain)


def test_a_processor_of_the_user_has_the_values_that_it_holds(model):
    settings = {"do_sample": True, "seed": 5, **LENGTH}
    own = [TemperatureLogitsWarper(2.5), TopKLogitsWarper(4), TopPLogitsWarper(0.8), MinPLogitsWarper(0.2)]
    by_name = {"temperature": 2.5, "top_k": 4, "top_p": 0.8, "min_p": 0.2}
    given = ours(model, PROMPT, logits_processor=own, top_k=0, **settings)
    assert torch.equal(given, ours(model, PROMPT, **by_name, **settings))
    assert not torch.equal(given, ours(model, PROMPT, top_k=0, **settings))


class OwnPenalty(RepetitionPenaltyLogitsProcessor):
    def __call__(self, input_ids, scores):
        return scores.roll(1, -1)


class OwnCriterion(EosTokenCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        return torch.tensor([True])


def renamed(kind, name):
    return type(name, (kind,), {})


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"logits_processor": [OwnPenalty(3.0)]}, "OwnPenalty"),
        (
            {"logits_processor": [renamed(OwnPenalty, "RepetitionPenaltyLogitsProcessor")(3.0)]},
            "RepetitionPenaltyLogitsProcessor",
        ),
        ({"stopping_criteria": [OwnCriterion(3)]}, "OwnCriterion"),
        ({"stopping_criteria": [renamed(OwnCriterion, "EosTokenCriteria")(3)]}, "EosTokenCriteria"),
        (
            {"logits_processor": [RepetitionPenaltyLogitsProcessor(3.0, prompt_ignore_length=4)]},
            "prompt_ignore_length",
        ),
        ({"logits_processor": [TopKLogitsWarper(1)]}, "do_sample"),
        ({"logits_processor": [TopKLogitsWarper(1)], "do_sample": True}, "TopKLogitsWarper twice"),
        (
            {"logits_processor": [TemperatureLogitsWarper(0.7)], "do_sample": True, "temperature": 0.7},
            "TemperatureLogitsWarper twice",
        ),
        (
            {"logits_processor": [MinPLogitsWarper(0.2)], "do_sample": True, "temperature": 0.7},
            "TemperatureLogitsWarper too late",
        ),
        (
            {"logits_processor": [TopKLogitsWarper(5, filter_value=-1.0)], "do_sample": True, "top_k": 0},
            "filter_value",
        ),
        (
            {
                "logits_processor": [TopPLogitsWarper(0.5, min_tokens_to_keep=2)],
                "do_sample": True,
                "top_k": 0,
            },
            "min_tokens_to_keep",
        ),
        ({"logits_processor": [MinNewTokensLengthLogitsProcessor(10, 4, [7])]}, "end tokens"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_processor_or_criterion_that_is_not_carried_out_exactly_is_refused(model, settings, named):
    with pytest.raises(secondguess.BadInputError, match=named):
        ours(model, PROMPT, **settings, **LENGTH)


def test_a_penalty_that_would_count_padding_is_refused(model):
    settings = {"attention_mask": BATCH_MASK, **LENGTH}
    with pytest.raises(secondguess.BadInputError, match="prompt_ignore_length"):
        ours(model, BATCH, logits_processor=[RepetitionPenaltyLogitsProcessor(3.0)], **settings)
    plain = theirs(model, BATCH, repetition_penalty=3.0, **settings)
    assert torch.equal(ours(model, BATCH, repetition_penalty=3.0, **settings), plain)


# Streamers


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
def test_a_streamer_gets_what_it_gets_from_transformers(model, prompt, settings):
    steps = []
    for generate in (theirs, ours):
        streamer = Steps()
        generate(model, prompt, streamer=streamer, **settings, **LENGTH)
        steps.append(
            [step if isinstance(step, str) else (step.dtype, step.tolist()) for step in streamer.steps]
        )
    assert len(steps[0]) > 4
    assert steps[1] == steps[0]


def test_a_streamer_may_be_given_to_custom_generate_itself(model):
    streamer = Steps()
    config = GenerationConfig(do_sample=False)
    sequences = secondguess.custom_generate(
        model, PROMPT, [], [MaxLengthCriteria(13)], config, drafter="none", streamer=streamer
    )
    assert streamer.steps[-1] == "end"
    assert torch.cat(streamer.steps[:-1]).tolist() == sequences[0, 10:].tolist()


def test_a_streamer_comes_while_text_is_decided(model):
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


def test_a_failing_streamer_leaves_the_model_as_it_was(model):
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


def test_streamers_of_text_say_what_they_say_with_transformers(text_model, tokenizer, text_prompt, capsys):
    printed = []
    for generate in (theirs, ours):
        generate(text_model, text_prompt, streamer=TextStreamer(tokenizer, skip_prompt=True), **LENGTH)
        printed.append(capsys.readouterr().out)
        pieces = TextIteratorStreamer(tokenizer, timeout=5)
        generate(text_model, text_prompt, streamer=pieces, **LENGTH)
        printed.append(list(pieces))
    assert printed[0].strip()
    assert printed[2:] == printed[:2]


# Stop strings


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


def test_rows_end_apart_at_their_stop_strings(text_model, tokenizer, text_prompt):
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
        with pytest.raises(secondguess.BadInputError, match="eos_token_id beside stop strings"):
            ours(text_model, batch, **settings | endless)
    finally:
        text_model.generation_config.eos_token_id = kept


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"tokenizer": None}, "tokenizer for stop_strings"),
        ({"min_new_tokens": 3}, "min_new_tokens"),
        ({"stop_strings": [""]}, "at least one character"),
    ],
)
def test_stop_strings_that_cannot_be_met_exactly_are_refused(
    text_model, tokenizer, text_prompt, settings, named
):
    with pytest.raises(secondguess.BadInputError, match=named):
        ours(text_model, text_prompt, **{"stop_strings": "x", "tokenizer": tokenizer} | settings | LENGTH)


# Seeds and samples


def sample(model, *, manual_seed=None, prompt=PROMPT, **settings):
    if manual_seed is not None:
        torch.manual_seed(manual_seed)
    return ours(model, prompt, do_sample=True, temperature=1.5, top_k=0, **settings, **LENGTH)


def test_torch_manual_seed_decides_sampled_text(model):
    first = sample(model, manual_seed=1)
    second = sample(model)
    assert torch.equal(sample(model, manual_seed=1), first)
    assert torch.equal(sample(model), second)
    assert not torch.equal(first, second)
    assert not torch.equal(sample(model, manual_seed=2), first)


def test_text_of_a_manual_seed_does_not_depend_on_how_far_is_drafted(tiny_checkpoint, tiny_draft_checkpoint):
    text_model = AutoModelForCausalLM.from_pretrained(tiny_checkpoint, dtype=torch.float32).eval()
    texts = [
        sample(
            text_model, manual_seed=1, drafter=f"model:{tiny_draft_checkpoint}", controller=f"fixed:{length}"
        )
        for length in (1, 4)
    ]
    assert torch.equal(*texts)


def test_greedy_text_takes_nothing_from_the_generator(model):
    torch.manual_seed(1)
    state = torch.get_rng_state()
    ours(model, PROMPT, **LENGTH)
    assert torch.equal(torch.get_rng_state(), state)


def test_rows_of_a_batch_are_drawn_independently(model):
    texts = sample(model, manual_seed=1, prompt=PROMPT.expand(3, -1), num_return_sequences=2)
    assert len({tuple(text) for text in texts.tolist()}) == 6


def test_samples_stand_as_in_transformers_and_a_prompt_gives_what_it_gives_alone(model):
    prompts = torch.cat([PROMPT, PROMPT + 3])
    texts = sample(model, prompt=prompts, num_return_sequences=2, seed=5)
    for index in range(2):
        alone = sample(model, prompt=prompts[index : index + 1], num_return_sequences=2, seed=5)
        assert torch.equal(texts[2 * index : 2 * index + 2], alone)
        assert not torch.equal(*alone)
        assert torch.equal(alone[:1], sample(model, prompt=prompts[index : index + 1], seed=5))


# Results


def test_a_dictionary_is_returned_when_asked_for(model):
    result = ours(model, PROMPT, return_dict_in_generate=True, **LENGTH)
    plain = theirs(model, PROMPT, return_dict_in_generate=True, **LENGTH)
    assert type(result) is type(plain)
    assert torch.equal(result.sequences, plain.sequences)


def test_the_result_has_the_dtype_that_transformers_gives_it(model):
    assert ours(model, PROMPT.int(), **LENGTH).dtype == theirs(model, PROMPT.int(), **LENGTH).dtype
