"""Logits processors and stopping criteria given by the user."""

import pytest
import torch
from transformers import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

import secondguess
from drop_in_cases import BATCH, BATCH_MASK, END, LENGTH, PROMPT, ours, theirs


@pytest.mark.parametrize(
    "criterion",
    [MaxLengthCriteria(13), MaxLengthCriteria(4), EosTokenCriteria(END), EosTokenCriteria([39, END])],
    ids=["length", "shorter than the prompt", "end", "ends"],
)
def test_a_criterion_of_the_user_replaces_that_of_the_config(model, criterion):
    plain = theirs(model, PROMPT, stopping_criteria=[criterion], **LENGTH)
    assert plain.shape[1] < 22
    assert torch.equal(ours(model, PROMPT, stopping_criteria=[criterion], **LENGTH), plain)


def test_the_values_of_a_user_processor_are_read_from_it(model):
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
def test_an_unsupported_processor_or_criterion_is_refused(model, settings, named):
    with pytest.raises(secondguess.BadInputError, match=named):
        ours(model, PROMPT, **settings, **LENGTH)


def test_a_penalty_that_would_count_padding_is_refused(model):
    settings = {"attention_mask": BATCH_MASK, **LENGTH}
    with pytest.raises(secondguess.BadInputError, match="prompt_ignore_length"):
        ours(model, BATCH, logits_processor=[RepetitionPenaltyLogitsProcessor(3.0)], **settings)
    plain = theirs(model, BATCH, repetition_penalty=3.0, **settings)
    assert torch.equal(ours(model, BATCH, repetition_penalty=3.0, **settings), plain)
