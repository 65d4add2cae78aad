"""End tokens, padding and attention masks, compared with Transformers."""

import numpy
import pytest
import torch
from transformers import (
    EosTokenCriteria,
)

import secondguess
from drop_in_cases import BATCH, BATCH_MASK, END, LENGTH, PROMPT, ours, theirs, tiny_model


@pytest.fixture(scope="module")
def model_without_padding():
    return tiny_model(pad_token_id=None)


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
def test_end_tokens_are_accepted_in_every_form_of_transformers(model, ends):
    settings = {"eos_token_id": ends, "min_new_tokens": 2, **LENGTH}
    plain = theirs(model, PROMPT, **settings)
    assert plain.shape[1] == (14 if END in numpy.atleast_1d(ends) else 22)
    assert torch.equal(ours(model, PROMPT, **settings), plain)


def test_end_tokens_that_are_not_integers_are_refused(model):
    with pytest.raises(secondguess.BadInputError, match="expected eos_token_id to be whole numbers"):
        ours(model, PROMPT, eos_token_id=torch.tensor([1.5]), **LENGTH)


@pytest.mark.parametrize("ends", [[30, END], torch.tensor([30, END])], ids=repr)
def test_padding_is_the_first_end_token_unless_it_is_given(model_without_padding, ends):
    for settings in ({"eos_token_id": ends}, {"eos_token_id": ends, "pad_token_id": 4}):
        settings |= {"attention_mask": BATCH_MASK, **LENGTH}
        plain = theirs(model_without_padding, BATCH, **settings)
        assert (plain[:, -1] == settings.get("pad_token_id", int(ends[0]))).any(), "a row is padded"
        assert torch.equal(ours(model_without_padding, BATCH, **settings), plain)


def test_rows_of_different_lengths_without_a_padding_token_are_refused():
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
