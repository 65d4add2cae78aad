"""Smoke test for GPUs: the same text with any drafter on every device of the machine."""

from __future__ import annotations

import pytest
import torch

import secondguess
from builtin_cases import with_drafter
from secondguess.api import LLM

DRAFTERS = [
    "suffix",
    "model:builtin-draft",
    "model:builtin-draft,tree=2x2x1",
    "suffix+model:builtin-draft",
    "self:int4",
    "suffix+self:int4",
    "medusa",
    "mtp",
    "eagle",
    "dspark",
]
ON_GPUS = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device"),
]
CASES = [
    *(pytest.param("cuda", drafter, marks=ON_GPUS) for drafter in DRAFTERS),
    # On a CPU, which has the equality matrices of other files, this only shows that the test itself works.
    ("cpu", DRAFTERS[-1]),
]
PROMPTS = ["def add(a, b):", "class Stack:\n    def push(self", "def add(a, b):\n    return"]


@pytest.fixture(scope="module")
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module", params=[0.0, 1.0])
def settings(request: pytest.FixtureRequest, device: str) -> dict[str, float | int]:
    max_tokens = 6 if device == "cpu" else 16
    return {"temperature": request.param, "max_tokens": max_tokens} | ({"seed": 3} if request.param else {})


@pytest.fixture(scope="module")
def pair(device: str) -> LLM:
    runtime = "transformers" if device == "cpu" else "auto"
    return secondguess.load("builtin", "model:builtin-draft", dtype="float32", device=device, runtime=runtime)


@pytest.fixture(scope="module")
def plain(pair: LLM, settings: dict[str, float | int]) -> list[list[int]]:
    return texts("none", pair, settings)


def texts(drafter: str, pair: LLM, settings: dict[str, float | int]) -> list[list[int]]:
    llm = with_drafter(pair, drafter, None if drafter == "none" else "fixed:3")
    llm.reset_prefix_cache()
    outputs = llm.generate(PROMPTS, **settings)
    again = llm.generate(PROMPTS[::-1], **settings)  # from prefixes that are cached
    assert isinstance(outputs, list)
    assert [output.token_ids for output in again[::-1]] == [output.token_ids for output in outputs]
    return [output.token_ids for output in outputs]


@pytest.mark.parametrize(("device", "drafter"), CASES, indirect=["device"], scope="module")
def test_text_equals_plain_decoding(drafter, pair, settings, plain):
    assert texts(drafter, pair, settings) == plain
