"""Growing drafter heads with their target: heads of the larger width that draft the same tokens.

A head of a grown target (growth.py) reads the small target's states, repeated; the last, normalised
ones are also divided by the number of repetitions. Its layers grow to the sizes of the target's, so
that a draft step costs what it would cost with a target of that shape.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from growth import GrownShape, copied_rows, copies, fill_layer, set_weight, shared_columns
from torch import Tensor

from secondguess.heads.base import Head, TargetModel
from secondguess.heads.dspark import DsparkHead
from secondguess.heads.eagle import EagleHead
from secondguess.heads.early_exit import EarlyExitHead
from secondguess.heads.layer import LayerConfig
from secondguess.heads.medusa import MedusaHead
from secondguess.heads.mtp import MtpHead


def target_model(model: Any) -> TargetModel:
    """Return the parts of a `LlamaForCausalLM` that its drafter heads use."""
    return TargetModel(
        width=model.config.hidden_size,
        dtype=model.dtype,
        embed=model.model.embed_tokens,
        normalise=model.model.norm,
        unembed=model.lm_head,
        vocab_size=model.config.vocab_size,
        num_layers=model.config.num_hidden_layers,
        device=model.device,
    )


def grow_eagle(head: EagleHead, target: TargetModel, shape: GrownShape) -> EagleHead:
    """Return a grown EAGLE-3 head.

    Raises:
        ValueError: a head with embeddings of its own or norms before its fusion, or one that reads
            the last state.
    """
    config = head.config
    if head.embed_tokens is not None or config.norm_before_fc or config.fc_norm:
        raise ValueError(
            f"expected an EAGLE-3 head with the target's embeddings and no norms before `fc`, got {config}"
        )
    grown = EagleHead(
        replace(config, layer=grown_layer(config.layer, shape)),
        target,
        head.vocabulary,
        has_head=head.lm_head is not None,
    )
    width = _width(head.layer_config, shape)
    set_weight(grown.fc, _fusion(head, width))
    for new, old in zip(grown.layers, head.layers, strict=True):
        _fill(new, old, head.layer_config, grown.layer_config)
    first, old = grown.layers[0], head.layers[0]
    set_weight(first.hidden_norm, old.hidden_norm.weight.repeat(width))
    for name in ("q_proj", "k_proj", "v_proj"):
        # The columns of both inputs were repeated together. The normalised feature, which may also
        # be the residual, is not divided by the repetitions: its first copy is read.
        weight = getattr(first.self_attn, name).weight
        parts = weight.view(len(weight), width, 2, head.layer_config.width).transpose(1, 2).clone()
        parts[:, 1, 1:] = 0
        set_weight(getattr(first.self_attn, name), parts.flatten(1))
    set_weight(grown.norm, _divided(head.norm.weight, width))
    if head.lm_head is not None:
        set_weight(grown.lm_head, head.lm_head.weight.repeat(1, width))
    return grown


def grow_mtp(head: MtpHead, target: TargetModel, shape: GrownShape) -> MtpHead:
    """Return a grown MTP module.

    Raises:
        ValueError: a module with embeddings or an LM head of its own.
    """
    if head.embed_tokens is not None or head.lm_head is not None:
        raise ValueError("expected an MTP module with the target's embeddings and LM head, got its own")
    grown = MtpHead(
        grown_layer(head.layer_config, shape), target, norm_output=head.norm_output, num_steps=head.num_steps
    )
    width = _width(head.layer_config, shape)
    for name in ("enorm", "hnorm", "norm"):
        set_weight(getattr(grown, name), _divided(getattr(head, name).weight, width))
    halves = [half.repeat(width, width) for half in head.eh_proj.weight.chunk(2, 1)]
    set_weight(grown.eh_proj, torch.cat(halves, 1))
    _fill(grown.layer, head.layer, head.layer_config, grown.layer_config)
    return grown


def grow_medusa(head: MedusaHead, target: TargetModel, shape: GrownShape) -> MedusaHead:
    """Return grown Medusa heads, the sum of whose copies is the small head's state.

    Activations cannot be divided by the repetitions, so the residual layers add to one copy only.

    Raises:
        ValueError: heads with output matrices of their own or biases.
    """
    if head.lm_heads or head.config.has_bias:
        raise ValueError(f"expected Medusa heads without biases and output matrices, got {head.config}")
    grown = MedusaHead(head.config, target)
    small = head.target.width
    for new, old in zip(grown.blocks, head.blocks, strict=True):
        for layer, original in zip(new.layers, old.layers, strict=True):
            weight = torch.zeros_like(layer.weight)
            weight[:small] = original.weight.repeat(1, shape.hidden_size // small)
            set_weight(layer, weight)
    return grown


def grow_dspark(head: DsparkHead, target: TargetModel, shape: GrownShape) -> DsparkHead:
    """Return a grown DSpark head.

    Raises:
        ValueError: a head with an output matrix of its own, or one that reads the last state.
    """
    if head.config.has_output:
        raise ValueError("expected a DSpark head with the target's output matrix, got its own")
    layer = head.config.layer
    grown = DsparkHead(replace(head.config, layer=grown_layer(layer, shape)), target, head.vocabulary)
    width = _width(layer, shape)
    set_weight(grown.fc, _fusion(head, width))
    for name in ("hidden_norm", "norm"):
        set_weight(getattr(grown, name), _divided(getattr(head, name).weight, width))
    for new, old in zip(grown.layers, head.layers, strict=True):
        _fill(new, old, layer, grown.config.layer)
    if head.config.markov_rank:
        grown.markov_head.load_state_dict(head.markov_head.state_dict())
    if head.config.has_confidence:
        weight = head.confidence_head.proj.weight
        of_states, of_markov = weight[:, : layer.width], weight[:, layer.width :]
        set_weight(grown.confidence_head.proj, torch.cat((of_states.repeat(1, width), of_markov), 1))
        grown.confidence_head.proj.bias.copy_(head.confidence_head.proj.bias)
    return grown


def grow_early_exit(head: EarlyExitHead, target: TargetModel, shape: GrownShape) -> EarlyExitHead:
    """Return a grown adapter behind the same layer, with a feed-forward network twice as wide as it."""
    small, mlp_size = head.norm.weight.shape[0], 2 * shape.hidden_size
    width = shape.hidden_size // small
    grown = EarlyExitHead(head.exit_layer, shape.hidden_size, mlp_size, head.norm.eps)
    units = copies(torch.arange(head.gate_proj.out_features), mlp_size)
    for name in ("input_norm", "norm"):
        set_weight(getattr(grown, name), _divided(getattr(head, name).weight, width))
    for name in ("gate_proj", "up_proj"):
        set_weight(getattr(grown, name), copied_rows(getattr(head, name).weight, units).repeat(1, width))
    set_weight(grown.down_proj, shared_columns(head.down_proj.weight, units).repeat(width, 1))
    return grown


GROW: dict[str, tuple[type[Head], Callable[..., Head]]] = {
    "eagle": (EagleHead, grow_eagle),
    "mtp": (MtpHead, grow_mtp),
    "medusa": (MedusaHead, grow_medusa),
    "dspark": (DsparkHead, grow_dspark),
    "early-exit": (EarlyExitHead, grow_early_exit),
}
"""By kind of drafter, the class of its head and the function that grows one."""


def grown_layer(layer: LayerConfig, shape: GrownShape) -> LayerConfig:
    """Return the config of a head's layer that has grown to the sizes of the target's layers.

    It has as many key-value heads as possible, at most the target's, with groups that are at least as
    large as the small head's.
    """
    group = layer.num_heads // layer.num_kv_heads
    num_kv_heads = max(
        number
        for number in range(layer.num_kv_heads, shape.num_key_value_heads + 1, layer.num_kv_heads)
        if shape.num_attention_heads % number == 0 and shape.num_attention_heads // number >= group
    )
    return replace(
        layer,
        width=shape.hidden_size,
        mlp_size=shape.intermediate_size,
        num_heads=shape.num_attention_heads,
        num_kv_heads=num_kv_heads,
    )


def _fill(grown: Any, layer: Any, small: LayerConfig, config: LayerConfig) -> None:
    fill_layer(grown, layer, _sizes(small), _sizes(config))
    if config.has_qk_norm:
        for name in ("q_norm", "k_norm"):
            set_weight(getattr(grown.self_attn, name), getattr(layer.self_attn, name).weight)


def _sizes(layer: LayerConfig) -> GrownShape:
    return GrownShape(layer.width, layer.mlp_size, 1, layer.num_heads, layer.num_kv_heads)


def _width(small: LayerConfig, shape: GrownShape) -> int:
    """Return the number of repetitions of the hidden state."""
    return shape.hidden_size // small.width


def _divided(weight: Tensor, width: int) -> Tensor:
    """Return the weight of a norm, repeated and divided by the number of repetitions."""
    return weight.repeat(width) / width


def _fusion(head: EagleHead | DsparkHead, width: int) -> Tensor:
    """Return the projection of several concatenated states, which reads the first copy of each.

    Raises:
        ValueError: it reads the last state, which is normalised.
    """
    num_states, weight = len(head.hidden_layers), head.fc.weight
    if max(head.hidden_layers) >= head.target.num_layers:
        raise ValueError(
            f"expected a head that reads states below {head.target.num_layers}, got {list(head.hidden_layers)}"
        )
    parts = weight.new_zeros(weight.shape[0], num_states, width, weight.shape[1] // num_states)
    parts[:, :, 0] = weight.unflatten(1, (num_states, -1))
    return parts.flatten(1).repeat(width, 1)
