"""Base class of runtimes with a KV cache: slots, cached lengths, positions and masks.

One forward pass serves rows of different lengths and drafts of any shape, because cache positions,
text positions and the mask are explicit. A subclass implements the forward pass of its model.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, ClassVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from secondguess.core import Draft, Row
from secondguess.errors import BadInputError, UnsupportedModelError
from secondguess.runtime import tree
from secondguess.runtime.base import ForwardOutput, HiddenStates, QuantisedCopy, Runtime, join_hidden
from secondguess.runtime.cache import KeyValueCache
from secondguess.runtime.chains import ChainDecision, ChainRequest, DrawnChains
from secondguess.runtime.layered import LayeredForward, PartialForward
from secondguess.runtime.refusals import quantised_copy_error
from secondguess.runtime.slots import CachedRow, SlotTable
from secondguess.runtime.step import ForwardStep
from secondguess.runtime.system.exclusive import CallLock, exclusive
from secondguess.runtime.system.machine import without_gradients
from secondguess.runtime.system.openmp import bound_spinning
from secondguess.runtime.weight_format import WeightFormat
from secondguess.tensors import ancestor_closure, token_tensor

UNLIMITED = 2**31
KEY_MULTIPLE = 32
"""Multiple to which the number of keys is padded on a CPU, with masked keys.

Keys after the last whole vector are summed by other instructions. Without padding, a token's bits
would depend on how many tokens are scored with it.
"""


@dataclass(frozen=True)
class Queries:
    """Inputs of one forward pass.

    Args:
        tokens: `[row, query]`.
        closure: `[row, query, query]` bool, from `ancestor_closure`; None if all rows are
            chains.
    """

    tokens: Tensor
    closure: Tensor | None


class CachedRuntime(Runtime):
    """Base runtime that manages rows, slots, chunks and masks around one forward pass, `run`.

    Several threads may share a runtime: each call runs alone, and the others wait. A row belongs to
    the thread that admits it; its rounds may alternate with those of other threads' rows.

    Attributes:
        kind: name of the runtime, one of `checkpoint.resolve.RUNTIMES` except `auto`.
        module: the Transformers module that the runtime runs; None if it runs none.
        forward: forward passes of the model, of which the subclass knows more; those of a copy while it drafts.
        layered: passes through some of the layers, if `supports_partial_forward`.
        takes_images: True if prompts may have images (`Row.images`).
        description: way in which rows are run, if it is special; shown by `inspect`.
        min_logits: fewest columns of logits that a forward pass computes, even if none is used,
            as in a prefill.
        cache_class: class of the cache.
        orders_rows: True if passes copy the cache unless rows are in the order of their slots.
        max_uncached: largest number of tokens besides `pending` that a pass over a draft runs; more run in a prefill.
        hidden_layers: layers whose hidden states the call in progress returns, numbered as in
            `output_hidden_states` (0 is the embeddings, `k` the output of layer k, -1 that of the
            last layer, normalised): those that `request_hidden_states` was given for its rows.
        prefill_chunk: largest number of tokens in one prefill forward pass; `UNLIMITED` if a prompt must run
            in one, also beyond the limit of a call.

    Args:
        vocab_size: width of the logits.
        context_length: largest number of positions; None if the model sets no limit.
        num_layers: number of decoder layers.
        device: device of the model.
    """

    kind: ClassVar[str]
    module: Any = None
    forward: Any
    layered: LayeredForward
    takes_images = False
    description = ""
    min_logits = 1
    cache_class: type[KeyValueCache] = KeyValueCache
    orders_rows = True
    max_uncached = UNLIMITED

    def __init__(
        self,
        *,
        vocab_size: int,
        context_length: int | None,
        num_layers: int,
        device: torch.device,
    ) -> None:
        bound_spinning()
        self.lock = CallLock()
        self.vocab_size = vocab_size
        self.context_length = context_length or UNLIMITED
        self.num_layers = num_layers
        self.device = device
        self.hidden_layers: tuple[int, ...] = ()
        self._layers_of_other_rows: tuple[int, ...] = ()
        self.prefill_chunk = 512
        self.cache = self.cache_class(device)
        self.slots = SlotTable(self.cache)
        # On a CPU rows are prefilled one at a time: a row's bits must not depend on other rows,
        # and a single prompt keeps the processor busy.
        self._prefills_together = device.type != "cpu"
        self._key_block = KEY_MULTIPLE if device.type == "cpu" else 1
        self._chain_masks = tree.ChainMasks(device)
        # Output of the first layers for a draft that is not scored yet. An interrupted round leaves it behind, and rows,
        # lengths and draft may match again after the cache has been overwritten.
        self._partial: PartialForward | None = None
        self._copies: WeakValueDictionary[WeightFormat, ForwardCopy] = WeakValueDictionary()

    @exclusive
    def request_hidden_states(self, layers: Sequence[int], rows: Sequence[Row] | None = None) -> None:
        for layer in layers:
            if not -self.num_layers - 1 <= layer <= self.num_layers:
                raise BadInputError(
                    f"expected hidden layers from {-self.num_layers - 1} to {self.num_layers}, got {layer}; "
                    "request an existing layer"
                )
        requested = tuple(dict.fromkeys(layers))
        if rows is None:
            self.hidden_layers = self._layers_of_other_rows = requested
            return
        for row in rows:
            self.slots[row].hidden_layers = requested

    def _states_of(self, rows: Sequence[Row]) -> list[CachedRow]:
        """Return the states of rows, and set `hidden_layers` to the layers requested for these rows."""
        states = [self.slots[row] for row in rows]
        others = self._layers_of_other_rows
        requests = {others if state.hidden_layers is None else state.hidden_layers for state in states}
        if requests != {self.hidden_layers}:
            self.hidden_layers = tuple(dict.fromkeys(layer for request in requests for layer in request))
        return states

    @abstractmethod
    def run(self, tokens: Tensor, step: ForwardStep, num_logits: int, with_hidden: bool) -> ForwardOutput:
        """Run one forward pass of the model, writing to the placement of `self.cache`.

        Args:
            tokens: `[row, query]` token ids; padding is any token.
            step: positions and mask.
            num_logits: number of last columns whose logits are needed.
            with_hidden: whether to return the hidden states of `hidden_layers`.
        """

    @exclusive
    def quantised_copy(self, weight_format: WeightFormat) -> QuantisedCopy:
        if self.why_not_copied:
            raise quantised_copy_error(weight_format, self.why_not_copied)
        copy = self._copies.get(weight_format)
        if copy is None:
            copy = self._copies[weight_format] = ForwardCopy(self, self._copied_forward(weight_format))
        return copy

    def _copied_forward(self, weight_format: WeightFormat) -> Any:
        """Return forward passes with quantised weights in this cache; called only if nothing is against it."""
        raise quantised_copy_error(weight_format, f"a {type(self).__name__}")

    def _run_new_queries(
        self, states: Sequence[CachedRow], num_uncached: Sequence[int], draft: Draft, num_known: int
    ) -> Tensor:
        """Return logits of the queries after the first `num_known`, whose cache entries are those of the last call."""
        return self._run_queries(states, num_uncached, draft)[0][:, num_known:]

    @exclusive
    def draft_chains(
        self, rows: Sequence[Row], requests: Sequence[ChainRequest], decision: ChainDecision
    ) -> DrawnChains | None:
        self._partial = None
        states = [self.slots[row] for row in rows]
        self._catch_up(states)
        drawn = self._draw_chains(states, requests, decision)
        if drawn is not None:
            for row, state, chain in zip(rows, states, drawn.tokens, strict=True):
                row.tokens += chain
                state.length = len(row.tokens) - 1
        return drawn

    def _draw_chains(
        self, states: Sequence[CachedRow], requests: Sequence[ChainRequest], decision: ChainDecision
    ) -> DrawnChains | None:
        """Draw chains after the tokens of rows, as `draft_chains`; None if they cannot be drawn at once."""
        return None

    @exclusive
    def probe(self, tokens: Tensor) -> ForwardOutput:
        """Run one forward pass over whole sequences `[row, query]` without keeping them, for probes; no row may be cached."""
        if len(self.slots):
            raise BadInputError(
                f"expected no row in the cache, got {len(self.slots)}; call release(row) first"
            )
        self.slots.forget()
        self.hidden_layers = self._layers_of_other_rows
        num_rows, width = tokens.shape
        starts = [0] * num_rows
        with torch.inference_mode():
            self.cache.place(starts, width, range(num_rows), width)
            step = self._step(starts, Queries(tokens, None), width, causal=True)
            return self.run(tokens, step, width, with_hidden=bool(self.hidden_layers))

    @exclusive
    def free(self) -> None:
        """Remove every row and free the cache."""
        self._partial = None
        self.cache.clear()
        self.slots = SlotTable(self.cache)

    @exclusive
    def reserve(self, num_rows: int, longest: int) -> None:
        """Make room in the cache for `num_rows` rows of up to `longest` tokens."""
        self.cache.reserve(num_rows, longest)

    def num_tokens_to_allocate(self, num_rows: int, longest: int) -> int:
        """Return the number of tokens by which the cache grows for `num_rows` rows of up to `longest` tokens."""
        return self.slots.num_tokens_to_allocate(num_rows, longest)

    @property
    def num_live_rows(self) -> int:
        """Number of rows that have begun and not ended."""
        return len(self.slots)

    @property
    def num_live_tokens(self) -> int:
        """Number of tokens that live rows have cached."""
        return self.slots.num_live_tokens

    @property
    def num_allocated_tokens(self) -> int:
        """Number of tokens for which the cache has room."""
        return self.cache.num_slots * self.cache.capacity

    @exclusive
    def admit(self, rows: Sequence[Row], reuse_limits: Sequence[int | None] | None = None) -> list[int]:
        self._partial = None
        states = self.slots.admit(rows, reuse_limits)
        for state in states:
            self._truncate(state, state.length)
        return [state.length for state in states]

    def _truncate(self, state: CachedRow, length: int) -> None:
        """Drop the nodes of a row and what is cached after its first `length` tokens."""
        state.length = self.cache.restore(state.slot, min(state.length, length))
        state.num_nodes = 0

    @exclusive
    def release(self, row: Row) -> None:
        self._partial = None
        self.slots.release(row)

    @exclusive
    def reset_prefix_cache(self) -> None:
        self.slots.forget()

    @exclusive
    def rewind(self, rows: Sequence[Row], lengths: Sequence[int]) -> None:
        self._partial = None
        for row, length in zip(rows, lengths, strict=True):
            self._truncate(self.slots[row], length)

    @exclusive
    def erase(self, rows: Sequence[Row], num_nodes: int) -> None:
        with torch.inference_mode():
            for row in rows:
                state = self.slots[row]
                self.cache.erase(state.slot, state.length, self._pad_keys(state.length + num_nodes + 1))

    @exclusive
    def keep(self, rows: Sequence[Row], paths: Sequence[Sequence[int]]) -> None:
        scattered = []
        for row, path in zip(rows, paths, strict=True):
            state = self.slots[row]
            if path and path[-1] >= state.num_nodes:
                raise BadInputError(
                    f"expected a path through the {state.num_nodes} nodes scored last, got {list(path)}"
                )
            start = self.cache.first_node(state.slot, state.length)
            if list(path) != list(range(len(path))):
                scattered.append((state.slot, start, path))
            state.length = self.cache.commit(state.slot, start, path)
            state.num_nodes = 0
        if scattered:
            slots, starts, moved = zip(*scattered, strict=True)
            with torch.inference_mode():
                self.cache.compact(slots, starts, moved)

    @exclusive
    def score(self, rows: Sequence[Row], draft: Draft) -> ForwardOutput:
        states = self._states_of(rows)
        order = self._order(states)
        if order is None:
            return self._score(states, draft)
        back = torch.tensor(sorted(range(len(order)), key=order.__getitem__), device=self.device)
        members = draft.select(torch.tensor(order, device=self.device))
        scores = self._score([states[index] for index in order], members)
        hidden = {layer: states[back] for layer, states in scores.hidden.items()}
        return ForwardOutput(scores.logits[back], hidden)

    def _order(self, states: Sequence[CachedRow]) -> list[int] | None:
        """Return the order in which rows are run, that of their slots, which ended rows change; None for their own."""
        slots = [state.slot for state in states]
        if not self.orders_rows or slots == sorted(slots):
            return None
        return sorted(range(len(slots)), key=slots.__getitem__)

    def _score(self, states: Sequence[CachedRow], draft: Draft) -> ForwardOutput:
        num_uncached = self._catch_up(states)
        with without_gradients():
            logits, hidden = self._run_queries(states, num_uncached, draft)
            if logits.dtype != torch.float64:
                logits = logits.float()
        for state in states:
            state.length = self.cache.commit(state.slot, len(state.row.tokens))
            state.num_nodes = draft.num_nodes
        return ForwardOutput(logits, hidden)

    @exclusive
    def run_first_layers(self, rows: Sequence[Row], draft: Draft, num_layers: int) -> Tensor:
        self.require_partial_forward()
        members = [self.slots[row] for row in rows]
        indices = self._order(members)
        order = None if indices is None else torch.tensor(indices, device=self.device)
        if indices is not None and order is not None:
            members, draft = [members[index] for index in indices], draft.select(order)
        if any(len(state.row.tokens) - state.length != 1 for state in members):
            raise BadInputError(
                "expected rows of which all but the last token is cached, got others; score them first"
            )
        ahead = self._partial
        can_extend = (
            ahead is not None and ahead.num_layers == num_layers and ahead.is_prefix_of(members, draft)
        )
        known = ahead.states if ahead is not None and can_extend else None
        with torch.inference_mode():
            states = self._extend_first_layers(members, draft, known, num_layers)[2]
        lengths = [state.length for state in members]
        self._partial = PartialForward([state.row for state in members], lengths, draft, states, num_layers)
        return states if order is None else states[order.argsort()]

    def _extend_first_layers(
        self, members: Sequence[CachedRow], draft: Draft, known: Tensor | None, num_layers: int
    ) -> tuple[Tensor, ForwardStep, Tensor]:
        """Return a round's tokens, its step and the first layers' output for all its queries."""
        starts = [state.length for state in members]
        queries = build_queries(members, [1] * len(members), draft)
        tokens = queries.tokens
        num_keys = self._pad_keys(max(starts) + draft.num_nodes + 1)
        step = self._step(starts, queries, num_keys)
        num_known = 0 if known is None else known.shape[1]
        if known is not None and num_known == tokens.shape[1]:
            states = known
        else:
            width = tokens.shape[1] - num_known
            self._place(members, [start + num_known for start in starts], width, num_keys)
            states = self.layered.run_first(tokens[:, num_known:], step, num_known, num_layers)
            if known is not None:
                states = torch.cat((known, states), 1)
        self._place(members, starts, tokens.shape[1], num_keys)
        return tokens, step, states

    def _run_queries(
        self, states: Sequence[CachedRow], num_uncached: Sequence[int], draft: Draft
    ) -> tuple[Tensor, HiddenStates]:
        """Return logits and hidden states `[row, node + 1, ...]` of pending and the nodes."""
        ahead, self._partial = self._partial, None
        if ahead is not None and ahead.is_prefix_of(states, draft) and self._keeps_hidden_states(ahead):
            tokens, step, read = self._extend_first_layers(states, draft, ahead.states, ahead.num_layers)
            output = self.layered.run_remaining(tokens, read, step, ahead.num_layers, self.hidden_layers)
            return output.logits, output.hidden
        tokens, step = self._prepare(states, num_uncached, draft)
        num_queries, width = draft.num_nodes + 1, tokens.shape[1]
        # Logits are needed from this column on. Only rows with less to catch up must be gathered.
        first = min(num_uncached) - 1
        output = self.run(tokens, step, width - first, with_hidden=bool(self.hidden_layers))
        offsets = None
        if min(num_uncached) != max(num_uncached):
            shift = torch.tensor(num_uncached, device=self.device)[:, None] - 1
            offsets = shift + torch.arange(num_queries, device=self.device)
        hidden = {
            layer: _columns(states_of_layer, num_queries, width, offsets)
            for layer, states_of_layer in output.hidden.items()
        }
        return _columns(output.logits, num_queries, width, offsets), hidden

    def _keeps_hidden_states(self, ahead: PartialForward) -> bool:
        """Return whether no hidden states are requested of layers that have run, except the embeddings."""
        levels = [layer % (self.num_layers + 1) for layer in self.hidden_layers]
        return not any(0 < level < ahead.num_layers for level in levels)

    def _prepare(
        self, states: Sequence[CachedRow], num_uncached: Sequence[int], draft: Draft
    ) -> tuple[Tensor, ForwardStep]:
        """Place a forward pass over each row's uncached tokens and its nodes; return its inputs."""
        queries = build_queries(states, num_uncached, draft)
        starts, width = [state.length for state in states], queries.tokens.shape[1]
        num_keys = self._pad_keys(max(starts) + width)
        self._place(states, starts, width, num_keys)
        return queries.tokens, self._step(starts, queries, num_keys)

    def _pad_keys(self, num_keys: int) -> int:
        return -(-num_keys // self._key_block) * self._key_block

    def _catch_up(self, states: Sequence[CachedRow]) -> list[int]:
        """Return the uncached tokens per row, at least 1; rows beyond a chunk are prefilled."""
        for state in states:
            self._truncate(state, len(state.row.tokens) - 1)
        limit = min(self.max_uncached, self.prefill_chunk - 1)
        far = [state for state in states if state.num_to_prefill > limit or self._lacks_images(state)]
        if far:
            self._prefill(far)
        return [len(state.row.tokens) - state.length for state in states]

    @exclusive
    def prefill(
        self, rows: Sequence[Row], max_tokens: int | None = None, with_hidden: bool = True
    ) -> list[HiddenStates]:
        self._partial = None
        states = self._states_of(rows)
        with_hidden = with_hidden and bool(self.hidden_layers)
        hidden = self._prefill(states, max_tokens, with_hidden, can_copy=True)
        return [hidden.get(row, {}) for row in rows]

    def num_to_prefill(self, row: Row) -> int:
        return self.slots[row].num_to_prefill

    def _prefill(
        self,
        states: Sequence[CachedRow],
        max_tokens: int | None = None,
        with_hidden: bool = False,
        can_copy: bool = False,
    ) -> dict[Row, HiddenStates]:
        """Cache tokens but the last, in passes of at most `prefill_chunk` tokens; return their hidden states if requested.

        Rows with similar numbers of uncached tokens are run together, and prompts with images in a pass of their own, however
        long they are. With `can_copy`, entries of other live rows are copied, unless hidden states are needed.
        """
        pieces: dict[Row, list[HiddenStates]] = defaultdict(list)
        can_copy = can_copy and not with_hidden
        left = math.inf if max_tokens is None else max_tokens
        for state in filter(self._lacks_images, states):
            if left > 0 and not (can_copy and self.slots.extend(state)):
                with torch.inference_mode():
                    pieces[state.row] = [self._prefill_images(state, with_hidden)]
                state.length = state.row.num_prompt - 1
                self.num_prefilled += state.length
                left -= state.length
        waiting = [state for state in states if not self._lacks_images(state)]
        while left > 0:
            waiting.sort(key=attrgetter("num_to_prefill"))
            if not waiting or not waiting[-1].num_to_prefill:
                break
            if can_copy and self.slots.extend(waiting[-1]):
                continue
            is_whole = self.prefill_chunk == UNLIMITED and not waiting[-1].length
            limit = UNLIMITED if is_whole else int(min(left, self.prefill_chunk))
            group, counts = self._next_chunk(waiting, limit)
            hidden = self._run_chunk(group, counts, with_hidden)
            left -= sum(counts)
            if with_hidden:
                for state, piece in zip(group, hidden, strict=True):
                    pieces[state.row].append(piece)
        return {row: join_hidden(row_pieces) for row, row_pieces in pieces.items()}

    def _next_chunk(self, waiting: Sequence[CachedRow], limit: int) -> tuple[list[CachedRow], list[int]]:
        """Return rows to prefill in one pass of at most `limit` tokens, padding included, and the number of tokens of each.

        `waiting` is in ascending order of uncached tokens; the last one has some.
        """
        width = min(waiting[-1].num_to_prefill, limit)
        num_rows = limit // width if self._prefills_together else 1
        group = [state for state in waiting[-num_rows:] if state.num_to_prefill > 0]
        return group, [min(state.num_to_prefill, width) for state in group]

    def _run_chunk(
        self, group: Sequence[CachedRow], counts: Sequence[int], with_hidden: bool
    ) -> list[HiddenStates]:
        """Cache the next `counts[i]` tokens of each row; return their hidden states, if requested."""
        width = max(counts)
        texts = [
            state.row.tokens[state.length : state.length + count] + [0] * (width - count)
            for state, count in zip(group, counts, strict=True)
        ]
        with torch.inference_mode():
            hidden = self._prefill_forward(group, torch.tensor(texts, device=self.device), with_hidden)
        for state, count in zip(group, counts, strict=True):
            state.length += count
            self.num_prefilled += count
        return [
            {layer: layer_states[index, :count] for layer, layer_states in hidden.items()}
            for index, count in enumerate(counts)
        ]

    def _lacks_images(self, state: CachedRow) -> bool:
        return self.takes_images and state.lacks_images

    def _prefill_images(self, state: CachedRow, with_hidden: bool) -> HiddenStates:
        """Cache the prompt of a row with images, except its last token; return its hidden states."""
        raise UnsupportedModelError(
            f"expected a prompt of text, got images; {type(self).__name__} takes none"
        )

    def _prefill_forward(
        self, states: Sequence[CachedRow], tokens: Tensor, with_hidden: bool
    ) -> HiddenStates:
        starts = [state.length for state in states]
        width = tokens.shape[1]
        num_keys = max(starts) + width
        self._place(states, starts, width, num_keys)
        step = self._step(starts, Queries(tokens, None), num_keys, causal=num_keys == width)
        return self.run(tokens, step, num_logits=self.min_logits, with_hidden=with_hidden).hidden

    def _place(self, states: Sequence[CachedRow], starts: Sequence[int], width: int, num_keys: int) -> None:
        """Place a forward pass that writes each row's tokens from `starts[i]` on."""
        self.cache.place(starts, width, [state.slot for state in states], num_keys)

    def _step(
        self, starts: Sequence[int], queries: Queries, num_keys: int, *, causal: bool = False
    ) -> ForwardStep:
        """Return positions and mask of a forward pass, shared by all rows with equal starts.

        With `causal` nothing is cached yet: plain causal attention, for which there are faster
        kernels.
        """
        width = queries.tokens.shape[1]
        if causal:
            return ForwardStep(None, torch.arange(width, device=self.device)[None], width)
        if min(starts) == max(starts) and queries.closure is None:
            start = starts[0]
            positions = torch.arange(start, start + width, device=self.device)[None]
            nothing_hidden = width == 1 and start + 1 == num_keys
            mask = None if nothing_hidden else self._chain_masks.mask(start, width, num_keys)
            return ForwardStep(mask, self._clamp_positions(positions, num_keys), num_keys, start=start)
        firsts = torch.tensor(starts, device=self.device)
        if queries.closure is None:
            positions = tree.query_slots(firsts, width)
            mask = tree.chain_mask(firsts, width, num_keys)
            return ForwardStep(mask, self._clamp_positions(positions, num_keys), num_keys)
        positions = firsts[:, None] + tree.depths(queries.closure)
        keys = torch.arange(num_keys, device=self.device).repeat(len(starts), 1)
        keys.scatter_(1, tree.query_slots(firsts, width), positions)
        mask = tree.tree_mask(firsts, queries.closure, num_keys)
        return ForwardStep(mask, self._clamp_positions(positions, num_keys), num_keys, keys)

    def _clamp_positions(self, positions: Tensor, num_keys: int) -> Tensor:
        """Return the positions, limited to the context length, which padding may exceed."""
        return positions.clamp(max=self.context_length - 1) if num_keys > self.context_length else positions


@dataclass(frozen=True, eq=False)
class ForwardCopy(QuantisedCopy):
    """Copy whose forward passes take the place of the target's own while it drafts."""

    target: CachedRuntime
    forward: Any

    def draft_logits(self, rows: Sequence[Row], draft: Draft, num_known: int) -> Tensor:
        target = self.target
        with target.lock.exclusive():
            states = [target.slots[row] for row in rows]
            num_uncached = target._catch_up(states)
            with self._in_place():
                logits = target._run_new_queries(states, num_uncached, draft, num_known)
            for state in states:
                target._truncate(state, state.length)  # recurrent states are those of the copy
                state.num_nodes = draft.num_nodes + 1
        return logits if logits.dtype == torch.float64 else logits.float()

    def draft_chains(
        self, rows: Sequence[Row], requests: Sequence[ChainRequest], decision: ChainDecision
    ) -> DrawnChains | None:
        target = self.target
        with target.lock.exclusive():
            states = [target.slots[row] for row in rows]
            if any(state.length != len(state.row.tokens) - 1 for state in states):
                return None
            with self._in_place():
                drawn = target._draw_chains(states, requests, decision)
            if drawn is not None:
                for state, chain in zip(states, drawn.tokens, strict=True):
                    state.num_nodes = len(chain)
        return drawn

    @contextmanager
    def _in_place(self) -> Iterator[None]:
        """Have the target run the copy, which returns no hidden states."""
        target = self.target
        own, layers = target.forward, target.hidden_layers
        target.forward, target.hidden_layers, target._partial = self.forward, (), None
        try:
            with without_gradients():
                yield
        finally:
            target.forward, target.hidden_layers = own, layers


def build_queries(states: Sequence[CachedRow], num_uncached: Sequence[int], draft: Draft) -> Queries:
    """Return each row's uncached tokens followed by its nodes and by padding."""
    device = draft.tokens.device
    committed = [state.row.tokens[state.length :] for state in states]
    longest = max(num_uncached)
    if min(num_uncached) == longest:
        rows = zip(committed, draft.token_lists, strict=True)
        tokens = token_tensor([[*row, *nodes] for row, nodes in rows], device)
    else:
        room = longest + draft.num_nodes
        tokens = token_tensor([[*row, *([0] * (room - len(row)))] for row in committed], device)
        if draft.num_nodes:
            node_columns = tree.query_slots(torch.tensor(num_uncached, device=device), draft.num_nodes)
            tokens.scatter_(1, node_columns, draft.tokens)
    if draft.is_chain:
        return Queries(tokens, None)
    parents, lengths = draft.parents.tolist(), draft.lengths.tolist()
    query_parents = torch.tensor(tree.attach_drafts(parents, lengths, num_uncached), device=device)
    return Queries(tokens, ancestor_closure(query_parents))


def _columns(values: Tensor, num_queries: int, width: int, offsets: Tensor | None) -> Tensor:
    """Return the columns of pending and the nodes of `values` `[row, column, ...]`, whose last column is query `width - 1`.

    `offsets` `[row, num_queries]` has the query of each column to return if rows differ.
    """
    if offsets is None:
        return values if values.shape[1] == num_queries else values[:, -num_queries:]
    columns = offsets - (width - values.shape[1])
    return values.gather(1, columns[:, :, None].expand(-1, -1, values.shape[2]))
