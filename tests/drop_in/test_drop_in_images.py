"""Images in `model.generate(..., custom_generate=...)`: the text is that of Transformers alone."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForImageTextToText

import secondguess
from drop_in_cases import ours, theirs
from secondguess.drop_in.arguments import take_images
from test_images import StubProcessor, asked, gemma3, image, llava, qwen3_vl

LENGTH = {"max_new_tokens": 12, "min_new_tokens": 12, "eos_token_id": 0, "pad_token_id": 0}


@pytest.fixture(scope="module", params=[llava, gemma3, qwen3_vl], ids=lambda make: make.__name__)
def model(request):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForImageTextToText.from_config(request.param(), dtype=torch.float32).eval()
        for name, parameter in model.named_parameters():  # images that texts depend on
            if "projector" in name or "merger" in name:
                parameter.data.normal_(std=0.3)
    return model


def inputs_of(model, seed):
    inputs = StubProcessor(model.config.model_type).apply_chat_template(asked(image(seed)))
    if model.config.model_type == "llava":
        del inputs["token_type_ids"]
    return inputs


@pytest.mark.parametrize("drafter", ["ngram", "self:int4", "none"])
def test_the_text_is_that_of_transformers(model, drafter):
    texts = []
    for seed in (1, 2):
        inputs = inputs_of(model, seed)
        expected = theirs(model, **inputs, **LENGTH)
        assert torch.equal(ours(model, drafter=drafter, **inputs, **LENGTH), expected)
        texts.append(expected.tolist())
    assert texts[0] != texts[1]


def test_the_attention_of_each_part_is_restored():
    model = AutoModelForImageTextToText.from_config(gemma3(), dtype=torch.float32).eval()
    config = model.config
    model.set_attn_implementation({"": "eager", "text_config": "sdpa", "vision_config": "eager"})
    ours(model, torch.tensor([[5, 6, 9]]), max_new_tokens=2)
    found = [each._attn_implementation for each in (config, config.text_config, config.vision_config)]
    assert found == ["eager", "sdpa", "eager"]


def test_a_text_after_an_image_has_no_image(model):
    text = {"input_ids": torch.tensor([[5, 6, 9, 8, 7]])}
    expected = theirs(model, **text, **LENGTH)
    ours(model, **inputs_of(model, 1), **LENGTH)
    assert torch.equal(ours(model, **text, **LENGTH), expected)


def test_several_rows_positions_and_padding_are_refused(model):
    inputs = inputs_of(model, 1)
    ids = inputs["input_ids"]
    for changes, words in (
        ({"num_return_sequences": 2, "do_sample": True}, "one prompt and one sample"),
        (
            {"position_ids": torch.arange(ids.shape[1])[None]},
            "no position_ids and no padding together with images",
        ),
        ({"attention_mask": torch.cat((ids[:, :1] * 0, torch.ones_like(ids[:, 1:])), 1)}, "no padding"),
    ):
        with pytest.raises(secondguess.BadInputError, match=words):
            ours(model, **inputs | changes, **LENGTH)


def test_other_inputs_and_models_are_refused(model, monkeypatch):
    inputs = inputs_of(model, 1)
    model_type = model.config.model_type
    with pytest.raises(secondguess.BadInputError, match=f"got video inputs for {model_type}"):
        take_images(model.config, inputs["input_ids"], {"mm_encoder_outputs": {"video": 1}}, None)
    monkeypatch.setattr("secondguess.drop_in.arguments.MODELS_WITH_IMAGES", frozenset({"other"}))
    with pytest.raises(
        secondguess.BadInputError, match=f"images for one of other, got image inputs for {model_type}"
    ):
        ours(model, **inputs, **LENGTH)
