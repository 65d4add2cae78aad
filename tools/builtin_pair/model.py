"""Llama decoder for training on a CPU.

Parameter names are those of ``transformers.LlamaForCausalLM``, so state dicts can be exchanged
(``tests/train`` asserts equal logits). It is separate from the Transformers module because a
training step on a CPU is dominated by everything that is not a matrix product: this module casts
each weight once, computes queries, keys and values in one product, has no cache, no padding mask
and no branches, and therefore compiles into few kernels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from secondguess.runtime.machine import has_bfloat16


def fast_dtype() -> torch.dtype:
    """Return the dtype of matrix products: bfloat16 with hardware support, else float32."""
    return torch.bfloat16 if has_bfloat16(torch.device("cpu")) else torch.float32


@dataclass(frozen=True)
class ModelShape:
    """Shape of a Llama decoder with tied embeddings."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    mlp_size: int
    vocab_size: int
    max_positions: int = 2048
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_heads


class Norm(nn.Module):
    """RMSNorm that computes in fp32 and returns the dtype of its input."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, states: Tensor) -> Tensor:
        wide = states.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * self.weight).to(states.dtype)


class Linear(nn.Module):
    """Linear layer without bias, with fp32 weights, that multiplies in the dtype of its input."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))

    def forward(self, states: Tensor) -> Tensor:
        return functional.linear(states, self.weight.to(states.dtype))


def rotate(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary embeddings in Llama's half-split layout to [row, position, head, size]."""
    first, second = states.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def rotary_tables(shape: ModelShape, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cos and sin [1, position, 1, head_size / 2] for positions from 0."""
    steps = torch.arange(0, shape.head_size, 2, dtype=torch.float32) / shape.head_size
    angles = torch.outer(torch.arange(length, dtype=torch.float32), shape.rope_theta**-steps)[
        None, :, None, :
    ]
    return angles.cos().to(dtype), angles.sin().to(dtype)


class _Softmax(torch.autograd.Function):
    """Masked softmax that saves only its result for the backward pass, in the training dtype.

    This halves the memory traffic of PyTorch's softmax.
    """

    @staticmethod
    def forward(ctx: Any, scores: Tensor, mask: Tensor, scale: float) -> Tensor:
        weights = torch.softmax(scores.float() * scale + mask, dim=-1).to(scores.dtype)
        ctx.save_for_backward(weights)
        ctx.scale = scale
        return weights

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None, None]:
        (weights,) = ctx.saved_tensors
        wide, slope_wide = weights.float(), slope.float()
        inner = (wide * slope_wide).sum(-1, keepdim=True)
        return (wide * (slope_wide - inner) * ctx.scale).to(slope.dtype), None, None


def _softmax(scores: Tensor, mask: Tensor, scale: float) -> Tensor:
    weights: Tensor = _Softmax.apply(scores, mask, scale)  # type: ignore[no-untyped-call]
    return weights


class Attention(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        query_size, kv_size = shape.num_heads * shape.head_size, shape.num_kv_heads * shape.head_size
        self.q_proj = Linear(shape.hidden_size, query_size)
        self.k_proj = Linear(shape.hidden_size, kv_size)
        self.v_proj = Linear(shape.hidden_size, kv_size)
        self.o_proj = Linear(query_size, shape.hidden_size)

    def forward(self, states: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        rows, length, _ = states.shape
        heads, kv_heads, size = self.shape.num_heads, self.shape.num_kv_heads, self.shape.head_size
        weight = torch.cat((self.q_proj.weight, self.k_proj.weight, self.v_proj.weight)).to(states.dtype)
        joint = functional.linear(states, weight).view(rows, length, heads + 2 * kv_heads, size)
        rotated = rotate(joint[:, :, : heads + kv_heads], cos, sin)
        # Query heads that share a key head are rows of one product. At training lengths, two plain
        # products and a softmax fused by the compiler are faster than the flash attention kernel
        # for CPUs, whose backward pass is slow.
        group = heads // kv_heads
        queries = rotated[:, :, :heads].view(rows, length, kv_heads, group, size).permute(0, 2, 3, 1, 4)
        queries = queries.reshape(rows * kv_heads, group * length, size)
        keys = rotated[:, :, heads:].transpose(1, 2).reshape(rows * kv_heads, length, size)
        values = joint[:, :, heads + kv_heads :].transpose(1, 2).reshape(rows * kv_heads, length, size)
        scores = torch.bmm(queries, keys.transpose(1, 2)).view(rows * kv_heads, group, length, length)
        weights = _softmax(scores, mask, size**-0.5).view(rows * kv_heads, group * length, length)
        mixed = torch.bmm(weights, values).view(rows, heads, length, size)
        output: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(rows, length, heads * size))
        return output


class Mlp(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.gate_proj = Linear(shape.hidden_size, shape.mlp_size)
        self.up_proj = Linear(shape.hidden_size, shape.mlp_size)
        self.down_proj = Linear(shape.mlp_size, shape.hidden_size)

    def forward(self, states: Tensor) -> Tensor:
        weight = torch.cat((self.gate_proj.weight, self.up_proj.weight)).to(states.dtype)
        gate, up = functional.linear(states, weight).chunk(2, dim=-1)
        output: Tensor = self.down_proj(functional.silu(gate) * up)
        return output


class Layer(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.input_layernorm = Norm(shape.hidden_size, shape.norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = Norm(shape.hidden_size, shape.norm_eps)
        self.mlp = Mlp(shape)

    def forward(self, states: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        states = states + self.self_attn(self.input_layernorm(states), cos, sin, mask)
        output: Tensor = states + self.mlp(self.post_attention_layernorm(states))
        return output


class Backbone(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList([Layer(shape) for _ in range(shape.num_layers)])
        self.norm = Norm(shape.hidden_size, shape.norm_eps)


class Decoder(nn.Module):
    """Llama decoder with the state dict of a ``LlamaForCausalLM`` with tied embeddings."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Backbone(shape)

    def forward(self, tokens: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return the logits `[row, position, vocab]` of `tokens` `[row, position]`.

        Args:
            tokens: token ids.
            dtype: dtype of the computation and of the logits; by default ``fast_dtype()``.
        """
        shape, dtype = self.shape, dtype or fast_dtype()
        cos, sin = rotary_tables(shape, tokens.shape[1], dtype)
        mask = torch.full((tokens.shape[1], tokens.shape[1]), -1e30).triu(1)
        states = functional.embedding(tokens, self.model.embed_tokens.weight).to(dtype)
        for layer in self.model.layers:
            states = layer(states, cos, sin, mask)
        return functional.linear(self.model.norm(states), self.model.embed_tokens.weight.to(dtype))

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Initialise the weights at random, except for zeros in output projections.

        A fresh layer is therefore the identity.
        """
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 1:
                parameter.fill_(1.0)
            elif name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.zero_()
            elif name.endswith("embed_tokens.weight"):
                parameter.normal_(0.0, 0.02, generator=generator)
            else:
                parameter.normal_(0.0, 1.0 / math.sqrt(parameter.shape[1]), generator=generator)
