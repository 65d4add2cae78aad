"""Slot table of a KV cache: live rows in the first slots, remembered texts in the others.

The slots of live rows are 0 to n - 1, so that a round over all rows reads views of the cache. A
slot that a row released keeps its entries until another row needs the slot, or until
`MAX_REMEMBERED` rows have been released after it. A new row starts with the entries of the longest
prefix that it shares with any slot, and is prefilled from there. Rows with images share entries only
with rows that have the same `Row.images`, as samples of one prompt have: their tokens alone do not say
what is cached.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter

import torch

from secondguess.core import Row
from secondguess.errors import BadInputError
from secondguess.runtime.cache import KeyValueCache

MAX_REMEMBERED = 64
"""Maximum number of released rows that are remembered, as their tokens are compared one by one.

None is added while more rows are live.
"""
MAX_EXCESS = 4
"""Largest size of a cache that grows for new rows alone, relative to the size that they need.

The cache is as long as the longest row for as many rows as ever decoded together: without a bound, a
few long rows after many short ones would need memory for many long rows.
"""


@dataclass(eq=False)
class CachedRow:
    """State of a row in the cache: `length` committed tokens in `slot`, then `num_nodes` nodes.

    `position_offset` is added to the position of a token in the text: an image may have fewer
    positions than tokens (Qwen-VL). `hidden_layers` are those requested for this row, if any were.
    """

    row: Row
    slot: int
    length: int = 0
    num_nodes: int = 0
    position_offset: int = 0
    hidden_layers: tuple[int, ...] | None = None

    @property
    def num_to_prefill(self) -> int:
        """Number of tokens, all but the last, that are not cached yet."""
        return len(self.row.tokens) - 1 - self.length

    @property
    def lacks_images(self) -> bool:
        """True if the prompt has images, and is not cached as a whole."""
        return self.row.images is not None and self.length < self.row.num_prompt - 1

    @property
    def cached_tokens(self) -> list[int]:
        """Tokens whose entries are in the cache."""
        return self.row.tokens[: self.length]


class SlotTable:
    """Slots of live rows and the tokens that are still cached in free slots.

    Args:
        cache: cache whose slots these are.
    """

    def __init__(self, cache: KeyValueCache) -> None:
        self._cache = cache
        self._rows: dict[Row, CachedRow] = {}
        self._remembered: dict[int, list[int]] = {}
        """Cached tokens by free slot, the slot that was released first coming first."""

    def __len__(self) -> int:
        """Return the number of live rows."""
        return len(self._rows)

    @property
    def num_live_tokens(self) -> int:
        """Number of tokens that live rows have cached; safe to read from any thread."""
        return sum([state.length for state in list(self._rows.values())])

    def __contains__(self, row: Row) -> bool:
        return row in self._rows

    def __getitem__(self, row: Row) -> CachedRow:
        return self._rows[row]

    def admit(self, rows: Sequence[Row], reuse_limits: Sequence[int | None] | None = None) -> list[CachedRow]:
        """Give each row a slot, with the entries of the longest prefix that it shares with any slot.

        At most `reuse_limits` entries of a row are reused. If a row has a slot already, or no token, none is admitted.
        """
        for row in rows:
            if row in self._rows:
                raise BadInputError(
                    "expected a new row, got one that has begun already; call release(row) first"
                )
            if not row.tokens:
                raise BadInputError("expected a row of at least one token, got an empty one")
        if rows and self._is_cleared_for(len(rows), max(len(row.tokens) + row.room for row in rows)):
            self.forget()
            self._cache.clear()
        if rows:  # at once, as a copy of the cache delays the rows that decode
            longest = max(len(row.tokens) for row in rows)
            self._cache.reserve(len(self._rows) + len(rows), longest, self._num_used())
        limits = reuse_limits or [None] * len(rows)
        # Of the rows of this call, only those that take over entries have any.
        live = [state for state in self._rows.values() if state.length and state.row.images is None]
        states = []
        for row, limit in zip(rows, limits, strict=True):
            states.append(self._admit(row, limit, live))
            if states[-1].length and row.images is None:
                live.append(states[-1])
        return states

    def _admit(self, row: Row, reuse_limit: int | None, live: Sequence[CachedRow]) -> CachedRow:
        tokens = row.tokens[: len(row.tokens) - 1][:reuse_limit] if row.images is None else []
        source, length = self._longest_prefix(tokens, live)
        slot = len(self._rows)
        with torch.inference_mode():
            self._fill(slot, source, length)
        self._rows[row] = CachedRow(row, slot, length)
        return self._rows[row]

    def num_tokens_to_allocate(self, num_rows: int, longest: int) -> int:
        """Return the number of tokens by which the cache grows for `num_rows` rows of up to `longest` tokens."""
        if self._is_cleared_for(num_rows, longest):
            held = self._cache.num_slots * self._cache.capacity
            return max(0, KeyValueCache(self._cache.device).num_tokens_to_allocate(num_rows, longest) - held)
        return self._cache.num_tokens_to_allocate(num_rows, longest)

    def _is_cleared_for(self, num_rows: int, longest: int) -> bool:
        """Return whether admitting such rows frees the cache first, because no row uses it and it is too large."""
        needed = KeyValueCache(self._cache.device).num_tokens_to_allocate(num_rows, longest)
        grown = self._cache.num_tokens_to_allocate(num_rows, longest)
        return not self._rows and grown > MAX_EXCESS * needed

    def extend(self, state: CachedRow) -> bool:
        """Copy the entries of a row's next tokens from the live row that has most of them; return False if none has any."""
        tokens, length = state.row.tokens[:-1], state.length
        others = [
            each
            for each in self._rows.values()
            if each.row.images is state.row.images
            and each.length > length
            and each.row.tokens[length] == tokens[length]
        ]
        lengths = [
            self._cache.reusable(other.slot, common_prefix(tokens, other.row.tokens, other.length))
            for other in others
        ]
        longest = max(lengths, default=0)
        if longest <= length:
            return False
        source = others[lengths.index(longest)]
        with torch.inference_mode():
            self._cache.reserve(state.slot + 1, longest)
            self._cache.copy(source.slot, state.slot, longest)
        state.length, state.position_offset = longest, source.position_offset
        return True

    def release(self, row: Row) -> None:
        """Free the slot of a row; do nothing for an unknown row.

        Its entries stay in the cache for rows that begin alike, unless some are not finite: attention
        reads entries of earlier rows with weight 0, and 0 times NaN is NaN. If this is interrupted, call
        it again.
        """
        state = self._rows.get(row)
        if state is None:
            return
        with torch.inference_mode():
            if not self._cache.is_finite(state.slot, state.length + state.num_nodes):
                self._cache.erase(state.slot, 0)
                state.length = 0
        last = max(self._rows.values(), key=attrgetter("slot"))
        # The slot of the last row is not allocated if its prefill has failed.
        can_keep = len(self._rows) <= MAX_REMEMBERED and last.slot < self._cache.num_slots
        kept = state.cached_tokens if can_keep and row.images is None else []
        if last is not state:
            self._move_last(last, state, len(kept))
        del self._rows[row]
        if kept:
            self._remembered[state.slot] = kept
            if len(self._remembered) > MAX_REMEMBERED:
                del self._remembered[next(iter(self._remembered))]

    def _move_last(self, last: CachedRow, released: CachedRow, num_kept: int) -> None:
        """Move the last row into the slot of a released one, which gets the last row's slot."""
        length, num_nodes = last.length, last.num_nodes
        # If this is interrupted, both have no entries: the last row is prefilled again by its next round.
        last.length = last.num_nodes = released.length = 0
        last.slot, released.slot = released.slot, last.slot
        with torch.inference_mode():
            if num_kept:
                self._cache.swap(last.slot, released.slot, max(length + num_nodes, num_kept))
            else:
                self._cache.move(released.slot, last.slot, length + num_nodes)
        last.length, last.num_nodes = length, num_nodes

    def _num_used(self) -> int:
        """Return how many positions hold entries, at most."""
        live = [state.length + state.num_nodes for state in self._rows.values()]
        return max([*live, *map(len, self._remembered.values())], default=0)

    def forget(self) -> None:
        """Forget the tokens of free slots."""
        self._remembered.clear()

    def _longest_prefix(self, tokens: Sequence[int], live: Sequence[CachedRow]) -> tuple[int, int]:
        """Return the slot with the longest common prefix, a free slot among equals, and its length."""
        slot, longest = 0, 0
        free = ((each, text, len(text)) for each, text in self._remembered.items())
        used = ((state.slot, state.row.tokens, state.length) for state in live)
        for each, text, num_cached in chain(free, used):
            if longest == len(tokens):
                break
            length = self._cache.reusable(each, common_prefix(tokens, text, num_cached))
            if length > longest:
                slot, longest = each, length
        return slot, longest

    def _fill(self, slot: int, source: int, length: int) -> None:
        """Copy or move `length` entries of the slot `source` to the first free slot, `slot`."""
        remembered = self._remembered
        victim = self._slot_to_overwrite(slot)
        if length and source in remembered and (victim == source or 2 * length > len(remembered[source])):
            # This row continues the text, or the text would be the next to be overwritten.
            text = remembered.pop(source)
            if source != slot:
                other = remembered.pop(slot, [])
                self._cache.swap(slot, source, max(len(text), len(other)))
                if other:
                    remembered[source] = other
            return
        text = remembered.pop(slot, [])
        if victim != slot:
            remembered.pop(victim, None)
            self._cache.move(slot, victim, len(text))
            remembered[victim] = text
            source = victim if source == slot else source
        if length:
            self._cache.reserve(slot + 1, length)
            self._cache.copy(source, slot, length)

    def _slot_to_overwrite(self, slot: int) -> int:
        """Return the free slot whose entries are given up for a new row in `slot`."""
        free = range(slot, self._cache.num_slots)
        if slot not in self._remembered:
            return slot
        unused = next((each for each in free if each not in self._remembered), None)
        return next(iter(self._remembered)) if unused is None else unused


def common_prefix(first: Sequence[int], second: Sequence[int], limit: int) -> int:
    """Return the length of the longest common prefix, at most `limit`."""
    low, high = 0, min(len(first), len(second), limit)
    if high and first[0] != second[0]:
        return 0
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
