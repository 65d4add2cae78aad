"""Rows that join and leave between rounds: prefill in pieces, reuse of prefixes, a limit of rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from families import needs_kernels
from gemma_cases import gemma_runtime
from head_cases import HEADS, NEEDS_GEMMA, NEEDS_NATIVE, tiny_target
from secondguess.controllers import make_controller
from secondguess.core import Row
from secondguess.decode import Batch, Components, decode
from secondguess.drafters.base import Drafter
from secondguess.drafters.combined import CombinedDrafter
from secondguess.drafters.model import ModelDrafter
from secondguess.drafters.none import NoDrafter
from secondguess.drafters.suffix import SuffixDrafter, SuffixOptions
from secondguess.errors import BadInputError
from secondguess.runtime.base import Runtime
from secondguess.runtime.cached import CachedRuntime
from secondguess.runtime.cpu.decoder import NativeDecoder
from secondguess.runtime.cpu.runtime import NativeRuntime
from secondguess.runtime.decoder.fused import FusedRuntime, fuse
from secondguess.runtime.slots import SlotTable
from secondguess.sampling import SamplingParams
from secondguess.verifiers import make_verifier

VOCAB_SIZE = 31
TARGET = fuse(tiny_target(VOCAB_SIZE), packed=False)
DRAFT_MODEL = fuse(tiny_target(VOCAB_SIZE, num_layers=1, seed=3), packed=False)


def fused(decoder: object) -> FusedRuntime:
    return FusedRuntime(decoder)  # type: ignore[arg-type]


DRAFTERS: dict[str, Callable[[Runtime], Drafter]] = {
    "none": lambda target: NoDrafter(),
    "suffix": lambda target: SuffixDrafter(SuffixOptions(min=1)),
    "model": lambda target: ModelDrafter(fused(DRAFT_MODEL), "model:tiny", VOCAB_SIZE),
    "suffix+model": lambda target: CombinedDrafter(
        [SuffixDrafter(SuffixOptions(min=8)), DRAFTERS["model"](target)], VOCAB_SIZE
    ),
    **{kind: lambda target, make=make: make(target, None) for kind, make in HEADS.items()},
}
every_drafter = pytest.mark.parametrize(
    "drafter",
    [pytest.param(each, marks=[needs_kernels] if each in NEEDS_NATIVE else []) for each in DRAFTERS],
)


@cache
def native_decoder() -> NativeDecoder:
    return NativeDecoder(fuse(tiny_target(VOCAB_SIZE).bfloat16(), packed=False))


SHORT = "eagle3-narrow"
"""Drafter with a context that is shorter than the prompts of these tests."""


def target_of(drafter: str) -> CachedRuntime:
    """Return a new target that supports the drafter."""
    if drafter in NEEDS_GEMMA:
        return gemma_runtime()
    return NativeRuntime(native_decoder()) if drafter in NEEDS_NATIVE else fused(TARGET)


def components_of(drafter: str, controller: str = "fixed:3", target_like: str = "") -> Components:
    """Return the drafter with a target that supports it, or another drafter."""
    target = target_of(target_like or drafter)
    return Components(target, DRAFTERS[drafter](target), make_verifier("auto"), make_controller(controller))


def row_of(prompt: Sequence[int], max_tokens: int = 12, temperature: float = 0.0) -> Row:
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=5)
    return Row(list(prompt), params, seed=5, coupled=temperature > 0)


def text(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCAB_SIZE, (length,), generator=generator).tolist()


def plain_text(row: Row, drafter: str) -> list[int]:
    """The output of a row of `row_of` that decodes alone, without drafts, on the drafter's target."""
    params, like = row.params, drafter if drafter in (*NEEDS_NATIVE, *NEEDS_GEMMA) else ""
    return plain_output(tuple(row.tokens[: row.num_prompt]), params.max_tokens, params.temperature, like)


@cache
def plain_output(prompt: tuple[int, ...], max_tokens: int, temperature: float, like: str) -> list[int]:
    alone = row_of(prompt, max_tokens, temperature)
    for _ in decode(components_of("none", target_like=like), [alone]):
        pass
    return alone.output


class CountsTokens:
    """Count the tokens of each forward pass of a runtime."""

    def __init__(self, runtime: CachedRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
        self.widths: list[int] = []
        run = runtime.run

        def counting(tokens: torch.Tensor, *arguments: object, **named: object) -> object:
            self.widths.append(tokens.numel())
            return run(tokens, *arguments, **named)  # type: ignore[arg-type]

        monkeypatch.setattr(runtime, "run", counting)


@every_drafter
def test_a_long_prompt_delays_the_other_rows_by_one_budget_per_round(drafter, monkeypatch):
    components = components_of(drafter)
    counter = CountsTokens(components.target, monkeypatch)
    batch = Batch(components, max_prefill_tokens=16)
    early = [row_of([1, 2, 3], max_tokens=40), row_of([4, 5], max_tokens=40)]
    batch.add(early)
    batch.step()
    late = row_of(text(80), max_tokens=12)
    batch.add([late])
    for _ in range(4):  # 79 tokens in pieces of 16
        del counter.widths[:]
        commits = batch.step()
        assert [commit.row for commit in commits] == early
        assert counter.widths[0] == 16
        assert sum(counter.widths[1:]) <= 2 * (3 + 1)
    assert late in [commit.row for commit in batch.step()]
    while batch:
        batch.step()
    for row in [*early, late]:
        assert row.output == plain_text(row, drafter)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("drafter", ["model", "eagle3", "suffix+model"])
def test_the_prefill_of_the_drafter_is_spread_over_rounds_too(drafter, temperature, monkeypatch):
    components = components_of(drafter)
    runtime = getattr(components.drafter, "parts", [components.drafter])[-1].runtime
    batch = Batch(components, max_prefill_tokens=16)
    early = [row_of([1, 2, 3], 40, temperature), row_of([4, 5], 40, temperature)]
    late = row_of(text(80), 20, temperature)
    batch.add(early)
    batch.step()
    counter = CountsTokens(runtime, monkeypatch)
    batch.add([late])
    num_waiting_steps = 0
    while batch:
        del counter.widths[:]
        batch.step()
        assert max(counter.widths, default=0) <= 3 * 17  # the last tokens go with the first draft step
        num_waiting_steps += late in components.drafter.unfinished
    assert num_waiting_steps >= 3
    assert components.recorder.of(late).num_drafted > 0
    for row in [*early, late]:
        assert row.output == plain_text(row, drafter)


def test_the_prefill_of_the_drafter_is_part_of_a_round_of_one_row():
    components = components_of("model")
    batch = Batch(components, max_prefill_tokens=1)
    row = row_of(text(40), 20)
    batch.add([row])
    while not batch.step():
        pass
    assert components.recorder.of(row).num_drafted > 0


def test_rows_with_the_prompt_of_another_wait_for_its_prefill(monkeypatch):
    components = components_of("none")
    counter = CountsTokens(components.target, monkeypatch)
    batch = Batch(components, max_prefill_tokens=16)
    batch.add([row_of(text(80), 4) for _ in range(3)])
    while not batch.step():
        pass
    assert counter.widths == [16, 16, 16, 16, 15, 3]


def test_a_row_that_leaves_during_the_prefill_of_the_drafter_is_forgotten():
    components = components_of("model")
    batch = Batch(components, max_prefill_tokens=16)
    late = row_of(text(80), 20)
    batch.add([row_of([1, 2, 3], 40), late])
    while late not in components.drafter.unfinished:
        batch.step()
    batch.remove([late])
    assert components.drafter.unfinished == []
    batch.step()


@every_drafter
@pytest.mark.parametrize("is_live", [False, True], ids=["released", "live"])
def test_only_the_unshared_part_of_a_prompt_is_prefilled(drafter, is_live, monkeypatch):
    components = components_of(drafter)
    first, second = row_of(text(60)), row_of([*text(54), *text(6, seed=1)])
    batch = Batch(components)
    batch.add([first])
    batch.step()
    while batch and not is_live:
        batch.step()
    counter = CountsTokens(components.target, monkeypatch)
    drafted = isinstance(getattr(components.drafter, "runtime", None), CachedRuntime)
    of_drafter = CountsTokens(components.drafter.runtime, monkeypatch) if drafted else None
    batch.add([second])
    while batch:
        batch.step()
    assert max(counter.widths) <= 16
    if drafter == SHORT:  # the prompt is longer than its context
        assert of_drafter is not None
        assert not of_drafter.widths
    else:
        assert of_drafter is None or max(of_drafter.widths) <= 16
    assert [first.output, second.output] == [plain_text(first, drafter), plain_text(second, drafter)]
    fresh, alone = components_of(drafter), row_of([*text(54), *text(6, seed=1)])
    for _ in decode(fresh, [alone]):
        pass
    assert components.recorder.of(second).num_accepted == fresh.recorder.of(alone).num_accepted


@every_drafter
@pytest.mark.parametrize("budget", [None, 16])
def test_samples_of_one_prompt_share_its_prefill(drafter, budget, monkeypatch):
    components = components_of(drafter)
    counter = CountsTokens(components.target, monkeypatch)
    samples = [row_of(text(60), temperature=1.0) for _ in range(4)]
    for number, row in enumerate(samples):
        row.sample_index = number
    batch = Batch(components, budget)
    batch.add(samples)
    while not batch.decoding:
        batch.prefill(batch.prefilling)
    assert batch.decoding == samples
    assert sum(counter.widths) == components.target.num_prefilled == 59
    while batch:
        batch.step()
    # not 4 * 59; rows that wait for their share go on decoding
    assert drafter != "model" or components.drafter.runtime.num_prefilled <= (59 if budget is None else 75)
    for number, row in enumerate(samples):
        fresh, alone = components_of(drafter), row_of(text(60), temperature=1.0)
        alone.sample_index = number
        for _ in decode(fresh, [alone]):
            pass
        assert row.output == alone.output
        if budget is None:  # else the drafter's own prefill takes several rounds
            assert components.recorder.of(row).num_accepted == fresh.recorder.of(alone).num_accepted
    assert len({tuple(row.output) for row in samples}) == 4


@pytest.mark.parametrize("drafter", ["none", "model"])
def test_prompts_that_begin_alike_are_prefilled_from_where_they_differ(drafter, monkeypatch):
    components = components_of(drafter)
    counter = CountsTokens(components.target, monkeypatch)
    rows = [row_of([*text(54), *text(6, seed=seed)]) for seed in (1, 2, 3)]
    batch = Batch(components)
    batch.add(rows)
    batch.prefill(rows)
    assert counter.widths == [59, 5, 5]
    while batch:
        batch.step()
    assert [row.output for row in rows] == [plain_text(row, drafter) for row in rows]


@every_drafter
def test_a_prefill_that_failed_can_be_repeated(drafter, monkeypatch):
    components = components_of(drafter)
    rows = [row_of(text(30)), row_of(text(30)), row_of(text(20, seed=1))]
    batch = Batch(components, max_prefill_tokens=40)
    batch.add(rows)
    with monkeypatch.context() as patch:
        patch.setattr(components.drafter, "begin", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            batch.prefill(rows)
    while batch:
        batch.step()
    assert [row.output for row in rows] == [plain_text(row, drafter) for row in rows]
    for row in rows:
        fresh, alone = components_of(drafter), row_of(row.tokens[: row.num_prompt])
        for _ in decode(fresh, [alone]):
            pass
        assert components.recorder.of(row).num_accepted == fresh.recorder.of(alone).num_accepted


@pytest.mark.parametrize("drafter", ["eagle3", "mtp", "dspark"])
def test_an_interrupted_admission_leaves_no_row_behind(drafter, monkeypatch):
    components = components_of(drafter)
    slots = SlotTable.admit

    def interrupted(*given: object, **named: object) -> object:
        slots(*given, **named)  # type: ignore[arg-type]
        raise KeyboardInterrupt

    batch, rows = Batch(components), [row_of(text(9)), row_of(text(5))]
    with monkeypatch.context() as patch:
        patch.setattr(SlotTable, "admit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            batch.add(rows)
    batch.close()
    made = components.drafter
    held = made.runtime.slots
    assert len(held) == components.target.num_live_rows == 0
    for _ in decode(components, rows):
        pass
    assert [row.output for row in rows] == [plain_text(row, drafter) for row in rows]


def test_limits_below_1_are_refused():
    with pytest.raises(BadInputError, match="max_prefill_tokens of at least 1, got 0"):
        Batch(components_of("none"), max_prefill_tokens=0)


@every_drafter
@settings(max_examples=8, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(1, 40),
            st.integers(0, 40),
            st.integers(1, 9),
            st.sampled_from([0.0, 1.0]),
            st.booleans(),
        ),
        min_size=3,
        max_size=8,
    ),
    st.integers(1, 30),
)
def test_texts_equal_plain_decoding_while_rows_join_and_leave(drafter, arrivals, budget):
    """Prompts share prefixes of one text; between any two rounds a row joins, or one is cancelled."""
    components = components_of(drafter, "cost")
    batch = Batch(components, budget)
    rows, cancelled = [], []
    for length, num_shared, max_tokens, temperature, cancels in arrivals:
        prompt = [*text(40)[: min(num_shared, length - 1)], *text(length, seed=length)][:length]
        rows.append(row_of(prompt, max_tokens, temperature))
        batch.add(rows[-1:])
        batch.step()
        if cancels and not rows[0].finished and rows[0] not in cancelled:
            cancelled.append(rows[0])
            batch.remove([rows[0]])
    while batch:
        batch.step()
    for row in rows:
        expected = plain_text(row, drafter)
        assert row.output == expected[: row.num_output]
        assert row.finished or row in cancelled
    assert components.target.num_live_rows == 0
