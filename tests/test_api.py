"""Results of `LLM.generate` and `LLM.stream`: samples, settings per prompt, finish reasons, log-probabilities."""

from __future__ import annotations

import pytest
import torch

import secondguess
from secondguess import SamplingParams, load
from secondguess.drafters import DRAFTERS
from secondguess.drafters.none import NoDrafter
from secondguess.errors import BadInputError
from secondguess.params import MAX_SAMPLES

pytestmark = pytest.mark.transformers

PROMPT = "def quicksort(items):"
OTHER_PROMPT = "class Stack:\n"
SAMPLED = {"max_tokens": 24, "temperature": 1.0, "seed": 1}


@pytest.fixture(scope="module")
def llm(tiny_checkpoint):
    return load(tiny_checkpoint, "none", dtype="float32")


def ids_of(outputs):
    return [output.token_ids for output in outputs]


class TestSamples:
    def test_one_prompt_gives_a_list_of_different_samples(self, llm):
        outputs = llm.generate(PROMPT, n=4, **SAMPLED)
        assert [output.index for output in outputs] == [0, 1, 2, 3]
        assert len({output.text for output in outputs}) == 4

    def test_a_list_of_prompts_gives_a_list_per_prompt(self, llm):
        outputs = llm.generate([PROMPT, OTHER_PROMPT], n=2, **SAMPLED)
        assert [[output.index for output in samples] for samples in outputs] == [[0, 1], [0, 1]]
        assert ids_of(outputs[1]) == ids_of(llm.generate(OTHER_PROMPT, n=2, **SAMPLED))

    def test_one_sample_keeps_the_shapes_without_lists(self, llm):
        single = llm.generate(PROMPT, n=1, **SAMPLED)
        assert (single.index, single.token_ids) == (0, llm.generate(PROMPT, **SAMPLED).token_ids)
        (listed,) = llm.generate([PROMPT], n=1, **SAMPLED)
        assert listed.token_ids == single.token_ids

    def test_the_same_seed_gives_the_same_samples_and_another_seed_others(self, llm):
        samples = ids_of(llm.generate(PROMPT, n=3, **SAMPLED))
        assert ids_of(llm.generate(PROMPT, n=3, **SAMPLED)) == samples
        others = ids_of(llm.generate(PROMPT, n=3, **{**SAMPLED, "seed": 2}))
        assert not any(other in samples for other in others)

    def test_samples_without_a_seed_differ_between_calls(self, llm):
        unseeded = {name: value for name, value in SAMPLED.items() if name != "seed"}
        first, second = (ids_of(llm.generate(PROMPT, n=2, **unseeded)) for _ in range(2))
        assert len({tuple(ids) for ids in first + second}) == 4

    def test_a_sample_does_not_depend_on_how_many_there_are(self, llm):
        four = ids_of(llm.generate(PROMPT, n=4, **SAMPLED))
        assert ids_of(llm.generate(PROMPT, n=2, **SAMPLED)) == four[:2]
        assert llm.generate(PROMPT, **SAMPLED).token_ids == four[0]

    def test_a_sample_does_not_depend_on_the_order_of_the_batch(self, llm):
        forward = llm.generate([PROMPT, OTHER_PROMPT], n=3, **SAMPLED)
        backward = llm.generate([OTHER_PROMPT, PROMPT], n=3, **SAMPLED)
        assert [ids_of(samples) for samples in forward] == [ids_of(samples) for samples in reversed(backward)]

    @pytest.mark.parametrize("drafter", ["suffix", "model:{}", "model:{},tree=2x2"])
    def test_a_sample_does_not_depend_on_the_drafter(
        self, llm, tiny_checkpoint, tiny_draft_checkpoint, drafter
    ):
        drafting = load(
            tiny_checkpoint, drafter.format(tiny_draft_checkpoint), dtype="float32", controller="fixed:3"
        )
        # Few tokens, which repeat: `suffix` drafts from repetitions.
        settings = {**SAMPLED, "logit_bias": {5: 90.0, 6: 90.0, 7: 90.0}}
        samples = drafting.generate([PROMPT, OTHER_PROMPT], n=3, **settings)
        assert sum(output.stats.num_drafted for output in samples[0]) > 0
        plain = llm.generate([PROMPT, OTHER_PROMPT], n=3, **settings)
        assert [ids_of(each) for each in samples] == [ids_of(each) for each in plain]

    def test_all_samples_decode_as_one_batch(self, llm, monkeypatch):
        num_rows, score = [], llm.target.runtime.score
        monkeypatch.setattr(
            llm.target.runtime, "score", lambda rows, *rest: num_rows.append(len(rows)) or score(rows, *rest)
        )
        llm.generate([PROMPT, OTHER_PROMPT], n=3, **SAMPLED)
        assert num_rows[0] == 6

    def test_a_stream_refuses_several_samples(self, llm):
        with pytest.raises(BadInputError, match=r"n=1.* got 2; .*generate"):
            llm.stream(PROMPT, n=2, **SAMPLED)

    def test_greedy_samples_are_equal(self, llm):
        first, second = llm.generate(PROMPT, n=2, max_tokens=20)
        assert first.text == second.text == llm.generate(PROMPT, max_tokens=20).text

    @pytest.mark.parametrize("n", [0, -1, 1.5, True, None, "2", MAX_SAMPLES + 1])
    def test_invalid_numbers_of_samples_are_refused(self, llm, n):
        with pytest.raises(BadInputError, match="expected n to be"):
            llm.generate(PROMPT, n=n, temperature=1)


class TestSettingsPerPrompt:
    def test_each_prompt_has_its_own_settings(self, llm):
        params = [
            SamplingParams(max_tokens=3),
            SamplingParams(max_tokens=5, temperature=1.0, seed=4),
        ]
        first, second = llm.generate([PROMPT, OTHER_PROMPT], params)
        assert first.token_ids == llm.generate(PROMPT, max_tokens=3).token_ids
        assert second.token_ids == llm.generate(OTHER_PROMPT, params[1]).token_ids

    def test_named_settings_override_all_prompts(self, llm):
        params = (SamplingParams(max_tokens=3), SamplingParams(max_tokens=9))
        first, second = llm.generate([PROMPT, OTHER_PROMPT], params, logprobs=0, max_tokens=2)
        assert len(first.logprobs) == len(second.logprobs) == 2

    def test_every_prompt_gives_a_list_if_any_requests_several_samples(self, llm):
        params = [SamplingParams(max_tokens=3), SamplingParams(max_tokens=3, temperature=1.0, seed=4, n=2)]
        outputs = llm.generate([PROMPT, OTHER_PROMPT], params)
        assert [[output.index for output in samples] for samples in outputs] == [[0], [0, 1]]

    @pytest.mark.parametrize(
        ("prompts", "params", "words"),
        [
            ([PROMPT, OTHER_PROMPT], [SamplingParams()], "each of 2 prompts, got 1"),
            ([PROMPT], [SamplingParams()] * 2, "each of 1 prompts, got 2"),
            ([PROMPT], [{"max_tokens": 2}], r"params\[0\] to be SamplingParams, got dict"),
            ([PROMPT, PROMPT], [SamplingParams(), None], r"params\[1\] to be SamplingParams, got NoneType"),
            (PROMPT, [SamplingParams()], "list of settings only together with a list of prompts"),
            ([PROMPT], "greedy", "params to be SamplingParams, got str"),
        ],
    )
    def test_a_wrong_number_of_settings_is_refused(self, llm, prompts, params, words):
        with pytest.raises(BadInputError, match=words):
            llm.generate(prompts, params)

    def test_there_is_no_generate_batch(self, llm):
        with pytest.raises(AttributeError):
            llm.generate_batch  # noqa: B018


class TestReasonsToFinish:
    def test_a_full_context_is_distinguished_from_max_tokens(self, llm):
        prompt = [7] * 250
        full = llm.generate(prompt, max_tokens=100, min_tokens=100)
        assert (full.finish_reason, len(full.token_ids)) == ("context", 6)
        assert llm.generate(prompt, max_tokens=5, min_tokens=5).finish_reason == "length"
        assert llm.generate(prompt, max_tokens=6, min_tokens=6).finish_reason == "length"

    def test_ignored_end_tokens_are_sampled_as_usual_but_do_not_end_the_text(self, tiny_checkpoint):
        llm = load(tiny_checkpoint, "ngram", dtype="float32")
        settings = {**SAMPLED, "logit_bias": {0: 6}}
        ended = llm.generate(PROMPT, **settings)
        plain, drafted = (
            llm.generate(PROMPT, **settings, ignore_eos=True, draft_length=length) for length in (0, 3)
        )
        assert (ended.finish_reason, plain.finish_reason) == ("stop", "length")
        assert plain.token_ids[: len(ended.token_ids)] == ended.token_ids
        assert drafted.token_ids == plain.token_ids
        assert drafted.stats.num_accepted > 0

    def test_ignored_end_tokens_still_end_a_text_whose_grammar_allows_nothing_else(self, llm):
        (token,) = llm.target.tokenizer("a").input_ids
        banned = {token: -float("inf")}
        output = llm.generate(PROMPT, grammar={"regex": "a"}, logit_bias=banned, ignore_eos=True)
        assert output.finish_reason == "grammar"


class TestLogprobs:
    def test_tokens_and_alternatives_have_their_text(self, llm):
        output = llm.generate("naïve ", max_tokens=6, logprobs=3)
        tokenizer = llm.target.tokenizer
        assert [each.text for each in output.logprobs] == [tokenizer.decode([i]) for i in output.token_ids]
        for each in output.logprobs:
            assert each.alternative_texts == {token: tokenizer.decode([token]) for token in each.alternatives}
            assert len(each.alternative_texts) == 3

    def test_a_special_token_has_its_text(self, llm):
        output = llm.generate("x", max_tokens=1, logprobs=1, logit_bias={0: 100.0})
        assert (output.text, output.token_ids, output.logprobs[0].text) == ("", [0], "<|end|>")

    def test_a_token_inside_a_character_is_shown_as_a_replacement(self, llm):
        first, _second = llm.target.tokenizer("—").input_ids[:2]
        output = llm.generate("x", max_tokens=1, logprobs=0, logit_bias={first: 100.0})
        assert output.token_ids == [first]
        assert output.logprobs[0].text == "\ufffd"


def test_dir_lists_the_public_names():
    assert set(secondguess.__all__) <= set(dir(secondguess))
    assert "__version__" in dir(secondguess)


def num_rounds(outputs):
    return sum(output.stats.num_rounds for output in outputs)


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.8, "seed": 3}])
def test_shared_outputs_change_the_speed_and_never_the_text(settings):
    alone, shared = (
        load(drafter="suffix,min=2,offset=0", controller="fixed:6", share_history=each)
        for each in (False, True)
    )
    prompts = ["def volume(width, height):\n", "def area(width, height):\n"]
    expected = alone.generate(prompts, max_tokens=50, **settings)
    for most in (num_rounds(expected), 0.7 * num_rounds(expected)):
        outputs = shared.generate(prompts, max_tokens=50, **settings)
        assert ids_of(outputs) == ids_of(expected)
        assert num_rounds(outputs) <= most
    declined = shared.generate(prompts, max_tokens=50, history=False, **settings)
    assert num_rounds(declined) == num_rounds(expected)


def test_a_seeded_text_that_depends_on_drafts_does_not_depend_on_earlier_requests():
    llm = load(drafter="suffix", verifier="block", controller="fixed:6", share_history=True)
    settings = {"max_tokens": 50, "temperature": 0.8, "seed": 3}
    assert len({llm.generate("def volume(width, height):\n", **settings).text for _ in range(3)}) == 1
    assert llm.drafter.histories.num_tokens == 0
    llm.generate("def volume(width, height):\n", max_tokens=50, temperature=0.8)
    assert llm.drafter.histories.num_tokens > 0


@pytest.mark.parametrize("drafter", ["ngram", "model:builtin-draft", "none"])
def test_sharing_outputs_needs_a_drafter_that_reads_them(drafter):
    with pytest.raises(BadInputError, match="expected the drafter suffix, alone or joined by"):
        load(drafter=drafter, share_history=True)
    with pytest.raises(BadInputError, match="expected share_history to be True or False, got 1"):
        load(share_history=1)
    with pytest.raises(BadInputError, match="expected history to be True or False, got 'no'"):
        SamplingParams(history="no")


def test_devices_of_torch_are_accepted():
    assert load(drafter="none", device=torch.device("cpu")).target.runtime.device == torch.device("cpu")


class DrafterByInstance(NoDrafter):
    """Decides only when it is made whether its drafts have probabilities."""

    def __init__(self):
        self.deterministic = True

    @classmethod
    def build(cls, name, resources):
        return cls()


def test_a_registered_drafter_may_say_when_it_is_made_that_it_is_deterministic(monkeypatch):
    monkeypatch.delattr(NoDrafter, "deterministic")
    monkeypatch.setitem(DRAFTERS, "mine", "test_api:DrafterByInstance")
    assert load(drafter="mine").generate("x", max_tokens=2).token_ids
    with pytest.raises(BadInputError, match="never drafts"):
        load(drafter="mine", controller="cost")
