"""Forward passes of a packed decoder, each in one call of the compiled kernels."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from ctypes import c_int64, c_void_p
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from secondguess.errors import BadInputError, OutOfMemoryError
from secondguess.runtime.base import ForwardOutput
from secondguess.runtime.cache import KeyValueCache
from secondguess.runtime.chains import ChainDecision, ChainRequest, DrawnChains
from secondguess.runtime.cpu import library
from secondguess.runtime.cpu.chain import ChainCall
from secondguess.runtime.cpu.decoder import PackedDecoder
from secondguess.runtime.step import ForwardStep
from secondguess.runtime.system.machine import num_threads
from secondguess.tensors import token_tensor

NO_MEMORY, UNKNOWN_TOKEN = 1, 2
NUM_PREALLOCATED_SLOTS = 1024
"""Largest batch whose slots, when in order, are taken from a preallocated list."""
NO_POSITIONS = torch.empty(0, dtype=torch.long)


def kernel_step(starts: Sequence[int], num_keys: int, closure: Tensor | None = None) -> ForwardStep:
    """Return the positions and ancestors of a forward pass, from which the kernels derive masks."""
    return ForwardStep(None, NO_POSITIONS, num_keys, starts=starts, closure=closure)


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
    def from_lists(
        cls, firsts: Sequence[int], selected: Sequence[int], places: Sequence[int], num_columns: int
    ) -> Layout:
        return cls(_array(firsts), _array(selected), _array(places), num_columns)


def _array(numbers: Sequence[int]) -> ctypes.Array[c_int64]:
    return (c_int64 * len(numbers))(*numbers)


@lru_cache(maxsize=256)
def even_layout(num_rows: int, width: int, num_logits: int, first: int | None = None) -> Layout:
    """Return the layout of rows of one width, with logits of the last columns or from `first` on; cached."""
    first = width - num_logits if first is None else first
    selected = [row * width + first + column for row in range(num_rows) for column in range(num_logits)]
    return Layout.from_lists(
        range(0, (num_rows + 1) * width, width), selected, range(len(selected)), num_logits
    )


@lru_cache(maxsize=256)
def uneven_layout(counts: tuple[int, ...], lengths: tuple[int, ...], num_nodes: int) -> Layout:
    """Return the layout of rows with these numbers of tokens, the last being pending and nodes of a padded draft; cached."""
    firsts = [0, *accumulate(counts)]
    queries = [(row, node) for row, length in enumerate(lengths) for node in range(length + 1)]
    selected = [firsts[row + 1] - 1 - lengths[row] + node for row, node in queries]
    return Layout.from_lists(
        firsts, selected, [row * (num_nodes + 1) + node for row, node in queries], num_nodes + 1
    )


@lru_cache(maxsize=256)
def last_token_layout(counts: tuple[int, ...]) -> Layout:
    """Return the layout of rows with these numbers of tokens, with the logits of the last of each."""
    return uneven_layout(counts, (0,) * len(counts), 0)


def num_keys_of_chains(
    tokens: Sequence[Sequence[int]], starts: Sequence[int], requests: Sequence[ChainRequest]
) -> int:
    """Return the largest number of positions that chains need, but for their last nodes, which are not run."""
    rows = zip(starts, tokens, requests, strict=True)
    return max(start + len(row_tokens) + request.num_nodes - 1 for start, row_tokens, request in rows)


def in_rows(output: ForwardOutput, tokens: Tensor) -> ForwardOutput:
    """Return an output with hidden states `[row, query, width]` for tokens `[row, query]`."""
    return ForwardOutput(
        output.logits, {layer: each.view(*tokens.shape, -1) for layer, each in output.hidden.items()}
    )


def in_columns(token_values: Tensor, layout: Layout) -> Tensor:
    """Return states `[token, width]` of the selected tokens as `[row, column, width]`, zeros where there is none."""
    num_rows, num_selected = len(layout.firsts) - 1, len(layout.selected)
    if num_selected < len(token_values):
        token_values = token_values[torch.tensor(layout.selected[:])]
    if num_selected < num_rows * layout.num_columns:
        selected = token_values
        token_values = selected.new_zeros(num_rows * layout.num_columns, selected.shape[-1])
        token_values[torch.tensor(layout.places[:])] = selected
    return token_values.view(num_rows, layout.num_columns, -1)


class KernelInputs(NamedTuple):
    """Inputs of a forward pass of the kernels.

    Args:
        tokens: tokens of all rows, in order; `num_known` other tokens of a row's step precede it.
            None with `states`.
        layout: the tokens of each row, and those whose logits are returned.
        step: starts and ancestors of all tokens of the step.
        layers: layers that are run.
        wanted: layers whose hidden states are returned: the input of the first of `layers`, or
            any of their outputs.
        num_known: number of preceding tokens of each row that these layers have run already.
        states: input of the first of `layers` in float32; None for the embeddings of `tokens`.
        features: `[..., width]` in bfloat16, read with the tokens by a drafter head.
    """

    tokens: Tensor | None
    layout: Layout
    step: ForwardStep
    layers: range
    wanted: Sequence[int] = ()
    num_known: int = 0
    states: Tensor | None = None
    features: Tensor | None = None


class PreparedCall(NamedTuple):
    """Outputs of a call of the kernels, and its inputs.

    Args:
        logits: `[row, column, vocab]`; zeros in columns that are not selected.
        levels: requested levels of hidden states.
        shown: their hidden states `[level, token, width]`; None if none was requested.
        held: inputs, which are kept until the call has ended.
    """

    logits: Tensor
    levels: list[int]
    shown: Tensor | None
    held: object


class KernelForward:
    """Forward passes of a packed decoder with a workspace of their own, for one thread at a time.

    Args:
        decoder: the weights.
        context_length: largest number of positions.

    Raises:
        OutOfMemoryError: no memory for the workspace.
    """

    def __init__(self, decoder: PackedDecoder, context_length: int) -> None:
        self.decoder = decoder
        self._kernels = kernels = decoder.unit.kernels
        self._workspace = c_void_p(kernels.secondguess_workspace())
        if not self._workspace:
            raise OutOfMemoryError(
                "cannot allocate the workspace of a model: out of memory. Use a smaller model."
            )
        # not at exit: a daemon thread may still be in a forward pass
        weakref.finalize(self, kernels.secondguess_free, self._workspace).atexit = False
        self._keys, self._values = (c_void_p * decoder.num_layers)(), (c_void_p * decoder.num_layers)()
        self._tables = (c_void_p * len(decoder.rotaries))()
        self._no_levels = (c_void_p * (decoder.num_layers + 1))()
        self._in_order = torch.arange(NUM_PREALLOCATED_SLOTS)
        self._arguments = library.Forward(
            context_length=context_length,
            cos_sin=ctypes.addressof(self._tables),
            keys=ctypes.addressof(self._keys),
            values=ctypes.addressof(self._values),
        )
        # Not the tensor itself: a cache that nothing else uses is freed.
        self._reached: Callable[[], Tensor | None] = lambda: None

    @contextmanager
    def with_experts(self, selected: Mapping[int, Tensor]) -> Iterator[None]:
        """Force the experts `[token, k]`, by layer, that tokens use in a forward pass, for a probe."""
        held = {layer: each.int().contiguous() for layer, each in selected.items()}
        addresses = (c_void_p * self.decoder.num_layers)()
        for layer, each in held.items():
            addresses[layer] = each.data_ptr()
        self._arguments.experts = ctypes.addressof(addresses)
        try:
            yield
        finally:
            self._arguments.experts = None

    def unembed(self, states: Tensor, *, is_normalised: bool = True) -> Tensor:
        """Return the logits `[..., vocab]` in float32 of hidden states `[..., width]`.

        They are the input of the LM head or, unless `is_normalised`, of the first layer of a decoder without attention.
        """
        flat = states.float().contiguous()
        num_rows = flat.numel() // flat.shape[-1]
        logits = library.float32_buffer(*states.shape[:-1], self.decoder.described.head.num_outputs)
        to_logits = (int(is_normalised), logits.data_ptr(), num_threads(), self._workspace)
        arguments = (flat.data_ptr(), num_rows, *to_logits)
        if num_rows and self._kernels.secondguess_unembed(self.decoder.described, *arguments):
            raise OutOfMemoryError(f"expected memory for the logits of {num_rows} states, got none")
        return logits

    def write_caches(
        self, cache: KeyValueCache, states: Tensor, counts: Sequence[int], step: ForwardStep, layers: range
    ) -> None:
        """Write the keys and values that layers compute from the same states, for a block drafter.

        `states` `[token, width]` in float32 are those of all rows in order, with `counts` tokens each.
        """
        self._arguments.caches_only = True
        try:
            layout = Layout.from_lists([0, *accumulate(counts)], (), (), 0)
            self(cache, KernelInputs(None, layout, step, layers, states=states))
        finally:
            self._arguments.caches_only = False

    def __call__(self, cache: KeyValueCache, inputs: KernelInputs) -> ForwardOutput:
        """Run some layers in one call of the kernels; return hidden states `[token, width]` in float32.

        A token id outside the vocabulary raises a `BadInputError`.
        """
        call = self._prepare(cache, inputs)
        failure = self._kernels.secondguess_run(self.decoder.described, self._arguments, self._workspace)
        self._check(failure, inputs.tokens, inputs.layout.firsts[-1])
        if call.shown is None:
            return ForwardOutput(call.logits)
        level_states = dict(zip(call.levels, call.shown.unbind(), strict=True))
        hidden = {layer: level_states[self._level(layer)] for layer in inputs.wanted}
        return ForwardOutput(call.logits, hidden)

    def draft_chains(
        self,
        cache: KeyValueCache,
        tokens: Sequence[Sequence[int]],
        starts: Sequence[int],
        requests: Sequence[ChainRequest],
        decision: ChainDecision,
        features: Tensor | None = None,
    ) -> DrawnChains:
        """Draw chains after the uncached tokens of rows, at least one each, in one call of the kernels.

        The cache is placed for the tokens and all nodes. `features` `[token, width]` are as in `KernelInputs`; those of nodes are
        the outputs of a drafter head.
        """
        flat = [token for row_tokens in tokens for token in row_tokens]
        layout = last_token_layout(tuple([len(row_tokens) for row_tokens in tokens]))
        step = kernel_step(starts, cache.placement.num_keys)
        layers, num_layers = range(self.decoder.num_layers), self.decoder.num_layers
        output = () if features is None else (num_layers,)
        flat_tokens = token_tensor(flat, torch.device("cpu"))
        inputs = KernelInputs(flat_tokens, layout, step, layers, output, features=features)
        call = self._prepare(cache, inputs)
        with ChainCall(requests, decision, call.logits[:, 0, : requests[0].vocab_size]) as drawing:
            failure: int = self._kernels.secondguess_draft_chains(
                self.decoder.described, self._arguments, self._workspace, drawing.chains
            )
        drawn = drawing.result(failure)
        if drawn is None:
            self._check(-failure, torch.tensor([*flat, *drawing.tokens]), len(flat))
        assert drawn is not None
        return drawn

    def _check(self, failure: int, tokens: Tensor | None, num_tokens: int) -> None:
        """Raise the error of a call."""
        if failure == NO_MEMORY:
            raise OutOfMemoryError(
                f"expected memory for a forward over {num_tokens} tokens, got none; decode fewer at once"
            )
        if failure == UNKNOWN_TOKEN and tokens is not None:
            raise BadInputError(
                f"expected token ids from 0 to {self.decoder.described.num_embedded - 1}, got {int(tokens.max())} "
                f"or {int(tokens.min())}; is it the tokenizer of another model?"
            )

    def _prepare(self, cache: KeyValueCache, inputs: KernelInputs) -> PreparedCall:
        """Set the arguments of a call."""
        tokens, layout, step, layers, wanted, num_known, states, features = inputs
        rows, num_tokens = len(layout.firsts) - 1, layout.firsts[-1]
        tokens = None if tokens is None else tokens.contiguous()
        self._reach_cache(cache)
        # held: a runtime that shares the decoder may replace a table
        tables = [rotary.table(step.num_keys) for rotary in self.decoder.rotaries]
        for index, table in enumerate(tables):
            self._tables[index] = table.data_ptr()
        # the last layer has two numbers
        asked = list(dict.fromkeys([self._level(layer) for layer in wanted]))
        addresses, shown = self._room_for(num_tokens, asked) if asked else (self._no_levels, None)
        logits = library.float32_buffer(rows, layout.num_columns, self.decoder.described.head.num_outputs)
        if len(layout.selected) < rows * layout.num_columns:
            logits.zero_()
        slots = cache.placement.slots
        if slots is None:
            slots = self._in_order if rows <= NUM_PREALLOCATED_SLOTS else torch.arange(rows)
        starts = (c_int64 * rows)(*step.starts)
        closure = None if step.closure is None else step.closure.contiguous()
        states = None if states is None else states.contiguous()
        features = None if features is None else features.contiguous()
        forward = self._arguments
        forward.num_rows, forward.num_tokens, forward.num_logits = rows, num_tokens, len(layout.selected)
        forward.firsts = ctypes.addressof(layout.firsts)
        forward.selected, forward.places = ctypes.addressof(layout.selected), ctypes.addressof(layout.places)
        forward.num_indices = 0 if closure is None else closure.shape[-1]
        forward.num_known, forward.first_layer, forward.last_layer = num_known, layers.start, layers.stop
        forward.capacity, forward.num_threads = cache.capacity, num_threads()
        forward.slots, forward.logits = slots.data_ptr(), logits.data_ptr()
        forward.starts, forward.hidden = ctypes.addressof(starts), ctypes.addressof(addresses)
        forward.closure = None if closure is None else closure.data_ptr()
        forward.tokens = None if tokens is None else tokens.data_ptr()
        forward.states = None if states is None else states.data_ptr()
        forward.features = None if features is None else features.data_ptr()
        held = (tables, addresses, starts, closure, tokens, states, features, slots)
        return PreparedCall(logits, asked, shown, held)

    def _room_for(self, num_tokens: int, asked: Sequence[int]) -> tuple[ctypes.Array[c_void_p], Tensor]:
        """Allocate the hidden states of these levels for the kernels.

        Return the addresses by level, null if not requested, and the states of the requested levels `[level, token, width]`.
        """
        addresses = (c_void_p * (self.decoder.num_layers + 1))()
        width = self.decoder.embedding.shape[1]
        states = library.float32_buffer(len(asked), num_tokens, width)
        address, size = states.data_ptr(), states.nbytes // len(asked)
        for number, level in enumerate(asked):
            addresses[level] = address + number * size
        return addresses, states

    def _level(self, layer: int) -> int:
        """Return a layer's level, counted from the embeddings; -1 is the last level."""
        return layer % (self.decoder.num_layers + 1)

    def _reach_cache(self, cache: KeyValueCache) -> None:
        """Update the addresses of keys and values, which change when the cache grows."""
        decoder = self.decoder
        dtypes = torch.float16, torch.bfloat16
        cache.allocate(decoder.num_layers, decoder.num_key_heads, decoder.head_size, *dtypes)
        # Every tensor of a cache is replaced when it grows.
        if self._reached() is not cache.keys[0]:
            for index in range(decoder.num_layers):
                self._keys[index] = cache.keys[index].data_ptr()
                self._values[index] = cache.values[index].data_ptr()
            self._reached = weakref.ref(cache.keys[0])
