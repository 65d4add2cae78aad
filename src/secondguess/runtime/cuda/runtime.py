"""Runtime on a GPU whose forward passes over few tokens are captured as CUDA graphs.

Prefills call the operations one by one. A round's passes have few tokens and fixed shapes: the numbers of rows and of
queries are rounded up, and one graph per shape is captured when it is first needed. Chains of a draft model are drawn
by graphs, too, several passes and draws in each.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import ReferenceType, WeakSet, ref

import torch
from torch import Tensor

from secondguess.core import Draft
from secondguess.runtime.base import EmbeddingAndHead, ForwardOutput, HiddenStates
from secondguess.runtime.cache import KeyValueCache
from secondguess.runtime.cached import CachedRuntime
from secondguess.runtime.chains import ChainDecision, ChainRequest, DrawnChains
from secondguess.runtime.cuda.capture import ROWS, Graph, GraphCache, StaticInputs, bucket
from secondguess.runtime.cuda.chains import MAX_CATCH_UP, ChainModel, can_draw, draw_chains
from secondguess.runtime.cuda.forward import run_decoder
from secondguess.runtime.cuda.operations import CHUNK, MAX_KERNEL_TOKENS, MAX_QUERIES, MAX_TILES, PassInputs
from secondguess.runtime.cuda.quantised import quantised_copy
from secondguess.runtime.cuda.queries import RowQueries, fields_of
from secondguess.runtime.decoder.forward import DecoderForward
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
from secondguess.runtime.step import ForwardStep
from secondguess.runtime.system.exclusive import exclusive
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


class GraphForward:
    """Forward passes of a fused decoder by kernels, those over few tokens captured as CUDA graphs.

    Args:
        decoder: without mixtures of experts.
        cache: of the runtime.
        context_length: largest number of positions.

    Attributes:
        by_torch: passes that the kernels do not run.
        graphs: captured passes.
        copies: forward passes of copies in the same cache.
    """

    def __init__(self, decoder: FusedDecoder, cache: KeyValueCache, context_length: int) -> None:
        self.decoder, self.cache, self.context_length = decoder, cache, context_length
        self.device = decoder.embedding.device
        self.by_torch = DecoderForward(decoder, cache)
        self.graphs = GraphCache(self.device)
        self.copies: WeakSet[GraphForward] = WeakSet()
        self._captured_cache: ReferenceType[Tensor] | None = None
        self._captured_tables: list[Tensor] = []

    def drop_graphs(self) -> None:
        """Free the graphs, also those of copies."""
        for forward in (self, *self.copies):
            forward.graphs.clear()

    def make_room(self, num_slots: int, num_positions: int) -> None:
        """Grow the cache to this many slots and positions, unless they fit already."""
        try:
            self.cache.reserve(num_slots, num_positions)
        except torch.OutOfMemoryError:  # without graphs there may be room
            self.drop_graphs()
            self.cache.reserve(num_slots, num_positions)

    def reserve(self, last_slot: int, num_positions: int) -> None:
        """Make room in the cache, and drop the graphs if a tensor that they read was replaced."""
        self.make_room(last_slot + 1, num_positions)
        heads, dtype = self.decoder.layers[0].heads, self.decoder.embedding.dtype
        self.cache.allocate(len(self.decoder.layers), heads.num_keys, heads.size, dtype, dtype)
        captured = None if self._captured_cache is None else self._captured_cache()
        # A runtime that shares the decoder may have made longer tables.
        tables = [rotary.table(self.cache.capacity) for rotary in self.decoder.rotaries.values()]
        is_same = [id(table) for table in tables] == [id(table) for table in self._captured_tables]
        if captured is not self.cache.keys[0] or not is_same:
            self.graphs.clear()
            self._captured_cache, self._captured_tables = ref(self.cache.keys[0]), tables

    def prefill(
        self,
        slots: Sequence[int],
        starts: Sequence[int],
        tokens: Tensor,
        hidden_layers: Sequence[int] = (),
        with_logits: bool = False,
    ) -> ForwardOutput:
        """Run tokens `[row, token]` after the first `starts` tokens of these slots; return values `[token, ...]`."""
        width = tokens.shape[1]
        self.reserve(max(slots), max(starts) + width)
        slot_index, firsts = torch.tensor([slots, starts], device=self.device)
        positions = firsts[:, None] + torch.arange(width, device=self.device)
        positions = positions.clamp(max=self.context_length - 1)
        num_finished = torch.zeros(MAX_TILES, dtype=torch.int32, device=self.device)
        inputs = PassInputs(slot_index, firsts, tokens, positions, None, num_finished)
        return run_decoder(self.decoder, self.cache, inputs, hidden_layers, with_logits)

    def score(
        self, queries: Sequence[RowQueries], width: int, hidden_layers: tuple[int, ...] = ()
    ) -> ForwardOutput | None:
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
        self.reserve(max(row.slot for row in queries), longest + num_queries)
        if width > MAX_QUERIES or self._attention_bytes(size * num_queries) > MAX_ATTENTION_BYTES:
            return None
        fields = fields_of(queries, size, num_queries, self.context_length)
        if is_captured:
            try:
                scoring = self.graphs.get(
                    (size, num_queries, hidden_layers),
                    lambda: self._scoring_pass(size, num_queries, hidden_layers, fields),
                )
            except torch.OutOfMemoryError:  # without graphs there may be room for this pass
                self.graphs.clear()
                return None
            scoring.static.set(fields)
            output = scoring.graph()
        else:
            static = StaticInputs(size, num_queries, self.device)
            static.set(fields)
            output = run_decoder(self.decoder, self.cache, static.inputs, hidden_layers)
        hidden = {layer: each.view(size, num_queries, -1) for layer, each in output.hidden.items()}
        return ForwardOutput(output.logits.view(size, num_queries, -1), hidden)

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
        graph = self.graphs.capture(lambda: run_decoder(decoder, cache, static.inputs, layers))
        return ScoringPass(static, graph)

    def draw_chains(
        self, states: Sequence[CachedRow], requests: Sequence[ChainRequest], decision: ChainDecision
    ) -> DrawnChains | None:
        """Draw chains after the tokens of rows; None if memory does not hold what that needs."""
        num_tokens = bucket(len(states), ROWS) * MAX_CATCH_UP
        if self._attention_bytes(num_tokens) > MAX_ATTENTION_BYTES:
            return None
        decoder, cache = self.decoder, self.cache
        model = ChainModel(
            self.graphs,
            self.reserve,
            lambda inputs: run_decoder(decoder, cache, inputs).logits,
            self.device,
            self.context_length,
        )
        return draw_chains(model, states, requests, decision)

    def probe_both_paths(self, tokens: Tensor) -> Tensor:
        """Return logits `[2, row, token, vocab]` of texts by a prefill and by a captured pass, as `GraphRuntime` does."""
        num_rows, width = tokens.shape
        slots, positions = list(range(num_rows)), list(range(width))
        prefilled = self.prefill(slots, [0] * num_rows, tokens, with_logits=True).logits
        ancestors = [(2 << query) - 1 for query in range(width)]
        fields = [
            slots,
            [0] * num_rows,
            tokens.flatten().tolist(),
            num_rows * positions,
            num_rows * ancestors,
        ]
        scoring = self.graphs.get("probe", lambda: self._scoring_pass(num_rows, width, (), fields))
        return torch.stack((prefilled, scoring.graph().logits)).view(2, num_rows, width, -1)


class GraphRuntime(CachedRuntime):
    """Runtime over a fused decoder without mixtures of experts.

    On a CPU the same operations run without being captured, for tests.

    Args:
        decoder: from `fuse`.
    """

    kind = "graphs"
    supports_partial_forward = True
    forward: GraphForward

    def __init__(self, decoder: FusedDecoder) -> None:
        super().__init__(**decoder.sizes())
        self.decoder = decoder
        self.prefill_chunk = PREFILL_CHUNK
        self.forward = GraphForward(decoder, self.cache, self.context_length)
        self.layered = self.forward.by_torch

    def embedding_and_head(self) -> EmbeddingAndHead:
        return self.decoder.embedding_and_head()

    def skip_layers(self, skipped: Sequence[int]) -> GraphRuntime:
        return GraphRuntime(self.decoder.without(skipped))

    @exclusive
    def free(self) -> None:
        self.forward.drop_graphs()
        super().free()

    @exclusive
    def reserve(self, num_rows: int, longest: int) -> None:
        self.forward.make_room(num_rows, longest)

    @property
    def why_not_copied(self) -> str:
        return ""

    def _copied_forward(self, weight_format: WeightFormat) -> GraphForward:
        if weight_format != INT4:
            raise quantised_copy_error(weight_format, f"a {type(self).__name__}")
        decoder = quantised_copy(self.decoder)
        if why_not := GraphRuntime(decoder).why_not_reproduced():
            raise quantised_copy_error(weight_format, f"one for which {why_not}")
        forward = GraphForward(decoder, self.cache, self.context_length)
        self.forward.copies.add(forward)
        return forward

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

    @exclusive
    def probe_both_paths(self, tokens: Tensor) -> Tensor:
        """Return logits `[2, row, token, vocab]` of texts by a prefill and by a captured pass, without keeping the texts.

        `tokens` `[row, token]` are at most `MAX_QUERIES` per row.
        """
        with torch.inference_mode():
            logits = self.forward.probe_both_paths(tokens)
        self.free()
        return logits

    def run(self, tokens: Tensor, step: ForwardStep, num_logits: int, with_hidden: bool) -> ForwardOutput:
        return self.forward.by_torch.run(tokens, step, num_logits, self.hidden_layers if with_hidden else ())

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
        output = None if self._partial is not None else self.forward.score(queries, width, self.hidden_layers)
        if output is None:
            return super()._run_queries(states, num_uncached, draft)
        logits = _kept(_columns(output.logits, num_uncached, draft.num_nodes))
        hidden = {
            layer: _columns(each, num_uncached, draft.num_nodes).clone()
            for layer, each in output.hidden.items()
        }
        return logits, hidden

    def _run_new_queries(
        self, states: Sequence[CachedRow], num_uncached: Sequence[int], draft: Draft, num_known: int
    ) -> Tensor:
        output, width = None, draft.num_nodes + 1 - num_known
        if draft.is_chain and max(num_uncached) == 1:  # the nodes before are seen by all
            queries = [
                RowQueries(state.slot, state.length + num_known, [state.row.pending, *nodes][num_known:])
                for state, nodes in zip(states, draft.token_lists, strict=True)
            ]
            output = self.forward.score(queries, width)
        if output is None:
            return super()._run_new_queries(states, num_uncached, draft, num_known)
        return _kept(output.logits[: len(states), :width])

    def _prefill_forward(
        self, states: Sequence[CachedRow], tokens: Tensor, with_hidden: bool
    ) -> HiddenStates:
        slots, starts = zip(*((state.slot, state.length) for state in states), strict=True)
        layers = self.hidden_layers if with_hidden else ()
        hidden = self.forward.prefill(slots, starts, tokens, layers).hidden
        return {layer: token_states.view(*tokens.shape, -1) for layer, token_states in hidden.items()}

    def _draw_chains(
        self, states: Sequence[CachedRow], requests: Sequence[ChainRequest], decision: ChainDecision
    ) -> DrawnChains | None:
        longest = max(len(state.row.tokens) - state.length for state in states)
        if longest > MAX_CATCH_UP or not can_draw(requests, self.vocab_size):
            return None
        return self.forward.draw_chains(states, requests, decision)


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
