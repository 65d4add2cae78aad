"""Properties of every head: greedy and seeded text equals plain decoding, and its state can be rebuilt from the text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial

import pytest
import torch

from gemma_cases import gemma_runtime, gemma_target
from head_cases import HEADS, NEEDS_FUSED, NEEDS_GEMMA, NEEDS_NATIVE, tiny_target
from secondguess.controllers import make_controller
from secondguess.controllers.base import Controller
from secondguess.core import Budgets, Candidate, Draft, Plan, RoundTime, Row, Verdict
from secondguess.decode import Components, decode
from secondguess.drafters.base import Drafter
from secondguess.drafters.combined import CombinedDrafter
from secondguess.drafters.none import NoDrafter
from secondguess.drafters.suffix import SuffixDrafter, SuffixOptions
from secondguess.drafters.trees import DynamicTree, StaticTree, TreeShape
from secondguess.proof.enumeration import enumerate_rounds, exact_dist, largest_difference, text_dist
from secondguess.runtime import cache as cache_module
from secondguess.runtime.base import ForwardOutput, Runtime
from secondguess.runtime.cached import CachedRuntime
from secondguess.runtime.cpu import library
from secondguess.runtime.cpu.decoder import NativeDecoder
from secondguess.runtime.cpu.runtime import NativeRuntime
from secondguess.runtime.decoder.fused import FusedRuntime, fuse
from secondguess.runtime.decoder.fused_decoder import FusedDecoder
from secondguess.runtime.modules.transformers import TransformersRuntime
from secondguess.sampling import SamplingParams
from secondguess.sampling.noise import KeyedNoise
from secondguess.verifiers import make_verifier

VOCAB_SIZE = 31
PROMPTS = [[3, 5, 7, 5, 7, 5, 7, 5], [1], [9, 9, 9, 9, 2, 9, 9], [4, 8, 15, 16, 23]]
NUM_ALONE = 2
"""Number of prompts that are also decoded alone: a repetitive one, and one of a single token."""
SHAPES: dict[str, TreeShape | None] = {
    "chain": None,
    "tree": StaticTree((3, 2, 1)),
    "dynamic": DynamicTree(nodes=6, width=2, depth=3),
}
TARGET = tiny_target(VOCAB_SIZE)

needs_kernels = pytest.mark.skipif(
    not library.units(), reason="no kernels for this processor, or none were built"
)
every_head = pytest.mark.parametrize(
    "head", [pytest.param(head, marks=[needs_kernels] if head in NEEDS_NATIVE else []) for head in HEADS]
)
every_shape = pytest.mark.parametrize("shape", SHAPES)


class VaryingLengths(Controller):
    """Controller with another draft length in every round, and every third round without drafts."""

    name = "varying"

    def __init__(self) -> None:
        self._round = 0

    def plan(self, rows: Sequence[Row], candidates: Sequence[Sequence[Candidate]]) -> list[Plan]:
        self._round += 1
        is_plain = self._round % 3 == 0
        return [
            Plan(
                choices[0].part,
                0 if is_plain else min(choices[0].longest, (self._round * 7 + index) % 5),
            )
            for index, choices in enumerate(candidates)
        ]

    def learn(self, rows: Sequence[Row], draft: Draft, verdict: Verdict, time: RoundTime) -> None:
        pass


def module_runtime() -> Runtime:
    return TransformersRuntime(TARGET)


@cache
def fused_decoder() -> FusedDecoder:
    return fuse(tiny_target(VOCAB_SIZE), packed=False)


def fused_runtime() -> Runtime:
    return FusedRuntime(fused_decoder())


@cache
def native_decoder() -> NativeDecoder:
    return NativeDecoder(fuse(tiny_target(VOCAB_SIZE).bfloat16(), packed=False))


def native_runtime() -> Runtime:
    return NativeRuntime(native_decoder())


def run(
    make: object,
    params: SamplingParams,
    verifier: str = "auto",
    controller: Controller | str = "fixed:4",
    prompts: Sequence[list[int]] = PROMPTS,
    make_target: object = module_runtime,
) -> list[list[int]]:
    target = make_target()  # type: ignore[operator]
    drafter: Drafter = make(target)  # type: ignore[operator]
    verify = make_verifier(verifier)
    coupled = verify.uses_coupling(params.seed is not None)
    rows = [
        Row(
            list(prompt),
            params,
            seed=params.seed or 0,
            coupled=coupled,
            context_length=target.context_length,
        )
        for prompt in prompts
    ]
    decider = make_controller(controller) if isinstance(controller, str) else controller
    for _ in decode(Components(target, drafter, verify, decider), rows):
        pass
    return [row.output for row in rows]


def make_head(head: str, shape: str) -> object:
    return partial(HEADS[head], shape=SHAPES[shape])


def target_for(head: str) -> Callable[[], Runtime]:
    """Return a function that makes a runtime which supports the head."""
    if head in NEEDS_NATIVE:
        return native_runtime
    if head in NEEDS_GEMMA:
        return gemma_runtime
    return fused_runtime if head in NEEDS_FUSED else module_runtime


def reference_for(head: str) -> Callable[[], Runtime]:
    """Return a function that makes the runtime whose plain text that of the head equals: the module, in float64."""
    return module_runtime if head in NEEDS_FUSED else target_for(head)


def plain_text(
    params: SamplingParams,
    prompts: Sequence[list[int]] = PROMPTS,
    make_target: Callable[[], Runtime] = module_runtime,
) -> list[list[int]]:
    """Return the outputs of plain decoding, decoded once per combination of arguments."""
    key = (repr(params), repr(prompts), make_target)
    if key not in _plain_texts:
        _plain_texts[key] = run(
            lambda target: NoDrafter(),
            params,
            controller="fixed:0",
            prompts=prompts,
            make_target=make_target,
        )
    return _plain_texts[key]


_plain_texts: dict[object, list[list[int]]] = {}


@every_head
@every_shape
@pytest.mark.parametrize(
    ("make_target", "together"),
    [(module_runtime, True), (fused_runtime, True), (fused_runtime, False)],
    ids=["module", "fused", "fused-alone"],
)
def test_greedy_text_equals_plain_decoding(
    head: str, shape: str, make_target: Callable[[], Runtime], together: bool
) -> None:
    is_module = make_target is module_runtime
    if head in NEEDS_NATIVE or (head in NEEDS_FUSED and is_module) or (head in NEEDS_GEMMA and not is_module):
        pytest.skip("another runtime cannot run it")
    make_target = gemma_runtime if head in NEEDS_GEMMA else make_target
    params = SamplingParams(max_tokens=12)
    batches = [PROMPTS] if together else [[prompt] for prompt in PROMPTS[:NUM_ALONE]]
    found = [
        text
        for batch in batches
        for text in run(make_head(head, shape), params, prompts=batch, make_target=make_target)
    ]
    assert found == plain_text(params, make_target=reference_for(head))[: len(found)]


@every_head
@every_shape
def test_greedy_text_under_traversal_equals_plain_decoding(head: str, shape: str) -> None:
    """At temperature 0 `auto` is `greedy`; `traversal` needs one-hot target distributions."""
    params = SamplingParams(max_tokens=12)
    found = run(make_head(head, shape), params, "traversal", make_target=target_for(head))
    assert found == plain_text(params, make_target=reference_for(head))


@needs_kernels
@every_head
@every_shape
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_text_over_the_kernels_equals_plain_decoding_over_them(
    head: str, shape: str, temperature: float
) -> None:
    if head in NEEDS_GEMMA:
        pytest.skip("the kernels do not run its target")
    params = SamplingParams(max_tokens=12, temperature=temperature, seed=4)
    found = run(make_head(head, shape), params, controller=VaryingLengths(), make_target=native_runtime)
    assert found == plain_text(params, make_target=native_runtime)


@every_head
@every_shape
@pytest.mark.parametrize("controller", ["cost", "confidence:4,threshold=0.2", "varying"])
def test_seeded_text_equals_plain_decoding(head: str, shape: str, controller: str) -> None:
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=7)
    decider = VaryingLengths() if controller == "varying" else controller
    assert run(
        make_head(head, shape), params, controller=decider, make_target=target_for(head)
    ) == plain_text(params, make_target=reference_for(head))


@every_head
@every_shape
def test_seeded_text_under_penalties_and_top_k_equals_plain_decoding(head: str, shape: str) -> None:
    params = SamplingParams(
        max_tokens=12, temperature=0.8, top_k=9, repetition_penalty=1.3, logit_bias={4: 2.0}, seed=3
    )
    found = run(make_head(head, shape), params, make_target=target_for(head))
    assert found == plain_text(params, make_target=reference_for(head))


@every_head
def test_combination_with_a_lookup_equals_plain_decoding(head: str) -> None:
    params = SamplingParams(max_tokens=12)

    def either(target: Runtime) -> Drafter:
        parts = [SuffixDrafter(SuffixOptions(min=1)), HEADS[head](target, None)]
        return CombinedDrafter(parts, VOCAB_SIZE)

    found = run(either, params, make_target=target_for(head))
    assert found == plain_text(params, make_target=reference_for(head))


@every_head
@every_shape
def test_text_up_to_the_end_of_the_context_equals_plain_decoding(head: str, shape: str) -> None:
    """The context has 128 tokens; the last ones are drafted, too."""
    params = SamplingParams(max_tokens=14)
    prompts, make_target = [[token % VOCAB_SIZE for token in range(120)]], target_for(head)
    found = run(make_head(head, shape), params, prompts=prompts, make_target=make_target)
    assert found == plain_text(params, prompts, make_target)


@every_head
@every_shape
@pytest.mark.parametrize("num_rows", [1, 2])
@pytest.mark.parametrize("num_rounds", [6, 7], ids=["after a plain round", "after a draft"])
def test_state_after_rounds_equals_that_of_a_new_drafter(
    head: str, shape: str, num_rows: int, num_rounds: int
) -> None:
    """The next draft equals that of a new drafter which begins with the whole text."""
    params = SamplingParams(max_tokens=60, temperature=1.0)
    target = target_for(head)()
    drafter = HEADS[head](target, SHAPES[shape])
    rows = [Row(list(prompt), params, seed=5) for prompt in (PROMPTS[0], PROMPTS[3])[:num_rows]]
    components = Components(target, drafter, make_verifier("auto"), VaryingLengths())
    rounds = decode(components, rows)
    for _ in range(num_rounds):
        next(rounds)
    fresh_target = target_for(head)()
    fresh = HEADS[head](fresh_target, SHAPES[shape])
    fresh_rows = [Row(list(row.tokens), params, seed=5) for row in rows]
    fresh_target.request_hidden_states(fresh.hidden_layers)
    fresh.begin(fresh_rows, fresh_target.begin(fresh_rows))
    drafts = []
    for each, own_rows in ((drafter, rows), (fresh, fresh_rows)):
        with torch.inference_mode():
            each.prepare(own_rows, [0] * num_rows)
            budgets = Budgets([3] * num_rows, lambda dists, depth: [True] * num_rows, uses_probs=False)
            drafts.append(each.propose(own_rows, budgets, KeyedNoise.from_rows(own_rows)))
    assert drafts[0].tokens.tolist() == drafts[1].tokens.tolist()
    assert drafts[0].probs is not None
    assert drafts[1].probs is not None
    torch.testing.assert_close(drafts[0].probs, drafts[1].probs)
    rounds.close()


def two_token_target(head: str) -> CachedRuntime:
    """Return a target with two tokens that supports the head."""
    if head in NEEDS_GEMMA:
        return gemma_runtime(vocab_size=2)
    model = tiny_target(vocab_size=2)
    if head in NEEDS_NATIVE:
        return NativeRuntime(NativeDecoder(fuse(model.bfloat16(), packed=False)))
    return FusedRuntime(fuse(model, packed=False)) if head in NEEDS_FUSED else TransformersRuntime(model)


def two_token_model(head: str) -> Callable[[torch.Tensor], ForwardOutput]:
    """Return the forward pass of the target with two tokens, without a cache."""
    if head in NEEDS_NATIVE:
        return two_token_target(head).probe
    return partial(gemma_target(2) if head in NEEDS_GEMMA else tiny_target(2), use_cache=False)


@cache
def two_token_dists(head: str) -> dict[tuple[int, ...], torch.Tensor]:
    """Return the target's distribution after every output of up to three tokens, without a cache."""
    run = two_token_model(head)
    dists = {}
    outputs: list[tuple[int, ...]] = [()]
    for output in outputs:
        with torch.inference_mode():
            dists[output] = run(torch.tensor([[0, 1, *output]])).logits[0, -1].double().softmax(-1)
        if len(output) < 3:
            outputs += [(*output, 0), (*output, 1)]
    return dists


@every_head
@pytest.mark.parametrize(
    ("widths", "num_rounds", "verifier"),
    [((), 2, "auto"), ((2,), 2, "auto"), ((2, 1), 1, "traversal")],
    ids=["chain", "siblings", "tree"],
)
def test_output_distribution_equals_the_targets(
    head: str,
    widths: tuple[int, ...],
    num_rounds: int,
    verifier: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One or two rounds on a real cache, enumerated."""
    monkeypatch.setattr(cache_module, "MIN_CAPACITY", 16)  # less memory to allocate for a thousand branches
    shape = StaticTree(widths) if widths else None
    target, dists = two_token_target(head), two_token_dists(head)
    # One prefill pass for all branches instead of one per branch: equal bits are not needed here.
    target._prefills_together = True
    components = Components(
        target, HEADS[head](target, shape), make_verifier(verifier), make_controller("fixed:2")
    )
    params = SamplingParams(temperature=1.0, max_tokens=20)
    (branches,) = enumerate_rounds(components, lambda: [Row([0, 1], params)], num_rounds=num_rounds)
    found = text_dist(branches, dists.__getitem__, 4)
    assert largest_difference(found, exact_dist(dists.__getitem__, 4)) < (
        1e-6 if head in (*NEEDS_FUSED, *NEEDS_NATIVE, *NEEDS_GEMMA) else 1e-9
    )  # the fused runtime's norms are in float64, the module's not; the kernels return logits in float32
    assert any(branch.num_accepted for branch in branches)
