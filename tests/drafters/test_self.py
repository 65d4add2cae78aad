"""The target's own quantised copy as a drafter: its name, its memory, and how well it drafts."""

from __future__ import annotations

import pytest

from families import needs_kernels
from secondguess import load
from secondguess.errors import UnsupportedModelError
from secondguess.runtime.weight_format import INT4


@needs_kernels
def test_a_copy_drafts_nearly_what_the_target_writes() -> None:
    llm = load("builtin", "self:int4", controller="fixed:3", dtype="bfloat16")
    out = llm.generate("def read_lines(path):", max_tokens=64)
    assert out.stats.num_accepted > 0.8 * out.stats.num_drafted
    plain = load("builtin", "none", dtype="bfloat16")
    assert out.text == plain.generate("def read_lines(path):", max_tokens=64).text


@needs_kernels
def test_the_memory_of_a_copy_is_estimated() -> None:
    target = load("builtin", "none", dtype="bfloat16").target
    num_bytes = target.runtime.decoder.requantised(INT4).read_weights(1)
    assert 0.95 < num_bytes / target.checkpoint.copy_bytes(INT4) < 1.1


def test_a_target_on_another_runtime_is_refused_before_it_is_read() -> None:
    with pytest.raises(
        UnsupportedModelError, match=r"bfloat16.*int4.*builtin \(runtime fused, bfloat16\).*suffix"
    ):
        load("builtin", "self:int4", dtype="bfloat16", runtime="fused")
