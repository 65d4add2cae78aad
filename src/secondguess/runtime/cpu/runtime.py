"""Runtime whose forward pass is one call of the compiled kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from secondguess.core import Draft
from secondguess.runtime.base import EmbeddingAndHead, ForwardOutput, HiddenStates
from secondguess.runtime.cache import IndexedCache, KeyValueCache
from secondguess.runtime.cached import CachedRuntime, Queries, build_queries
from secondguess.runtime.chains import ChainDecision, ChainRequest, DrawnChains
from secondguess.runtime.cpu.decoder import NativeDecoder
from secondguess.runtime.cpu.forward import (
    KernelForward,
    KernelInputs,
    even_layout,
    in_columns,
    in_rows,
    kernel_step,
    num_keys_of_chains,
    uneven_layout,
)
from secondguess.runtime.layered import LayeredForward
from secondguess.runtime.modules.support import context_length_of
from secondguess.runtime.slots import CachedRow
from secondguess.runtime.step import ForwardStep
from secondguess.runtime.system.exclusive import exclusive
from secondguess.runtime.system.machine import has_bfloat16, without_gradients
from secondguess.runtime.weight_format import WeightFormat
from secondguess.tensors import token_tensor


class KernelRuntime(CachedRuntime):
    """Runtime whose forward passes are calls of the compiled kernels, of a decoder or of a drafter head.

    A row's bits depend on that row alone: not on other rows, padding, chunk lengths or the shape
    of a draft.
    """

    kind = "native"
    min_logits = 0
    cache_class = IndexedCache
    orders_rows = False
    forward: KernelForward

    def __init__(self, *sizes: Any, **options: Any) -> None:
        super().__init__(*sizes, **options)
        self._key_block, self._prefills_together = 1, True

    def _step(
        self, starts: Sequence[int], queries: Queries, num_keys: int, *, causal: bool = False
    ) -> ForwardStep:
        return kernel_step(starts, num_keys, queries.closure)

    def _chain_features(self, counts: Sequence[int]) -> Tensor | None:
        """Return the features `[token, width]` of the tokens just placed; None for a decoder."""
        return None

    def _draw_chains(
        self, states: Sequence[CachedRow], requests: Sequence[ChainRequest], decision: ChainDecision
    ) -> DrawnChains | None:
        if requests[0].vocab_size > self.vocab_size:
            return None
        tokens = [state.row.tokens[state.length :] for state in states]
        starts, counts = [state.length for state in states], list(map(len, tokens))
        num_keys = num_keys_of_chains(tokens, starts, requests)
        with without_gradients():
            self._place(states, starts, max(counts), num_keys)
            features = self._chain_features(counts)
            return self.forward.draft_chains(self.cache, tokens, starts, requests, decision, features)


class NativeRuntime(KernelRuntime):
    """Runtime of a decoder over the compiled kernels.

    Args:
        decoder: the packed weights.
    """

    supports_partial_forward = True

    def __init__(self, decoder: NativeDecoder) -> None:
        super().__init__(
            vocab_size=decoder.described.head.num_outputs,
            context_length=context_length_of(decoder.config),
            num_layers=decoder.num_layers,
            device=decoder.embedding.device,
        )
        self.decoder = decoder
        # Drafters process hidden states with torch, which is slow in bfloat16 on many processors.
        self._dtype_of_states = torch.bfloat16 if has_bfloat16(self.device) else torch.float32
        self.forward = KernelForward(decoder, self.context_length)
        self._differentiable_head: Tensor | None = None
        self.layered = KernelLayers(self.forward, self.cache, self.embedding_and_head())

    def probe_with_experts(self, tokens: Tensor, selected: Mapping[int, Tensor]) -> Tensor:
        """Return the logits of tokens `[row, token]` that select the experts `selected`, `[row, token, k]` by layer."""
        token_experts = {layer: each.flatten(0, 1) for layer, each in selected.items()}
        with self.forward.with_experts(token_experts):
            return self.probe(tokens).logits

    @exclusive
    def probe_layers(
        self, states: Tensor, layers: range, selected: Mapping[int, Tensor], num_logits: int = 0
    ) -> tuple[Tensor, Tensor | None]:
        """Run some layers over whole sequences without keeping them, for a check.

        Args:
            states: `[row, token, width]`, input of the first of these layers.
            layers: the layers; with an empty range only logits are computed.
            selected: experts that tokens use, `[row, token, k]` by layer.
            num_logits: last tokens of each row whose logits are returned.

        Returns:
            Logits `[row, token, vocab]`, and the output of the last layer `[row, token, width]`, not normalised.
        """
        num_rows, width, _ = states.shape
        starts, experts = [0] * num_rows, {layer: each.flatten(0, 1) for layer, each in selected.items()}
        wanted, described = (layers.stop,) if layers else (), self.decoder.described
        described.output_is_raw = True
        try:
            with torch.inference_mode(), self.forward.with_experts(experts):
                self.cache.place(starts, width, range(num_rows), width)
                step, layout = kernel_step(starts, width), even_layout(num_rows, width, num_logits)
                inputs = KernelInputs(None, layout, step, layers, wanted, states=states)
                output = self.forward(self.cache, inputs)
        finally:
            described.output_is_raw = False
        hidden = [each.view(num_rows, width, -1) for each in output.hidden.values()]
        return output.logits, hidden[0] if hidden else None

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
        decoder = self.decoder
        if states.requires_grad and decoder.is_tied:
            if self._differentiable_head is None:
                self._differentiable_head = decoder.embedding.to(self._dtype_of_states)
            bias = None if decoder.head_bias is None else decoder.head_bias.to(states.dtype)
            return decoder.logit_scaling(functional.linear(states, self._differentiable_head, bias))
        with self.lock.exclusive():
            return self.forward.unembed(states)

    def skip_layers(self, skipped: Sequence[int]) -> NativeRuntime:
        return NativeRuntime(self.decoder.without(skipped))

    @property
    def why_not_copied(self) -> str:
        weight_format = self.decoder.weight_format
        return f"one with weights in {weight_format.name}" if weight_format.is_quantised else ""

    def _copied_forward(self, weight_format: WeightFormat) -> KernelForward:
        return KernelForward(self.decoder.requantised(weight_format), self.context_length)

    def _run_new_queries(
        self, states: Sequence[CachedRow], num_uncached: Sequence[int], draft: Draft, num_known: int
    ) -> Tensor:
        if max(num_uncached) > 1:
            return super()._run_new_queries(states, num_uncached, draft, num_known)
        starts, num_new = [state.length for state in states], draft.num_nodes + 1 - num_known
        num_keys = max(starts) + draft.num_nodes + 1
        queries = build_queries(states, num_uncached, draft)
        self._place(states, [start + num_known for start in starts], num_new, num_keys)
        tokens, step = queries.tokens[:, num_known:], self._step(starts, queries, num_keys)
        layout, layers = even_layout(len(states), num_new, num_new), range(self.num_layers)
        inputs = KernelInputs(tokens, layout, step, layers, num_known=num_known)
        return self.forward(self.cache, inputs).logits

    def run(self, tokens: Tensor, step: ForwardStep, num_logits: int, with_hidden: bool) -> ForwardOutput:
        wanted = self.hidden_layers if with_hidden else ()
        layout = even_layout(*tokens.shape, num_logits)
        inputs = KernelInputs(tokens, layout, step, range(self.num_layers), wanted)
        output = in_rows(self.forward(self.cache, inputs), tokens)
        return ForwardOutput(output.logits, self._returned(output.hidden))

    def _returned(self, hidden: HiddenStates) -> HiddenStates:
        """Return hidden states in the dtype of drafters."""
        return {layer: states.to(self._dtype_of_states) for layer, states in hidden.items()}

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
        inputs = KernelInputs(tokens, layout, step, range(self.num_layers), self.hidden_layers)
        output = self.forward(self.cache, inputs)
        hidden = {layer: in_columns(states, layout) for layer, states in output.hidden.items()}
        return output.logits, self._returned(hidden)

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
        return token_tensor(tokens, self.device), kernel_step(starts, num_keys)


class KernelLayers(LayeredForward):
    """Passes of the compiled kernels through some layers of a decoder.

    Args:
        forward: passes of the kernels.
        cache: of the runtime.
        shared: the embeddings, in the dtype of hidden states.
    """

    def __init__(self, forward: KernelForward, cache: KeyValueCache, shared: EmbeddingAndHead) -> None:
        self._forward, self._cache, self._num_layers = forward, cache, forward.decoder.num_layers
        self._embed, self._dtype = shared.embed, shared.dtype

    def run_first(self, tokens: Tensor, step: ForwardStep, num_known: int, num_layers: int) -> Tensor:
        layout = even_layout(*tokens.shape, 0)
        inputs = KernelInputs(tokens, layout, step, range(num_layers), (num_layers,), num_known)
        return in_rows(self._forward(self._cache, inputs), tokens).hidden[num_layers]

    def run_remaining(
        self,
        tokens: Tensor,
        states: Tensor,
        step: ForwardStep,
        num_layers: int,
        hidden_layers: Sequence[int],
    ) -> ForwardOutput:
        wanted = [layer for layer in hidden_layers if layer % (self._num_layers + 1)]
        layers, layout = range(num_layers, self._num_layers), even_layout(*tokens.shape, tokens.shape[1])
        inputs = KernelInputs(tokens, layout, step, layers, wanted, states=states)
        output = in_rows(self._forward(self._cache, inputs), tokens)
        hidden = {layer: states.to(self._dtype) for layer, states in output.hidden.items()}
        hidden |= {layer: self._embed(tokens) for layer in hidden_layers if layer not in wanted}
        return ForwardOutput(output.logits, hidden)
