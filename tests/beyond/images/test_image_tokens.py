"""Image models: pictures of ImageGPT through the same loop, with every drafter that suits pictures."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import ImageGPTConfig, ImageGPTForCausalImageModeling

from checkpoints import write_llama
from secondguess import LLM, load
from secondguess.checkpoint.description import describe
from secondguess.checkpoint.plan import Checkpoint
from secondguess.errors import BadInputError, CheckpointError
from secondguess.proof.certificate import CertifyOptions, certify, system_of

SIDE, SHADES = 4, 5
START = SHADES
DRAWN = {"max_tokens": SIDE * SIDE, "temperature": 1.0}


def write_image_model(folder: Path, seed: int, num_layers: int, shades: int = SHADES) -> Path:
    """Write a random ImageGPT for pictures of 4 x 4 pixels, as `save_pretrained` leaves it."""
    config = ImageGPTConfig(
        vocab_size=shades + 1, n_positions=SIDE * SIDE, n_embd=16, n_layer=num_layers, n_head=2,
        initializer_range=0.4,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        ImageGPTForCausalImageModeling(config).double().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("image-models")
    write_image_model(place / "target", 0, 2)
    write_image_model(place / "drafter", 1, 1)
    return place


@pytest.fixture(scope="module")
def loaded(folder: Path) -> Any:
    """Function that loads the target with a drafter."""

    def load_with(drafter: str = "none", controller: str | None = None, **settings: str) -> LLM:
        name = drafter.replace("FOLDER", str(folder))
        return load(folder / "target", name, controller=controller, dtype="float64", device="cpu", **settings)

    return cache(load_with)


@pytest.fixture(scope="module")
def module(folder: Path) -> ImageGPTForCausalImageModeling:
    found = ImageGPTForCausalImageModeling.from_pretrained(folder / "target", dtype=torch.float64)
    return found.eval()


def pictures(llm: LLM, seeds: Sequence[int]) -> list[list[int]]:
    """Return the pictures of some seeds, drawn as one batch."""
    params = [llm.sampling(**DRAWN, seed=seed) for seed in seeds]
    return [output.token_ids for output in llm.generate([[START]] * len(seeds), params)]


DRAFTERS = ["model:FOLDER/drafter", "model:FOLDER/target", "grid,width=4", "jacobi,width=4", "suffix,min=1"]


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_seed_gives_one_picture_with_every_drafter(loaded: Any, drafter: str) -> None:
    plain = pictures(loaded(), range(3))
    assert {len(picture) for picture in plain} == {SIDE * SIDE}
    assert len(set(map(tuple, plain))) == 3
    assert pictures(loaded(drafter, "fixed:5"), range(3)) == plain


@pytest.mark.parametrize("drafter", ["none", *DRAFTERS])
def test_greedy_pictures_are_those_of_the_module_to_the_last_pixel(
    loaded: Any, module: ImageGPTForCausalImageModeling, drafter: str
) -> None:
    tokens = [START, 2, 0]
    with torch.no_grad():
        while len(tokens) <= SIDE * SIDE:
            tokens.append(int(module(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    output = loaded(drafter, None if drafter == "none" else "fixed:5").generate([START, 2, 0], max_tokens=99)
    assert (output.token_ids, output.finish_reason) == (tokens[3:], "context")


def test_a_draft_model_reads_the_start_token(loaded: Any) -> None:
    """It is outside of the logits; the target itself as draft model is right only if it reads it."""
    output = loaded("model:FOLDER/target", "fixed:5").generate([START], **DRAWN, seed=1)
    assert output.stats.acceptance_rate == 1.0


def test_a_certificate_of_pictures_passes(loaded: Any) -> None:
    """Sampled by the loop, against the module without a cache."""
    llm = loaded("model:FOLDER/drafter", "fixed:1")
    certificate = certify(system_of(llm, [START]), CertifyOptions(num_samples=1000, num_tokens=2, limit=0.2))
    assert certificate.passed, str(certificate)
    assert certificate.acceptance_rate > 0


def test_an_image_model_is_described(folder: Path) -> None:
    found = describe(Checkpoint.resolve(folder / "target", dtype="float32", device="cpu"))
    assert (found.vocab_size, found.num_tokens, found.context_length) == (SHADES, SHADES + 1, SIDE * SIDE + 1)


@pytest.mark.parametrize(
    ("prompt", "settings", "message"),
    [
        (
            "a three",
            {},
            "expected token ids for .*target, .* have no text, got the text 'a three'; .* \\[5\\]",
        ),
        ([{"role": "user", "content": "a three"}], {}, "chat template"),
        ([START], {"stop": "x"}, "expected no stop strings .* got 'x'; give stop_token_ids"),
        ([START], {"prediction": "a three"}, "expected token ids for"),
        ([START + 1], {}, "expected token ids from 0 to 5, got 6"),
        ([START], {"stop_token_ids": [START]}, "token ids below 5"),
    ],
)
def test_text_for_a_model_of_pixels_is_refused(
    loaded: Any, prompt: Any, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(BadInputError, match=message):
        loaded().generate(prompt, **settings)


def test_draft_models_with_other_tokens_are_refused(folder: Path, tmp_path: Path) -> None:
    others = [write_image_model(tmp_path / "shades", 0, 1, shades=9), write_llama(tmp_path / "text", 0)]
    for other in others:
        with pytest.raises(CheckpointError, match=r"without tokenizer\.json"):
            load(folder / "target", f"model:{other}", dtype="float32", device="cpu")


@pytest.mark.parametrize("drafter", ["grid,width=2", "ngram,min=1", "suffix", "ngram,min=1+model:PATH"])
@pytest.mark.parametrize("verifier", ["auto", "block", "traversal"])
def test_tokens_that_the_model_cannot_draw_are_not_drafted(folder: Path, drafter: str, verifier: str) -> None:
    """The start token has an embedding but no logit; look-ups find it in this prompt."""
    drafter = drafter.replace("PATH", str(folder / "drafter"))
    llm = load(folder / "target", drafter, dtype="float64", verifier=verifier, controller="fixed:4")
    prompt = [3, START, 3, START, 3, START, 3]
    for settings in ({"temperature": 1.0}, {"temperature": 0.0}):
        output = llm.generate(prompt, max_tokens=SIDE * SIDE - len(prompt), **settings)
        assert max(output.token_ids) < START
