"""Weights of drafter heads in the layout of the kernels, rounded to bfloat16.

Heads consist of the parts that dense decoders consist of, so the target's kernels run them, with
its embeddings and LM head where a head has none of its own.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from secondguess.heads.dspark import DsparkHead
from secondguess.heads.early_exit import EarlyExitHead
from secondguess.heads.feature import FeatureHead
from secondguess.heads.layer import LayerConfig, RotaryPositions
from secondguess.heads.medusa import MedusaHead
from secondguess.runtime.native import library
from secondguess.runtime.native.decoder import ACTIVATIONS, NativeDecoder, PackedDecoder
from secondguess.runtime.native.forward import KernelForward
from secondguess.runtime.rotary import Rotary


def release_matrices(head: nn.Module) -> None:
    """Free the matrices of a head that the kernels have packed."""
    for module in head.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            module.weight = nn.Parameter(module.weight.new_empty(0), requires_grad=False)


class PackedHead(PackedDecoder):
    """Weights of a drafter head in the layout of the kernels; it may use the target's embeddings and LM head."""

    num_layers = num_key_heads = head_size = 0

    def __init__(self, target: NativeDecoder) -> None:
        super().__init__(target.unit)
        self.embedding, self.rotaries = target.embedding, []
        self._target = target  # keeps shared weights allocated

    def _describe(self, layers: Sequence[library.Layer], **fields: Any) -> library.Decoder:
        """Return a description of layers, with the target's embeddings and LM head by default."""
        described = self._target.described
        shared = {
            "width": described.width,
            "activation": ACTIVATIONS["silu"],
            "num_embedded": described.num_embedded,
            "amx": described.amx,
            "embedding_scale": described.embedding_scale,
            "embedding": described.embedding,
            "head": described.head,
            "logit_divisor": described.logit_divisor,
            "logit_cap": described.logit_cap,
        }
        array = (library.Layer * len(layers))(*layers)
        return library.Decoder(layers=array, num_layers=len(layers), **{**shared, **fields})

    def _describe_attention(
        self, layers: Sequence[Any], config: LayerConfig, rotary: RotaryPositions, **fields: Any
    ) -> library.Decoder:
        """Return a description of decoder layers of one configuration, and set what their cache depends on."""
        self.num_layers, self.num_key_heads, self.head_size = (
            len(layers),
            config.num_kv_heads,
            config.head_size,
        )
        self.rotaries = [Rotary(rotary.frequencies, rotary.factor, torch.float32)]
        return self._describe(
            [self._layer(layer, config) for layer in layers],
            inner_width=config.mlp_size,
            num_queries=config.num_heads,
            num_keys=config.num_kv_heads,
            head_size=config.head_size,
            scaling=config.head_size**-0.5,
            **fields,
        )

    def _layer(self, layer: Any, config: LayerConfig) -> library.Layer:
        attention, mlp = layer.self_attn, layer.mlp
        has_norms = config.has_qk_norm
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
        return self._keep_norm(norm.weight, norm.eps)


class PackedFeatureHead(PackedHead):
    """Weights of a feature-reading drafter head: EAGLE, MTP."""

    def __init__(self, head: FeatureHead, target: NativeDecoder) -> None:
        super().__init__(target)
        parts = head.parts
        fields: dict[str, Any] = {}
        if head.embed_tokens is not None:
            self.embedding = head.embed_tokens.weight.detach().bfloat16()
            fields = {
                "embedding": self.embedding.data_ptr(),
                "num_embedded": len(self.embedding),
                "embedding_scale": 1.0,
            }
        if head.lm_head is not None:
            fields |= {"head": self._linear(head.lm_head), "logit_divisor": 0, "logit_cap": 0}
        if parts.projection is not None:
            fields["projection"] = self._linear(parts.projection)
        self.described = self._describe_attention(
            list(parts.layers),
            head.layer_config,
            head.rotary,
            norm=self._norm(head.norm),
            joins_features=True,
            residual_is_normalised=parts.residual_is_normalised,
            output_is_raw=not head.norm_output,
            token_norm=self._norm(parts.token_norm),
            feature_norm=self._norm(parts.feature_norm),
            **fields,
        )


class PackedBlockHead(PackedHead):
    """Weights of the backbone of a block drafter: DSpark, DFlash."""

    def __init__(self, head: DsparkHead, target: NativeDecoder) -> None:
        super().__init__(target)
        fields = {"head": self._linear(head.lm_head)} if head.config.has_output else {}
        self.described = self._describe_attention(
            list(head.layers),
            head.config.layer,
            head.rotary,
            norm=self._norm(head.norm),
            feature_norm=self._norm(head.hidden_norm),
            is_bidirectional=True,
            **fields,
        )


class PackedMedusaHead(PackedHead):
    """Weights of a set of Medusa drafter heads."""

    def __init__(self, head: MedusaHead, target: NativeDecoder) -> None:
        super().__init__(target)
        blocks: Iterable[Any] = head.blocks
        lm_heads: Iterable[Any] = head.lm_heads
        outputs = [self._linear(lm_head) for lm_head in lm_heads] or [target.described.head]
        self._depths = [
            self._describe(
                [library.Layer(down=self._linear(layer)) for layer in block.layers],
                head=outputs[min(depth, len(outputs) - 1)],
            )
            for depth, block in enumerate(blocks)
        ]

    def depths(self) -> list[PackedMedusaHead]:
        """Return the drafter heads one by one, as decoders that share these weights."""
        found = [copy.copy(self) for _ in self._depths]
        for decoder, described in zip(found, self._depths, strict=True):
            decoder.described, decoder.num_layers = described, described.num_layers
        return found


class PackedExit(PackedHead):
    """Weights of an early exit: an adapter, or without one the target's last norm."""

    def __init__(self, head: EarlyExitHead | None, target: NativeDecoder) -> None:
        super().__init__(target)
        if head is None:
            self.described = self._describe([], norm=target.described.norm)
            return
        adapter = library.Layer(
            mlp_norm=self._norm(head.input_norm),
            gate_up=self._linear(head.gate_proj, head.up_proj, gated=True),
            down=self._linear(head.down_proj),
        )
        self.num_layers = 1
        self.described = self._describe(
            [adapter], inner_width=head.gate_proj.out_features, norm=self._norm(head.norm)
        )


class PackedLinear(PackedHead):
    """Linear layer on the kernels, for one thread at a time."""

    def __init__(self, linear: nn.Linear, target: NativeDecoder) -> None:
        super().__init__(target)
        self.described = self._describe([], width=linear.in_features, head=self._linear(linear))
        self._forward = KernelForward(self, 0)

    def __call__(self, values: Tensor) -> Tensor:
        """Return the outputs `[..., output]` in float32 of inputs `[..., input]`."""
        return self._forward.unembed(values)
