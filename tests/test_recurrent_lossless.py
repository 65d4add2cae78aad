"""Targets with recurrent states: enumerated distributions, and text equal to plain decoding.

With states that are recorded after each token, and with accepted tokens that run again.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch
import transformers

from distribution_cases import PAIRS, SAMPLED, dist_error, make_pair_drafter
from families import COPIED, RECURRENT, needs_kernels
from head_cases import HEADS, NEEDS_FUSED, NEEDS_GEMMA, NEEDS_NATIVE
from secondguess.controllers import make_controller
from secondguess.core import Row
from secondguess.decode import Components, decode
from secondguess.drafters.self import SelfDrafter
from secondguess.drafters.spec import make_drafter
from secondguess.errors import UnsupportedModelError
from secondguess.proof.enumeration import enumerate_rounds
from secondguess.runtime.cached import ForwardCopy
from secondguess.runtime.modules.transformers import TransformersRuntime
from secondguess.sampling import SamplingParams
from secondguess.verifiers import make_verifier

pytestmark = pytest.mark.transformers

PROMPT = (1, 0, 1)
PROMPTS = [[3, 5, 7, 5, 7, 5, 7, 5], [1], [9, 9, 9, 9, 2, 9, 9], [4, 8, 15]]
VOCAB_SIZE = 24
NUM_TOKENS = 8


@cache
def tiny_pair(family, vocab_size):
    """Return a target in float64 and a similar draft model; some layers compute in float32 all the same."""
    if family == "mamba":
        config = transformers.MambaConfig(hidden_size=16, state_size=4, num_hidden_layers=2, time_step_rank=2)
    else:
        config = (RECURRENT | COPIED)[family]()
    config.vocab_size, config.initializer_range = vocab_size, 0.3
    config.eos_token_id = config.pad_token_id = None
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(3)
        target, drafter = (
            transformers.AutoModelForCausalLM.from_config(config, experts_implementation="eager")
            .double()
            .eval()
            for _ in range(2)
        )
        drafter.load_state_dict(target.state_dict())
        for weights in drafter.parameters():
            weights.add_(0.05 * torch.randn_like(weights))
    return target, drafter


@cache
def wrap(model, records_states):
    """Return a runtime that all tests of a model share, with the slots of earlier rows."""
    runtime = TransformersRuntime(model)
    runtime.forward.records_states = records_states
    return runtime


@pytest.mark.parametrize(
    ("family", "records", "name"),
    [
        *((family, True, "model") for family in RECURRENT),
        ("falcon-h1", False, "model"),
        *(pytest.param(family, True, "self:int4", marks=needs_kernels) for family in COPIED),
    ],
)
def test_the_output_distribution_equals_the_modules(family, records, name):
    target, _ = tiny_pair(family, 2)

    @cache
    def next_dist(output):
        with torch.inference_mode():
            logits = target(torch.tensor([[*PROMPT, *output]]), use_cache=False).logits
        return logits[0, -1].double().softmax(-1)

    runtime = wrap(target, records)
    drafter = make_pair_drafter("sampled", PAIRS["binary"]) if name == "model" else SelfDrafter(runtime, name)
    components = Components(runtime, drafter, make_verifier("block"), make_controller("fixed:1"))
    (branches,) = enumerate_rounds(components, lambda: [Row(list(PROMPT), SAMPLED)], num_rounds=2)
    assert {branch.num_accepted for branch in branches} == {0, 1, 2}
    assert dist_error(branches, next_dist, num_tokens=4) < 1e-5


SETTINGS = {
    "greedy": SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0),
    "seeded": SamplingParams(max_tokens=NUM_TOKENS, temperature=1.0, seed=7),
}


def generate(family, drafter, controller, setting, records=True, num_rows=4):
    target, draft_model = tiny_pair(family, VOCAB_SIZE)
    runtime = wrap(target, records)
    if drafter in HEADS:
        proposer = HEADS[drafter](runtime, None)
    elif drafter == "self:int4":
        proposer = SelfDrafter(runtime, drafter)
    else:
        proposer = make_drafter(
            drafter, target_vocab_size=VOCAB_SIZE, load_draft_model=lambda _: wrap(draft_model, records)
        )
    runtime.request_hidden_states(proposer.hidden_layers)
    verifier, params = make_verifier("auto"), SETTINGS[setting]
    rows = [
        Row(list(prompt), params, seed=7, coupled=verifier.uses_coupling(params.seed is not None))
        for prompt in PROMPTS[:num_rows]
    ]
    components = Components(runtime, proposer, verifier, make_controller(controller))
    for _ in decode(components, rows):
        pass
    return [row.output for row in rows], sum(components.recorder.of(row).num_drafted for row in rows)


@cache
def plain_texts(family, setting):
    return generate(family, "none", "fixed:0", setting)[0]


DRAFTERS = (
    "ngram",
    "suffix,min=1",
    "jacobi,width=2",
    "model:draft",
    "model:draft,tree=2x1",
    "suffix,min=1+model:draft",
    *(kind for kind in HEADS if kind not in (*NEEDS_FUSED, *NEEDS_NATIVE, *NEEDS_GEMMA)),
)
"""All drafters but those for some targets: layer by layer, with `self:int4`'s copy, or with keys that are shared."""


@pytest.mark.parametrize(
    ("family", "drafter"),
    [
        *((family, drafter) for family in (*RECURRENT, "mamba") for drafter in DRAFTERS),
        *(pytest.param(family, "self:int4", marks=needs_kernels) for family in COPIED),
    ],
)
def test_text_equals_plain_decoding(family, drafter):
    """A batch, and one row with `cost`, which runs rounds without drafts between others.

    Drafts of text are the same with both kinds of states, which alternate.
    """
    families, drafters = [*RECURRENT, "mamba", "qwen3.5"], [*DRAFTERS, "self:int4"]
    records = (families.index(family) + drafters.index(drafter)) % 2 == 0
    found, num_drafted = generate(family, drafter, "fixed:4", "seeded", records)
    assert found == plain_texts(family, "seeded")
    assert num_drafted > 0
    found, _ = generate(family, drafter, "cost", "greedy", records, num_rows=1)
    assert found == plain_texts(family, "greedy")[:1]


@needs_kernels
def test_a_copy_that_verifies_its_own_drafts_would_change_the_text(monkeypatch):
    """The mistake that the tests above have to find."""
    draft_logits = ForwardCopy.draft_logits

    def stay_with_copy(copy, rows, draft, num_known):
        logits = draft_logits(copy, rows, draft, num_known)
        copy.target.forward = copy.forward
        return logits

    wrap.cache_clear()
    monkeypatch.setattr(ForwardCopy, "draft_logits", stay_with_copy)
    found, _ = generate("lfm2", "self:int4", "fixed:4", "seeded")
    wrap.cache_clear()
    assert found != plain_texts("lfm2", "seeded")


@needs_kernels
def test_a_module_that_reads_the_weight_of_a_layer_is_not_copied():
    with pytest.raises(UnsupportedModelError, match=r"int4.*Transformers module.*suffix"):
        generate("mamba", "self:int4", "fixed:4", "seeded")


@pytest.mark.parametrize("family", [*RECURRENT, "mamba"])
def test_greedy_text_equals_that_of_transformers(family):
    model, _ = tiny_pair(family, VOCAB_SIZE)
    for prompt, text in zip(PROMPTS, plain_texts(family, "greedy"), strict=True):
        found = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=NUM_TOKENS)
        assert found[0, len(prompt) :].tolist() == text
