"""The shipped heads: each loads by its name without a path, drafts, and keeps the target's text."""

from __future__ import annotations

from pathlib import Path

import pytest

import secondguess
from builtin_cases import with_drafter
from secondguess.api import LLM
from secondguess.builtin import builtin_paths, head_path
from secondguess.checkpoint.weight_files import hash_weights
from secondguess.heads.files import read_provenance
from secondguess.train.head_card import card_text

SHIPPED = ("early-exit", "medusa", "mtp", "eagle", "dspark")
PROMPT = "def read_lines(path):"
LARGEST_TOGETHER = 45_000_000
"""Bytes of the weights of the target and of all shipped drafters."""

every_kind = pytest.mark.parametrize("kind", SHIPPED)


def folder_of(kind: str) -> Path:
    folder = head_path(kind)
    assert folder is not None, f"no {kind} in the package"
    return folder


@pytest.fixture(scope="module")
def pair() -> LLM:
    return secondguess.load("builtin", "model:builtin-draft", dtype="float32")


@pytest.fixture(scope="module")
def plain_text(pair: LLM) -> str:
    return with_drafter(pair, "none").generate(PROMPT, max_tokens=24).text


@every_kind
@pytest.mark.parametrize("tree", ["", ",tree=2x1"], ids=["chain", "tree"])
def test_a_shipped_head_drafts_and_keeps_the_text(kind: str, tree: str, pair: LLM, plain_text: str) -> None:
    llm = with_drafter(pair, kind + tree, "fixed:3")
    llm.reset_prefix_cache()
    out = llm.generate(PROMPT, max_tokens=24)
    assert out.text == plain_text
    assert out.stats.num_drafted > 0


@every_kind
def test_a_shipped_head_was_trained_for_the_builtin_target(kind: str) -> None:
    provenance = read_provenance(folder_of(kind))
    assert provenance is not None
    assert provenance.fingerprint == hash_weights(builtin_paths().target)
    assert provenance.training["minutes"] > 0
    assert (folder_of(kind) / "README.md").stat().st_size > 500


@every_kind
def test_the_card_of_a_shipped_head_has_its_measurements(kind: str) -> None:
    """A drafter in backoff has no speedup, and the card's rows are those that training writes."""
    provenance = read_provenance(folder_of(kind))
    assert provenance is not None
    figures = provenance.figures
    assert (
        (figures["speedup"] is None) == (figures["cost_ratio"] is None) == (figures["acceptance_length"] == 1)
    )
    card = (folder_of(kind) / "README.md").read_text()
    written = card_text(provenance, f"secondguess generate PROMPT --model builtin --drafter {kind}:FOLDER")
    assert card == written
    assert "sampling at temperature 1 without filters" in card
    assert "held-out text that the target wrote at temperatures 0, 0.7, 1." in card
    assert "greedy decoding (temperature 0)" in card


def test_shipped_weights_are_small() -> None:
    folders = [*builtin_paths(), *map(folder_of, SHIPPED)]
    weights = [path.stat().st_size for folder in folders for path in folder.glob("*.safetensors")]
    assert sum(weights) < LARGEST_TOGETHER
