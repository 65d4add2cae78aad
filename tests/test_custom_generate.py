"""The drop-in for `model.generate(custom_generate=...)`."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, NoRepeatNGramLogitsProcessor

import secondguess


@pytest.fixture
def model():
    config = LlamaConfig(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.3,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
    )
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return LlamaForCausalLM(config).eval()


PROMPT = torch.tensor([[5, 6, 7, 8, 5, 6, 7, 8, 5, 6]])


@pytest.mark.parametrize("drafter", ["none", "ngram", "suffix"])
def test_greedy_output_equals_generate(model, drafter):
    plain = model.generate(PROMPT, max_new_tokens=30, do_sample=False)
    ours = model.generate(
        PROMPT,
        max_new_tokens=30,
        do_sample=False,
        custom_generate=secondguess.custom_generate,
        drafter=drafter,
    )
    assert torch.equal(ours, plain)


def test_left_padded_rows_equal_generate_and_pad_on_the_right(model):
    batch = torch.tensor([[2, 2, 5, 6, 5, 6], [9, 8, 7, 9, 8, 7]])
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    settings = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False, "repetition_penalty": 1.2}
    plain = model.generate(batch, **settings)
    ours = model.generate(batch, custom_generate=secondguess.custom_generate, drafter="ngram", **settings)
    assert torch.equal(ours, plain)


def test_a_seed_gives_the_same_sample_with_any_drafter(model):
    def sample(drafter):
        return model.generate(
            PROMPT,
            max_new_tokens=30,
            do_sample=True,
            temperature=1.2,
            top_k=10,
            custom_generate=secondguess.custom_generate,
            drafter=drafter,
            seed=5,
        )

    assert torch.equal(sample("none"), sample("suffix"))


def test_the_users_model_keeps_its_attention(model):
    before = model.config._attn_implementation
    model.generate(PROMPT, max_new_tokens=3, custom_generate=secondguess.custom_generate, drafter="none")
    assert model.config._attn_implementation == before


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"no_repeat_ngram_size": 2}, "no_repeat_ngram_size"),
        ({"num_beams": 2}, "num_beams"),
        ({"logits_processor": [NoRepeatNGramLogitsProcessor(2)]}, "NoRepeatNGramLogitsProcessor"),
        ({"max_time": 3.0}, "max_time"),
    ],
)
def test_what_cannot_be_carried_out_is_refused_by_name(model, settings, named):
    with pytest.raises(secondguess.BadInputError, match=named):
        model.generate(
            PROMPT, max_new_tokens=3, custom_generate=secondguess.custom_generate, drafter="none", **settings
        )


class Collector:
    def __init__(self):
        self.tokens = []
        self.ended = False

    def put(self, value):
        self.tokens += value.flatten().tolist()

    def end(self):
        self.ended = True


def test_a_streamer_receives_prompt_and_every_token(model):
    collector = Collector()
    out = model.generate(
        PROMPT,
        max_new_tokens=12,
        do_sample=False,
        streamer=collector,
        custom_generate=secondguess.custom_generate,
        drafter="ngram",
    )
    assert collector.tokens == out[0].tolist()
    assert collector.ended
