"""Quantised copies of a target: they draft in the target's cache, whose committed entries they leave as they are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from checkpoints import read_module
from families import (
    FAMILIES,
    SIMILAR,
    logits_after_a_move,
    needs_kernels,
    random_tokens,
    row_of,
    trees,
    write_checkpoint,
)
from secondguess.core import Draft
from secondguess.errors import UnsupportedModelError
from secondguess.runtime.cpu.decoder import NativeDecoder
from secondguess.runtime.cpu.runtime import NativeRuntime
from secondguess.runtime.decoder.fused import FusedRuntime, fuse
from secondguess.runtime.weight_format import BFLOAT16, INT4, INT8, WeightFormat

pytestmark = needs_kernels

TOKENS = random_tokens(24, seed=3)


@pytest.fixture(scope="module", params=["llama", "qwen2", "gemma3", "mixtral", "qwen3-moe-mixed", "gpt-oss"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tied and untied heads, biases, norms of outputs, experts."""
    return write_checkpoint((FAMILIES | SIMILAR)[request.param](), tmp_path_factory.mktemp("copied"))


def native(path: Path, weight_format: WeightFormat = BFLOAT16) -> NativeRuntime:
    decoder = fuse(read_module(str(path), torch.bfloat16).eval(), packed=False)
    assert decoder is not None
    return NativeRuntime(NativeDecoder(decoder, weight_format))


def entries(target: NativeRuntime, slot: int, length: int) -> Tensor:
    return torch.stack([block[slot, :, :length] for block in (*target.cache.keys, *target.cache.values)])


@pytest.mark.parametrize("weight_format", [INT8, INT4], ids=lambda each: each.name)
def test_weights_rounded_later_are_those_rounded_at_loading(
    checkpoint: Path, weight_format: WeightFormat
) -> None:
    rounded = NativeRuntime(native(checkpoint).decoder.requantised(weight_format))
    tokens = torch.tensor([TOKENS])
    assert torch.equal(rounded.probe(tokens).logits, native(checkpoint, weight_format).probe(tokens).logits)


def test_a_copy_drafts_behind_the_cache_of_its_target(checkpoint: Path) -> None:
    """Step by step or at once, in chains and trees; committed entries and the target's logits stay the same bits."""
    target = native(checkpoint)
    copy = target.quantised_copy(INT4)
    rows = [row_of(TOKENS[:9]), row_of(TOKENS[:14])]
    target.begin(rows)
    chains = Draft.chains([TOKENS[9:13], TOKENS[14:18]])
    expected = target.score(rows, chains).logits
    target.rewind(rows, [8, 13])
    before = [entries(target, slot, length) for slot, length in ((0, 8), (1, 13))]
    at_once = copy.draft_logits(rows, chains, 0)
    parts = [
        copy.draft_logits(rows, Draft.chains([TOKENS[9 : 9 + n], TOKENS[14 : 14 + n]]), n) for n in range(5)
    ]
    assert torch.equal(torch.cat(parts, 1), at_once)
    assert not torch.equal(at_once, expected)
    tree = trees(([5, TOKENS[9], TOKENS[10]], [-1, -1, 1]), ([TOKENS[14], 6, TOKENS[15]], [-1, 0, 0]))
    of_tree = copy.draft_logits(rows, tree, 0)
    assert torch.equal(of_tree[0, [0, 2, 3]], at_once[0, :3])
    assert torch.equal(of_tree[1, [0, 1, 3]], at_once[1, :3])
    for slot, length in ((0, 8), (1, 13)):
        assert torch.equal(entries(target, slot, length), before[slot])
    assert torch.equal(target.score(rows, chains).logits, expected)


def test_first_layers_that_were_run_before_a_copy_are_run_again(checkpoint: Path) -> None:
    """An early exit drafts for one row, and the copy for the other."""
    found = []
    for drafts in (False, True):
        target = native(checkpoint)
        rows = [row_of(TOKENS[:9]), row_of(TOKENS[:14])]
        target.begin(rows)
        if drafts:
            target.run_first_layers(rows, Draft.empty(2), 1)
            target.quantised_copy(INT4).draft_logits(rows[1:], Draft.empty(1), 0)
        found.append(target.score(rows, Draft.chains([TOKENS[9:10], TOKENS[14:15]])).logits)
    assert torch.equal(*found)


def test_entries_of_a_draft_move_with_their_row(checkpoint: Path) -> None:
    """Another thread may release its row between two steps of a draft."""
    found, expected = logits_after_a_move(native(checkpoint), TOKENS)
    assert torch.equal(found, expected)


def test_a_copy_follows_the_cache_when_it_is_replaced(checkpoint: Path) -> None:
    """By one of the same size, as after a few long texts."""
    target = native(checkpoint)
    copy = target.quantised_copy(INT4)
    replaced = []
    for tokens in (TOKENS[:9], TOKENS[5:14]):
        row, nothing = row_of(tokens), Draft.empty(1)
        target.begin([row])
        found = copy.draft_logits([row], nothing, 0)
        target.release(row)
        target.slots.forget()
        replaced.append(target.cache.keys)
        target.cache.clear()
    fresh = native(checkpoint)
    fresh.begin([row])
    assert torch.equal(found, fresh.quantised_copy(INT4).draft_logits([row], nothing, 0))


def test_only_targets_in_bfloat16_on_the_kernels_are_copied(checkpoint: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"int4.*weights in int8.*bfloat16"):
        native(checkpoint, INT8).quantised_copy(INT4)
    decoder = fuse(read_module(str(checkpoint), torch.bfloat16).eval(), packed=False)
    assert decoder is not None
    with pytest.raises(UnsupportedModelError, match=r"a FusedRuntime.*bfloat16"):
        FusedRuntime(decoder).quantised_copy(INT4)
