"""Runtime whose forward pass is one call of the compiled kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from secondguess.runtime.attention import ForwardStep
from secondguess.runtime.base import EmbeddingAndHead
from secondguess.runtime.cached import Output, Queries
from secondguess.runtime.fused import FusedDecoder, FusedRuntime, probe_passes
from secondguess.runtime.layered import LayeredRuntime
from secondguess.runtime.native.decoder import NativeDecoder
from secondguess.runtime.native.forward import KernelForward, kernel_step
from secondguess.runtime.support import context_length_of, has_bfloat16

PROBE_WIDTH = 16
PROBE_TOLERANCE = {False: 0.03, True: 0.12}
"""Largest relative root-mean-square error of the logits attributed to rounding, by `eight_bits`.

Trained and tiny random models have errors of 0.01 in bfloat16 and 0.03 to 0.05 in 8 bits; a wrong
computation has an error of about 1.
"""


def to_native(decoder: FusedDecoder, eight_bits: bool = False) -> NativeDecoder | None:
    """Return a fused decoder in the layout of the kernels, or None if they would not reproduce it.

    The fused decoder must not be used afterwards in either case.

    Args:
        decoder: unpacked, in bfloat16.
        eight_bits: as in `NativeDecoder`.
    """
    tokens = torch.arange(2 * PROBE_WIDTH).remainder(decoder.embedding.shape[0]).reshape(2, PROBE_WIDTH)
    expected = FusedRuntime(decoder).read(tokens).logits
    native = NativeDecoder(decoder, eight_bits)
    found = NativeRuntime(native).read(tokens).logits
    name = "native (8 bits)" if eight_bits else "native"
    return native if probe_passes(name, found, expected, PROBE_TOLERANCE[eight_bits]) else None


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
        # Drafters process hidden states with torch, which is slow in bfloat16 on many processors.
        self._dtype_of_states = torch.bfloat16 if has_bfloat16(self.device) else torch.float32
        self._forward = KernelForward(decoder, self.context_length, self._dtype_of_states)
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
        with self.lock:
            return self._forward.unembed(states)

    def skip_layers(self, skipped: Sequence[int]) -> NativeRuntime:
        return NativeRuntime(self.decoder.without(skipped), prefill_chunk=self.prefill_chunk)

    def release(self) -> None:
        super().release()
        self._forward.forget_cache()

    def _step(
        self, starts: Sequence[int], queries: Queries, num_keys: int, *, causal: bool = False
    ) -> ForwardStep:
        return kernel_step(starts, queries, num_keys)

    def run(self, tokens: Tensor, step: ForwardStep, num_logits: int, with_hidden: bool) -> Output:
        wanted = self.hidden_layers if with_hidden else ()
        return self._forward(self.cache, tokens, step, range(self.num_layers), num_logits, wanted)

    def run_first(self, tokens: Tensor, step: ForwardStep, num_known: int, num_layers: int) -> Tensor:
        layers = range(num_layers)
        output = self._forward(self.cache, tokens, step, layers, 0, (num_layers,), num_known=num_known)
        return output.hidden[num_layers]

    def run_remaining_layers(
        self, tokens: Tensor, states: Tensor, step: ForwardStep, num_layers: int
    ) -> Output:
        wanted = [layer for layer in self.hidden_layers if layer % (self.num_layers + 1)]
        layers = range(num_layers, self.num_layers)
        states = states.to(torch.bfloat16)
        output = self._forward(self.cache, tokens, step, layers, tokens.shape[1], wanted, states=states)
        of_tokens = {
            layer: self.embedding_and_head().embed(tokens)
            for layer in self.hidden_layers
            if layer not in wanted
        }
        return Output(output.logits, output.hidden | of_tokens)
