"""The target's own quantised copy as a drafter: its name, its memory, and how well it drafts."""

from __future__ import annotations

import gc
import shutil
import weakref
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import transformers

from families import COPIED, RECURRENT, needs_kernels, write_checkpoint
from secondguess import GuidedPrompt, load
from secondguess.bench.roster import all_drafters
from secondguess.bench.systems import Models
from secondguess.builtin import builtin_paths
from secondguess.checkpoint.memory import peak_memory
from secondguess.checkpoint.plan import Checkpoint
from secondguess.core import Draft, Row
from secondguess.errors import BadInputError, UnsupportedModelError
from secondguess.pairing import default_drafter
from secondguess.runtime.cached import ForwardCopy
from secondguess.runtime.cpu.linear import KernelLinear
from secondguess.runtime.cpu.weights import Blocks
from secondguess.runtime.modules.packing import copy_quantised
from secondguess.runtime.weight_format import INT4


@needs_kernels
def test_a_copy_drafts_nearly_what_the_target_writes() -> None:
    llm = load("builtin", "self:int4", controller="fixed:3", dtype="bfloat16")
    out = llm.generate("def read_lines(path):", max_tokens=64)
    assert out.stats.num_accepted > 0.8 * out.stats.num_drafted
    plain = load("builtin", "none", dtype="bfloat16")
    assert out.text == plain.generate("def read_lines(path):", max_tokens=64).text


@needs_kernels
def test_a_copy_drafts_trees_and_runs_each_node_once(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = load("builtin", "self:int4,tree=2x1x1", controller="fixed:3", dtype="bfloat16")
    draft_logits, seen = ForwardCopy.draft_logits, set()

    def note(copy: ForwardCopy, rows: Sequence[Row], draft: Draft, num_known: int) -> torch.Tensor:
        seen.add((draft.num_nodes, num_known))
        return draft_logits(copy, rows, draft, num_known)

    monkeypatch.setattr(ForwardCopy, "draft_logits", note)
    stats = llm.generate("def read_lines(path):", max_tokens=64).stats
    assert stats.num_rounds < 64 / 2.5
    assert seen == {(0, 0), (2, 1), (4, 3)}


@needs_kernels
def test_the_memory_of_a_copy_is_estimated() -> None:
    target = load("builtin", "none", dtype="bfloat16").target
    kept = target.runtime.decoder.requantised(INT4)._kept
    num_bytes = sum(blocks.tensors[-1].numel() for blocks in kept if isinstance(blocks, Blocks))
    assert 0.95 < num_bytes / target.checkpoint.copy_bytes(INT4) < 1.1


def test_a_target_on_another_runtime_is_refused_before_it_is_read() -> None:
    with pytest.raises(UnsupportedModelError, match=r"int4.*builtin \(runtime fused, bfloat16\).*suffix"):
        load("builtin", "self:int4", dtype="bfloat16", runtime="fused")


@pytest.fixture
def other_target(tmp_path: Path) -> str:
    """The built-in target under another name, so that it has no draft model of its own."""
    return str(shutil.copytree(builtin_paths().target, tmp_path / "target"))


@needs_kernels
def test_a_target_without_a_draft_model_drafts_with_its_copy_by_default(other_target: str) -> None:
    llm = load(other_target, dtype="bfloat16")
    assert llm.drafter.kinds == ("suffix", "self")
    assert load(other_target, dtype="float32").drafter.kinds == ("suffix",)
    assert load(other_target, dtype="bfloat16", quantize="int4").drafter.kinds == ("suffix",)
    out = llm.generate("def read_lines(path):", max_tokens=64)
    assert out.stats.num_accepted > 0
    assert (
        out.text
        == load(other_target, "none", dtype="bfloat16").generate("def read_lines(path):", max_tokens=64).text
    )


@needs_kernels
def test_a_copy_without_room_in_memory_is_left_out(
    other_target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = Checkpoint.resolve(other_target, dtype="bfloat16", device="cpu")
    needed, copy = peak_memory([target.memory()]), target.copy_bytes(INT4)
    # The copy, as much while it is made, and as much for longer caches.
    for room, expected in ((int(2.9 * copy), "suffix"), (int(3.1 * copy), "suffix+self:int4")):
        monkeypatch.setattr(
            "secondguess.checkpoint.plan.available_memory", lambda device, room=room: needed + room
        )
        assert default_drafter(other_target, target) == expected


@needs_kernels
def test_a_target_whose_kernels_fail_their_check_drafts_without_a_copy(
    other_target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("secondguess.checkpoint.loader._native_runtime", lambda *_: None)
    assert load(other_target, dtype="bfloat16").drafter.kinds == ("suffix",)
    with pytest.raises(UnsupportedModelError, match="int4"):
        load(other_target, "self:int4", dtype="bfloat16")


@needs_kernels
def test_a_guided_prompt_uses_the_parts_that_run_no_layers_of_the_target(other_target: str) -> None:
    texts, prompts = [], [GuidedPrompt("def add(a, b):", negative="def", scale=1.5)]
    for drafter in ("none", "suffix+self:int4"):
        llm = load(
            other_target, drafter, dtype="bfloat16", controller=None if drafter == "none" else "fixed:3"
        )
        texts.append(llm.generate(prompts, max_tokens=32)[0].text)
    assert texts[0] == texts[1]
    for refused in ("self:int4", "suffix+self:int4"):
        with pytest.raises(BadInputError, match="guided prompt, got self"):
            load(other_target, refused, dtype="bfloat16").generate(prompts, draft_with="self")


@needs_kernels
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_module_drafts_with_a_copy_by_default(tmp_path: Path, dtype: str) -> None:
    path = str(write_checkpoint(RECURRENT["lfm2"](), tmp_path))
    llm = load(path, dtype=dtype, controller="fixed:3")
    assert llm.drafter.kinds == ("suffix", "self")
    out = llm.generate(list(range(5, 15)), max_tokens=24, temperature=1.0, seed=3, draft_with="self")
    assert out.stats.num_accepted > 0
    assert load(path, dtype=dtype, quantize="int8").drafter.kinds == ("suffix",)


@needs_kernels
def test_the_memory_of_a_copy_of_a_module_is_estimated(tmp_path: Path) -> None:
    config = RECURRENT["lfm2"]()
    config.hidden_size = config.intermediate_size = 256
    target = load(str(write_checkpoint(config, tmp_path)), "none", dtype="float32").target
    copy = copy_quantised(target.runtime.model, INT4)
    num_bytes = sum(each.num_bytes for each in copy.modules() if isinstance(each, KernelLinear))
    assert 0.95 < num_bytes / target.checkpoint.copy_bytes(INT4) < 1.1


@needs_kernels
def test_the_copy_of_a_module_is_freed_with_its_drafter(tmp_path: Path) -> None:
    runtime = load(str(write_checkpoint(COPIED["lfm2"](), tmp_path)), "none", dtype="float32").target.runtime
    copy = runtime.quantised_copy(INT4)
    assert runtime.quantised_copy(INT4) is copy
    module = weakref.ref(copy.forward.call.model)  # type: ignore[attr-defined]
    assert copy_quantised(runtime.model, INT4) is module()  # type: ignore[attr-defined]
    del copy
    gc.collect()
    assert module() is None


@needs_kernels
def test_a_module_that_cannot_be_copied_drafts_without_a_copy(tmp_path: Path) -> None:
    config = transformers.MambaConfig(
        vocab_size=96, hidden_size=16, state_size=4, num_hidden_layers=2, time_step_rank=2
    )
    path = str(write_checkpoint(config, tmp_path))
    assert load(path).drafter.kinds == ("suffix",)
    with pytest.raises(UnsupportedModelError, match="int4"):
        load(path, "self:int4")
    for quantize in ("int8", "int4"):
        with pytest.raises(UnsupportedModelError, match="computes with their weights in its own code"):
            load(path, "suffix", quantize=quantize)


@needs_kernels
def test_copies_in_use_are_shared() -> None:
    runtime = load("builtin", "none", dtype="bfloat16").target.runtime
    first = runtime.quantised_copy(INT4)
    assert runtime.quantised_copy(INT4) is first
    again = weakref.ref(first)
    del first
    gc.collect()
    assert again() is None


@needs_kernels
def test_benchmarks_have_the_default_drafter_of_load(
    other_target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert Models(other_target, "bfloat16", "cpu").default_drafter == "suffix+self:int4"
    assert all_drafters(other_target, "suffix+self:int4") == (
        "suffix+self:int4",
        "suffix",
        "self:int4",
        "ngram",
    )
    monkeypatch.setattr("secondguess.checkpoint.loader._native_runtime", lambda *_: None)
    assert Models(other_target, "bfloat16", "cpu").default_drafter == "suffix"
