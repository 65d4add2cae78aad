"""Chains that the kernels draw at once: the same bits as chains drawn token by token, which define them."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from chain_cases import SETTINGS, compare_batches, run_batches, run_rounds
from test_native_heads import native_target, random_head

from checkpoints import read_module
from families import FAMILIES, needs_kernels, write_checkpoint
from secondguess.core import Budgets, Row
from secondguess.drafters.eagle import EagleDrafter
from secondguess.drafters.model import ModelDrafter
from secondguess.drafters.mtp import MtpDrafter
from secondguess.drafters.sampling_drafter import SamplingDrafter
from secondguess.drafters.self import SelfDrafter
from secondguess.drafters.vocabulary.drafter import TranslatingDrafter
from secondguess.drafters.vocabulary.pair import VocabularyPair
from secondguess.errors import SecondGuessError
from secondguess.runtime.cpu import library
from secondguess.runtime.cpu.decoder import NativeDecoder
from secondguess.runtime.cpu.runtime import NativeRuntime
from secondguess.runtime.decoder.fused import fuse
from secondguess.sampling import SamplingParams
from secondguess.sampling.noise import KeyedNoise
from vocabulary_cases import vocabulary

pytestmark = needs_kernels

NUM_CASES = 125
Pair = tuple[SamplingDrafter, NativeRuntime | None]
"""A drafter, and the target whose cache or states it reads."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("chains")


def native(folder: Path, family: str) -> NativeRuntime:
    path = folder / family
    decoder = fuse(
        read_module(str(write_checkpoint(FAMILIES[family](), path)), torch.bfloat16).eval(), packed=False
    )
    assert decoder is not None
    return NativeRuntime(NativeDecoder(decoder))


def model(folder: Path, family: str = "llama") -> Pair:
    runtime = native(folder, family)
    return ModelDrafter(runtime, "model:draft", runtime.vocab_size - 3), None  # some tokens are never drafted


def copy(folder: Path, family: str = "llama") -> Pair:
    target = native(folder, family)
    return SelfDrafter(target, "self:int4"), target


def eagle(folder: Path, name: str = "eagle") -> Pair:
    target = native_target()
    return EagleDrafter(random_head(name, target), target, "eagle"), target


def mtp(folder: Path) -> Pair:
    target = native_target()
    return MtpDrafter(random_head("mtp", target), target, "mtp"), target


def other_tokenizer(folder: Path, kind: str = "byte-level") -> Pair:
    """Return a draft model whose drafts are text; its first token ends it."""
    runtime = native(folder, "llama")
    vocabularies = VocabularyPair.from_vocabularies(vocabulary(kind), vocabulary("byte-level"))
    assert (max(vocabularies.lengths(320)) > 1) == (kind == "sentencepiece")
    return TranslatingDrafter(runtime, "model:draft", 320, vocabularies), None


CASES: dict[str, Callable[[Path], Pair]] = {
    "model, other tokenizer": other_tokenizer,
    "model, other vocabulary": lambda folder: other_tokenizer(folder, "sentencepiece"),
    "model": model,
    "model, gemma3": lambda folder: model(folder, "gemma3"),
    "self:int4": copy,
    "self:int4, gemma3": lambda folder: copy(folder, "gemma3"),
    "eagle": eagle,
    "eagle, two layers": lambda folder: eagle(folder, "eagle, two layers"),
    "eagle, two layers, one with a window": lambda folder: eagle(
        folder, "eagle, two layers, one with a window"
    ),
    "eagle 1": lambda folder: eagle(folder, "eagle 1"),
    "mtp": mtp,
}


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[bool], None]]:
    original = KeyedNoise.of_rows

    def choose(is_at_once: bool) -> None:
        method = original if is_at_once else (lambda self: None)
        monkeypatch.setattr(KeyedNoise, "of_rows", method)

    return choose


@pytest.mark.parametrize("name", CASES)
def test_chains_drawn_at_once_have_the_bits_of_those_drawn_token_by_token(name, folder, at_once):
    pairs = [CASES[name](folder) for _ in range(2)]
    num_drafts = 0
    for case in range(NUM_CASES):
        found = []
        for is_at_once, pair in zip((True, False), pairs, strict=True):
            at_once(is_at_once)
            found.append(run_rounds(*pair, random.Random(case), SETTINGS[case % len(SETTINGS)]))
        for (tokens, probs, *decisions), (own_tokens, own_probs, *own_decisions) in zip(*found, strict=True):
            assert tokens == own_tokens
            assert decisions == own_decisions
            assert probs is own_probs is None or torch.equal(probs, own_probs)
            num_drafts += 1
    assert num_drafts > 2 * NUM_CASES


@pytest.mark.parametrize("name", CASES)
def test_chains_of_batches_drawn_at_once_have_the_bits_of_those_drawn_token_by_token(name, folder, at_once):
    """Rows of unequal lengths at all temperatures, some of which draft nothing."""
    pairs = [CASES[name](folder) for _ in range(2)]
    # depths of drafts of text are in other tokens than the draft
    depths_are_nodes, num_compared = not isinstance(pairs[0][0], TranslatingDrafter), 0
    for case in range(60):
        found = []
        for is_at_once, pair in zip((True, False), pairs, strict=True):
            at_once(is_at_once)
            found.append(run_batches(*pair, random.Random(case)))
        num_compared += compare_batches(*found, depths_are_nodes=depths_are_nodes)
    assert num_compared > 100 or not depths_are_nodes


@pytest.mark.parametrize("name", CASES)
def test_chains_are_drawn_at_once(name, folder, monkeypatch):
    """Otherwise the test above compares nothing."""
    drafter, target = CASES[name](folder)
    monkeypatch.setattr(drafter, "chain_logits", lambda *_: pytest.fail("a step per token"))
    assert run_rounds(drafter, target, random.Random(0), {"temperature": 1.0})
    assert run_batches(drafter, target, random.Random(1))


def draft_once(
    drafter: SamplingDrafter, keep: Callable[..., list[bool]] | None = None, temperature: float = 1.0
) -> list[list[int]]:
    row = Row([3, 4, 5], SamplingParams(temperature=temperature))
    drafter.prepare([row], [0])
    budgets = Budgets([4], keep or (lambda *_: [True]), keep is not None)
    return drafter.propose([row], budgets, KeyedNoise.from_rows([row])).token_lists


def test_an_error_of_the_controller_reaches_the_caller(folder):
    def fail(*_: object) -> list[bool]:
        raise SecondGuessError("expected a decision, got none")

    with pytest.raises(SecondGuessError, match="expected a decision"):
        draft_once(model(folder)[0], fail)


def test_an_interruption_between_a_step_and_its_decision_is_not_lost(folder, monkeypatch):
    """Python drops exceptions of signals there, and the decision has not been made."""
    original = library.KEEP_DRAFTING
    silent = original(lambda *_: None)
    monkeypatch.setattr(library, "KEEP_DRAFTING", lambda *function: silent if function else original())
    with pytest.raises(KeyboardInterrupt):
        draft_once(model(folder)[0], lambda *_: [True])


def test_a_chain_leaves_nothing_to_the_garbage_collector(folder):
    drafter, _ = model(folder)
    kept: list[weakref.ref[torch.Tensor]] = []

    def keep(logits: torch.Tensor, *_: object) -> list[bool]:
        kept.append(weakref.ref(logits))
        return [True]

    gc.disable()
    try:
        draft_once(drafter, keep)
    finally:
        gc.enable()
    assert kept
    assert not any(each() is not None for each in kept)


def test_greedy_drafts_of_a_broken_model_are_those_of_the_loop(folder, at_once):
    """NaN counts as the largest logit; the target corrects such drafts."""
    found = []
    for is_at_once in (True, False):
        at_once(is_at_once)
        drafter, _ = model(folder)
        drafter.runtime.decoder.embedding.fill_(float("nan"))
        found.append(draft_once(drafter, temperature=0.0))
    assert found[0] == found[1]


def test_logits_that_are_not_finite_are_refused(folder):
    drafter, _ = model(folder)
    drafter.runtime.decoder.embedding.fill_(float("nan"))
    with pytest.raises(SecondGuessError, match="expected finite logits from the drafter"):
        draft_once(drafter)
