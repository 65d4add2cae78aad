"""Recurrences of linear layers over the few tokens of a draft, computed by the kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from secondguess.errors import OutOfMemoryError
from secondguess.runtime.cpu import library
from secondguess.runtime.system.machine import num_threads


def can_run(state: Tensor) -> bool:
    """Return whether the kernels can continue from a state `[row, head, ...]`."""
    return (
        state.is_cpu
        and state.dtype is torch.float32
        and state.shape[0] == 1
        and state.is_contiguous()
        and bool(library.units())
    )


@dataclass(frozen=True)
class Recurrence:
    """Inputs of a recurrence over the tokens of one row, in the form that the kernels take.

    Args:
        run: function of the kernels.
        arguments: its arguments without the states and the outputs.
        inputs: tensors that the arguments point into.
        output_shape: `[token, head, number]`.
    """

    run: Callable[[Any, int], int]
    arguments: Any
    inputs: Sequence[Tensor]
    output_shape: torch.Size

    def advance(self, before: Tensor, after: Tensor, num_tokens: int) -> Tensor:
        """Run the first tokens; return outputs `[row, token, head, number]` in float32.

        `after` takes the state after the last of them; it may be `before`.
        """
        outputs = library.float32_buffer(1, num_tokens, *self.output_shape[1:])
        arguments = self.arguments
        arguments.num_tokens = num_tokens
        arguments.before, arguments.after = before.data_ptr(), after.data_ptr()
        arguments.outputs = outputs.data_ptr()
        if self.run(arguments, num_threads()):
            raise OutOfMemoryError(f"expected memory for {num_tokens} tokens of a linear layer, got none")
        return outputs


class StatesByToken(Sequence[Tensor]):
    """States after each token of a recurrence but the last, each computed when it is asked for.

    Only the one after the last accepted token is needed, and storing all would take longer.

    Args:
        recurrence: the inputs.
        state: the state before the first token.
    """

    def __init__(self, recurrence: Recurrence, state: Tensor) -> None:
        self._recurrence = recurrence
        self._state = state

    def __len__(self) -> int:
        return self._recurrence.output_shape[0] - 1

    def __getitem__(self, step: Any) -> Any:
        if step >= len(self):
            raise IndexError(step)
        after = torch.empty_like(self._state)
        self._recurrence.advance(self._state, after, step + 1)
        return after


def delta_rule(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, normalises: bool
) -> Recurrence:
    """Return the gated delta rule over `[row, token, head, number]` of one row.

    Args:
        query, key: one head for each, or for several heads of the values.
        value: as above.
        g: logarithm of the decay, per head or also per number of the key.
        beta: learning rate per head.
        normalises: whether to divide queries and keys by their norms.
    """
    inputs = [each.float().contiguous() for each in (query, key, value, g, beta)]
    num_key_heads, key_size = key.shape[2:]
    num_heads, value_size = value.shape[2:]
    arguments = library.DeltaRule(
        0,
        *(num_heads, num_key_heads, key_size, value_size, key_size if g.dim() == 4 else 1, int(normalises)),
        *(each.data_ptr() for each in inputs),
    )
    return Recurrence(library.units()[0].kernels.secondguess_delta_rule, arguments, inputs, value.shape[1:])


def state_space(
    values: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, dt_bias: Tensor
) -> Recurrence:
    """Return the state-space model of Mamba-2 over the tokens of one row.

    Args:
        values: `[row, token, head, number]`.
        dt: time steps `[row, token, head]` before bias and softplus.
        a: logarithm of the decay in a unit of time, per head.
        b, c: `[row, token, group, number]`, how values are written to the state and read from it.
        d: factor on the values that are added to the output, per head.
        dt_bias: bias of the time steps, per head.
    """
    inputs = [each.float().contiguous() for each in (values, dt + dt_bias.to(dt.dtype), b, c, a, d)]
    num_heads, head_size = values.shape[2:]
    num_groups, state_size = b.shape[2:]
    arguments = library.StateSpace(
        0, num_heads, num_groups, head_size, state_size, *(each.data_ptr() for each in inputs)
    )
    return Recurrence(library.units()[0].kernels.secondguess_state_space, arguments, inputs, values.shape[1:])
