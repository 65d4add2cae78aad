"""What every runtime with a cache of keys and values shares: which row is cached where, how far, and what it sees.

One forward serves rows of different lengths and drafts of any shape: tokens are written to explicit cache
positions, text positions are explicit, and a mask says who sees whom. A subclass only knows how to run its model.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from secondguess.core import Draft, Row, token_tensor
from secondguess.errors import BadInputError
from secondguess.runtime import tree
from secondguess.runtime.attention import Step
from secondguess.runtime.base import Hidden, Runtime, Scores
from secondguess.runtime.cache import KeyValueCache

UNLIMITED = 2**31
KEY_BLOCK = 32
"""On a CPU so many keys are read together, masked where there are fewer. What stands behind the last whole vector would
be summed by other instructions: a token's bits would depend on how many tokens are scored with it."""


@dataclass
class CachedRow:
    """What the cache holds of a row: `length` committed tokens in `slot`, and behind them `num_nodes` nodes."""

    row: Row
    slot: int
    length: int = 0
    num_nodes: int = 0


@dataclass(frozen=True)
class Queries:
    """What one forward reads: `tokens` `[row, query]`, and who descends from whom unless all are chains."""

    tokens: Tensor
    closure: Tensor | None


@dataclass(frozen=True)
class Output:
    """What a model says: `logits` `[row, column, vocab]` of the last columns asked for (or of more), and hidden
    states `[row, query, width]` of the layers asked for."""

    logits: Tensor
    hidden: dict[int, Tensor] = field(default_factory=dict)


class CachedRuntime(Runtime):
    """Rows, slots, chunks and masks around one forward, `run`.

    Attributes:
        least_logits: columns of logits that a forward makes even when nobody reads them, as in a prefill.

    Args:
        vocab_size: width of the logits.
        context_length: positions that the model holds; None when it names no limit.
        num_layers: of the model; hidden states are numbered by it.
        device: where the model is.
        hidden_layers: hidden states that `score` returns, numbered as in `output_hidden_states` (0 is the
            embeddings, `k` the output of layer k, -1 the last, normalised one).
        prefill_chunk: most tokens in one prefill forward.
    """

    least_logits = 1

    def __init__(
        self,
        *,
        vocab_size: int,
        context_length: int | None,
        num_layers: int,
        device: torch.device,
        hidden_layers: Sequence[int] = (),
        prefill_chunk: int = 512,
    ) -> None:
        if prefill_chunk < 1:
            raise BadInputError(f"prefill_chunk must be at least 1 token, got {prefill_chunk}")
        self.vocab_size = vocab_size
        self.context_length = context_length or UNLIMITED
        self.num_layers = num_layers
        self.device = device
        self.hidden_layers: tuple[int, ...] = ()
        self.prefill_chunk = prefill_chunk
        self.cache = KeyValueCache(device)
        self._states: dict[Row, CachedRow] = {}
        self._by_slot: list[CachedRow] = []
        # On a CPU a row's bits must not depend on its neighbours, and a prompt fills the processor by itself.
        self._prefills_together = device.type != "cpu"
        self._key_block = KEY_BLOCK if device.type == "cpu" else 1
        self._stairs = tree.Stairs(device)
        self.request_hidden(hidden_layers)

    def request_hidden(self, layers: Sequence[int]) -> None:
        for layer in layers:
            if not -self.num_layers - 1 <= layer <= self.num_layers:
                raise BadInputError(
                    f"hidden layer must be in 0..{self.num_layers} (or negative), got {layer}"
                )
        self.hidden_layers = tuple(dict.fromkeys(layers))

    @abstractmethod
    def run(self, tokens: Tensor, step: Step, num_logits: int, with_hidden: bool) -> Output:
        """One forward of the model over `tokens` `[row, query]`, written to where `self.cache` was placed.

        Args:
            tokens: ids; padding is any token.
            step: positions, and who sees whom.
            num_logits: how many of the last columns need logits.
            with_hidden: whether `hidden_layers` are wanted.
        """

    def read(self, tokens: Tensor) -> Output:
        """Whole texts `[row, query]` in one forward, which nobody keeps: for probes, before any row has begun."""
        if self._by_slot:
            raise BadInputError(
                f"expected no row in the cache, got {len(self._by_slot)}; call end(row) first"
            )
        num_rows, width = tokens.shape
        starts = [0] * num_rows
        with torch.inference_mode():
            self.cache.place(starts, width, range(num_rows), width)
            step = self._step(starts, Queries(tokens, None), width, causal=True)
            return self.run(tokens, step, width, with_hidden=bool(self.hidden_layers))

    def release(self) -> None:
        """Forget every row and give the cache back."""
        self.cache = KeyValueCache(self.device)
        self._states.clear()
        self._by_slot.clear()

    @property
    def num_live_rows(self) -> int:
        """Rows that have begun and not ended."""
        return len(self._by_slot)

    def begin(self, rows: Sequence[Row]) -> list[Hidden]:
        for row in rows:
            if row in self._states:
                raise BadInputError("expected a new row, got one that has begun already; call end(row) first")
            if not row.tokens:
                raise BadInputError("expected a row of at least one token, got an empty one")
        for row in rows:
            state = CachedRow(row, slot=len(self._by_slot))
            self._states[row] = state
            self._by_slot.append(state)
        seen = self._prefill([self._states[row] for row in rows], with_hidden=bool(self.hidden_layers))
        return [seen.get(row, {}) for row in rows]

    def read_up(self, rows: Sequence[Row]) -> None:
        self._prefill([self._states[row] for row in rows])

    def end(self, row: Row) -> None:
        state = self._states.pop(row, None)
        if state is None:
            return
        last = self._by_slot.pop()
        if last is not state:  # slots stay contiguous: the last row moves into the hole
            num_cached = last.length + last.num_nodes
            if num_cached:  # a row whose prefill failed has no place in the cache yet
                with torch.inference_mode():
                    self.cache.move(last.slot, state.slot, num_cached)
            last.slot = state.slot
            self._by_slot[state.slot] = last

    def rewind(self, rows: Sequence[Row], lengths: Sequence[int]) -> None:
        for row, length in zip(rows, lengths, strict=True):
            state = self._states[row]
            state.length = min(state.length, length)
            state.num_nodes = 0

    def keep(self, rows: Sequence[Row], paths: Sequence[Sequence[int]]) -> None:
        scattered = []
        for row, path in zip(rows, paths, strict=True):
            state = self._states[row]
            if path and path[-1] >= state.num_nodes:
                raise BadInputError(
                    f"expected a path through the {state.num_nodes} nodes scored last, got {list(path)}"
                )
            if list(path) != list(range(len(path))):
                scattered.append((state.slot, state.length, path))
            state.length += len(path)
            state.num_nodes = 0
        if scattered:
            slots, starts, moved = zip(*scattered, strict=True)
            with torch.inference_mode():
                self.cache.compact(slots, starts, moved)

    def score(self, rows: Sequence[Row], draft: Draft) -> Scores:
        slots = [self._states[row].slot for row in rows]
        if slots == sorted(slots):
            return self._score([self._states[row] for row in rows], draft)
        # Rows that left or joined have shuffled the slots; in their order the cache can be read without a copy.
        order = torch.tensor(slots, device=self.device).argsort()
        scores = self._score([self._states[rows[index]] for index in order.tolist()], draft.select(order))
        back = order.argsort()
        hidden = {layer: states[back] for layer, states in scores.hidden.items()}
        return Scores(scores.logits[back], hidden)

    def _score(self, states: Sequence[CachedRow], draft: Draft) -> Scores:
        num_uncached = self._catch_up(states)
        queries = queries_of(states, num_uncached, draft)
        num_queries = draft.num_nodes + 1
        width = queries.tokens.shape[1]
        # all rows' queries lie in the last columns; only rows that had less to catch up must be gathered
        first = min(num_uncached) - 1
        starts = [state.length for state in states]
        num_keys = -(-(max(starts) + width) // self._key_block) * self._key_block
        with torch.inference_mode():
            self._place(states, starts, width, num_keys)
            step = self._step(starts, queries, num_keys)
            output = self.run(queries.tokens, step, width - first, with_hidden=bool(self.hidden_layers))
            offsets = None
            if min(num_uncached) != max(num_uncached):
                shift = torch.tensor(num_uncached, device=self.device)[:, None] - 1
                offsets = shift + torch.arange(num_queries, device=self.device)
            logits = _columns(output.logits, num_queries, width, offsets)
            hidden = {
                layer: _columns(states_of_layer, num_queries, width, offsets)
                for layer, states_of_layer in output.hidden.items()
            }
            if logits.dtype != torch.float64:
                logits = logits.float()
        for state in states:
            state.length = len(state.row.tokens)
            state.num_nodes = draft.num_nodes
        return Scores(logits, hidden)

    def _catch_up(self, states: Sequence[CachedRow]) -> list[int]:
        """Uncached tokens per row, at least pending; what exceeds one chunk is cached on its own first."""
        for state in states:
            state.length = min(state.length, len(state.row.tokens) - 1)
            state.num_nodes = 0
        behind = [state for state in states if len(state.row.tokens) - state.length > self.prefill_chunk]
        if behind:
            self._prefill(behind)
        return [len(state.row.tokens) - state.length for state in states]

    def _prefill(self, states: Sequence[CachedRow], with_hidden: bool = False) -> dict[Row, Hidden]:
        """Cache all tokens but the last, rows of similar need together, `prefill_chunk` tokens a forward.

        Returns:
            Where wanted, the hidden states of what was cached, by row.
        """
        pieces: dict[Row, list[Hidden]] = {}
        waiting = sorted(states, key=_num_to_prefill)
        while waiting and _num_to_prefill(waiting[-1]) > 0:
            width = min(_num_to_prefill(waiting[-1]), self.prefill_chunk)
            num_rows = self.prefill_chunk // width if self._prefills_together else 1
            group = [state for state in waiting[-num_rows:] if _num_to_prefill(state) > 0]
            counts = [min(_num_to_prefill(state), width) for state in group]
            texts = [
                state.row.tokens[state.length : state.length + count] + [0] * (width - count)
                for state, count in zip(group, counts, strict=True)
            ]
            with torch.inference_mode():
                hidden = self._prefill_forward(group, torch.tensor(texts, device=self.device), with_hidden)
            for place, (state, count) in enumerate(zip(group, counts, strict=True)):
                state.length += count
                if with_hidden:
                    piece = {
                        layer: states_of_layer[place, :count] for layer, states_of_layer in hidden.items()
                    }
                    pieces.setdefault(state.row, []).append(piece)
            waiting.sort(key=_num_to_prefill)
        return {row: _joined(of_row) for row, of_row in pieces.items()}

    def _prefill_forward(self, states: Sequence[CachedRow], tokens: Tensor, with_hidden: bool) -> Hidden:
        starts = [state.length for state in states]
        width = tokens.shape[1]
        num_keys = max(starts) + width
        self._place(states, starts, width, num_keys)
        step = self._step(starts, Queries(tokens, None), num_keys, causal=num_keys == width)
        return self.run(tokens, step, num_logits=self.least_logits, with_hidden=with_hidden).hidden

    def _place(self, states: Sequence[CachedRow], starts: Sequence[int], width: int, num_keys: int) -> None:
        """Prepare a forward that writes each row's tokens from `starts[i]` on."""
        self.cache.place(starts, width, [state.slot for state in states], num_keys)

    def _step(self, starts: Sequence[int], queries: Queries, num_keys: int, *, causal: bool = False) -> Step:
        """Positions and mask of a forward; rows that stand equally far share one of each.

        With `causal` nothing is cached yet: plain causal attention, for which there are faster kernels.
        """
        width = queries.tokens.shape[1]
        if causal:
            return Step(None, torch.arange(width, device=self.device)[None], width)
        if min(starts) == max(starts) and queries.closure is None:
            start = starts[0]
            positions = torch.arange(start, start + width, device=self.device)[None]
            nothing_hidden = width == 1 and start + 1 == num_keys
            mask = None if nothing_hidden else self._stairs.mask(start, width, num_keys)
            return Step(mask, self._in_range(positions, num_keys), num_keys, start=start)
        firsts = torch.tensor(starts, device=self.device)
        if queries.closure is None:
            positions = tree.query_slots(firsts, width)
            mask = tree.chain_mask(firsts, width, num_keys)
            return Step(mask, self._in_range(positions, num_keys), num_keys)
        positions = firsts[:, None] + tree.depths(queries.closure)
        keys = torch.arange(num_keys, device=self.device).repeat(len(starts), 1)
        keys.scatter_(1, tree.query_slots(firsts, width), positions)
        mask = tree.tree_mask(firsts, queries.closure, num_keys)
        return Step(mask, self._in_range(positions, num_keys), num_keys, keys)

    def _in_range(self, positions: Tensor, num_keys: int) -> Tensor:
        """Padding must not look up positions that the model does not have."""
        return positions.clamp(max=self.context_length - 1) if num_keys > self.context_length else positions


def queries_of(states: Sequence[CachedRow], num_uncached: Sequence[int], draft: Draft) -> Queries:
    """Every row's uncached tokens with its nodes right behind them; the rest is padding."""
    device = draft.tokens.device
    committed = [state.row.tokens[state.length :] for state in states]
    longest = max(num_uncached)
    if min(num_uncached) == longest:
        tokens = token_tensor(committed, device)
        if draft.num_nodes:
            tokens = torch.cat([tokens, draft.tokens], dim=1)
    else:
        room = longest + draft.num_nodes
        tokens = token_tensor([[*row, *([0] * (room - len(row)))] for row in committed], device)
        if draft.num_nodes:
            behind = tree.query_slots(torch.tensor(num_uncached, device=device), draft.num_nodes)
            tokens.scatter_(1, behind, draft.tokens)
    if draft.is_chain:
        return Queries(tokens, None)
    parents, lengths = draft.parents.tolist(), draft.lengths.tolist()
    hung = torch.tensor(tree.hang_below(parents, lengths, num_uncached), device=device)
    return Queries(tokens, tree.ancestor_closure(hung))


def _joined(pieces: Sequence[Hidden]) -> Hidden:
    """The states of successive chunks as one."""
    return {layer: torch.cat([piece[layer] for piece in pieces]) for layer in pieces[0]}


def _num_to_prefill(state: CachedRow) -> int:
    return len(state.row.tokens) - 1 - state.length


def _columns(values: Tensor, num_queries: int, width: int, offsets: Tensor | None) -> Tensor:
    """Of `[row, column, ...]`, whose last column is query `width - 1`, those of pending and the nodes.

    `offsets` `[row, num_queries]` names the columns of a forward over `width` where rows differ.
    """
    if offsets is None:
        return values if values.shape[1] == num_queries else values[:, -num_queries:]
    columns = offsets - (width - values.shape[1])
    return values.gather(1, columns[:, :, None].expand(-1, -1, values.shape[2]))
