"""Mixtures of experts whose weights are read one by one when they are packed.

Transformers joins the weights of all experts of a layer, which would take the memory of the whole model.
"""

from __future__ import annotations

from typing import Any

import torch

from secondguess.runtime.families import FAMILIES
from secondguess.runtime.feed_forward import StoredExperts
from secondguess.runtime.stored import StoredLinear, WeightSource


def expert_weight_names(outline: Any, layer: int, expert: int) -> list[str]:
    """Return the names of the weights of an expert in a checkpoint: gates, values and output."""
    mixture = FAMILIES[outline.config.model_type].experts
    assert mixture is not None, "the caller found experts"
    layer_name = f"{outline.base_model_prefix}.layers.{layer}"
    return [f"{layer_name}.{name.format(expert)}.weight" for name in mixture.names]


def stored_experts(
    weights: WeightSource, outline: Any, dtype: torch.dtype
) -> tuple[dict[str, StoredExperts], set[str]]:
    """Return the experts of each layer that a checkpoint stores one by one, and the names of their weights.

    Args:
        weights: weights of the checkpoint.
        outline: module without memory.
        dtype: dtype of the weights.

    Returns:
        Modules by their names, and names in the checkpoint.
    """
    config, found, used = outline.config, dict[str, StoredExperts](), set[str]()
    family = FAMILIES.get(config.model_type)
    if family is None or family.experts is None:
        return found, used
    present = set(weights.names)
    for index, has_experts in enumerate(family.has_experts(config)):
        if not has_experts:
            continue
        layer_name = f"{outline.base_model_prefix}.layers.{index}"
        num_experts, *sizes = outline.base_model.layers[index].mlp.experts.down_proj.shape
        width, size = reversed(sizes) if family.experts.is_transposed else sizes
        names = [expert_weight_names(outline, index, expert) for expert in range(num_experts)]
        all_names = {name for expert_names in names for name in expert_names}
        if all_names <= present:  # else they are joined in the checkpoint too

            def linear(name: str, num_inputs: int, num_outputs: int) -> StoredLinear:
                bias = weights.read(_bias_of(name)).to(dtype) if _bias_of(name) in present else None
                return StoredLinear(weights, name, num_inputs, num_outputs, bias, dtype)

            linears = [
                ([linear(gate, width, size), linear(up, width, size)], linear(down, size, width))
                for gate, up, down in names
            ]
            found[f"{layer_name}.mlp.experts"] = StoredExperts(
                linears, getattr(config, family.activation), family.gate_clamp(config)
            )
            used |= all_names | (present & set(map(_bias_of, all_names)))
    return found, used


def _bias_of(name: str) -> str:
    return f"{name.removesuffix('weight')}bias"
