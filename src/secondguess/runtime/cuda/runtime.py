"""Runtime on a GPU whose forward passes over few tokens are captured as CUDA graphs.

Prefills call the operations one by one. A round's passes have few tokens and fixed shapes: the numbers of rows and of
queries are rounded up, and one graph per shape is captured when it is first needed. Chains of a draft model are drawn
by graphs, too, several passes and draws in each.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import ReferenceType, ref

import torch
from torch import Tensor

from secondguess.core import Draft, Row
from secondguess.runtime.base import ForwardOutput, HiddenStates, QuantisedCopy
from secondguess.runtime.chains import ChainDecision, ChainRequest, DrawnChains
from secondguess.runtime.cuda.capture import ROWS, Graph, GraphCache, StaticInputs, bucket
from secondguess.runtime.cuda.chains import MAX_CATCH_UP, ChainModel, can_draw, draw_chains
from secondguess.runtime.cuda.forward import run_decoder
from secondguess.runtime.cuda.operations import CHUNK, MAX_KERNEL_TOKENS, MAX_QUERIES, MAX_TILES, PassInputs
from secondguess.runtime.cuda.quantised import quantised_copy
from secondguess.runtime.cuda.queries import RowQueries, fields_of
from secondguess.runtime.decoder.fused import (
    PROBE_TOLERANCE,
    PROBE_WIDTH,
    CheckedDecoder,
    FusedRuntime,
    probe_passes,
)
from secondguess.runtime.decoder.fused_decoder import FusedDecoder
from secondguess.runtime.refusals import quantised_copy_error
from secondguess.runtime.slots import CachedRow
from secondguess.runtime.system.exclusive import exclusive
from secondguess.runtime.system.machine import without_gradients
from secondguess.runtime.weight_format import INT4, WeightFormat

WIDTHS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32, 48, MAX_QUERIES)
"""Numbers of queries per row to which a pass is padded."""
WIDTHS_OF_FEW = (1, 2, 4, 8, 16, 32, MAX_QUERIES)
"""Numbers of queries in passes of at most `MAX_KERNEL_TOKENS` tokens, where padding costs less than more graphs."""
MAX_TOKENS = 512
"""Largest number of tokens of a captured pass; larger ones are not bound by the time of launching kernels."""
MAX_ATTENTION_BYTES = 2**30
"""Largest size of the unmerged attention outputs of a captured pass, which grow with the capacity of the cache."""
PREFILL_CHUNK = 2048

logger = logging.getLogger(__name__)


def to_graphs(checked: CheckedDecoder) -> GraphRuntime | None:
    """Return the runtime of a fused decoder, or None if its kernels fail or would not reproduce the module's logits.

    The fused decoder must not be used afterwards in the latter case.
    """
    runtime = GraphRuntime(checked.decoder)
    try:
        found = runtime.probe_both_paths(checked.tokens)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # the compiler's errors are of many kinds
        logger.warning(
            "the graphs runtime is not used: expected kernels that can be compiled for this device, got %s: %s; another "
            "runtime computes the model, which may be slower",
            type(error).__name__,
            error,
        )
        return None
    expected = checked.logits.expand_as(found)
    return runtime if probe_passes("graphs", found, expected, checked.tolerance) else None


class ScoringPass(NamedTuple):
    """Captured forward pass over the nodes of drafts.

    Args:
        static: its inputs.
        graph: returns logits `[token, vocab]` and the requested hidden states.
    """

    static: StaticInputs
    graph: Graph[Any]


class GraphRuntime(FusedRuntime):
    """Runtime over a fused decoder without mixtures of experts.

    On a CPU the same operations run without being captured, for tests.

    Args:
        decoder: from `fuse`.
    """

    kind = "graphs"

    def __init__(self, decoder: FusedDecoder) -> None:
        super().__init__(decoder)
        self.prefill_chunk = PREFILL_CHUNK
        self._graphs = GraphCache(self.device)
        self._captured_cache: ReferenceType[Tensor] | None = None
        self._captured_tables: list[Tensor] = []

    def skip_layers(self, skipped: Sequence[int]) -> GraphRuntime:
        return GraphRuntime(self.decoder.without(skipped))

    @exclusive
    def free(self) -> None:
        self._graphs.clear()
        for copy in self._copies.values():
            copy.model.free()
        super().free()

    @property
    def why_not_copied(self) -> str:
        return ""

    @exclusive
    def reserve(self, num_rows: int, longest: int) -> None:
        try:
            super().reserve(num_rows, longest)
        except torch.OutOfMemoryError:  # without graphs there may be room
            self._graphs.clear()
            for copy in self._copies.values():
                copy.model.free()
            super().reserve(num_rows, longest)

    def _make_copy(self, weight_format: WeightFormat) -> QuantisedCopy:
        if weight_format != INT4:
            return super()._make_copy(weight_format)
        runtime = GraphRuntime(quantised_copy(self.decoder))
        if why_not := runtime.why_not_reproduced():
            raise quantised_copy_error(weight_format, f"one for which {why_not}")
        runtime.lock = self.lock
        return QuantisedCopy(self, runtime)

    def why_not_reproduced(self) -> str:
        """Return why the kernels do not give the logits of torch's operations; empty if they do."""
        width = min(PROBE_WIDTH, self.context_length)
        tokens = torch.arange(2 * width, device=self.device).remainder(self.vocab_size).view(2, width)
        try:
            found = self.probe_both_paths(tokens)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # the compiler's errors are of many kinds
            return f"the kernels fail on this device ({type(error).__name__}: {error})"
        expected = FusedRuntime(self.decoder).probe(tokens).logits.expand_as(found)
        tolerance = PROBE_TOLERANCE[torch.bfloat16]  # states are rounded in products with weights in 4 bits
        return "" if probe_passes("graphs", found, expected, tolerance) else "the kernels give other logits"

    def _lend_cache(self, copy: GraphRuntime) -> GraphRuntime:
        """Have a copy run in this runtime's cache from now on."""
        self._drop_partial_forward()
        copy.cache, copy.slots = self.cache, self.slots
        return copy

    @exclusive
    def run_copy(self, model: GraphRuntime, rows: Sequence[Row], draft: Draft, num_known: int) -> Tensor:
        return self._lend_cache(model).run_nodes(rows, draft, num_known)

    @exclusive
    def draft_chains_of_copy(
        self,
        model: GraphRuntime,
        rows: Sequence[Row],
        requests: Sequence[ChainRequest],
        decision: ChainDecision,
    ) -> DrawnChains | None:
        return self._lend_cache(model).draw_after_pending(rows, requests, decision)

    @exclusive
    def probe_both_paths(self, tokens: Tensor) -> Tensor:
        """Return logits `[2, row, token, vocab]` of texts by a prefill and by a captured pass, without keeping the texts.

        `tokens` `[row, token]` are at most `MAX_QUERIES` per row.
        """
        num_rows, width = tokens.shape
        with torch.inference_mode():
            self._reserve(num_rows - 1, width)
            slots = torch.arange(num_rows, device=self.device)
            positions = torch.arange(width, device=self.device).repeat(num_rows, 1)
            inputs = PassInputs(slots, torch.zeros_like(slots), tokens, positions, None, self._num_finished())
            prefilled = run_decoder(self.decoder, self.cache, inputs).logits
            ancestors = [(2 << query) - 1 for query in range(width)]
            fields = [
                slots.tolist(),
                [0] * num_rows,
                tokens.flatten().tolist(),
                positions.flatten().tolist(),
                num_rows * ancestors,
            ]
            scoring = self._graphs.get("probe", lambda: self._scoring_pass(num_rows, width, (), fields))
            logits = torch.stack((prefilled, scoring.graph().logits)).view(2, num_rows, width, -1)
        self.free()
        return logits

    def _run_queries(
        self, states: Sequence[CachedRow], num_uncached: Sequence[int], draft: Draft
    ) -> tuple[Tensor, HiddenStates]:
        rows = zip(states, draft.token_lists, draft.shapes, strict=True)
        queries = [
            RowQueries(
                state.slot, state.length, [*state.row.tokens[state.length :], *nodes[: len(shape)]], shape
            )
            for state, nodes, shape in rows
        ]
        width = max(num_uncached) + draft.num_nodes
        output = None if self._partial is not None else self._run_by_kernels(queries, width)
        if output is None:
            return super()._run_queries(states, num_uncached, draft)
        logits = _kept(_columns(output.logits, num_uncached, draft.num_nodes))
        hidden = {
            layer: _columns(each, num_uncached, draft.num_nodes).clone()
            for layer, each in output.hidden.items()
        }
        return logits, hidden

    def _run_by_kernels(self, queries: Sequence[RowQueries], width: int) -> ForwardOutput | None:
        """Run a pass over at most `width` queries per row, captured if it is small; None if it needs too much memory.

        Logits and hidden states `[row, query, ...]` have padding, and the next pass overwrites them.
        """
        size, num_queries = bucket(len(queries), ROWS), bucket(width, WIDTHS_OF_FEW)
        if size * num_queries > MAX_KERNEL_TOKENS:
            num_queries = bucket(width, WIDTHS)
        longest = max(row.start for row in queries)
        if longest + width <= self.cache.capacity < longest + num_queries:
            num_queries = width  # padding alone would make the cache grow
        is_captured = size * num_queries <= MAX_TOKENS
        if not is_captured:
            size, num_queries = len(queries), width
        self._reserve(max(row.slot for row in queries), longest + num_queries)
        if width > MAX_QUERIES or self._attention_bytes(size * num_queries) > MAX_ATTENTION_BYTES:
            return None
        fields = fields_of(queries, size, num_queries, self.context_length)
        layers = self.hidden_layers
        if is_captured:
            try:
                scoring = self._graphs.get(
                    (size, num_queries, layers), lambda: self._scoring_pass(size, num_queries, layers, fields)
                )
            except torch.OutOfMemoryError:  # without graphs there may be room for this pass
                self._graphs.clear()
                return None
            scoring.static.set(fields)
            output = scoring.graph()
        else:
            static = StaticInputs(size, num_queries, self.device)
            static.set(fields)
            output = run_decoder(self.decoder, self.cache, static.inputs, layers)
        hidden = {layer: each.view(size, num_queries, -1) for layer, each in output.hidden.items()}
        return ForwardOutput(output.logits.view(size, num_queries, -1), hidden)

    def _prefill_forward(
        self, states: Sequence[CachedRow], tokens: Tensor, with_hidden: bool
    ) -> HiddenStates:
        num_rows, width = tokens.shape
        starts = [state.length for state in states]
        self._reserve(max(state.slot for state in states), max(starts) + width)
        slots, firsts = torch.tensor([[state.slot for state in states], starts], device=self.device)
        positions = firsts[:, None] + torch.arange(width, device=self.device)
        positions = positions.clamp(max=self.context_length - 1)
        inputs = PassInputs(slots, firsts, tokens, positions, None, self._num_finished())
        layers = self.hidden_layers if with_hidden else ()
        hidden = run_decoder(self.decoder, self.cache, inputs, layers, with_logits=False).hidden
        return {layer: token_states.view(num_rows, width, -1) for layer, token_states in hidden.items()}

    def _num_finished(self) -> Tensor:
        return torch.zeros(MAX_TILES, dtype=torch.int32, device=self.device)

    def _reserve(self, last_slot: int, num_positions: int) -> None:
        """Make room in the cache, and drop the graphs if a tensor that they read was replaced."""
        self.reserve(last_slot + 1, num_positions)
        heads, dtype = self.decoder.layers[0].heads, self.decoder.embedding.dtype
        self.cache.allocate(self.num_layers, heads.num_keys, heads.size, dtype, dtype)
        captured = None if self._captured_cache is None else self._captured_cache()
        # A runtime that shares the decoder may have made longer tables.
        tables = [rotary.table(self.cache.capacity) for rotary in self.decoder.rotaries.values()]
        is_same = [id(table) for table in tables] == [id(table) for table in self._captured_tables]
        if captured is not self.cache.keys[0] or not is_same:
            self._graphs.clear()
            self._captured_cache, self._captured_tables = ref(self.cache.keys[0]), tables

    def _attention_bytes(self, num_tokens: int) -> int:
        """Return the size of the unmerged attention outputs of a pass, in float32."""
        heads = self.decoder.layers[0].heads
        return 4 * num_tokens * heads.num_queries * heads.size * -(-self.cache.capacity // CHUNK)

    def _scoring_pass(
        self, size: int, num_queries: int, layers: tuple[int, ...], fields: Sequence[Sequence[int]]
    ) -> ScoringPass:
        static = StaticInputs(size, num_queries, self.device)
        static.set(fields)  # capturing runs a pass, which must write to the right places
        decoder, cache = self.decoder, self.cache
        graph = self._graphs.capture(lambda: run_decoder(decoder, cache, static.inputs, layers))
        return ScoringPass(static, graph)

    def run_nodes(self, rows: Sequence[Row], draft: Draft, num_known: int) -> Tensor:
        """Run pending and nodes in a shared cache, as in `QuantisedCopy.draft_logits`; the caller holds the lock."""
        states = [self.slots[row] for row in rows]
        with without_gradients():
            output = None
            if draft.is_chain:  # the nodes before are seen by all
                queries = [
                    RowQueries(state.slot, state.length + num_known, [state.row.pending, *nodes][num_known:])
                    for state, nodes in zip(states, draft.token_lists, strict=True)
                ]
                output = self._run_by_kernels(queries, draft.num_nodes + 1 - num_known)
            if output is None:
                logits = self._run_queries(states, [1] * len(states), draft)[0][:, num_known:]
            else:
                logits = _kept(output.logits[: len(rows), : draft.num_nodes + 1 - num_known])
        self._hold_nodes(states, [draft.num_nodes + 1] * len(states))
        return logits

    def draw_after_pending(
        self, rows: Sequence[Row], requests: Sequence[ChainRequest], decision: ChainDecision
    ) -> DrawnChains | None:
        """Draw chains in a shared cache, as in `QuantisedCopy.draft_chains`; the caller holds the lock."""
        states = [self.slots[row] for row in rows]
        if not can_draw(requests, self.vocab_size) or any(
            state.length != len(state.row.tokens) - 1 for state in states
        ):
            return None
        drawn = self._draw_chains(states, requests, decision)
        if drawn is not None:
            self._hold_nodes(states, map(len, drawn.tokens))
        return drawn

    @exclusive
    def draft_chains(
        self, rows: Sequence[Row], requests: Sequence[ChainRequest], decision: ChainDecision
    ) -> DrawnChains | None:
        if not can_draw(requests, self.vocab_size):
            return None
        self._drop_partial_forward()
        states = [self.slots[row] for row in rows]
        if max(self._catch_up(states)) > MAX_CATCH_UP:
            return None
        drawn = self._draw_chains(states, requests, decision)
        if drawn is not None:
            self._append_chains(rows, states, drawn.tokens)
        return drawn

    def _draw_chains(
        self, states: Sequence[CachedRow], requests: Sequence[ChainRequest], decision: ChainDecision
    ) -> DrawnChains | None:
        num_tokens = bucket(len(states), ROWS) * MAX_CATCH_UP
        if self._attention_bytes(num_tokens) > MAX_ATTENTION_BYTES:
            return None
        decoder, cache = self.decoder, self.cache
        model = ChainModel(
            self._graphs,
            self._reserve,
            lambda inputs: run_decoder(decoder, cache, inputs).logits,
            self.device,
            self.context_length,
        )
        return draw_chains(model, states, requests, decision)


def _kept(logits: Tensor) -> Tensor:
    """Return a copy in float32, which the next pass does not overwrite."""
    return logits.to(torch.float32, copy=True)


def _columns(values: Tensor, num_uncached: Sequence[int], num_nodes: int) -> Tensor:
    """Return those of pending and the nodes, `[row, node + 1, ...]`, of padded values `[row, query, ...]`."""
    first = num_uncached[0] - 1
    if all(count == num_uncached[0] for count in num_uncached):
        return values[: len(num_uncached), first : first + num_nodes + 1]
    firsts = torch.tensor(num_uncached, device=values.device)[:, None] - 1
    rows = torch.arange(len(num_uncached), device=values.device)[:, None]
    return values[rows, firsts + torch.arange(num_nodes + 1, device=values.device)]
