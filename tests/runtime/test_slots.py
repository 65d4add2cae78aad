"""Slots: entries of live rows and of released rows stay with their tokens, and prefixes are reused."""

from __future__ import annotations

import errno
import os
import sys
from functools import partial
from itertools import count
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from interruptions import interrupted_at
from secondguess.core import Row
from secondguess.errors import OutOfMemoryError
from secondguess.runtime import cache, slots
from secondguess.runtime.cache import IndexedCache, KeyValueCache
from secondguess.runtime.slots import CachedRow, SlotTable, common_prefix
from secondguess.sampling import SamplingParams

every_cache = pytest.mark.parametrize("kind", [KeyValueCache, IndexedCache])


class TokenCache:
    """Cache whose entries are the tokens themselves, with the slot table under test."""

    def __init__(self, kind: type[KeyValueCache] = KeyValueCache) -> None:
        self.cache = kind(torch.device("cpu"))
        self.slots = SlotTable(self.cache)
        self.num_written = 0

    def admit(self, tokens: list[int], reuse_limit: int | None = None) -> Row:
        row = Row(list(tokens), SamplingParams())
        self.slots.admit([row], [reuse_limit])
        self.write(row)
        return row

    @torch.inference_mode()
    def write(self, row: Row) -> None:
        """Write what is not cached yet, as a prefill does."""
        state = self.slots[row]
        missing = row.tokens[state.length : -1]
        self.num_written += len(missing)
        if missing:
            self.cache.place([state.length], len(missing), [state.slot], len(row.tokens))
            self.cache.allocate(1, 1, 1, torch.float, torch.float)
            written = slice(state.length, state.length + len(missing))
            self.cache.keys[0][self.block(state), 0, written, 0] = torch.tensor(missing, dtype=torch.float)
            state.length += len(missing)

    def block(self, state: CachedRow) -> int:
        return self.cache.blocks[state.slot] if isinstance(self.cache, IndexedCache) else state.slot

    def entries(self, state: CachedRow) -> list[int]:
        if not state.length:
            return []
        return self.cache.keys[0][self.block(state), 0, : state.length, 0].int().tolist()

    def check(self, rows: list[Row]) -> None:
        assert sorted(self.slots[row].slot for row in rows) == list(range(len(rows)))
        for row in rows:
            assert self.entries(self.slots[row]) == row.tokens[: self.slots[row].length]


TEXTS = st.lists(st.integers(0, 2), min_size=1, max_size=12)


@given(
    st.lists(
        st.tuples(st.sampled_from(["admit", "release", "extend", "rewind"]), st.integers(0, 5), TEXTS),
        max_size=30,
    ),
    st.sampled_from([KeyValueCache, IndexedCache]),
)
def test_every_row_keeps_its_own_entries_while_rows_join_and_leave(steps, kind):
    held = TokenCache(kind)
    rows: list[Row] = []
    for action, number, tokens in steps:
        if action == "admit":
            rows.append(held.admit(tokens))
        elif rows:
            row = rows[number % len(rows)]
            if action == "release":
                rows.remove(row)
                held.slots.release(row)
            elif action == "extend":
                row.tokens += tokens
                held.write(row)
            else:
                state = held.slots[row]
                state.length = min(state.length, number)
                del row.tokens[state.length + 1 :]
        held.check(rows)


@every_cache
def test_a_released_prompt_is_continued_in_its_own_slot(kind):
    held = TokenCache(kind)
    held.slots.release(held.admit([1, 2, 3, 4, 5]))
    row = held.admit([1, 2, 3, 4, 6, 7])
    assert held.num_written == 4 + 1
    held.check([row])


@every_cache
def test_a_prefix_that_a_live_row_still_uses_is_copied(kind):
    held = TokenCache(kind)
    first = held.admit([1, 2, 3, 4, 5])
    second = held.admit([1, 2, 3, 9, 9])
    assert held.num_written == 4 + 1
    held.check([first, second])


@every_cache
def test_a_limit_bounds_what_is_reused(kind):
    held = TokenCache(kind)
    held.slots.release(held.admit([1, 2, 3, 4, 5]))
    row = held.admit([1, 2, 3, 4, 5], reuse_limit=2)
    assert held.num_written == 4 + 2
    held.check([row])


@every_cache
def test_the_row_released_first_is_evicted_first(kind):
    held = TokenCache(kind)
    rows = [held.admit([number] * 9) for number in (1, 2, 3, 4)]
    for row in (rows[2], rows[0], rows[3], rows[1]):
        held.slots.release(row)
    held.num_written = 0
    new = [held.admit([number] * 9) for number in (8, 4, 2, 1)]
    assert held.num_written == 8  # 8 took the slot of 3, and all others were found again
    held.check(new)


@every_cache
def test_a_short_shared_prefix_is_copied_and_the_long_row_stays(kind):
    held = TokenCache(kind)
    long, other = held.admit(list(range(20))), held.admit([50, 51])
    held.slots.release(other)
    held.slots.release(long)
    row = held.admit([0, 1, 70, 71])  # takes the slot of the long text, which takes that of the other one
    held.check([row])
    held.slots.release(row)
    held.num_written = 0
    row = held.admit(list(range(20)))
    assert held.num_written == 0
    held.check([row])


@every_cache
def test_the_number_of_remembered_rows_is_limited(monkeypatch, kind):
    monkeypatch.setattr("secondguess.runtime.slots.MAX_REMEMBERED", 2)
    held = TokenCache(kind)
    rows = [held.admit([number] * 4) for number in range(5)]
    for row in rows:
        held.slots.release(row)
    held.num_written = 0
    held.check([held.admit([number] * 4) for number in range(5)])
    assert held.num_written == 3 * 3


@every_cache
def test_rows_admitted_together_share_only_already_cached_prefixes(kind):
    held = TokenCache(kind)
    new = [Row([1, 2, 3, 4], SamplingParams()) for _ in range(3)]
    assert [(each.slot, each.length) for each in held.slots.admit(new)] == [(0, 0), (1, 0), (2, 0)]
    for row in new:
        held.slots.release(row)
    held.slots.release(held.admit([1, 2, 3, 4]))
    again = [Row([1, 2, 3, 4], SamplingParams()) for _ in range(3)]
    assert [each.length for each in held.slots.admit(again)] == [3, 3, 3]
    held.check(again)


@every_cache
@pytest.mark.parametrize("tokens", [[1, 2, 3, 4], [1, 2, 3, 9, 9], [7, 8]])
def test_a_row_that_is_released_after_any_interruption_takes_no_slot(kind, tokens):
    """While it is released, and while a row like it or another one is admitted."""
    for line in count(1):
        held = TokenCache(kind)
        held.slots.release(held.admit([7, 8, 9]))
        first, second = held.admit([1, 2, 3, 4]), held.admit([5, 6, 7, 8])
        was_released = not interrupted_at(line, (slots, cache), partial(held.slots.release, first))
        held.slots.release(first)
        held.write(second)
        assert held.entries(held.slots[second]) == [5, 6, 7]
        row = Row(list(tokens), SamplingParams())
        was_admitted = not interrupted_at(line, (slots, cache), partial(held.slots.admit, [row]))
        held.slots.release(row)
        held.check([second, held.admit(tokens), held.admit([5, 6, 7, 8]), held.admit([1, 2, 3, 4])])
        if was_released and was_admitted:
            break
    assert line > 30


@every_cache
def test_rows_are_not_reused_after_forget(kind):
    held = TokenCache(kind)
    held.slots.release(held.admit([1, 2, 3]))
    held.slots.forget()
    held.admit([1, 2, 3])
    assert held.num_written == 2 + 2


@given(TEXTS, TEXTS, st.integers(0, 12))
def test_common_prefix_of_token_lists(first, second, limit):
    expected = 0
    while expected < min(len(first), len(second), limit) and first[expected] == second[expected]:
        expected += 1
    assert common_prefix(first, second, limit) == expected


@every_cache
def test_a_cache_of_many_short_rows_does_not_grow_for_few_long_ones(kind):
    held = TokenCache(kind)
    for row in [held.admit([number, 2, 3]) for number in range(64)]:
        held.slots.release(row)
    assert held.slots.num_tokens_to_allocate(8, 4000) == 8 * 4096 - 64 * 256, "what is freed counts"
    rows = [Row([number] * 1500, SamplingParams(max_tokens=500)) for number in range(2)]
    held.slots.admit(rows)
    for row in rows:
        held.write(row)
    assert (held.cache.num_slots, held.cache.capacity) == (2, 2048)
    held.check(rows)


@every_cache
def test_a_cache_that_live_rows_use_grows(kind):
    held = TokenCache(kind)
    rows = [held.admit([number, 2, 3]) for number in range(8)]
    assert held.slots.num_tokens_to_allocate(9, 2000) == 16 * 2048
    rows.append(held.admit([9] * 2000))
    assert (held.cache.num_slots, held.cache.capacity) == (16, 2048)
    held.check(rows)


@every_cache
def test_a_cache_that_is_long_enough_is_kept(kind):
    held = TokenCache(kind)
    for row in [held.admit([number, 2, 3]) for number in range(8)]:
        held.slots.release(row)
    held.admit([7, 2, 3, 4])
    assert (held.cache.num_slots, held.num_written) == (8, 8 * 2 + 1)


@every_cache
def test_the_cache_grows_once_for_a_row_when_it_is_admitted(kind):
    held = TokenCache(kind)
    rows = [held.admit([1, 2, 3]), held.admit([4, 5, 6])]
    rows.append(Row(list(range(2000)), SamplingParams()))
    held.slots.admit(rows[2:])
    keys = held.cache.keys[0]
    held.write(rows[2])
    assert held.cache.keys[0] is keys
    held.check(rows)


@pytest.mark.skipif(sys.platform != "linux", reason="memory in use is read from /proc")
def test_memory_of_the_cache_is_not_taken_before_it_is_used():
    """Writing zeros to all of a growing cache would delay the rows that decode."""
    cache = KeyValueCache(torch.device("cpu"))
    cache.reserve(16, 4096)
    before = resident_bytes()
    cache.allocate(8, 4, 64, torch.bfloat16, torch.bfloat16)
    assert not cache.keys[0][3, 1, 100:200].any()
    allocated = sum(block.nbytes for block in (*cache.keys, *cache.values))
    assert resident_bytes() - before < allocated / 10


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_exchanged_slots_of_kernels_move_no_entries():
    held = TokenCache(IndexedCache)
    rows = [held.admit([number, number, 5]) for number in range(4)]
    before = held.cache.keys[0].clone()
    held.slots.release(rows.pop(0))
    assert torch.equal(held.cache.keys[0], before)
    held.check(rows)
    assert held.cache.blocks == [3, 1, 2, 0]


def test_a_cache_for_which_the_system_has_no_room_is_out_of_memory(monkeypatch):
    def refuse(*_, **__):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr("mmap.mmap", refuse)
    cache = KeyValueCache(torch.device("cpu"))
    cache.reserve(1, 64)
    with pytest.raises(OutOfMemoryError, match="Cannot allocate memory; use a smaller model, dtype or batch"):
        cache.allocate(1, 2, 8, torch.float32, torch.float32)
