"""Runtime whose forward pass is one call of the compiled kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from secondguess.core import Draft, Row, token_tensor
from secondguess.runtime.attention import ForwardStep
from secondguess.runtime.base import (
    ChainDecision,
    ChainRequest,
    DrawnChains,
    EmbeddingAndHead,
    HiddenStates,
    QuantisedCopy,
)
from secondguess.runtime.cache import IndexedCache
from secondguess.runtime.cached import Output, Queries, build_queries
from secondguess.runtime.exclusive import exclusive
from secondguess.runtime.fused import CheckedDecoder, probe_passes
from secondguess.runtime.layered import LayeredRuntime
from secondguess.runtime.native.decoder import NativeDecoder
from secondguess.runtime.native.forward import (
    NO_POSITIONS,
    KernelForward,
    even_layout,
    in_columns,
    in_rows,
    kernel_step,
    num_keys_of_chains,
    uneven_layout,
)
from secondguess.runtime.slots import CachedRow
from secondguess.runtime.support import context_length_of, has_bfloat16, without_gradients
from secondguess.runtime.weight_format import BFLOAT16, PROBE_TOLERANCE, WeightFormat


def to_native(checked: CheckedDecoder, weight_format: WeightFormat = BFLOAT16) -> NativeDecoder | None:
    """Return a fused decoder in the layout of the kernels, or None if they would not reproduce the module.

    The fused decoder must not be used afterwards in either case.

    Args:
        checked: the fused decoder, in bfloat16.
        weight_format: as in `NativeDecoder`.
    """
    native = NativeDecoder(checked.decoder, weight_format)
    found = NativeRuntime(native).read_with_experts(checked.tokens, checked.experts)
    name = f"native ({weight_format.name})"
    return native if probe_passes(name, found, checked.logits, PROBE_TOLERANCE[weight_format]) else None


class NativeRuntime(LayeredRuntime):
    """Runtime over the compiled kernels.

    A row's bits depend on that row alone: not on other rows, padding, chunk lengths or the shape
    of a draft.

    Args:
        decoder: from `to_native`.
    """

    min_logits = 0
    cache_class = IndexedCache
    orders_rows = False

    def __init__(self, decoder: NativeDecoder) -> None:
        super().__init__(
            vocab_size=decoder.described.head.num_outputs,
            context_length=context_length_of(decoder.config),
            num_layers=decoder.num_layers,
            device=decoder.embedding.device,
        )
        self.decoder = decoder
        self._key_block = 1
        self._prefills_together = True
        # Drafters process hidden states with torch, which is slow in bfloat16 on many processors.
        self._dtype_of_states = torch.bfloat16 if has_bfloat16(self.device) else torch.float32
        self._forward = KernelForward(decoder, self.context_length, self._dtype_of_states)
        self._differentiable_head: Tensor | None = None

    def read_with_experts(self, tokens: Tensor, selected: Mapping[int, Tensor]) -> Tensor:
        """Return the logits of tokens `[row, token]` that select the experts `selected`, `[row, token, k]` by layer."""
        of_tokens = {layer: each.flatten(0, 1) for layer, each in selected.items()}
        with self._forward.with_experts(of_tokens):
            return self.read(tokens).logits

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
            return self.decoder.logit_scaling(functional.linear(states, self._differentiable_head, bias))
        with self.lock.exclusive():
            return self._forward.unembed(states)

    def skip_layers(self, skipped: Sequence[int]) -> NativeRuntime:
        return NativeRuntime(self.decoder.without(skipped))

    @property
    def why_not_copied(self) -> str:
        weight_format = self.decoder.weight_format
        return f"one with weights in {weight_format.name}" if weight_format.is_quantised else ""

    def _make_copy(self, weight_format: WeightFormat) -> NativeCopy:
        return NativeCopy(self, weight_format)

    @exclusive
    def run_copy(self, forward: KernelForward, rows: Sequence[Row], draft: Draft, num_known: int) -> Tensor:
        """Run a copy of the decoder in this runtime's cache, as in `QuantisedCopy.draft_logits`."""
        self._partial = None  # its cache entries are overwritten
        states = [self.slots[row] for row in rows]
        starts, num_queries = [state.length for state in states], draft.num_nodes + 1
        num_new, num_keys = num_queries - num_known, max(starts) + num_queries
        with without_gradients():
            queries = build_queries(states, [1] * len(states), draft)
            self._place(states, [start + num_known for start in starts], num_new, num_keys)
            tokens, step = queries.tokens[:, num_known:], self._step(starts, queries, num_keys)
            layout, layers = even_layout(len(rows), num_new, num_new), range(self.num_layers)
            output = forward(self.cache, tokens, layout, step, layers, (), num_known)
        for state in states:
            state.num_nodes = num_queries  # moved with the row's slot until the target overwrites them
        return output.logits

    @exclusive
    def draft_chains(
        self, rows: Sequence[Row], requests: Sequence[ChainRequest], decision: ChainDecision
    ) -> DrawnChains | None:
        if requests[0].vocab_size > self.vocab_size:
            return None
        self._partial = None
        states = [self.slots[row] for row in rows]
        self._catch_up(states)
        uncached = [row.tokens[state.length :] for row, state in zip(rows, states, strict=True)]
        drawn = self._draft_chains(self._forward, states, uncached, requests, decision)
        for row, state, chain in zip(rows, states, drawn.tokens, strict=True):
            row.tokens += chain
            state.length = len(row.tokens) - 1
        return drawn

    @exclusive
    def draft_chains_of_copy(
        self,
        forward: KernelForward,
        rows: Sequence[Row],
        requests: Sequence[ChainRequest],
        decision: ChainDecision,
    ) -> DrawnChains:
        """Draw chains from a copy of the decoder in this runtime's cache, as in `QuantisedCopy.draft_chains`."""
        self._partial = None  # its cache entries are overwritten
        states = [self.slots[row] for row in rows]
        drawn = self._draft_chains(forward, states, [[row.pending] for row in rows], requests, decision)
        for state, chain in zip(states, drawn.tokens, strict=True):
            state.num_nodes = len(chain)  # moved with the row's slot until the target overwrites them
        return drawn

    def _draft_chains(
        self,
        forward: KernelForward,
        states: Sequence[CachedRow],
        tokens: Sequence[Sequence[int]],
        requests: Sequence[ChainRequest],
        decision: ChainDecision,
    ) -> DrawnChains:
        starts = [state.length for state in states]
        num_keys = num_keys_of_chains(tokens, starts, requests)
        with without_gradients():
            self._place(states, starts, max(map(len, tokens)), num_keys)
            return forward.draft_chains(self.cache, tokens, starts, requests, decision)

    def _step(
        self, starts: Sequence[int], queries: Queries, num_keys: int, *, causal: bool = False
    ) -> ForwardStep:
        return kernel_step(starts, queries, num_keys)

    def run(self, tokens: Tensor, step: ForwardStep, num_logits: int, with_hidden: bool) -> Output:
        wanted = self.hidden_layers if with_hidden else ()
        layout = even_layout(*tokens.shape, num_logits)
        return in_rows(
            self._forward(self.cache, tokens, layout, step, range(self.num_layers), wanted), tokens
        )

    def _run_queries(
        self, states: Sequence[CachedRow], num_uncached: Sequence[int], draft: Draft
    ) -> tuple[Tensor, HiddenStates]:
        if self._partial is not None:
            return super()._run_queries(states, num_uncached, draft)
        lengths: list[int] = draft.lengths.tolist()
        counts = [count + length for count, length in zip(num_uncached, lengths, strict=True)]
        if draft.is_chain:
            tokens, step = self._prepare_chains(states, draft, counts, lengths)
        else:
            padded, step = self._prepare(states, num_uncached, draft)
            tokens = padded[torch.arange(padded.shape[1]) < torch.tensor(counts)[:, None]]
        layout = uneven_layout(tuple(counts), tuple(lengths), draft.num_nodes)
        output = self._forward(self.cache, tokens, layout, step, range(self.num_layers), self.hidden_layers)
        hidden = {layer: in_columns(each, layout) for layer, each in output.hidden.items()}
        return output.logits, hidden

    def _prepare_chains(
        self, states: Sequence[CachedRow], draft: Draft, counts: Sequence[int], lengths: Sequence[int]
    ) -> tuple[Tensor, ForwardStep]:
        """Return the uncached tokens and nodes of all rows, which follow each other without padding."""
        starts = [state.length for state in states]
        num_keys = max([start + count for start, count in zip(starts, counts, strict=True)])
        self._place(states, starts, max(counts), num_keys)
        tokens = []
        for state, nodes, length in zip(states, draft.token_lists, lengths, strict=True):
            tokens += state.row.tokens[state.length :]
            tokens += nodes[:length]
        step = ForwardStep(None, NO_POSITIONS, num_keys, starts=starts)
        return token_tensor(tokens, self.device), step

    def run_first(self, tokens: Tensor, step: ForwardStep, num_known: int, num_layers: int) -> Tensor:
        layout = even_layout(*tokens.shape, 0)
        output = self._forward(
            self.cache, tokens, layout, step, range(num_layers), (num_layers,), num_known=num_known
        )
        return in_rows(output, tokens).hidden[num_layers]

    def run_remaining_layers(
        self, tokens: Tensor, states: Tensor, step: ForwardStep, num_layers: int
    ) -> Output:
        wanted = [layer for layer in self.hidden_layers if layer % (self.num_layers + 1)]
        layers = range(num_layers, self.num_layers)
        layout = even_layout(*tokens.shape, tokens.shape[1])
        output = self._forward(
            self.cache, tokens, layout, step, layers, wanted, states=states.to(torch.bfloat16)
        )
        output = in_rows(output, tokens)
        of_tokens = {
            layer: self.embedding_and_head().embed(tokens)
            for layer in self.hidden_layers
            if layer not in wanted
        }
        return Output(output.logits, output.hidden | of_tokens)


class NativeCopy(QuantisedCopy):
    """Quantised copy over the compiled kernels; it shares all but the weights with its target.

    Args:
        target: in bfloat16.
        weight_format: encoding of the copy's weights.
    """

    def __init__(self, target: NativeRuntime, weight_format: WeightFormat) -> None:
        self._target = target
        decoder = target.decoder.requantised(weight_format)
        self._forward = KernelForward(decoder, target.context_length, torch.bfloat16)

    def draft_logits(self, rows: Sequence[Row], draft: Draft, num_known: int) -> Tensor:
        return self._target.run_copy(self._forward, rows, draft, num_known)

    def draft_chains(
        self, rows: Sequence[Row], requests: Sequence[ChainRequest], decision: ChainDecision
    ) -> DrawnChains:
        return self._target.draft_chains_of_copy(self._forward, rows, requests, decision)
