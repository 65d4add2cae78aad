"""Runtime whose forward pass is one call of the compiled kernels."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from ctypes import c_int64, c_void_p
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn import functional

from secondguess.core import Draft
from secondguess.errors import BadInputError, OutOfMemoryError
from secondguess.runtime.attention import ForwardStep
from secondguess.runtime.base import EmbeddingAndHead, HiddenStates
from secondguess.runtime.cache import KeyValueCache
from secondguess.runtime.cached import Output, Queries
from secondguess.runtime.fused import FusedDecoder, FusedRuntime, probe_passes
from secondguess.runtime.layered import LayeredRuntime
from secondguess.runtime.native import library
from secondguess.runtime.native.decoder import NativeDecoder
from secondguess.runtime.slots import CachedRow
from secondguess.runtime.support import context_length_of, has_bfloat16, num_threads
from secondguess.runtime.weight_format import BFLOAT16, INT8, WeightFormat

NO_MEMORY, UNKNOWN_TOKEN = 1, 2
NUM_PREALLOCATED_SLOTS = 1024
"""Largest batch whose slots, when in order, are taken from a preallocated list."""
NO_POSITIONS = torch.empty(0, dtype=torch.long)

PROBE_WIDTH = 16
PROBE_TOLERANCE = {BFLOAT16: 0.03, INT8: 0.12}
"""Largest relative root-mean-square error of the logits attributed to rounding.

Trained and tiny random models have errors of 0.01 in bfloat16 and 0.03 to 0.05 in 8 bits; a wrong
computation has an error of about 1.
"""


def to_native(decoder: FusedDecoder, weight_format: WeightFormat = BFLOAT16) -> NativeDecoder | None:
    """Return a fused decoder in the layout of the kernels, or None if they would not reproduce it.

    The fused decoder must not be used afterwards in either case.

    Args:
        decoder: unpacked, in bfloat16.
        weight_format: as in `NativeDecoder`.
    """
    tokens = torch.arange(2 * PROBE_WIDTH).remainder(decoder.embedding.shape[0]).reshape(2, PROBE_WIDTH)
    expected = FusedRuntime(decoder).read(tokens).logits
    native = NativeDecoder(decoder, weight_format)
    found = NativeRuntime(native).read(tokens).logits
    name = f"native ({weight_format.name})"
    return native if probe_passes(name, found, expected, PROBE_TOLERANCE[weight_format]) else None


@dataclass(frozen=True)
class Layout:
    """Tokens of the rows of a forward pass, which follow each other without padding.

    Args:
        firsts: first token of each row, then the number of tokens.
        selected: tokens whose logits are computed.
        places: place of each of these logits in a tensor `[row, column]`, flattened.
        num_columns: number of columns of that tensor.
    """

    firsts: ctypes.Array[c_int64]
    selected: ctypes.Array[c_int64]
    places: ctypes.Array[c_int64]
    num_columns: int

    @classmethod
    def of(
        cls, firsts: Sequence[int], selected: Sequence[int], places: Sequence[int], num_columns: int
    ) -> Layout:
        return cls(_array(firsts), _array(selected), _array(places), num_columns)


def _array(numbers: Sequence[int]) -> ctypes.Array[c_int64]:
    return (c_int64 * len(numbers))(*numbers)


@lru_cache(maxsize=256)
def even_layout(num_rows: int, width: int, num_logits: int) -> Layout:
    """Return the layout of rows of one width, with logits of the last columns; cached, as sizes recur."""
    selected = [
        row * width + column for row in range(num_rows) for column in range(width - num_logits, width)
    ]
    return Layout.of(range(0, (num_rows + 1) * width, width), selected, range(len(selected)), num_logits)


def uneven_layout(counts: Sequence[int], lengths: Sequence[int], num_nodes: int) -> Layout:
    """Return the layout of rows with these numbers of tokens, the last ones being pending and nodes.

    Args:
        counts: per row, the number of tokens.
        lengths: per row, the number of nodes, which are the last tokens.
        num_nodes: number of nodes of the padded draft.
    """
    firsts = [0, *accumulate(counts)]
    queries = [(row, node) for row, length in enumerate(lengths) for node in range(length + 1)]
    selected = [firsts[row + 1] - 1 - lengths[row] + node for row, node in queries]
    return Layout.of(firsts, selected, [row * (num_nodes + 1) + node for row, node in queries], num_nodes + 1)


def _in_rows(output: Output, tokens: Tensor) -> Output:
    """Return an output with hidden states `[row, query, width]` for tokens `[row, query]`."""
    return Output(
        output.logits, {layer: each.view(*tokens.shape, -1) for layer, each in output.hidden.items()}
    )


class NativeRuntime(LayeredRuntime):
    """Runtime over the compiled kernels.

    A row's bits depend on that row alone: not on other rows, padding, chunk lengths or the shape
    of a draft.

    Args:
        decoder: from `to_native`.
        hidden_layers, prefill_chunk: as in `CachedRuntime`.
    """

    min_logits = 0

    def __init__(
        self, decoder: NativeDecoder, hidden_layers: Sequence[int] = (), prefill_chunk: int = 512
    ) -> None:
        super().__init__(
            vocab_size=decoder.described.head.num_outputs,
            context_length=context_length_of(decoder.config),
            num_layers=decoder.num_layers,
            device=decoder.embedding.device,
            hidden_layers=hidden_layers,
            prefill_chunk=prefill_chunk,
        )
        self.decoder = decoder
        self._key_block = 1
        self._prefills_together = True
        self._kernels = kernels = decoder.unit.kernels
        self._workspace = c_void_p(kernels.secondguess_workspace())
        if not self._workspace:
            raise OutOfMemoryError("expected memory for a model's workspace, got none")
        # not at exit: a daemon thread may still be in a forward pass
        weakref.finalize(self, kernels.secondguess_free, self._workspace).atexit = False
        levels = decoder.num_layers + 1
        self._keys, self._values = (c_void_p * decoder.num_layers)(), (c_void_p * decoder.num_layers)()
        self._turns = (c_void_p * len(decoder.rotaries))()
        self._no_levels = (c_void_p * levels)()
        self._in_order = torch.arange(NUM_PREALLOCATED_SLOTS)
        self._forward = library.Forward(
            context_length=self.context_length,
            cos_sin=ctypes.addressof(self._turns),
            keys=ctypes.addressof(self._keys),
            values=ctypes.addressof(self._values),
        )
        self._reached: tuple[KeyValueCache | None, int, int] = (None, 0, 0)
        # Drafters process hidden states with torch, which is slow in bfloat16 on many processors.
        self._dtype_of_states = torch.bfloat16 if has_bfloat16(self.device) else torch.float32
        self._forward.hidden_is_float32 = self._dtype_of_states == torch.float32
        self._differentiable_head: Tensor | None = None

    def embedding_and_head(self) -> EmbeddingAndHead:
        decoder, dtype = self.decoder, self._dtype_of_states

        def embed(tokens: Tensor) -> Tensor:
            return decoder.embed(tokens).to(dtype)

        def normalise(states: Tensor) -> Tensor:
            return decoder.norm(states.to(torch.bfloat16)).to(dtype)

        return EmbeddingAndHead(decoder.embedding.shape[1], dtype, embed, normalise, self._unembed)

    def _unembed(self, states: Tensor) -> Tensor:
        """Return the logits of normalised hidden states.

        Computed by the kernels. If a gradient is needed and the head is tied to the embeddings,
        torch computes them; with an untied head the result has no gradient.
        """
        head = self.decoder.tied_head
        if states.requires_grad and head is not None:
            if self._differentiable_head is None:
                self._differentiable_head = head.weight.to(self._dtype_of_states)
            bias = None if head.bias is None else head.bias.to(states.dtype)
            return functional.linear(states, self._differentiable_head, bias)
        flat = states.to(torch.bfloat16).contiguous()
        num_rows = flat.numel() // flat.shape[-1]
        logits = torch.empty(*states.shape[:-1], self.vocab_size)
        arguments = (flat.data_ptr(), num_rows, logits.data_ptr(), num_threads(), self._workspace)
        with self.lock:
            failed = num_rows and self._kernels.secondguess_unembed(self.decoder.described, *arguments)
        if failed:
            raise OutOfMemoryError(f"expected memory for the logits of {num_rows} states, got none")
        return logits

    def skip_layers(self, skipped: Sequence[int]) -> NativeRuntime:
        return NativeRuntime(self.decoder.without(skipped), prefill_chunk=self.prefill_chunk)

    def free(self) -> None:
        super().free()
        self._reached = (None, 0, 0)

    def _step(
        self, starts: Sequence[int], queries: Queries, num_keys: int, *, causal: bool = False
    ) -> ForwardStep:
        return ForwardStep(None, NO_POSITIONS, num_keys, starts=starts, closure=queries.closure)

    def _reach_cache(self) -> None:
        """Update the addresses of keys and values, which change when the cache grows."""
        cache, decoder = self.cache, self.decoder
        cache.allocate(decoder.num_layers, decoder.num_key_heads, decoder.head_size, torch.bfloat16)
        reached = (cache, cache.num_slots, cache.capacity)
        if reached != self._reached:
            for index in range(decoder.num_layers):
                self._keys[index] = cache.keys[index].data_ptr()
                self._values[index] = cache.values[index].data_ptr()
            self._reached = reached

    def run(self, tokens: Tensor, step: ForwardStep, num_logits: int, with_hidden: bool) -> Output:
        wanted = self.hidden_layers if with_hidden else ()
        layout = even_layout(*tokens.shape, num_logits)
        return _in_rows(self._call(tokens, layout, step, range(self.num_layers), wanted), tokens)

    def _run_queries(
        self, states: Sequence[CachedRow], num_uncached: Sequence[int], draft: Draft
    ) -> tuple[Tensor, HiddenStates]:
        if len(states) == 1 or self._partial is not None:
            return super()._run_queries(states, num_uncached, draft)
        lengths = draft.lengths.tolist()
        counts = [count + length for count, length in zip(num_uncached, lengths, strict=True)]
        if min(counts) == max(counts):
            return super()._run_queries(states, num_uncached, draft)
        # Rows differ: their tokens follow each other without padding.
        tokens, step = self._prepare(states, num_uncached, draft)
        is_real = torch.arange(tokens.shape[1]) < torch.tensor(counts)[:, None]
        layout = uneven_layout(counts, lengths, draft.num_nodes)
        output = self._call(tokens[is_real], layout, step, range(self.num_layers), self.hidden_layers)
        padding = ~torch.cat((torch.ones(len(states), 1, dtype=torch.bool), draft.mask), 1)
        output.logits[padding] = 0
        hidden = {}
        for layer, of_tokens in output.hidden.items():
            hidden[layer] = of_tokens.new_zeros(*padding.shape, of_tokens.shape[-1])
            hidden[layer][~padding] = of_tokens[torch.tensor(layout.selected[:])]
        return output.logits, hidden

    def run_first(self, tokens: Tensor, step: ForwardStep, num_known: int, num_layers: int) -> Tensor:
        layout = even_layout(*tokens.shape, 0)
        output = self._call(tokens, layout, step, range(num_layers), (num_layers,), num_known=num_known)
        return _in_rows(output, tokens).hidden[num_layers]

    def run_remaining_layers(
        self, tokens: Tensor, states: Tensor, step: ForwardStep, num_layers: int
    ) -> Output:
        wanted = [layer for layer in self.hidden_layers if layer % (self.num_layers + 1)]
        layers = range(num_layers, self.num_layers)
        layout = even_layout(*tokens.shape, tokens.shape[1])
        output = self._call(tokens, layout, step, layers, wanted, states=states.to(torch.bfloat16))
        output = _in_rows(output, tokens)
        of_tokens = {
            layer: self.embedding_and_head().embed(tokens)
            for layer in self.hidden_layers
            if layer not in wanted
        }
        return Output(output.logits, output.hidden | of_tokens)

    def _call(
        self,
        tokens: Tensor,
        layout: Layout,
        step: ForwardStep,
        layers: range,
        wanted: Sequence[int],
        num_known: int = 0,
        states: Tensor | None = None,
    ) -> Output:
        """Run some layers in one call of the kernels; return hidden states `[token, width]`.

        Args:
            tokens: tokens of all rows, in order; `num_known` other tokens of a row's step precede it.
            layout: the tokens of each row, and those whose logits are returned.
            step: starts and ancestors of all tokens of the step.
            layers: consecutive layers to run.
            wanted: layers whose hidden states are returned: the input of the first of `layers`, or
                any of their outputs.
            num_known: number of preceding tokens of each row that these layers have run already.
            states: input of the first of `layers`; None for the embeddings of `tokens`.
        """
        rows, num_tokens = len(layout.firsts) - 1, tokens.numel()
        tokens = tokens.contiguous()
        self._reach_cache()
        # held during the call: a runtime that shares the decoder may replace a table
        tables = [rotary.table(step.num_keys) for rotary in self.decoder.rotaries]
        for index, table in enumerate(tables):
            self._turns[index] = table.data_ptr()
        # the last layer has two numbers
        asked = list(dict.fromkeys([self._level(layer) for layer in wanted]))
        addresses, shown = self._room_for(num_tokens, asked) if asked else (self._no_levels, None)
        logits = torch.empty(rows, layout.num_columns, self.vocab_size)
        slots = self.cache.placement.slots
        if slots is None:
            slots = self._in_order if rows <= NUM_PREALLOCATED_SLOTS else torch.arange(rows)
        starts = (c_int64 * rows)(*step.starts)
        closure = None if step.closure is None else step.closure.contiguous()
        states = None if states is None else states.contiguous()
        forward = self._forward
        forward.num_rows, forward.num_tokens, forward.num_logits = rows, num_tokens, len(layout.selected)
        forward.firsts = ctypes.addressof(layout.firsts)
        forward.selected, forward.places = ctypes.addressof(layout.selected), ctypes.addressof(layout.places)
        forward.num_indices = 0 if closure is None else closure.shape[-1]
        forward.num_known, forward.first_layer, forward.last_layer = num_known, layers.start, layers.stop
        forward.capacity, forward.num_threads = self.cache.capacity, num_threads()
        forward.tokens, forward.slots, forward.logits = tokens.data_ptr(), slots.data_ptr(), logits.data_ptr()
        forward.starts, forward.hidden = ctypes.addressof(starts), ctypes.addressof(addresses)
        forward.closure = None if closure is None else closure.data_ptr()
        forward.states = None if states is None else states.data_ptr()
        failure = self._kernels.secondguess_run(self.decoder.described, forward, self._workspace)
        if failure == NO_MEMORY:
            raise OutOfMemoryError(
                f"expected memory for a forward over {num_tokens} tokens, got none; decode fewer at once"
            )
        if failure == UNKNOWN_TOKEN:
            raise BadInputError(
                f"expected token ids from 0 to {self.decoder.described.num_embedded - 1}, got {int(tokens.max())} "
                f"or {int(tokens.min())}; is it the tokenizer of another model?"
            )
        if shown is None:
            return Output(logits)
        of_levels = dict(zip(asked, shown.unbind(), strict=True))
        return Output(logits, {layer: of_levels[self._level(layer)] for layer in wanted})

    def _room_for(self, num_tokens: int, asked: Sequence[int]) -> tuple[ctypes.Array[c_void_p], Tensor]:
        """Allocate the hidden states of these levels for the kernels.

        Returns:
            The addresses by level, null if not requested, and the states of the requested levels
            `[level, token, width]`.
        """
        addresses = (c_void_p * (self.decoder.num_layers + 1))()
        width = self.decoder.embedding.shape[1]
        states = torch.empty(len(asked), num_tokens, width, dtype=self._dtype_of_states)
        address, size = states.data_ptr(), states.nbytes // len(asked)
        for number, level in enumerate(asked):
            addresses[level] = address + number * size
        return addresses, states

    def _level(self, layer: int) -> int:
        """Return a layer's level, counted from the embeddings; -1 is the last level."""
        return layer % (self.decoder.num_layers + 1)
