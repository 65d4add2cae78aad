"""What holds for every head: the text is the target's own, whatever the head was told, forgot or guessed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from head_cases import HEADS, NEEDS_FUSED, tiny_target
from transformers import LlamaForCausalLM

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
from secondguess.runtime.base import Runtime
from secondguess.runtime.fused import FusedRuntime, fuse
from secondguess.runtime.native import library
from secondguess.runtime.native.decoder import NativeDecoder
from secondguess.runtime.native.runtime import NativeRuntime
from secondguess.runtime.transformers import TransformersRuntime
from secondguess.sampling import SamplingParams
from secondguess.sampling.noise import KeyedNoise
from secondguess.verifiers import make_verifier

VOCAB_SIZE = 31
PROMPTS = [[3, 5, 7, 5, 7, 5, 7, 5], [1], [9, 9, 9, 9, 2, 9, 9], [4, 8, 15, 16, 23]]
SHAPES: dict[str, TreeShape | None] = {
    "chain": None,
    "tree": StaticTree.from_widths([3, 2, 1]),
    "dynamic": DynamicTree(nodes=6, width=2, depth=3),
}
TARGET = tiny_target(VOCAB_SIZE)

needs_kernels = pytest.mark.skipif(
    not library.units(), reason="no kernels for this processor, or none were built"
)
every_head = pytest.mark.parametrize("head", HEADS)
every_shape = pytest.mark.parametrize("shape", SHAPES)


class Whimsical(Controller):
    """Drafts in some rounds and not in others, each time another length: whoever listens must not lose the thread."""

    name = "whimsical"

    def __init__(self) -> None:
        self._round = 0

    def plan(self, rows: Sequence[Row], candidates: Sequence[Sequence[Candidate]]) -> list[Plan]:
        self._round += 1
        everybody_rests = self._round % 3 == 0
        return [
            Plan(
                choices[0].part,
                0 if everybody_rests else min(choices[0].longest, (self._round * 7 + index) % 5),
            )
            for index, choices in enumerate(candidates)
        ]

    def learn(self, rows: Sequence[Row], draft: Draft, verdict: Verdict, time: RoundTime) -> None:
        pass


def module_runtime() -> Runtime:
    return TransformersRuntime(TARGET)


def fused_runtime() -> Runtime:
    return fused(tiny_target(VOCAB_SIZE))


def fused(model: LlamaForCausalLM) -> Runtime:
    decoder = fuse(model, packed=False)
    assert decoder is not None
    return FusedRuntime(decoder)


def native_runtime() -> Runtime:
    decoder = fuse(tiny_target(VOCAB_SIZE).bfloat16(), packed=False)
    assert decoder is not None
    return NativeRuntime(NativeDecoder(decoder))


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


def drafts_with(head: str, shape: str) -> object:
    return partial(HEADS[head], shape=SHAPES[shape])


def target_for(head: str) -> Callable[[], Runtime]:
    """The runtime that a head works with, where it does not work with all."""
    return fused_runtime if head in NEEDS_FUSED else module_runtime


def plainly(params: SamplingParams, **settings: object) -> list[list[int]]:
    return run(lambda target: NoDrafter(), params, controller="fixed:0", **settings)  # type: ignore[arg-type]


@every_head
@every_shape
@pytest.mark.parametrize("make_target", [module_runtime, fused_runtime], ids=["module", "fused"])
@pytest.mark.parametrize("together", [True, False], ids=["one-batch", "alone"])
@pytest.mark.parametrize("verifier", ["auto", "traversal"])
def test_greedy_text_is_the_targets(
    head: str, shape: str, verifier: str, together: bool, make_target: object
) -> None:
    if head in NEEDS_FUSED and make_target is module_runtime:
        pytest.skip("it runs some of the target's layers, which modules cannot")
    params = SamplingParams(max_tokens=16)
    batches = [PROMPTS] if together else [[prompt] for prompt in PROMPTS]
    found = [
        text
        for batch in batches
        for text in run(drafts_with(head, shape), params, verifier, prompts=batch, make_target=make_target)
    ]
    assert found == plainly(params)


@needs_kernels
@every_head
@every_shape
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_over_the_kernels_the_text_is_theirs(head: str, shape: str, temperature: float) -> None:
    params = SamplingParams(max_tokens=16, temperature=temperature, seed=4)
    found = run(drafts_with(head, shape), params, controller=Whimsical(), make_target=native_runtime)
    assert found == plainly(params, make_target=native_runtime)


@every_head
@every_shape
@pytest.mark.parametrize("controller", ["fixed:3", "cost", "confidence:4,threshold=0.2", "whimsical"])
def test_seeded_text_is_that_of_no_drafter(head: str, shape: str, controller: str) -> None:
    params = SamplingParams(max_tokens=16, temperature=1.0, seed=7)
    decider = Whimsical() if controller == "whimsical" else controller
    assert run(drafts_with(head, shape), params, controller=decider, make_target=target_for(head)) == plainly(
        params
    )


@every_head
@every_shape
def test_seeded_text_under_penalties_and_filters(head: str, shape: str) -> None:
    params = SamplingParams(
        max_tokens=16, temperature=0.8, top_k=9, repetition_penalty=1.3, logit_bias={4: 2.0}, seed=3
    )
    assert run(drafts_with(head, shape), params, make_target=target_for(head)) == plainly(params)


@every_head
def test_it_takes_turns_with_a_look_up(head: str) -> None:
    params = SamplingParams(max_tokens=16)

    def either(target: Runtime) -> Drafter:
        parts = [SuffixDrafter(SuffixOptions(min=1)), HEADS[head](target, None)]
        return CombinedDrafter(parts, VOCAB_SIZE)

    assert run(either, params, make_target=target_for(head)) == plainly(params)


@every_head
@every_shape
def test_it_stops_where_the_context_ends(head: str, shape: str) -> None:
    """The target holds 128 tokens; the last ones are drafted for too."""
    params = SamplingParams(max_tokens=14)
    settings = {"prompts": [[token % VOCAB_SIZE for token in range(120)]], "make_target": target_for(head)}
    assert run(drafts_with(head, shape), params, **settings) == plainly(params, **settings)


@every_head
@every_shape
@pytest.mark.parametrize("num_rows", [1, 2])
@pytest.mark.parametrize("num_rounds", [6, 7], ids=["behind a plain round", "behind a draft"])
def test_what_it_remembers_is_the_truth(head: str, shape: str, num_rows: int, num_rounds: int) -> None:
    """After any rounds it guesses as a drafter would that is told the whole texts at once."""
    params = SamplingParams(max_tokens=60, temperature=1.0)
    target = target_for(head)()
    drafter = HEADS[head](target, SHAPES[shape])
    rows = [Row(list(prompt), params, seed=5) for prompt in (PROMPTS[0], PROMPTS[3])[:num_rows]]
    components = Components(target, drafter, make_verifier("auto"), Whimsical())
    rounds = decode(components, rows)
    for _ in range(num_rounds):
        next(rounds)
    fresh_target = target_for(head)()
    fresh = HEADS[head](fresh_target, SHAPES[shape])
    fresh_rows = [Row(list(row.tokens), params, seed=5) for row in rows]
    fresh_target.request_hidden_states(fresh.hidden_layers)
    fresh.begin(fresh_rows, fresh_target.begin(fresh_rows))
    drafts = []
    for who, whose in ((drafter, rows), (fresh, fresh_rows)):
        with torch.inference_mode():
            who.prepare(whose, [0] * num_rows)
            budgets = Budgets([3] * num_rows, lambda dists, depth: [True] * num_rows, uses_probs=False)
            drafts.append(who.propose(whose, budgets, KeyedNoise.from_rows(whose)))
    assert drafts[0].tokens.tolist() == drafts[1].tokens.tolist()
    assert drafts[0].probs is not None
    assert drafts[1].probs is not None
    torch.testing.assert_close(drafts[0].probs, drafts[1].probs)
    rounds.close()


@every_head
@pytest.mark.parametrize(
    ("widths", "num_rounds", "verifier"),
    [((), 2, "auto"), ((2,), 2, "auto"), ((2, 1), 1, "recursive")],
    ids=["chain", "siblings", "tree"],
)
def test_the_distribution_of_the_text_is_the_targets(
    head: str, widths: tuple[int, ...], num_rounds: int, verifier: str
) -> None:
    """One or two rounds on a real cache, enumerated."""
    shape = StaticTree.from_widths(widths) if widths else None
    model = tiny_target(vocab_size=2)
    dists = {}
    outputs: list[tuple[int, ...]] = [()]
    for output in outputs:
        with torch.inference_mode():
            logits = model(torch.tensor([[0, 1, *output]]), use_cache=False).logits[0, -1]
        dists[output] = logits.softmax(-1)
        if len(output) < 3:
            outputs += [(*output, 0), (*output, 1)]
    target = fused(model) if head in NEEDS_FUSED else TransformersRuntime(model)
    components = Components(
        target, HEADS[head](target, shape), make_verifier(verifier), make_controller("fixed:2")
    )
    params = SamplingParams(temperature=1.0, max_tokens=20)
    (branches,) = enumerate_rounds(components, lambda: [Row([0, 1], params)], num_rounds=num_rounds)
    found = text_dist(branches, dists.__getitem__, 4)
    assert largest_difference(found, exact_dist(dists.__getitem__, 4)) < (
        1e-6 if head in NEEDS_FUSED else 1e-9
    )  # the fused runtime's norms are in float64, the module's not
    assert any(branch.num_accepted for branch in branches)
