"""Dense decoder with few calls per layer, built from the weights of a Transformers module.

On a CPU the time of a small model is determined by the number of its calls. A module makes some
fifty per layer and prepares masks and positions through several levels of Python; this decoder
makes about twenty. Transformers loads the model. Its weights are then packed and joined layer by
layer, and the module's own are released on the way.

A family is covered if it is one of the `FAMILIES` and a probe finds that the fused decoder
reproduces the module's logits.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from secondguess.runtime.attention import ForwardStep, explicit_attention, masked_attention
from secondguess.runtime.base import EmbeddingAndHead
from secondguess.runtime.cached import KEY_MULTIPLE, Output
from secondguess.runtime.families import ACTIVATIONS, FAMILIES, NO_ROTARY, Family, Norm, linears_of
from secondguess.runtime.layered import LayeredRuntime, remaining_layers
from secondguess.runtime.packing import PackableLinear
from secondguess.runtime.quiet import quiet
from secondguess.runtime.stored import StoredLinear
from secondguess.runtime.support import context_length_of
from secondguess.runtime.tree import ChainMasks

with quiet():
    from transformers.masking_utils import causal_mask_function, sliding_window_causal_mask_function

PROBE_TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-4, torch.bfloat16: 0.03, torch.float16: 0.005}
"""Largest relative root-mean-square error of the logits attributed to rounding, by dtype.

The largest single error grows with the number of logits, and refused correct models.
"""

MAX_PROBE_POSITION = 4096
"""Largest end position of the probe, which otherwise uses the last positions of the context."""
PROBE_WIDTH = 16

logger = logging.getLogger(__name__)


def fuse(model: Any, packed: bool) -> FusedDecoder | None:
    """Return the fused decoder of a module, or None if it would not reproduce the module's logits.

    The module must not be used afterwards in either case.

    Args:
        model: a causal language model that `why_not_fused` does not refuse, in evaluation mode.
        packed: whether to pack its weights (see `packing.can_pack`).
    """
    if not all(type(linear) in (nn.Linear, StoredLinear) for linear in _linears(model)):
        return None  # adapters and the like compute something else from the same weights
    config = model.config
    limit = min(context_length_of(config) or MAX_PROBE_POSITION, MAX_PROBE_POSITION)
    width = min(PROBE_WIDTH, limit)
    tokens = torch.arange(2 * width).remainder(model.get_input_embeddings().weight.shape[0]).reshape(2, width)
    # late positions, at which scaled rotary embeddings differ from plain ones
    positions = torch.arange(limit - width, limit)[None]
    with torch.inference_mode():
        expected = model(input_ids=tokens, position_ids=positions.expand(2, -1), use_cache=False).logits
        decoder = FusedDecoder(model, packed)
        for rotary in decoder.rotaries.values():
            rotary.table(limit)
        found = _probe(decoder, tokens, positions)
    tolerance = PROBE_TOLERANCE[expected.dtype]
    return decoder if probe_passes("fused", found, expected, tolerance) else None


def _probe(decoder: FusedDecoder, tokens: Tensor, positions: Tensor) -> Tensor:
    """Return logits `[row, query, vocab]` of a prefill followed by a decode step of one token."""
    runtime = FusedRuntime(decoder)
    rows, slots = tokens.shape[0], list(range(tokens.shape[0]))
    width = tokens.shape[1] - 1
    runtime.cache.place([0] * rows, width, slots, width)
    prefill = ForwardStep(None, positions[:, :-1], width, key_positions=positions[:, :-1].expand(rows, -1))
    first = runtime.run(tokens[:, :-1], prefill, width, with_hidden=False).logits
    runtime.cache.place([width] * rows, 1, slots, KEY_MULTIPLE)
    keys = positions[:, :1] + torch.arange(KEY_MULTIPLE)
    mask = ChainMasks(positions.device).mask(width, 1, KEY_MULTIPLE)
    decode = ForwardStep(mask, positions[:, -1:], KEY_MULTIPLE, key_positions=keys.expand(rows, -1))
    last = runtime.run(tokens[:, -1:], decode, 1, with_hidden=False).logits
    return torch.cat((first, last), 1)


def _linears(model: Any) -> Iterator[Any]:
    """Yield every module that becomes part of a `PackableLinear`."""
    family = FAMILIES[model.config.model_type]
    for layer in model.base_model.layers:
        attention_inputs, attention_output, mlp_inputs, mlp_output = linears_of(layer, family)
        yield from (*attention_inputs, attention_output, *mlp_inputs, mlp_output)
    yield model.get_output_embeddings()


def probe_passes(runtime: str, found: Tensor, expected: Tensor, tolerance: float) -> bool:
    """Return whether logits have at most this relative root-mean-square error; log one that has more.

    Args:
        runtime: name of the probed runtime, for the message.
        found, expected: logits of the runtime and of the original.
        tolerance: largest error that is attributed to rounding.
    """
    difference, size = ((found.float() - expected.float()).norm(), expected.float().norm())
    passes = bool(difference <= tolerance * size)
    if not passes:
        logger.warning(
            "the %s runtime is not used: expected the model's logits with a relative error of at most %.3g, got %.3g; "
            "another runtime computes the model, which may be slower or take more memory",
            runtime,
            tolerance,
            difference / size,
        )
    return passes


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


class AttentionHeads:
    """Number, size and score scaling of a layer's heads, which are joined as query, key, value.

    Args:
        num_queries, num_keys: number of query heads and of key heads.
        size: numbers per head.
        scaling: factor on the scores.
        cap: soft cap, which replaces scores by `cap * tanh(score / cap)`; None for none.
    """

    def __init__(
        self, num_queries: int, num_keys: int, size: int, scaling: float, cap: float | None = None
    ) -> None:
        self.num_queries = num_queries
        self.num_keys = num_keys
        self.group = num_queries // num_keys
        self.size = size
        self.scaling = scaling
        self.cap = cap

    def attend(self, query: Tensor, key: Tensor, value: Tensor, view: LayerMask) -> Tensor:
        """Return the attention output `[row, query, head * size]`.

        Args:
            query: `[row, query, head, size]`.
            key, value: `[row, kv_head, key, size]`, from the cache.
            view: the mask.
        """
        rows, width = query.shape[:2]
        if self.cap is not None:
            mask = None if view.mask is None else view.mask[:, :, :: self.group]
            mixed = explicit_attention(query.transpose(1, 2), key, value, mask, self.scaling, self.cap)
            return mixed.reshape(rows, width, self.num_queries * self.size)
        if view.causal:
            mixed = functional.scaled_dot_product_attention(
                query.transpose(1, 2),
                key,
                value,
                is_causal=True,
                scale=self.scaling,
                enable_gqa=self.group > 1,
            )
            return mixed.transpose(1, 2).reshape(rows, width, self.num_queries * self.size)
        # Query heads that share a key head are folded into the queries, those of one query
        # adjacent.
        folded = query.reshape(rows, width, self.num_keys, self.group * self.size).transpose(1, 2)
        folded = folded.reshape(rows, self.num_keys, width * self.group, self.size)
        mixed = masked_attention(folded, key, value, view.mask, self.scaling)
        mixed = mixed.view(rows, self.num_keys, width, self.group * self.size)
        return mixed.transpose(1, 2).reshape(rows, width, self.num_queries * self.size)


class Rotary:
    """Table of rotary cosines and sines, computed on demand.

    Args:
        frequencies: `[size / 2]`, angle between neighbouring positions. `size` numbers of a head are
            rotated, the first ones.
        scaling: factor on cosines and sines.
        dtype: dtype of the table.
        pairs: whether neighbouring numbers are rotated together, not one of each half.
    """

    def __init__(self, frequencies: Tensor, scaling: float, dtype: torch.dtype, pairs: bool = False) -> None:
        self.frequencies = frequencies.float()
        self.scaling = scaling
        self.dtype = dtype
        self.pairs = pairs
        self._table = torch.empty(0)

    @classmethod
    def of(cls, module: Any, dtype: torch.dtype, kind: str | None = None, pairs: bool = False) -> Rotary:
        """Return the table of a rotary embedding.

        Args:
            module: the rotary embedding.
            dtype: dtype of the table.
            kind: layer type whose frequencies are used; None if the module has only one set, or
                `NO_ROTARY` for a table that changes nothing.
            pairs: as in the constructor.
        """
        if kind == NO_ROTARY:
            return cls(torch.zeros_like(module.inv_freq), 1.0, dtype, pairs)
        prefix = "" if kind is None else f"{kind}_"
        frequencies = getattr(module, f"{prefix}inv_freq")
        return cls(frequencies, getattr(module, f"{prefix}attention_scaling"), dtype, pairs)

    def at(self, step: ForwardStep) -> tuple[Tensor, Tensor]:
        """Return cos and sin of a forward pass's queries, `[row or 1, query, 1, size]` each.

        The sines of the first number of each pair are negated, as `rotate` expects.
        """
        table = self.table(step.num_keys)
        if step.start is None:
            found = table[step.query_positions]
        else:
            found = table[None, step.start : step.start + step.query_positions.shape[1]]
        cos, sin = found.unsqueeze(-2).chunk(2, -1)
        return cos, sin

    def table(self, num_positions: int) -> Tensor:
        """Return a table `[position, 2 * size]` of cosines, then sines.

        It has at least `num_positions` positions. Runtimes of several threads may share this
        object: one may replace the table while another uses the one that it was given.
        """
        table = self._table
        if num_positions > table.shape[0]:
            self._table = table = self._rows(max(256, 2 * num_positions))
        return table

    def _rows(self, count: int) -> Tensor:
        angles = torch.outer(torch.arange(count, dtype=torch.float32), self.frequencies)
        cos, sin = angles.cos() * self.scaling, angles.sin() * self.scaling
        join = _interleaved if self.pairs else torch.cat
        return torch.cat((join((cos, cos), -1), join((-sin, sin), -1)), -1).to(self.dtype)


def _interleaved(parts: Sequence[Tensor], dim: int) -> Tensor:
    return torch.stack(tuple(parts), dim).flatten(dim - 1)


def rotate(states: Tensor, cos: Tensor, sin: Tensor, pairs: bool = False) -> Tensor:
    """Apply the rotary embedding to the first numbers of each head, rounding where the modules round.

    The modules negate half of the states; here the sine is negated, which gives the same bits.

    Args:
        states: `[..., head_size]`.
        cos, sin: `[..., size]` from `Rotary.at`.
        pairs: as in `Rotary`.
    """
    size = cos.shape[-1]
    part, rest = states[..., :size], states[..., size:]
    other = part.reshape(*part.shape[:-1], -1, 2).flip(-1).flatten(-2) if pairs else part.roll(size // 2, -1)
    turned = (part * cos + other * sin).to(states.dtype)
    return torch.cat((turned, rest), -1) if rest.shape[-1] else turned


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
        family, config: description of the module's computation.
        window: sliding window in tokens; None for full attention.
        rotary_kind: key of the rotary table that the layer uses.
        packed: whether to pack the weights.
    """

    def __init__(
        self,
        module: Any,
        family: Family,
        config: Any,
        window: int | None,
        rotary_kind: str | None,
        packed: bool,
    ) -> None:
        attention_inputs, attention_output, mlp_inputs, mlp_output = linears_of(module, family)
        attention = getattr(module, family.attention)
        num_queries: int = config.num_attention_heads
        size = attention_output.in_features // num_queries
        num_heads = sum(linear.out_features for linear in attention_inputs) // size
        self.window = window
        self.rotary_kind = rotary_kind
        self.rotates_pairs = family.rotates_pairs
        cap = family.number(config, "attn_logit_softcapping")
        self.heads = AttentionHeads(num_queries, (num_heads - num_queries) // 2, size, attention.scaling, cap)
        self.activation_name: str = getattr(config, family.activation)
        self.activation = ACTIVATIONS[self.activation_name]
        self.is_gated = family.is_gated
        self.is_parallel = family.is_parallel(config)
        self.residual_scale = family.number(config, "residual_multiplier")

        def norm(name: str | None, owner: Any = module) -> Norm | None:
            return None if name is None else family.norm(getattr(owner, name))

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
        self.gate_up = PackableLinear.joined(mlp_inputs, packed)
        self.down = PackableLinear.joined([mlp_output], packed)

    def forward(
        self, states: Tensor, index: int, rotary: tuple[Tensor, Tensor], view: LayerMask, cache: Any
    ) -> Tensor:
        """Return the output of this layer, `[row, query, width]`.

        Args:
            states: input of the layer, `[row, query, width]`.
            index: index of the layer in the cache.
            rotary: cos and sin from `Rotary.at`.
            view: the attention mask.
            cache: the `KeyValueCache`.
        """
        attended = self._attend(states, index, rotary, view, cache)
        if self.is_parallel:
            return self._feed_forward(states) + attended + states
        states = states + attended
        return states + self._feed_forward(states)

    def _attend(
        self, states: Tensor, index: int, rotary: tuple[Tensor, Tensor], view: LayerMask, cache: Any
    ) -> Tensor:
        rows, width, _ = states.shape
        heads = self.heads
        qkv = self.qkv(_normalised(self.attention_norm, states)).view(rows, width, -1, heads.size)
        num_turned = heads.num_queries + heads.num_keys
        turned = qkv[:, :, :num_turned]
        if self.query_norm is not None and self.key_norm is not None:
            query, key = turned[:, :, : heads.num_queries], turned[:, :, heads.num_queries :]
            normalised = _normalised_heads(self.query_norm, query), _normalised_heads(self.key_norm, key)
            turned = torch.cat(normalised, 2)
        turned = rotate(turned, *rotary, self.rotates_pairs)
        keys, values = cache.update(
            turned[:, :, heads.num_queries :].transpose(1, 2), qkv[:, :, num_turned:].transpose(1, 2), index
        )
        mixed = heads.attend(turned[:, :, : heads.num_queries], keys, values, view)
        return self._scaled(_normalised(self.attention_output_norm, self.output(mixed)))

    def _feed_forward(self, states: Tensor) -> Tensor:
        inner = self.gate_up(_normalised(self.mlp_norm, states))
        if self.is_gated:
            gate, up = inner.chunk(2, -1)
            inner = self.activation(gate) * up
        else:
            inner = self.activation(inner)
        return self._scaled(_normalised(self.mlp_output_norm, self.down(inner)))

    def _scaled(self, added: Tensor) -> Tensor:
        return added if self.residual_scale is None else added * self.residual_scale


def _normalised(norm: Norm | None, states: Tensor) -> Tensor:
    return states if norm is None else norm(states)


def _normalised_heads(norm: Norm, heads: Tensor) -> Tensor:
    """Normalise `[row, query, head, size]` per head, or all heads together if the weight is that long."""
    return norm(heads.reshape(*heads.shape[:2], -1, norm.weight.shape[0])).view_as(heads)


class FusedDecoder:
    """Weights of a module, in the form that `FusedRuntime` runs.

    Args:
        model: a causal language model of one of the `FAMILIES`; its layers are removed.
        packed: whether to pack the weights.
    """

    def __init__(self, model: Any, packed: bool) -> None:
        config = model.config.get_text_config()
        family = FAMILIES[config.model_type]
        body = model.base_model
        self.config = config
        embeddings = model.get_input_embeddings()
        self.embedding: Tensor = embeddings.weight.detach()
        dtype = self.embedding.dtype
        self.embedding_scale = family.number(config, "embedding_multiplier")
        if family.scales_embeddings:
            self.embedding_scale = float(embeddings.embed_scale.to(dtype))
        self.logit_scaling = LogitScaling(
            family.number(config, "logits_scaling"), family.number(config, "final_logit_softcapping")
        )
        windows, kinds = family.windows(config), family.rotaries(config)
        table_dtype = torch.float32 if family.rotates_in_float32 else dtype
        self.rotaries = {
            kind: Rotary.of(body.rotary_emb, table_dtype, kind, family.rotates_pairs)
            for kind in dict.fromkeys(kinds)
        }
        self.layers: list[Layer] = []
        for index, (window, kind) in enumerate(zip(windows, kinds, strict=True)):
            self.layers.append(Layer(body.layers[index], family, config, window, kind, packed))
            body.layers[index] = nn.Identity()  # frees the module's weights
        self.norm = family.norm(getattr(body, family.final_norm))
        self.head = PackableLinear.joined([model.get_output_embeddings()], packed)
        self.windows = set(windows)

    def without(self, skipped: Sequence[int]) -> FusedDecoder:
        """Return a decoder that shares the weights but skips some layers.

        Args:
            skipped: layers to skip, counted from 0.

        Raises:
            BadInputError: if a layer does not exist, or none would be left.
        """
        fewer = copy.copy(self)
        fewer.layers = [self.layers[index] for index in remaining_layers(skipped, len(self.layers))]
        return fewer

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the inputs of the first layer, `[..., width]`."""
        states = functional.embedding(tokens, self.embedding)
        return states if self.embedding_scale is None else states * self.embedding_scale

    def unembed(self, states: Tensor) -> Tensor:
        """Return the logits of normalised hidden states."""
        return self.logit_scaling(self.head(states))

    def embedding_and_head(self) -> EmbeddingAndHead:
        """Return the embeddings, final norm and head, which a drafter may share."""
        width = self.embedding.shape[1]
        return EmbeddingAndHead(width, self.embedding.dtype, self.embed, self.norm, self.unembed)

    @property
    def num_heads_per_key(self) -> int:
        """Number of query heads per key head, the same in all layers."""
        return self.layers[0].heads.group


class FusedRuntime(LayeredRuntime):
    """Runtime over a fused decoder.

    Args:
        decoder: from `fuse`.
        hidden_layers, prefill_chunk: as in `CachedRuntime`.
    """

    def __init__(
        self, decoder: FusedDecoder, hidden_layers: Sequence[int] = (), prefill_chunk: int = 512
    ) -> None:
        super().__init__(
            vocab_size=decoder.head.num_outputs,
            context_length=context_length_of(decoder.config),
            num_layers=len(decoder.layers),
            device=decoder.embedding.device,
            hidden_layers=hidden_layers,
            prefill_chunk=prefill_chunk,
        )
        self.decoder = decoder
        self._shown, self._hidden = torch.tensor([0.0, -torch.inf], dtype=decoder.embedding.dtype)
        group = decoder.num_heads_per_key
        self._added_stairs = ChainMasks(self.device, self._shown, self._hidden, repeats=group)

    def embedding_and_head(self) -> EmbeddingAndHead:
        return self.decoder.embedding_and_head()

    def run(self, tokens: Tensor, step: ForwardStep, num_logits: int, with_hidden: bool) -> Output:
        decoder = self.decoder
        levels = self._run_layers(decoder.embed(tokens), step, range(len(decoder.layers)))
        return self._output(levels, num_logits, with_hidden)

    def _output(self, levels: list[Tensor], num_logits: int, with_hidden: bool) -> Output:
        """Return the output for the hidden states of all levels, embeddings first."""
        last = levels[-1] = self.decoder.norm(levels[-1])
        logits = self.decoder.unembed(last[:, -num_logits:])
        return Output(logits, {layer: levels[layer] for layer in self.hidden_layers} if with_hidden else {})

    def _run_layers(self, states: Tensor, step: ForwardStep, layers: range) -> list[Tensor]:
        """Run these layers; return their input and each layer's output, `[row, query, width]`."""
        decoder = self.decoder
        cos_sin = {kind: rotary.at(step) for kind, rotary in decoder.rotaries.items()}
        views = {window: self._layer_mask(step, window) for window in decoder.windows}
        levels = [states]
        for index in layers:
            layer = decoder.layers[index]
            states = layer.forward(states, index, cos_sin[layer.rotary_kind], views[layer.window], self.cache)
            levels.append(states)
        return levels

    def skip_layers(self, skipped: Sequence[int]) -> FusedRuntime:
        return FusedRuntime(self.decoder.without(skipped), prefill_chunk=self.prefill_chunk)

    def run_first(self, tokens: Tensor, step: ForwardStep, num_known: int, num_layers: int) -> Tensor:
        return self._run_layers(self.decoder.embed(tokens), step.drop_first(num_known), range(num_layers))[-1]

    def run_remaining_layers(
        self, tokens: Tensor, states: Tensor, step: ForwardStep, num_layers: int
    ) -> Output:
        levels = self._run_layers(states, step, range(num_layers, len(self.decoder.layers)))
        # Of the levels that were not kept, only the embeddings can be requested.
        levels = [self.decoder.embed(tokens)] + [states] * (num_layers - 1) + levels
        return self._output(levels, tokens.shape[1], bool(self.hidden_layers))

    def _layer_mask(self, step: ForwardStep, window: int | None) -> LayerMask:
        """Return the mask of the layers of one kind, with heads folded, in the model's dtype."""
        width = step.query_positions.shape[1]
        sees_all = window is None or step.num_keys <= window
        if sees_all and step.mask is not None and step.start is not None:
            return LayerMask(self._added_stairs.mask(step.start, width, step.num_keys), causal=False)
        rule = causal_mask_function if window is None else sliding_window_causal_mask_function(window)
        allowed = step.visible(rule, window)
        if allowed is None:
            return LayerMask(None, causal=width > 1)
        mask = torch.where(allowed, self._shown, self._hidden)
        return LayerMask(mask.repeat_interleave(self.decoder.num_heads_per_key, 2), causal=False)
