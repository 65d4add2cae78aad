"""Sampled text: the distribution of Transformers, and seeds."""

import pytest
import torch
from scipy.stats import chisquare
from transformers import AutoModelForCausalLM

from drop_in_cases import LENGTH, PROMPT, SAME_DISTRIBUTION, ours, theirs, tiny_model

FEW_TOKENS = {"vocab_size": 8, "eos_token_id": None}
SHORT = torch.tensor([[3, 4, 5]])


@pytest.fixture(scope="module")
def model_of_few_tokens():
    return tiny_model(**FEW_TOKENS)


def first_tokens(generate, model, num_samples=400, **settings):
    torch.manual_seed(1)
    return generate(
        model, SHORT, max_new_tokens=1, do_sample=True, num_return_sequences=num_samples, **settings
    )


def distribution_of_first_token(model, **settings):
    """Return the distribution of Transformers' first token."""
    report = {"return_dict_in_generate": True, "output_scores": True}
    return first_tokens(theirs, model, num_samples=1, **settings, **report).scores[0][0].double().softmax(-1)


def agrees(tokens, probs):
    """p-value that the tokens were drawn from these probabilities; 0 if one has probability 0."""
    counts = torch.bincount(tokens[:, -1], minlength=len(probs)).double()
    if counts[probs == 0].any():
        return 0.0
    kept = probs > 0
    return 1.0 if kept.sum() == 1 else chisquare(counts[kept], (probs * len(tokens))[kept]).pvalue


@pytest.mark.parametrize("name", SAME_DISTRIBUTION)
def test_a_setting_of_sampling_gives_the_distribution_of_transformers(model_of_few_tokens, name):
    settings = SAME_DISTRIBUTION[name]
    tokens = first_tokens(ours, model_of_few_tokens, **settings)
    assert agrees(tokens, distribution_of_first_token(model_of_few_tokens, **settings)) > 1e-3
    if settings != {"top_k": 0}:
        assert agrees(tokens, distribution_of_first_token(model_of_few_tokens, top_k=0)) < 1e-6


def test_two_tokens_have_the_joint_distribution_of_transformers(model_of_few_tokens):
    settings = {
        "temperature": 1.3,
        "top_k": 5,
        "top_p": 0.9,
        "repetition_penalty": 1.4,
        "max_new_tokens": 2,
        "do_sample": True,
    }
    torch.manual_seed(2)
    report = {"return_dict_in_generate": True, "output_scores": True, "num_return_sequences": 60}
    known = theirs(model_of_few_tokens, SHORT, **settings, **report)
    first = known.scores[0][0].double().softmax(-1)
    second = torch.zeros(8, 8, dtype=torch.double)
    second[known.sequences[:, 3]] = known.scores[1].double().softmax(-1)
    joint = (first[:, None] * second).flatten()
    assert joint.sum() == pytest.approx(1), "Transformers has drawn every possible first token"
    drawn = ours(model_of_few_tokens, SHORT, num_return_sequences=800, **settings)
    pairs = (drawn[:, -2] * 8 + drawn[:, -1])[:, None]
    assert agrees(pairs, joint) > 1e-3
    assert len(joint.nonzero()) > 10


def sample(model, *, manual_seed=None, prompt=PROMPT, **settings):
    if manual_seed is not None:
        torch.manual_seed(manual_seed)
    return ours(model, prompt, do_sample=True, temperature=1.5, top_k=0, **settings, **LENGTH)


def test_torch_manual_seed_determines_sampled_text(model):
    first = sample(model, manual_seed=1)
    second = sample(model)
    assert torch.equal(sample(model, manual_seed=1), first)
    assert torch.equal(sample(model), second)
    assert not torch.equal(first, second)
    assert not torch.equal(sample(model, manual_seed=2), first)


def test_text_of_a_manual_seed_does_not_depend_on_the_draft_length(tiny_checkpoint, tiny_draft_checkpoint):
    text_model = AutoModelForCausalLM.from_pretrained(tiny_checkpoint, dtype=torch.float32).eval()
    texts = [
        sample(
            text_model, manual_seed=1, drafter=f"model:{tiny_draft_checkpoint}", controller=f"fixed:{length}"
        )
        for length in (1, 4)
    ]
    assert torch.equal(*texts)


def test_greedy_text_does_not_use_the_generator(model):
    torch.manual_seed(1)
    state = torch.get_rng_state()
    ours(model, PROMPT, **LENGTH)
    assert torch.equal(torch.get_rng_state(), state)


def test_rows_of_a_batch_are_drawn_independently(model):
    texts = sample(model, manual_seed=1, prompt=PROMPT.expand(3, -1), num_return_sequences=2)
    assert len({tuple(text) for text in texts.tolist()}) == 6


def test_samples_are_ordered_as_in_transformers_and_equal_those_of_the_prompt_alone(model):
    prompts = torch.cat([PROMPT, PROMPT + 3])
    texts = sample(model, prompt=prompts, num_return_sequences=2, seed=5)
    for index in range(2):
        alone = sample(model, prompt=prompts[index : index + 1], num_return_sequences=2, seed=5)
        assert torch.equal(texts[2 * index : 2 * index + 2], alone)
        assert not torch.equal(*alone)
        assert torch.equal(alone[:1], sample(model, prompt=prompts[index : index + 1], seed=5))
