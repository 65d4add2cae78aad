"""Every parameter of `generate` and every field of `GenerationConfig`: as Transformers does, or refused by name."""

import functools
import inspect
import warnings
from types import SimpleNamespace

import pytest
import torch
from transformers import (
    AutoModelForImageTextToText,
    CompileConfig,
    DynamicCache,
    GenerationConfig,
    GenerationMixin,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    MaxLengthCriteria,
    RepetitionPenaltyLogitsProcessor,
    WatermarkingConfig,
)

import secondguess
from drop_in_cases import END, LENGTH, PROMPT, SAME_DISTRIBUTION, ours, theirs, tiny_model
from secondguess.drop_in import arguments
from secondguess.runtime.modules.support import cache_parameter
from test_images import gemma3, qwen3_vl

pytestmark = pytest.mark.transformers

ENDING = {"eos_token_id": END, **LENGTH}

SAME_GREEDY_TEXT = {
    "eos_token_id": ENDING,
    "max_length": {"max_length": 15},
    "max_new_tokens": {"max_new_tokens": 3},
    "min_length": {"min_length": 18, **ENDING},
    "min_new_tokens": {"min_new_tokens": 8, **ENDING},
    "repetition_penalty": {"repetition_penalty": 1.7, **LENGTH},
}
"""Fields that change greedy text."""

TESTED_APART = {"bos_token_id", "pad_token_id", "return_dict_in_generate", "stop_strings"}
"""Fields with a test of their own in the other files."""

NO_EFFECT = {
    "decoder_start_token_id": 5,
    "disable_compile": True,
    "early_stopping": True,
    "length_penalty": 2.0,
    "transformers_version": "0.0",
}

REFUSED = {
    "assistant_confidence_threshold": 0.7,
    "assistant_early_exit": 1,
    "assistant_ensemble_weight": 0.5,
    "assistant_lookbehind": 3,
    "bad_words_ids": [[5]],
    "begin_suppress_tokens": [5],
    "cache_config": {"backend": "quanto"},
    "cache_implementation": "static",
    "compile_config": CompileConfig(),
    "constraints": [5],
    "continuous_batching_config": {"num_blocks": 4},
    "diversity_penalty": 0.5,
    "dola_layers": "low",
    "encoder_no_repeat_ngram_size": 2,
    "encoder_repetition_penalty": 1.5,
    "epsilon_cutoff": 0.1,
    "eta_cutoff": 0.1,
    "exponential_decay_length_penalty": (2, 1.5),
    "force_words_ids": [[5]],
    "forced_bos_token_id": 5,
    "forced_eos_token_id": 5,
    "guidance_scale": 1.5,
    "is_assistant": True,
    "low_memory": True,
    "max_cache_len": 64,
    "max_matching_ngram_size": 3,
    "max_time": 3.0,
    "no_repeat_ngram_size": 2,
    "num_assistant_tokens": 7,
    "num_assistant_tokens_schedule": "heuristic",
    "num_beam_groups": 2,
    "num_beams": 2,
    "output_attentions": True,
    "output_hidden_states": True,
    "output_logits": True,
    "output_scores": True,
    "penalty_alpha": 0.5,
    "prefill_chunk_size": 4,
    "prompt_lookup_num_tokens": 3,
    "remove_invalid_values": True,
    "renormalize_logits": True,
    "sequence_bias": {(5,): 1.0},
    "speculation_type": "dflash",
    "suppress_tokens": [5],
    "target_lookbehind": 3,
    "token_healing": True,
    "top_h": 0.5,
    "typical_p": 0.5,
    "use_cache": False,
    "use_mtp": True,
    "watermarking_config": WatermarkingConfig(),
}
"""Fields that are refused, some of them by Transformers before it calls us."""


def test_every_field_of_the_generation_config_is_in_the_matrix():
    fields = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    classes = [SAME_GREEDY_TEXT, SAME_DISTRIBUTION, TESTED_APART, NO_EFFECT, REFUSED]
    assert sorted(fields) == sorted(name for names in classes for name in names)


@pytest.mark.parametrize("name", SAME_GREEDY_TEXT)
def test_a_setting_gives_the_greedy_text_of_transformers(model, name):
    settings = SAME_GREEDY_TEXT[name]
    plain = theirs(model, PROMPT, do_sample=False, **settings)
    without = {key: value for key, value in settings.items() if key != name}
    assert not torch.equal(plain, theirs(model, PROMPT, do_sample=False, **(LENGTH | without)))
    assert torch.equal(ours(model, PROMPT, do_sample=False, **settings), plain)


@pytest.mark.parametrize("name", NO_EFFECT)
def test_a_setting_that_transformers_ignores_has_no_effect(model, name):
    settings = {name: NO_EFFECT[name], **LENGTH}
    assert torch.equal(ours(model, PROMPT, **settings), theirs(model, PROMPT, **LENGTH))
    assert torch.equal(theirs(model, PROMPT, **settings), theirs(model, PROMPT, **LENGTH))


@pytest.mark.parametrize("name", REFUSED)
def test_an_unsupported_setting_is_refused_by_name(model, name):
    settings = {name: REFUSED[name], "do_sample": name in arguments.SAMPLING_ONLY, **LENGTH}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # token_healing needs a tokenizer, which Transformers does not find for a custom_generate
        error = ValueError if name == "token_healing" else secondguess.BadInputError
        with pytest.raises(error, match="tokenizer" if name == "token_healing" else f"expected {name} "):
            ours(model, PROMPT, **settings)


@pytest.mark.parametrize("name", sorted(arguments.SAMPLING_ONLY))
def test_sampling_settings_in_the_config_of_a_greedy_call_are_accepted(model, name):
    settings = {name: REFUSED[name], **LENGTH}
    assert torch.equal(ours(model, PROMPT, **settings), theirs(model, PROMPT, **settings))


@pytest.mark.parametrize(
    "settings",
    [
        {"cache_implementation": "dynamic"},
        {"guidance_scale": 1.0},
        {"penalty_alpha": 0.0},
        {"output_scores": False},
        {"dola_layers": []},
    ],
    ids=str,
)
def test_a_disabled_setting_is_accepted(model, settings):
    assert torch.equal(ours(model, PROMPT, **settings, **LENGTH), theirs(model, PROMPT, **LENGTH))


def test_a_field_of_a_later_transformers_is_refused(monkeypatch):
    class Later(GenerationConfig):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.curiosity = kwargs.get("curiosity")

    monkeypatch.setattr(arguments, "GenerationConfig", Later)
    arguments.check_generation_config(Later())
    with pytest.raises(secondguess.BadInputError, match=r"curiosity.*0\.5"):
        arguments.check_generation_config(Later(curiosity=0.5))


def any_token(batch, ids):
    return [3, 4]


PARAMETERS_REFUSED = {
    "prefix_allowed_tokens_fn": any_token,
    "synced_gpus": True,
    "assistant_model": "the model itself",
    "negative_prompt_ids": PROMPT,
    "negative_prompt_attention_mask": PROMPT,
}
PARAMETERS_CARRIED_OUT = {
    "inputs": {"inputs": PROMPT},
    "generation_config": {"generation_config": GenerationConfig(max_new_tokens=3)},
    "logits_processor": {"logits_processor": [RepetitionPenaltyLogitsProcessor(3.0)]},
    "stopping_criteria": {"stopping_criteria": [MaxLengthCriteria(13)]},
}
PARAMETERS_TESTED_APART = {"self", "custom_generate", "streamer", "kwargs"}


def test_every_parameter_of_generate_is_in_the_matrix():
    parameters = inspect.signature(GenerationMixin.generate).parameters
    classes = [PARAMETERS_REFUSED, PARAMETERS_CARRIED_OUT, PARAMETERS_TESTED_APART]
    assert sorted(parameters) == sorted(name for names in classes for name in names)


@pytest.mark.parametrize("name", PARAMETERS_REFUSED)
def test_an_unsupported_parameter_is_refused_by_name(model, name):
    value = model if name == "assistant_model" else PARAMETERS_REFUSED[name]
    with pytest.raises(secondguess.BadInputError, match=f"expected {name} "):
        ours(model, PROMPT, **{name: value}, **LENGTH)


@pytest.mark.parametrize("name", PARAMETERS_CARRIED_OUT)
def test_a_parameter_has_the_effect_that_it_has_in_transformers(model, name):
    settings = {"inputs": PROMPT} | PARAMETERS_CARRIED_OUT[name]
    length = {} if name == "generation_config" else LENGTH
    plain = theirs(model, **settings, **length)
    assert torch.equal(ours(model, **settings, **length), plain)
    assert name == "inputs" or not torch.equal(plain, theirs(model, PROMPT, **LENGTH))


INPUTS_REFUSED = {
    cache_parameter(LlamaForCausalLM): lambda model: DynamicCache(config=model.config),
    "inputs_embeds": lambda model: model.get_input_embeddings()(PROMPT).detach(),
    "position_ids": lambda model: PROMPT * 0,
    "use_cache": lambda model: False,
    "assistant_tokenizer": lambda model: object(),
    "output_attentions": lambda model: True,
    "labels": lambda model: PROMPT,
}
INPUTS_WITHOUT_EFFECT = {
    "attention_mask": torch.ones_like(PROMPT),
    "position_ids": torch.arange(10)[None],
    "logits_to_keep": 3,
    "tokenizer": object(),
    "trust_remote_code": True,
    "output_attentions": False,
    "use_cache": True,
}


@pytest.mark.parametrize("name", INPUTS_REFUSED)
def test_an_input_that_would_change_the_text_or_the_result_is_refused_by_name(model, name):
    prompt = () if name == "inputs_embeds" else (PROMPT,)  # embeddings replace the tokens
    with pytest.raises(secondguess.BadInputError, match=f"expected {name} "):
        ours(model, *prompt, **{name: INPUTS_REFUSED[name](model)}, **LENGTH)


def test_arguments_are_found_under_further_decorators(model, monkeypatch):
    """As those that rename arguments, since Transformers 5.24."""
    generate = GenerationMixin.generate

    @functools.wraps(generate)
    def decorated(*args, **kwargs):
        return generate(*args, **kwargs)

    monkeypatch.setattr(GenerationMixin, "generate", decorated)
    with pytest.raises(secondguess.BadInputError, match="expected assistant_tokenizer "):
        ours(model, PROMPT, assistant_tokenizer=object(), **LENGTH)


@pytest.mark.parametrize("axes", [(0, 0, 0), (0, 0, 1)])
def test_positions_on_several_axes_are_accepted_if_they_are_those_of_a_text(model, axes):
    """As a vision-language model makes them."""
    positions = torch.arange(10).expand(3, 1, 10) + torch.tensor(axes)[:, None, None]
    if any(axes):
        with pytest.raises(secondguess.BadInputError, match="expected position_ids that count"):
            ours(model, PROMPT, position_ids=positions, **LENGTH)
    else:
        assert torch.equal(
            ours(model, PROMPT, position_ids=positions, **LENGTH), theirs(model, PROMPT, **LENGTH)
        )


@pytest.mark.parametrize(("config", "name"), [(gemma3, "token_type_ids"), (qwen3_vl, "mm_token_type_ids")])
def test_marks_of_text_are_accepted_and_those_of_images_refused(config, name):
    """Processors of vision-language models return them for every prompt."""
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config(), dtype=torch.float32).eval()
    text = torch.zeros_like(PROMPT)
    expected = theirs(model, PROMPT, **{name: text}, **LENGTH)
    assert torch.equal(ours(model, PROMPT, **{name: text}, **LENGTH), expected)
    with pytest.raises(secondguess.BadInputError, match=f"expected {name} "):
        ours(model, PROMPT, **{name: text + 1}, **LENGTH)


def test_token_types_that_are_embedded_are_refused_whatever_their_value():
    model = GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=64)).eval()
    with pytest.raises(secondguess.BadInputError, match="expected token_type_ids "):
        ours(model, PROMPT, token_type_ids=torch.zeros_like(PROMPT), **LENGTH)


@pytest.mark.parametrize("name", INPUTS_WITHOUT_EFFECT)
def test_an_input_that_changes_nothing_is_accepted(model, name):
    settings = {name: INPUTS_WITHOUT_EFFECT[name]}
    assert torch.equal(ours(model, PROMPT, **settings, **LENGTH), theirs(model, PROMPT, **settings, **LENGTH))


def test_an_unknown_argument_is_refused_by_transformers(model):
    with pytest.raises(ValueError, match="use_model_defaults"):
        ours(model, PROMPT, use_model_defaults=True, **LENGTH)


class Adapted:
    """A model as PEFT wraps it for prompt tuning, prefix tuning or p-tuning, or for LoRA."""

    def __init__(self, model, is_prompt_learning):
        self.active_peft_config = SimpleNamespace(is_prompt_learning=is_prompt_learning)
        self._prepare = model.prepare_inputs_for_generation
        model.prepare_inputs_for_generation = self.prepare_inputs_for_generation

    def prepare_inputs_for_generation(self, *args, **kwargs):
        return self._prepare(*args, **kwargs)


def test_learned_prompts_are_refused_and_other_adapters_are_not():
    model = tiny_model()
    Adapted(model, is_prompt_learning=False)
    assert torch.equal(ours(model, PROMPT, **LENGTH), theirs(model, PROMPT, **LENGTH))
    Adapted(model, is_prompt_learning=True)
    with pytest.raises(secondguess.BadInputError, match="prompt tuning"):
        ours(model, PROMPT, **LENGTH)
