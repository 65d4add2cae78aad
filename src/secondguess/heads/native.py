"""Feature-reading drafter heads (EAGLE, MTP) on the compiled kernels.

The head's layers are those of a dense decoder, so the target's kernels run them, with its
embeddings and LM head where the drafter head has none of its own. Weights are rounded to bfloat16.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from secondguess.heads.feature import FeatureHead
from secondguess.heads.layer import LayerConfig
from secondguess.heads.runtime import FEATURE_KEY, FeatureRuntime, TorchFeatureRuntime
from secondguess.runtime.attention import ForwardStep
from secondguess.runtime.base import HiddenStates, Runtime
from secondguess.runtime.cached import Output, Queries
from secondguess.runtime.fused import Rotary, probe_passes
from secondguess.runtime.native import library
from secondguess.runtime.native.decoder import ACTIVATIONS, NativeDecoder, PackedDecoder
from secondguess.runtime.native.forward import KernelForward, even_layout, in_rows, kernel_step
from secondguess.runtime.native.runtime import PROBE_TOLERANCE, PROBE_WIDTH, NativeRuntime
from secondguess.runtime.weight_format import BFLOAT16


def feature_runtime(head: FeatureHead, target: Runtime) -> FeatureRuntime:
    """Return the fastest runtime of a drafter head that reproduces its logits.

    Args:
        head: in evaluation mode, on the target's device and in its dtype; not to be used afterwards.
        target: target whose hidden states the head reads.
    """
    plain = TorchFeatureRuntime(head, target.context_length, target.device)
    if not isinstance(target, NativeRuntime):
        return plain
    native = NativeFeatureRuntime(head, target.decoder, target.context_length)
    vocab_size, generator = head.target.vocab_size, torch.Generator().manual_seed(0)
    tokens = torch.arange(2 * PROBE_WIDTH).remainder(vocab_size).reshape(2, PROBE_WIDTH)
    features = torch.randn(2, PROBE_WIDTH, head.shape.width, generator=generator).bfloat16()
    with torch.inference_mode():
        expected = plain.read_with(tokens, features.to(head.target.dtype)).logits
        found = native.read_with(tokens, features).logits
    covered = expected.isfinite()  # the draft vocabulary
    tolerance = PROBE_TOLERANCE[target.decoder.weight_format if head.lm_head is None else BFLOAT16]
    passes = probe_passes("native (drafter head)", found[covered], expected[covered], tolerance)
    return native if passes else plain


class PackedFeatureHead(PackedDecoder):
    """Weights of a feature-reading drafter head in the layout of the kernels, in bfloat16.

    Args:
        head: drafter head.
        target: decoder whose embeddings and LM head it uses where it has none of its own.
    """

    def __init__(self, head: FeatureHead, target: NativeDecoder) -> None:
        super().__init__(target.unit)
        shape, parts = head.shape, head.parts
        self._target = target  # keeps shared weights allocated
        self.num_layers, self.num_key_heads, self.head_size = (
            head.num_layers,
            shape.num_kv_heads,
            shape.head_size,
        )
        own_embedding = None if head.embed_tokens is None else head.embed_tokens.weight
        self.embedding = target.embedding if own_embedding is None else own_embedding.detach().bfloat16()
        steps = torch.arange(0, shape.head_size, 2, dtype=torch.float32) / shape.head_size
        self.rotaries = [Rotary(shape.rope_theta**-steps, 1.0, torch.bfloat16)]
        layers = (library.Layer * head.num_layers)()
        for index, layer in enumerate(parts.layers):
            layers[index] = self._layer(layer, shape)
        self.described = library.Decoder(
            layers=layers,
            num_layers=head.num_layers,
            width=shape.width,
            inner_width=shape.mlp_size,
            num_queries=shape.num_heads,
            num_keys=shape.num_kv_heads,
            head_size=shape.head_size,
            activation=ACTIVATIONS["silu"],
            num_embedded=self.embedding.shape[0],
            amx=self.unit.has_tiles,
            scaling=shape.head_size**-0.5,
            embedding_scale=target.described.embedding_scale if own_embedding is None else 1.0,
            embedding=self.embedding.data_ptr(),
            norm=self._norm(head.norm),
            head=target.head.weight if head.lm_head is None else self._linear(head.lm_head),
            joins_features=True,
            residual_is_normalised=parts.residual_is_normalised,
            output_is_raw=not head.norm_output,
            token_norm=self._norm(parts.token_norm),
            feature_norm=self._norm(parts.feature_norm),
            projection=library.Weight() if parts.projection is None else self._linear(parts.projection),
        )

    def _layer(self, layer: Any, shape: LayerConfig) -> library.Layer:
        attention, mlp = layer.self_attn, layer.mlp
        has_norms = shape.has_qk_norm
        return library.Layer(
            attention_norm=self._norm(layer.input_layernorm),
            query_norm=self._norm(attention.q_norm) if has_norms else library.Norm(),
            key_norm=self._norm(attention.k_norm) if has_norms else library.Norm(),
            mlp_norm=self._norm(layer.post_attention_layernorm),
            qkv=self._linear(attention.q_proj, attention.k_proj, attention.v_proj),
            output=self._linear(attention.o_proj),
            gate_up=self._linear(mlp.gate_proj, mlp.up_proj, gated=True),
            down=self._linear(mlp.down_proj),
        )

    def _linear(self, *linears: nn.Linear, gated: bool = False) -> library.Weight:
        """Return the packed weight of linear layers with the same input, outputs concatenated."""
        weight = torch.cat([linear.weight.detach().bfloat16() for linear in linears])
        biases = [linear.bias.detach() for linear in linears if linear.bias is not None]
        return self._pack(weight, torch.cat(biases) if biases else None, gated=gated).weight

    def _norm(self, norm: Any) -> library.Norm:
        if isinstance(norm, nn.Identity):
            return library.Norm()
        return self._keep_norm(norm.weight, norm.eps, rounds_first=False)


class PackedLinear(PackedDecoder):
    """Linear layer without bias on the kernels, in bfloat16; for one thread at a time.

    Args:
        linear: the layer.
        unit: as in `PackedDecoder`.
    """

    def __init__(self, linear: nn.Linear, unit: library.Unit) -> None:
        super().__init__(unit)
        self.num_layers, self.rotaries = 0, []
        weight = self._pack(linear.weight.detach().bfloat16()).weight
        self.described = library.Decoder(
            width=linear.in_features, amx=unit.has_tiles, embedding_scale=1.0, head=weight
        )
        self._forward = KernelForward(self, 0, torch.float32)

    def __call__(self, values: Tensor) -> Tensor:
        """Return the outputs `[..., output]` in float32 of inputs `[..., input]`."""
        return self._forward.unembed(values)


class NativeFeatureRuntime(FeatureRuntime):
    """Feature runtime over the compiled kernels; features are kept in bfloat16.

    Args:
        head: drafter head.
        target: packed target, with which it shares embeddings and LM head.
        context_length: as in `FeatureRuntime`.
    """

    min_logits = 0

    def __init__(self, head: FeatureHead, target: NativeDecoder, context_length: int) -> None:
        super().__init__(head, context_length, target.embedding.device)
        self._key_block = 1
        self._prefills_together = True
        self._vocabulary = head.vocabulary
        self._join_states = head.join_states
        self._fusion = None if head.fusion is None else PackedLinear(head.fusion, target.unit)
        self._forward = KernelForward(PackedFeatureHead(head, target), self.context_length, torch.bfloat16)

    def features(self, hidden: HiddenStates) -> Tensor:
        joined = self._join_states(hidden)
        return (joined if self._fusion is None else self._fusion(joined)).bfloat16()

    def free(self) -> None:
        super().free()
        self._forward.forget_cache()

    def _step(
        self, starts: Sequence[int], queries: Queries, num_keys: int, *, causal: bool = False
    ) -> ForwardStep:
        return kernel_step(starts, queries, num_keys)

    def run(self, tokens: Tensor, step: ForwardStep, num_logits: int, with_hidden: bool) -> Output:
        last = (self.num_layers,) if with_hidden else ()
        layout = even_layout(*tokens.shape, num_logits)
        layers, features = range(self.num_layers), self._forward_features
        output = in_rows(
            self._forward(self.cache, tokens, layout, step, layers, last, features=features), tokens
        )
        hidden = {FEATURE_KEY: output.hidden[self.num_layers]} if with_hidden else {}
        return Output(self._vocabulary.to_target(output.logits), hidden)
