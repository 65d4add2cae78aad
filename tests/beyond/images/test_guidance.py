"""Classifier-free guidance: the guided distribution with any drafter, and the text of Transformers' own generate."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Emu3Config, Emu3ForConditionalGeneration

from checkpoints import write_llama, write_tokenizer
from distribution_cases import PAIRS, PROMPT, ROUNDING, SAMPLED, dist_error, make_pair_drafter, mean_accepted
from families import LLAMA_LIKE, VOCAB_SIZE
from secondguess import LLM, GuidedPrompt, load
from secondguess.beyond.images.guidance import GuidedRuntime, combine
from secondguess.checkpoint import memory
from secondguess.controllers import make_controller
from secondguess.core import Row
from secondguess.decode import Components
from secondguess.errors import BadInputError, OutOfMemoryError
from secondguess.proof.enumeration import Branch, enumerate_rounds
from secondguess.proof.fakes import TableModel
from secondguess.verifiers import make_verifier

NEGATIVE, SCALE = (1, 1, 0), 1.7
VISUAL = range(200, 240)


def guided_branches(verifier: str, drafter: str, num_rounds: int, pair: str = "ternary") -> list[Branch]:
    """Return all branches of guided rounds, with a row without guidance."""

    target = GuidedRuntime(TableModel(PAIRS[pair].vocab_size, PAIRS[pair].target))

    def make_rows() -> list[Row]:
        return [target.guide(Row(list(PROMPT), SAMPLED), NEGATIVE, SCALE), Row([0], SAMPLED)]

    proposer = make_pair_drafter(drafter, PAIRS[pair])
    components = Components(target, proposer, make_verifier(verifier), make_controller("fixed:2"))
    return enumerate_rounds(components, make_rows, num_rounds)[0]


def guided_dist(pair: str = "ternary") -> Callable[[tuple[int, ...]], Tensor]:
    """Return the distribution after an output, computed from probabilities."""
    target = PAIRS[pair].target

    def dist(output: tuple[int, ...]) -> Tensor:
        weights = target((*NEGATIVE, *output)) ** (1 - SCALE) * target((*PROMPT, *output)) ** SCALE
        return weights / weights.sum()

    return dist


@pytest.mark.parametrize("drafter", ["sampled", "deterministic", "small-tree"])
@pytest.mark.parametrize("verifier", ["auto", "coupled", "traversal"])
def test_output_has_the_guided_distribution(verifier: str, drafter: str) -> None:
    branches = guided_branches(verifier, drafter, num_rounds=1)
    assert mean_accepted(branches) > 0
    assert dist_error(branches, guided_dist(), num_tokens=3) < ROUNDING


def test_both_prompts_follow_the_text_over_rounds() -> None:
    branches = guided_branches("auto", "sampled", num_rounds=2, pair="binary")
    assert dist_error(branches, guided_dist("binary"), num_tokens=4) < ROUNDING


def test_impossible_tokens_stay_impossible_and_scale_one_changes_nothing() -> None:
    own = torch.tensor([[[0.0, 1.0, -math.inf, 2.0]]])
    negative = torch.tensor([[[0.5, -math.inf, 0.0, 1.0]]])
    assert combine(own, negative, [3.0]).softmax(-1)[0, 0, 1:3].tolist() == [0.0, 0.0]
    plain = torch.tensor([[[0.0, 1.0, 0.5, 2.0]]])
    torch.testing.assert_close(combine(plain, negative.clip(-5), [1.0]).softmax(-1), plain.softmax(-1))


@pytest.mark.parametrize("negative", [(), (1,), (1, 2), (1, 2, 3)])
def test_a_guided_row_has_a_slot_for_each_of_its_texts(negative: tuple[int, ...]) -> None:
    target = GuidedRuntime(TableModel(2, PAIRS["binary"].target))
    row = target.guide(Row([1, 0], SAMPLED), negative, 2.0)
    assert target.slot_lengths(row) == [2, len(negative)]
    row.commit([], 1)
    assert target.slot_lengths(row) == [3, len(negative) + 1]
    assert target.slot_lengths(Row([1], SAMPLED)) == [1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("guided") / "target", seed=0, max_position_embeddings=96)


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return load(folder, "jacobi,width=5", controller="fixed:4", dtype="float32", device="cpu")


def test_guided_text_is_that_of_transformers(folder: Path, llm: LLM) -> None:
    """At temperature 0, with a row of the batch that is not guided."""
    own, negative = [5, 6, 7, 250], [9, 250]
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    guidance = {"guidance_scale": 3.0, "negative_prompt_ids": torch.tensor([negative])}
    with torch.no_grad():
        guided, plain = (
            model.generate(torch.tensor([own]), max_new_tokens=24, do_sample=False, **more)[0, 4:].tolist()
            for more in (guidance, {})
        )
    prompts: list[Any] = [GuidedPrompt(own, negative, scale=3.0), own]
    outputs = llm.generate(prompts, max_tokens=24)
    assert [output.token_ids for output in outputs] == [guided, plain]
    assert guided != plain


def test_the_target_is_wrapped_by_the_first_guided_prompt_beside_rows_that_decode(folder: Path) -> None:
    llm = load(folder, "none", dtype="float32", device="cpu")
    alone = llm.generate([5, 6, 7], max_tokens=12).token_ids
    assert llm.shared_batch.components.target is llm.target.runtime
    pieces = llm.stream([5, 6, 7], max_tokens=12)
    begun = next(pieces).tokens
    guided = llm.generate(GuidedPrompt([5, 6, 7], [9], 3.0), max_tokens=12).token_ids
    assert isinstance(llm.shared_batch.components.target, GuidedRuntime)
    assert [*begun, *(token for piece in pieces for token in piece.tokens)] == alone != guided


def test_a_seed_gives_one_guided_text(folder: Path, llm: LLM) -> None:
    drawn = [
        each.generate(GuidedPrompt("def ", "class", 2.0), max_tokens=16, temperature=1.0, seed=3).token_ids
        for each in (llm, load(folder, "none", dtype="float32", device="cpu"))
    ]
    assert drawn[0] == drawn[1]


def test_guided_image_tokens_of_emu3_are_those_of_transformers(tmp_path: Path) -> None:
    """Its image tokens are part of its vocabulary."""
    names = {f"<|visual token {code:06}|>": token for code, token in enumerate(VISUAL)}
    vq = {
        "codebook_size": len(VISUAL), "embed_dim": 4, "latent_channels": 4, "base_channels": 32, "hidden_size": 32,
        "channel_multiplier": [1, 1], "num_res_blocks": 1, "attn_resolutions": [1], "temporal_downsample_factor": 2,
    }  # fmt: skip
    text = LLAMA_LIKE | {"bos_token_id": 1}
    vocabulary = names | {"<image>": 250, "<|extra_200|>": 251}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Emu3ForConditionalGeneration(
            Emu3Config(vq_config=vq, text_config=text, vocabulary_map=vocabulary)
        )
    model.eval().save_pretrained(tmp_path)
    write_tokenizer(tmp_path, VOCAB_SIZE)
    with torch.no_grad():
        expected = model.generate(
            torch.tensor([[5, 6, 250]]), max_new_tokens=20, do_sample=False, guidance_scale=3.0,
            negative_prompt_ids=torch.tensor([[250]]), prefix_allowed_tokens_fn=lambda *_: list(VISUAL),
        )[0, 3:].tolist()  # fmt: skip
    others = {token: -math.inf for token in range(VOCAB_SIZE) if token not in VISUAL}
    llm = load(tmp_path, "jacobi,width=5", controller="fixed:4", dtype="float32", device="cpu")
    output = llm.generate(GuidedPrompt([5, 6, 250], [250], 3.0), max_tokens=20, logit_bias=others)
    assert output.token_ids == expected


@pytest.mark.parametrize("scale", [math.inf, "3", True])
def test_a_scale_that_is_no_number_is_refused(scale: Any) -> None:
    with pytest.raises(BadInputError, match="expected the scale of a guided prompt to be a finite number"):
        GuidedPrompt([1], [2], scale)


def test_a_negative_prompt_that_fills_the_context_is_refused(llm: LLM) -> None:
    with pytest.raises(BadInputError, match="expected a prompt of at most"):
        llm.generate(GuidedPrompt([5], [9] * 96, 2.0), max_tokens=4)
    output = llm.generate(GuidedPrompt([5], [9] * 90, 2.0), max_tokens=40)
    assert (len(output.token_ids), output.finish_reason) == (6, "context")


def test_a_guided_row_takes_the_memory_of_two_rows(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the length of its longer prompt and its output."""
    llm = load(folder, "none", dtype="float32", device="cpu")
    sizes: list[tuple[int, int]] = []

    def fits(num_rows: int, longest: int) -> bool:
        sizes.append((num_rows, longest))
        return num_rows <= 4

    monkeypatch.setattr(llm.shared_batch.scheduler, "_fits", fits)
    guided: list[Any] = [GuidedPrompt([5, 6], [9, 8, 7], 2.0)] * 3
    llm.generate([*guided, [5]], max_tokens=4, ignore_eos=True)
    assert sizes[:2] == [(4, 7), (6, 7)]
    assert llm.target.runtime.cache.num_slots == 4


def test_a_negative_prompt_that_does_not_fit_in_memory_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = load(folder, "none", dtype="float32", device="cpu")
    needed = llm.target.runtime.num_tokens_to_allocate(2, 90) * llm.cache_bytes
    for available in (needed - 1, needed):
        monkeypatch.setattr(memory, "available_memory", lambda _, available=available: available)
        with pytest.raises(OutOfMemoryError) if available < needed else nullcontext():
            llm.generate(GuidedPrompt([5], [9] * 90, 2.0), max_tokens=2)


def test_drafters_that_run_layers_of_the_target_are_refused() -> None:
    llm = load("builtin", "early-exit", runtime="fused", dtype="float32", device="cpu")
    with pytest.raises(
        BadInputError, match="runs no layers of the target for a guided prompt, got early-exit"
    ):
        llm.generate(GuidedPrompt("a", "b", 2.0), max_tokens=2)
