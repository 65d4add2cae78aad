"""Text by the row: a batch of prompts of one length, continued together with a preallocated cache.

Training and evaluation need a lot of the target's own text and nothing of what serving needs (ragged rows, stops,
rollback), so this stays beside the training module and apart from the runtime.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from secondguess.errors import BadInputError
from secondguess.train.model import Decoder, fast_dtype, rotary_tables, rotate


class RowGenerator:
    """The keys and values of a batch of rows of equal length, and the weights in the dtype of the products."""

    def __init__(
        self, decoder: Decoder, rows: int, most_positions: int, dtype: torch.dtype | None = None
    ) -> None:
        dtype = dtype or fast_dtype()
        shape = decoder.shape
        if most_positions > shape.max_positions:
            raise BadInputError(
                f"{most_positions} positions exceed the model's {shape.max_positions}; ask for fewer tokens"
            )
        self.shape, self.dtype = shape, dtype
        self.weights = {name: weight.detach().to(dtype) for name, weight in decoder.named_parameters()}
        size = (shape.num_layers, rows, shape.num_kv_heads, most_positions, shape.head_size)
        self.keys, self.values = torch.zeros(size, dtype=dtype), torch.zeros(size, dtype=dtype)
        self.cos, self.sin = rotary_tables(shape, most_positions, dtype)
        self.length = 0

    @torch.no_grad()
    def run(self, prompts: Tensor, new_tokens: int, temperature: float, generator: torch.Generator) -> Tensor:
        """Prompts followed by ``new_tokens`` tokens each."""
        rows, fresh = prompts, prompts
        for _ in range(new_tokens):
            fresh = _pick(self._forward(fresh), temperature, generator)
            rows = torch.cat((rows, fresh), dim=1)
        return rows

    def _norm(self, states: Tensor, name: str) -> Tensor:
        return functional.rms_norm(states, states.shape[-1:], self.weights[name], self.shape.norm_eps)

    def _forward(self, tokens: Tensor) -> Tensor:
        """Logits of the last position after appending ``tokens`` [row, position] to every row."""
        count = tokens.shape[1]
        positions = slice(self.length, self.length + count)
        states = functional.embedding(tokens, self.weights["model.embed_tokens.weight"])
        for index in range(self.shape.num_layers):
            prefix = f"model.layers.{index}"
            normed = self._norm(states, f"{prefix}.input_layernorm.weight")
            states = states + self._attend(normed, index, prefix, positions)
            normed = self._norm(states, f"{prefix}.post_attention_layernorm.weight")
            gate = functional.linear(normed, self.weights[f"{prefix}.mlp.gate_proj.weight"])
            up = functional.linear(normed, self.weights[f"{prefix}.mlp.up_proj.weight"])
            states = states + functional.linear(
                functional.silu(gate) * up, self.weights[f"{prefix}.mlp.down_proj.weight"]
            )
        self.length += count
        last = self._norm(states[:, -1], "model.norm.weight")
        return functional.linear(last, self.weights["model.embed_tokens.weight"])

    def _attend(self, normed: Tensor, index: int, prefix: str, positions: slice) -> Tensor:
        rows, count, _ = normed.shape
        cos, sin = self.cos[:, positions], self.sin[:, positions]

        def project(name: str) -> Tensor:
            projected = functional.linear(normed, self.weights[f"{prefix}.self_attn.{name}_proj.weight"])
            return projected.view(rows, count, -1, self.shape.head_size)

        self.keys[index, :, :, positions] = rotate(project("k"), cos, sin).transpose(1, 2)
        self.values[index, :, :, positions] = project("v").transpose(1, 2)
        mixed = functional.scaled_dot_product_attention(
            rotate(project("q"), cos, sin).transpose(1, 2),
            self.keys[index, :, :, : positions.stop],
            self.values[index, :, :, : positions.stop],
            is_causal=count > 1,
            enable_gqa=True,
        )
        flat = mixed.transpose(1, 2).reshape(rows, count, -1)
        return functional.linear(flat, self.weights[f"{prefix}.self_attn.o_proj.weight"])


def _pick(logits: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    return torch.multinomial((logits.float() / temperature).softmax(-1), 1, generator=generator)
