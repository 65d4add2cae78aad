"""Quantised copies of Transformers modules: they draft in the target's cache, which they leave as it was."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from families import (
    COPIED,
    FAMILIES,
    assert_near,
    logits_after_a_move,
    needs_kernels,
    random_tokens,
    row_of,
    runtime_of,
    trees,
    write_checkpoint,
)
from secondguess.core import Draft
from secondguess.runtime.cached import CachedRuntime
from secondguess.runtime.cpu.linear import KernelLinear
from secondguess.runtime.weight_format import INT4

pytestmark = needs_kernels

TOKENS = random_tokens(24, seed=3)
TOLERANCE = 0.03
"""Inputs of layers are rounded to 8 bits, so that a last bit may change a code."""


@pytest.fixture(scope="module", params=["llama", "gemma3", "gemma4", "bloom", *COPIED])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Whole batches and row by row, windows, recurrent states."""
    return write_checkpoint((FAMILIES | COPIED)[request.param](), tmp_path_factory.mktemp("copied"))


def module(path: Path) -> CachedRuntime:
    return runtime_of(path, "transformers")


def test_a_copy_drafts_behind_the_cache_of_its_target(checkpoint: Path) -> None:
    """Step by step or at once, in chains and trees; the target's logits stay the same bits."""
    target = module(checkpoint)
    copy = target.quantised_copy(INT4)
    rows = [row_of(TOKENS[:9]), row_of(TOKENS[:14])]
    target.begin(rows)
    chains = Draft.chains([TOKENS[9:13], TOKENS[14:18]])
    expected = target.score(rows, chains).logits
    target.rewind(rows, [8, 13])
    at_once = copy.draft_logits(rows, chains, 0)
    parts = [
        copy.draft_logits(rows, Draft.chains([TOKENS[9 : 9 + n], TOKENS[14 : 14 + n]]), n) for n in range(5)
    ]
    assert_near(torch.cat(parts, 1), at_once, TOLERANCE)
    assert not torch.equal(at_once, expected)
    assert float((at_once - expected).norm()) < 0.5 * float(expected.norm())
    tree = trees(([5, TOKENS[9], TOKENS[10]], [-1, -1, 1]), ([TOKENS[14], 6, TOKENS[15]], [-1, 0, 0]))
    of_tree = copy.draft_logits(rows, tree, 0)
    assert_near(of_tree[0, [0, 2, 3]], at_once[0, :3], TOLERANCE)
    assert_near(of_tree[1, [0, 1, 3]], at_once[1, :3], TOLERANCE)
    assert torch.equal(target.score(rows, chains).logits, expected)


def test_entries_of_a_draft_move_with_their_row(checkpoint: Path) -> None:
    """Another thread may release its row between two steps of a draft."""
    found, expected = logits_after_a_move(module(checkpoint), TOKENS)
    assert_near(found, expected, TOLERANCE)


def test_only_linear_layers_of_the_copy_take_memory(checkpoint: Path) -> None:
    target = module(checkpoint)
    copy = target.quantised_copy(INT4)
    shared = {id(each) for each in target.model.parameters()}  # type: ignore[attr-defined]
    assert {id(each) for each in copy.forward.call.model.parameters()} <= shared  # type: ignore[attr-defined]
    layers = [each for each in copy.forward.call.model.modules() if isinstance(each, KernelLinear)]  # type: ignore[attr-defined]
    assert layers
    assert all(each.weight_format.is_quantised for each in layers)
    assert not any(isinstance(each, KernelLinear) for each in target.model.modules())  # type: ignore[attr-defined]
