"""Equality matrix: every drafter x verifier x controller x batch size generates the text of plain decoding.

Tiny random Transformers checkpoints in float64, where rounding cannot flip a decision, and in bfloat16 on a CPU, in
torch and in the kernels, where a token's bits do not depend on the tokens scored with it. The distribution of sampled
text is enumerated in test_distributions.py.
"""

import itertools
from dataclasses import dataclass
from functools import cache, partial

import pytest
import torch
from transformers import LlamaForCausalLM

from checkpoints import random_llama
from grammar_cases import tiny_matcher, with_regex
from secondguess.controllers import make_controller
from secondguess.core import Row
from secondguess.decode import Components, decode
from secondguess.drafters.row_sources import ForcedTokens, Prediction
from secondguess.drafters.spec import make_drafter
from secondguess.runtime.cached import CachedRuntime
from secondguess.runtime.cpu.decoder import NativeDecoder
from secondguess.runtime.cpu.library import units
from secondguess.runtime.cpu.runtime import NativeRuntime
from secondguess.runtime.decoder.fused import FusedRuntime, fuse
from secondguess.runtime.decoder.products import can_pack
from secondguess.runtime.modules.row_by_row import RowByRowForward
from secondguess.runtime.modules.transformers import TransformersRuntime
from secondguess.runtime.weight_format import BFLOAT16, INT4, INT8
from secondguess.sampling import SamplingParams
from secondguess.verifiers import make_verifier

VOCAB_SIZE = 31
DRAFTERS = ("none", "model:draft", "model:itself", "ngram", "suffix", "suffix,min=3+model:draft")
PICTURE_DRAFTERS = ("grid,width=2", "jacobi,width=2")
"""Drafters of pictures, with one draft length: to a runtime and a controller they are look-ups."""
SHARED = "shared "
"""Prefix of drafters whose rows draft from the outputs of the same requests, which are decoded before them."""
SHARED_DRAFTERS = (f"{SHARED}suffix,min=1", f"{SHARED}suffix,min=1+model:draft")
DRAFTERS += SHARED_DRAFTERS
TREE_DRAFTERS = (
    "model:draft,tree=2x2x1",
    "model:draft,tree=dynamic,nodes=6",
    "suffix,min=3+model:draft,tree=2x1x1",
)
CONTROLLERS = (
    "fixed:1",
    "fixed:4",
    "confidence:6,threshold=0.2",
    "entropy:6",
    "cost",
    "learned,length=6,threshold=0.8",
)
TREE_CONTROLLERS = ("fixed:3", "cost")
SELF_DRAFTERS = ("self:int4", "self:int4,tree=2x2x1", "suffix,min=3+self:int4")
"""Drafters that copy their target, on the kernels alone."""
LOOKUP_CONTROLLERS = ("fixed:1", "fixed:4", "cost")
"""Controllers that differ for a drafter without distributions."""
VERIFIERS = ("greedy", "rejection", "block", "traversal", "coupled")
TREE_VERIFIERS = ("greedy", "traversal", "coupled")
PROMPTS = [[3, 5, 7, 5, 7, 5, 7, 5], [1], [9, 9, 9, 9, 2, 9, 9], [4, 8, 15, 16, 23], [2, 3]]
REGEX = "([a-h]{2}key(x|yz)[i-z]*)+"
"""A grammar over letters with a choice, forced tokens (`key`) and an open end."""
NUM_TOKENS = 16
EVERY_CONTROLLER = ["module", "native"]
"""Kinds of runtimes with the whole matrix: float64 without our code in the forward pass, and bfloat16."""
EVERY_SETTING = ["fused", "native"]
"""Kinds of runtimes for all verifiers and settings, which read logits alone: the fastest in float64 and in bfloat16."""
NUM_ALONE = 2
"""Number of prompts that are also decoded alone: one with repetitions for lookups, and one of a single token."""


def controllers_for(drafter: str) -> tuple[str, ...]:
    """Return the controllers whose decisions can change the drafts of this drafter."""
    if drafter in TREE_DRAFTERS:
        return TREE_CONTROLLERS
    lookups = ("ngram", "suffix", SHARED_DRAFTERS[0])
    few = dict.fromkeys(lookups, LOOKUP_CONTROLLERS) | dict.fromkeys(PICTURE_DRAFTERS, ("fixed:4",))
    return {"none": CONTROLLERS[:1], **few}.get(drafter, CONTROLLERS)


def chain_and_ragged(drafter: str) -> list[str]:
    """Return the controllers that draft one length for all rows, or different ones.

    This is what runtimes, verifiers and sampling settings can distinguish.
    """
    found = [
        name
        for name in controllers_for(drafter)
        if name in ("fixed:4", "confidence:6,threshold=0.2")
        or (drafter in TREE_DRAFTERS and name == "fixed:3")
    ]
    return found or [*controllers_for(drafter)]


def tiny_llama(seed: int) -> LlamaForCausalLM:
    return random_llama(seed, hidden_size=64).double()


@pytest.fixture(
    scope="module",
    params=["module", "row by row", "fused", "fused in bfloat16", "native", "native in 4 bits"],
)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def models(kind):
    """Functions that return a new runtime of this kind, by the name of the model."""
    target = tiny_llama(0)
    draft = tiny_llama(0)
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(1)
        for parameter in draft.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    if kind in ("module", "row by row"):
        forward = RowByRowForward(target) if kind == "row by row" else None
        # `model:itself` drafts row by row, too.
        return {
            "itself": partial(TransformersRuntime, target, forward),
            "draft": partial(TransformersRuntime, draft),
        }
    if kind.startswith("native"):
        if not units():
            pytest.skip("no kernels for this processor, or no compiler built them")
        made = {
            name: NativeDecoder(fuse(model.bfloat16(), packed=False), weight_format)
            for name, model, weight_format in (
                ("itself", target, BFLOAT16 if kind == "native" else INT4),
                ("draft", draft, INT8 if kind == "native" else INT4),
            )
        }
        return {name: partial(NativeRuntime, decoder) for name, decoder in made.items()}
    half = kind == "fused in bfloat16"
    if half and not can_pack(torch.bfloat16, torch.device("cpu")):
        pytest.skip("no bfloat16 products on this processor: their bits then depend on the number of rows")
    if half:
        target, draft = target.bfloat16(), draft.bfloat16()
    return {
        "itself": partial(FusedRuntime, fuse(target, packed=half)),
        "draft": partial(FusedRuntime, fuse(draft, packed=half)),
    }


def make_row(prompt, params, verifier):
    """A row with the sources that its settings ask for; a grammar's end token is the last of the vocabulary."""
    row = Row(
        list(prompt),
        params,
        seed=params.seed or 0,
        coupled=verifier.uses_coupling(params.seed is not None),
        grammar=tiny_matcher(params, VOCAB_SIZE),
    )
    if row.grammar is not None:
        row.end_tokens, row.sources = frozenset([VOCAB_SIZE - 1]), (ForcedTokens(row.grammar),)
    if params.prediction is not None:
        row.sources = (*row.sources, Prediction(params.prediction))
    return row


@dataclass(frozen=True)
class Loaded:
    """Target as `make_drafter` expects it; it has no files."""

    runtime: CachedRuntime
    name: str = "tiny"
    path: str = "."


def generate(models, drafter, verifier, controller, settings, prompts=None, together=True):
    """Return the output tokens of the first `len(settings)` prompts, decoded as one batch or one after another."""
    prompts = PROMPTS[: len(settings)] if prompts is None else prompts
    target = models["itself"]()
    verify = verifier and make_verifier(verifier)
    requests = list(zip(prompts, settings, strict=True))
    outputs = []
    for batch in [requests] if together else [[request] for request in requests]:
        proposer = make_drafter(
            drafter.removeprefix(SHARED),
            target_vocab_size=VOCAB_SIZE,
            load_draft_model=lambda name: models[name](),
            target=Loaded(target),
        )
        for _ in range(2 if drafter.startswith(SHARED) else 1):
            rows = [make_row(prompt, params, verify) for prompt, params in batch]
            for row in rows:
                row.history = "" if drafter.startswith(SHARED) else None
            for _ in decode(Components(target, proposer, verify, make_controller(controller)), rows):
                pass
        outputs += [row.output for row in rows]
    return outputs


def greedy_by_transformers(model, prompt, num_tokens):
    """Return greedy text by the Transformers module without a cache, as a reference without our code."""
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(num_tokens):
            tokens.append(int(model(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.fixture(scope="module")
def greedy_oracle(models, kind):
    if kind not in ("module", "row by row", "fused"):  # rounds unlike the module in float64, but always alike
        settings = [SamplingParams(max_tokens=NUM_TOKENS)] * len(PROMPTS)
        return generate(models, "none", "auto", "fixed:0", settings, together=False)
    model = tiny_llama(0)
    return [greedy_by_transformers(model, prompt, NUM_TOKENS) for prompt in PROMPTS]


one_batch_and_alone = pytest.mark.parametrize("together", [True, False], ids=["one-batch", "alone"])


@one_batch_and_alone
@pytest.mark.parametrize("drafter", [*DRAFTERS, *PICTURE_DRAFTERS, *TREE_DRAFTERS])
def test_greedy_output_equals_plain_decoding(models, kind, greedy_oracle, drafter, together):
    """Under all controllers over the module and the kernels.

    The other runtimes decode chains alone and ragged drafts in one batch; seeded text has both in a batch.
    """
    controllers = controllers_for(drafter)
    if kind not in EVERY_CONTROLLER:
        controllers = chain_and_ragged(drafter)[-1:] if together else chain_and_ragged(drafter)[:1]
    assert_greedy(models, greedy_oracle, drafter, "auto", controllers, together)


@one_batch_and_alone
@pytest.mark.parametrize("kind", EVERY_SETTING, indirect=True, scope="module")
@pytest.mark.parametrize(
    ("drafter", "verifier"),
    [*itertools.product(DRAFTERS[1:], VERIFIERS), *itertools.product(TREE_DRAFTERS, TREE_VERIFIERS)],
)
def test_greedy_output_of_every_verifier_equals_plain_decoding(
    models, greedy_oracle, drafter, verifier, together
):
    """In float64, and in bfloat16 over the kernels.

    At temperature 0 all verifiers accept the same path of a draft, and no controller knows the verifier. The other
    runtimes and controllers are therefore compared only under `auto`.
    """
    controllers = chain_and_ragged(drafter)
    controller = controllers[-1] if together else controllers[0]
    assert_greedy(models, greedy_oracle, drafter, verifier, [controller], together)


@one_batch_and_alone
@pytest.mark.parametrize("kind", ["native"], indirect=True, scope="module")
@pytest.mark.parametrize(
    ("drafter", "verifier"),
    [
        (drafter, verifier)
        for drafter in SELF_DRAFTERS
        for verifier in ("auto", *(TREE_VERIFIERS if "tree" in drafter else VERIFIERS))
    ],
)
def test_greedy_output_drafted_by_a_copy_equals_plain_decoding(
    models, greedy_oracle, drafter, verifier, together
):
    controllers = TREE_CONTROLLERS if "tree" in drafter else chain_and_ragged(drafter)
    assert_greedy(models, greedy_oracle, drafter, verifier, controllers, together)


def assert_greedy(models, greedy_oracle, drafter, verifier, controllers, together):
    num_prompts = len(PROMPTS) if together else NUM_ALONE
    settings = [SamplingParams(max_tokens=NUM_TOKENS)] * num_prompts
    for controller in controllers:
        found = generate(models, drafter, verifier, controller, settings, together=together)
        assert found == greedy_oracle[:num_prompts]


SAMPLED = {
    "temperature": SamplingParams(max_tokens=14, temperature=1.0, seed=7),
    "filters": SamplingParams(max_tokens=14, temperature=1.3, top_k=12, top_p=0.9, min_p=0.02, seed=8),
    "penalties": SamplingParams(
        max_tokens=14,
        temperature=0.8,
        repetition_penalty=1.3,
        frequency_penalty=0.4,
        presence_penalty=0.3,
        logit_bias={4: 1.5, 9: -2.0},
        seed=9,
    ),
    "ends": SamplingParams(max_tokens=14, min_tokens=3, temperature=1.0, stop_token_ids=(5, 6), seed=10),
    "grammar": with_regex(SamplingParams(max_tokens=20, temperature=1.0, seed=11), REGEX),
    "greedy grammar": with_regex(SamplingParams(max_tokens=20), REGEX),
    "prediction": SamplingParams(max_tokens=20, temperature=0.7, seed=12, prediction=(3, 5, 7, 4, 3, 5) * 4),
}


@pytest.fixture(scope="module")
def plain_text(models):
    """Function from a setting to the text of each prompt, decoded alone and without drafts."""

    @cache
    def text_under(setting):
        return generate(models, "none", "auto", "fixed:0", [SAMPLED[setting]] * len(PROMPTS), together=False)

    return text_under


@pytest.mark.parametrize("drafter", [*DRAFTERS, *PICTURE_DRAFTERS, *TREE_DRAFTERS])
def test_seeded_output_equals_plain_decoding(models, kind, plain_text, drafter):
    controllers = TREE_CONTROLLERS[:1] if drafter in TREE_DRAFTERS else controllers_for(drafter)
    if kind not in EVERY_CONTROLLER:
        controllers = chain_and_ragged(drafter)
    assert_seeded(models, plain_text, drafter, controllers, "temperature")


@pytest.mark.parametrize("kind", EVERY_SETTING, indirect=True, scope="module")
@pytest.mark.parametrize("setting", list(SAMPLED)[1:])
@pytest.mark.parametrize("drafter", [*DRAFTERS[1:], *TREE_DRAFTERS])
def test_seeded_output_under_other_settings_equals_plain_decoding(models, plain_text, drafter, setting):
    """In float64, and in bfloat16 over the kernels.

    No runtime knows the settings, and no controller: it reads draft distributions as they are before them.
    """
    controllers = chain_and_ragged(drafter)
    assert_seeded(models, plain_text, drafter, controllers[-1:], setting, alone=controllers[0])


@pytest.mark.parametrize("kind", ["native"], indirect=True, scope="module")
@pytest.mark.parametrize("setting", SAMPLED)
@pytest.mark.parametrize("drafter", SELF_DRAFTERS)
def test_seeded_output_drafted_by_a_copy_equals_plain_decoding(models, plain_text, drafter, setting):
    controllers = TREE_CONTROLLERS[:1] if "tree" in drafter else chain_and_ragged(drafter)
    assert_seeded(models, plain_text, drafter, controllers, setting)


def assert_seeded(models, plain_text, drafter, controllers, setting, alone=None):
    # One controller is enough for rows alone: greedy text is compared under all of them.
    for controller, together in [*((name, True) for name in controllers), (alone or controllers[0], False)]:
        num_prompts = len(PROMPTS) if together else NUM_ALONE
        settings = [SAMPLED[setting]] * num_prompts
        found = generate(models, drafter, "auto", controller, settings, together=together)
        assert found == plain_text(setting)[:num_prompts]


def test_a_row_does_not_depend_on_rows_with_other_settings(models):
    settings = [*SAMPLED.values(), SamplingParams(max_tokens=24)]
    prompts = [PROMPTS[index % len(PROMPTS)] for index in range(len(settings))]
    alone = generate(models, "model:draft", "auto", "fixed:4", settings, prompts, together=False)
    assert generate(models, "model:draft", "auto", "fixed:4", settings, prompts, together=True) == alone


def test_different_seeds_give_different_texts(models):
    settings = [SamplingParams(max_tokens=24, temperature=1.0, seed=seed) for seed in range(5)]
    texts = generate(models, "model:draft", "block", "fixed:4", settings, prompts=[PROMPTS[0]] * 5)
    assert len({tuple(text) for text in texts}) == 5


def test_the_global_generator_is_not_used(models):
    before = torch.random.get_rng_state()
    generate(models, "model:draft", "block", "fixed:4", [SAMPLED["temperature"]] * len(PROMPTS))
    assert torch.equal(before, torch.random.get_rng_state())
