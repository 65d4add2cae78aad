"""Decoder with few calls per layer, built from the weights of a Transformers module or of a checkpoint.

On a CPU the time of a small model is determined by the number of its calls. A module makes some
fifty per layer and prepares masks and positions through several levels of Python; this decoder
makes about twenty. Weights are packed and joined layer by layer. Those of a module that Transformers has
loaded are released on the way, those of a file are read layer by layer.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from secondguess.runtime.base import EmbeddingAndHead
from secondguess.runtime.decoder.families import (
    FAMILIES,
    Family,
    Norm,
    attention_linears,
    head_size_of,
    num_key_heads,
)
from secondguess.runtime.decoder.feed_forward import make_feed_forward
from secondguess.runtime.decoder.products import PackableLinear
from secondguess.runtime.decoder.rotary import Rotary, rotate
from secondguess.runtime.decoder.scores import explicit_attention, masked_attention
from secondguess.runtime.decoder.stored import StoredModel
from secondguess.runtime.layered import remaining_layers
from secondguess.runtime.modules.support import context_length_of


@dataclass(frozen=True)
class LayerMask:
    """Attention mask of the layers of one kind, in the form that `AttentionHeads.attend` takes.

    Args:
        mask: `[row or 1, 1, query * group, key]`, added to the scores; None if no key is masked or
            `causal` is True.
        causal: whether attention is plain causal attention, with nothing cached yet.
    """

    mask: Tensor | None
    causal: bool


def embed(tokens: Tensor, weight: Tensor, scale: float | None) -> Tensor:
    """Return the embeddings of tokens, `[..., width]`, scaled unless `scale` is None."""
    states = functional.embedding(tokens, weight)
    return states if scale is None else states * scale


class AttentionHeads:
    """Number, size and score scaling of a layer's heads, which are joined as query, key, value.

    Args:
        num_queries, num_keys: number of query heads and of key heads.
        size: numbers per head.
        scaling: factor on the scores.
        cap: soft cap, which replaces scores by `cap * tanh(score / cap)`; None for none.
        sinks: `[head]`, scores of keys without values; None for none.
    """

    def __init__(
        self,
        num_queries: int,
        num_keys: int,
        size: int,
        scaling: float,
        cap: float | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        self.num_queries = num_queries
        self.num_keys = num_keys
        self.group = num_queries // num_keys
        self.size = size
        self.scaling = scaling
        self.cap, self.sinks = cap, sinks

    def attend(self, query: Tensor, key: Tensor, value: Tensor, layer_mask: LayerMask) -> Tensor:
        """Return the attention output `[row, query, head * size]`.

        Queries are `[row, query, head, size]`, keys and values of the cache `[row, kv_head, key, size]`.
        """
        rows, width = query.shape[:2]
        if self.cap is not None or self.sinks is not None:
            mask = None if layer_mask.mask is None else layer_mask.mask[:, :, :: self.group]
            attended = explicit_attention(
                query.transpose(1, 2), key, value, mask, self.scaling, self.cap, self.sinks
            )
            return attended.reshape(rows, width, self.num_queries * self.size)
        if layer_mask.causal:
            attended = functional.scaled_dot_product_attention(
                query.transpose(1, 2),
                key,
                value,
                is_causal=True,
                scale=self.scaling,
                enable_gqa=self.group > 1,
            )
            return attended.transpose(1, 2).reshape(rows, width, self.num_queries * self.size)
        # Query heads that share a key head are folded into the queries, those of one query
        # adjacent.
        folded = query.reshape(rows, width, self.num_keys, self.group * self.size).transpose(1, 2)
        folded = folded.reshape(rows, self.num_keys, width * self.group, self.size)
        attended = masked_attention(folded, key, value, layer_mask.mask, self.scaling)
        attended = attended.reshape(rows, self.num_keys, width, self.group * self.size)
        return attended.transpose(1, 2).reshape(rows, width, self.num_queries * self.size)


@dataclass(frozen=True)
class LogitScaling:
    """Last step of the logits, beyond the LM head.

    Args:
        divisor: divides the logits (Granite).
        cap: soft cap, applied after that (Gemma 2).
    """

    divisor: float | None = None
    cap: float | None = None

    def __call__(self, logits: Tensor) -> Tensor:
        if self.divisor is not None:
            logits = logits / self.divisor
        return logits if self.cap is None else torch.tanh(logits / self.cap) * self.cap


class Layer:
    """Decoder layer: attention and feed-forward with residual connections.

    Args:
        module: the layer whose weights are taken.
        index: number of the layer.
        family, config: description of the module's computation.
        window: sliding window in tokens; None for full attention.
        rotary_kind: key of the rotary table that the layer uses.
        packed: whether to pack the weights.
    """

    def __init__(
        self,
        module: Any,
        index: int,
        family: Family,
        config: Any,
        window: int | None,
        rotary_kind: str | None,
        packed: bool,
    ) -> None:
        attention_inputs, attention_output = attention_linears(module, family)
        attention = getattr(module, family.attention)
        num_queries: int = config.num_attention_heads
        num_keys = num_key_heads(config)
        size, num_heads = head_size_of(config), num_queries + 2 * num_keys
        self.window = window
        self.rotary_kind = rotary_kind
        self.is_interleaved = family.is_interleaved
        cap = family.number(config, "attn_logit_softcapping")
        sinks = attention.sinks.detach() if family.has_sinks else None
        self.heads = AttentionHeads(
            num_queries, num_keys, size, family.score_factor(config, size), cap, sinks
        )
        self.is_parallel = family.is_parallel(config)
        self.residual_scale = family.number(config, "residual_multiplier")

        def norm(name: str | None, owner: Any = module) -> Norm | None:
            return (
                None if name is None else family.norm(getattr(owner, name), getattr(config, family.epsilon))
            )

        self.attention_norm, self.attention_output_norm, self.mlp_norm, self.mlp_output_norm = map(
            norm, family.norms
        )
        self.query_norm = norm("q_norm", attention) if family.has_qk_norm else None
        self.key_norm = norm("k_norm", attention) if family.has_qk_norm else None
        order = None
        if family.has_interleaved_heads:
            order = torch.arange(num_heads * size).view(-1, 3, size).transpose(0, 1).flatten()
        self.qkv = PackableLinear.joined(attention_inputs, packed, order)
        self.output = PackableLinear.joined([attention_output], packed)
        self.feed_forward = make_feed_forward(module, index, family, config, packed)

    def forward(
        self, states: Tensor, index: int, rotary: tuple[Tensor, Tensor], layer_mask: LayerMask, cache: Any
    ) -> Tensor:
        """Return the output of this layer `[row, query, width]`; `rotary` has the cosines and sines of `Rotary.at`."""
        attended = self._attend(states, index, rotary, layer_mask, cache)
        if self.is_parallel:
            return self._feed_forward(states) + attended + states
        states = states + attended
        return states + self._feed_forward(states)

    def _attend(
        self, states: Tensor, index: int, rotary: tuple[Tensor, Tensor], layer_mask: LayerMask, cache: Any
    ) -> Tensor:
        rows, width, _ = states.shape
        heads = self.heads
        qkv = self.qkv(_normalised(self.attention_norm, states)).view(rows, width, -1, heads.size)
        num_rotated = heads.num_queries + heads.num_keys
        rotated = qkv[:, :, :num_rotated]
        if self.query_norm is not None and self.key_norm is not None:
            query, key = rotated[:, :, : heads.num_queries], rotated[:, :, heads.num_queries :]
            normalised = _normalised_heads(self.query_norm, query), _normalised_heads(self.key_norm, key)
            rotated = torch.cat(normalised, 2)
        rotated = rotate(rotated, *rotary, self.is_interleaved)
        keys, values = cache.update(
            rotated[:, :, heads.num_queries :].transpose(1, 2), qkv[:, :, num_rotated:].transpose(1, 2), index
        )
        attended = heads.attend(rotated[:, :, : heads.num_queries], keys, values, layer_mask)
        return self._scaled(_normalised(self.attention_output_norm, self.output(attended)))

    def _feed_forward(self, states: Tensor) -> Tensor:
        output = self.feed_forward(_normalised(self.mlp_norm, states))
        return self._scaled(_normalised(self.mlp_output_norm, output))

    @property
    def num_active_parameters(self) -> int:
        """Number of weights that one token reads."""
        return self.qkv.weight.numel() + self.output.weight.numel() + self.feed_forward.num_active_parameters

    def _scaled(self, added: Tensor) -> Tensor:
        return added if self.residual_scale is None else added * self.residual_scale


def _normalised(norm: Norm | None, states: Tensor) -> Tensor:
    return states if norm is None else norm(states)


def _normalised_heads(norm: Norm, heads: Tensor) -> Tensor:
    """Normalise `[row, query, head, size]` per head, or all heads together if the weight is that long."""
    return norm(heads.reshape(*heads.shape[:2], -1, norm.weight.shape[0])).view_as(heads)


class FusedDecoder:
    """Weights of a decoder, as `FusedRuntime` runs them and the kernels pack them.

    Args:
        model: a causal language model of one of the `FAMILIES`: a module of Transformers, whose layers are removed, or
            a `StoredModel`.
        packed: whether to pack the weights.
    """

    def __init__(self, model: Any, packed: bool) -> None:
        config = model.config.get_text_config()
        family = FAMILIES[config.model_type]
        is_stored = isinstance(model, StoredModel)
        body = getattr(model, family.body) if is_stored else model.base_model
        embeddings = getattr(body, family.embedding) if is_stored else model.get_input_embeddings()
        self.config = config
        self.embedding: Tensor = embeddings.weight.detach()
        dtype, device = self.embedding.dtype, self.embedding.device
        self.embedding_scale = family.number(config, "embedding_multiplier")
        if family.scales_embeddings:
            self.embedding_scale = float(torch.tensor(config.hidden_size**0.5).to(dtype))
        self.logit_scaling = LogitScaling(
            family.number(config, "logits_scaling"), family.number(config, "final_logit_softcapping")
        )
        windows, kinds = family.windows(config), family.rotaries(config)
        table_dtype = torch.float32 if family.rotates_in_float32 else dtype
        self.rotaries = {
            kind: Rotary.from_config(config, table_dtype, device, kind, family.is_interleaved)
            for kind in dict.fromkeys(kinds)
        }
        self.layers: list[Layer] = []
        for index, (window, kind) in enumerate(zip(windows, kinds, strict=True)):
            self.layers.append(Layer(body.layers[index], index, family, config, window, kind, packed))
            if not is_stored:
                body.layers[index] = nn.Identity()  # frees the module's weights
        self.norm = family.norm(getattr(body, family.final_norm), getattr(config, family.epsilon))
        if is_stored:
            self.is_tied: bool = config.tie_word_embeddings
            head = embeddings if self.is_tied else getattr(model, family.head)
        else:
            head = model.get_output_embeddings()
            self.is_tied = head.weight is embeddings.weight
        self.head = PackableLinear.joined([head], packed)
        self.windows = set(windows)

    def without(self, skipped: Sequence[int]) -> FusedDecoder:
        """Return a decoder that shares the weights but skips some layers, by `remaining_layers`."""
        fewer = copy.copy(self)
        fewer.layers = [self.layers[index] for index in remaining_layers(skipped, len(self.layers))]
        return fewer

    def sizes(self) -> dict[str, Any]:
        """Return the arguments of `CachedRuntime` for this decoder."""
        return {
            "vocab_size": self.head.num_outputs,
            "context_length": context_length_of(self.config),
            "num_layers": len(self.layers),
            "device": self.embedding.device,
        }

    def embedding_and_head(self) -> EmbeddingAndHead:
        """Return the embeddings, final norm and head."""
        width, dtype = self.embedding.shape[1], self.embedding.dtype
        return EmbeddingAndHead(width, dtype, self.embed, self.norm, self.unembed)

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the inputs of the first layer, `[..., width]`."""
        return embed(tokens, self.embedding, self.embedding_scale)

    def unembed(self, states: Tensor) -> Tensor:
        """Return the logits of normalised hidden states."""
        return self.logit_scaling(self.head(states))

    @property
    def num_heads_per_key(self) -> int:
        """Number of query heads per key head, the same in all layers."""
        return self.layers[0].heads.group
