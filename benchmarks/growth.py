"""Growing a trained Llama: a model of a larger shape that computes the same function.

Net2Net (arXiv 1511.05641): the hidden state is repeated, attention heads and feed-forward units are
copied with their outputs divided by the number of copies, and what is added beyond that (units,
heads, layers) has zero outputs. The logits equal those of the small model within the rounding of
the norm weights; the cost is that of the larger shape.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM


@dataclass(frozen=True)
class GrownShape:
    """Sizes of a grown model, as in `LlamaConfig`; head size and vocabulary stay.

    Args:
        hidden_size: a multiple of the small model's.
        num_key_value_heads: a multiple of the small model's.
        num_attention_heads: at least as many for each key-value head as in the small model.
        intermediate_size, num_hidden_layers: at least those of the small model.

    Raises:
        ValueError: from `check`, sizes to which a model cannot grow.
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int

    @classmethod
    def of(cls, config: LlamaConfig) -> GrownShape:
        """Return the sizes of a model."""
        return cls(*(getattr(config, field.name) for field in fields(cls)))

    def check(self, small: GrownShape) -> None:
        """Refuse a shape to which a model of the shape `small` cannot grow."""
        group = self.num_attention_heads // self.num_key_value_heads
        small_group = small.num_attention_heads // small.num_key_value_heads
        if (
            self.hidden_size % small.hidden_size
            or self.num_key_value_heads % small.num_key_value_heads
            or self.num_attention_heads % self.num_key_value_heads
            or group < small_group
            or self.intermediate_size < small.intermediate_size
            or self.num_hidden_layers < small.num_hidden_layers
        ):
            raise ValueError(
                f"expected multiples of hidden size {small.hidden_size} and of {small.num_key_value_heads} key-value "
                f"heads with at least {small_group} query heads each, intermediate size {small.intermediate_size} "
                f"or more and {small.num_hidden_layers} layers or more, got {self}"
            )


def grow(small: Any, shape: GrownShape) -> Any:
    """Return a `LlamaForCausalLM` of `shape` that has the logits of `small`.

    Raises:
        ValueError: a shape to which `small` cannot grow.
    """
    sizes = GrownShape.of(small.config)
    shape.check(sizes)
    config = copy.deepcopy(small.config)
    for name, size in vars(shape).items():
        setattr(config, name, size)
    config.head_dim = small.model.layers[0].self_attn.head_dim
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model = model.to(small.dtype).to_empty(device="cpu")
    model.model.rotary_emb = type(model.model.rotary_emb)(config)  # `to_empty` left its buffers unset
    width = shape.hidden_size // sizes.hidden_size
    with torch.no_grad():
        set_weight(model.model.embed_tokens, small.model.embed_tokens.weight.repeat(1, width))
        set_weight(model.lm_head, small.lm_head.weight.repeat(1, width))
        set_weight(model.model.norm, small.model.norm.weight.repeat(width) / width)
        for index, layer in enumerate(model.model.layers):
            is_identity = index >= small.config.num_hidden_layers
            fill_layer(layer, small.model.layers[-1 if is_identity else index], sizes, shape)
            if is_identity:
                layer.self_attn.o_proj.weight.zero_()
                layer.mlp.down_proj.weight.zero_()
    model.tie_weights()
    return model.eval()


def fill_layer(grown: Any, layer: Any, small: GrownShape, shape: GrownShape) -> None:
    """Set the weights of a grown decoder layer.

    The repeated hidden state enters every product through a norm, whose weight is divided by the
    number of repetitions; the weights behind it are repeated as they are.
    """
    width = shape.hidden_size // small.hidden_size
    for name in ("input_layernorm", "post_attention_layernorm"):
        set_weight(getattr(grown, name), getattr(layer, name).weight.repeat(width) / width)
    units = copies(torch.arange(small.intermediate_size), shape.intermediate_size)
    for name in ("gate_proj", "up_proj"):
        set_weight(
            getattr(grown.mlp, name), copied_rows(getattr(layer.mlp, name).weight, units).repeat(1, width)
        )
    set_weight(grown.mlp.down_proj, shared_columns(layer.mlp.down_proj.weight, units).repeat(width, 1))
    attention = layer.self_attn
    size = attention.o_proj.weight.shape[1] // small.num_attention_heads
    keys, queries = _copied_heads(small, shape)
    for name, heads in {"q_proj": queries, "k_proj": keys, "v_proj": keys}.items():
        weight = copied_rows(getattr(attention, name).weight, _expand(heads, size))
        set_weight(getattr(grown.self_attn, name), weight.repeat(1, width))
    output = shared_columns(attention.o_proj.weight, _expand(queries, size))
    set_weight(grown.self_attn.o_proj, output.repeat(width, 1))


def _copied_heads(small: GrownShape, shape: GrownShape) -> tuple[Tensor, Tensor]:
    """Return the original of each key-value head and of each query head, -1 for none."""
    keys = torch.arange(small.num_key_value_heads).repeat_interleave(
        shape.num_key_value_heads // small.num_key_value_heads
    )
    small_group = small.num_attention_heads // small.num_key_value_heads
    group = shape.num_attention_heads // shape.num_key_value_heads
    return keys, torch.cat([copies(key * small_group + torch.arange(small_group), group) for key in keys])


def copies(originals: Tensor, size: int) -> Tensor:
    """Return `originals` repeated a power of two times, since division by it is exact, then -1."""
    copied = originals.repeat(1 << ((size // len(originals)).bit_length() - 1))
    return torch.cat((copied, copied.new_full((size - len(copied),), -1)))


def _expand(heads: Tensor, size: int) -> Tensor:
    """Return the rows of heads, `size` of each, -1 for those without an original."""
    rows = heads[:, None] * size + torch.arange(size)
    return torch.where(heads[:, None] < 0, -1, rows).flatten()


def copied_rows(weight: Tensor, originals: Tensor) -> Tensor:
    """Return copies of rows of `weight`, zeros where there is no original."""
    return weight[originals.clamp(min=0)] * (originals >= 0)[:, None]


def shared_columns(weight: Tensor, originals: Tensor) -> Tensor:
    """Return copies of columns of `weight`, each divided by the number of its copies."""
    counts = torch.bincount(originals[originals >= 0], minlength=weight.shape[1])
    return copied_rows((weight / counts).to(weight.dtype).T, originals).T


def set_weight(module: Any, weight: Tensor) -> None:
    module.weight.copy_(weight)
