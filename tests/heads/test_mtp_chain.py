"""Chains of MTP modules: the logits of Transformers' own chain, also after rounds with accepted and rejected nodes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from head_formats import Named, named
from safetensors.torch import load_file, save_file

from mtp_chain_cases import (
    HAS_ORACLE,
    NUM_LAYERS,
    NUM_MODULES,
    chain_drafts_as_published,
    drafted,
    expected_logits,
    make_drafter,
    target,
    write_chain,
)
from secondguess.core import Row
from secondguess.drafters.mtp import MtpDrafter
from secondguess.drafters.mtp_chain import MtpChainDrafter
from secondguess.runtime.modules.transformers import TransformersRuntime
from secondguess.sampling import SamplingParams
from unrolled_cases import TEXT

pytestmark = pytest.mark.skipif(not HAS_ORACLE, reason="this release of Transformers runs no MTP modules")


@pytest.mark.parametrize("length", [4, 5, 12, 20])
def test_a_chain_has_the_logits_of_transformers(length: int, tmp_path: Path) -> None:
    drafter, runtime = make_drafter(write_chain(tmp_path))
    row = Row(TEXT[:length], SamplingParams())
    runtime.request_hidden_states(drafter.hidden_layers)
    drafter.begin([row], runtime.begin([row]))
    found = drafted(drafter, row, [7, 2, 20])
    torch.testing.assert_close(found, expected_logits(TEXT[:length], [7, 2, 20]), atol=1e-5, rtol=0)


def test_logits_after_rounds_are_those_of_transformers(tmp_path: Path) -> None:
    assert chain_drafts_as_published(tmp_path)


def test_the_modules_of_a_target_are_found(tmp_path: Path) -> None:
    write_chain(tmp_path)
    drafter = named("mtp,tree=2x1x1", Named(TransformersRuntime(target()), str(tmp_path)))
    assert isinstance(drafter, MtpChainDrafter)
    assert len(drafter.head.heads) == NUM_MODULES
    assert drafter.room(Row(TEXT[:2], SamplingParams())) == 1
    tensors = load_file(tmp_path / "model.safetensors")
    alone = {
        name: tensor for name, tensor in tensors.items() if name.startswith(f"model.layers.{NUM_LAYERS}.")
    }
    save_file(alone, tmp_path / "model.safetensors")
    assert isinstance(named("mtp", Named(TransformersRuntime(target()), str(tmp_path))), MtpDrafter)
