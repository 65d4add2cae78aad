"""Scans of Transformers' linear layers that record the state after every token.

These layers run several tokens as chunks, padded to 64 or 256 tokens, and return the last state
only. For the few tokens of a draft, repeating the layer's own single step costs less, equals passes
over single tokens to the last bit, and has every state on its way.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

Step = Callable[..., Any]
Repeat = Callable[..., tuple[Tensor, list[Tensor]]]
Record = Callable[[list[Tensor]], None]
MAX_RECORDED = 32
"""Largest number of tokens in one pass whose states are recorded, so that their memory is bounded."""


class _Current(threading.local):
    record: Record | None = None


_current = _Current()


@contextmanager
def recording(record: Record) -> Iterator[None]:
    """Let the scans of this thread pass the states after each token but the last to `record`."""
    _current.record = record
    try:
        yield
    finally:
        _current.record = None


class RecordedScan:
    """Scan over chunks, or over single tokens while states are recorded.

    Args:
        chunked: the layer's function for several tokens.
        step: its function for single tokens.
        repeat: calls `step` for each token; returns the outputs and the state after each.
    """

    def __init__(self, chunked: Step, step: Step, repeat: Repeat) -> None:
        self.chunked = chunked
        self.step = step
        self.repeat = repeat

    def __call__(self, *inputs: Tensor, **options: Any) -> Any:
        starts_anew = options.get("initial_state") is None and options.get("initial_states") is None
        if _current.record is None or starts_anew:
            return self.chunked(*inputs, **options)
        outputs, states = self.repeat(self.step, *inputs, **options)
        _current.record(states[:-1])
        return outputs, states[-1]


def _repeat_delta_rule(
    step: Step,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor,
    **options: Any,
) -> tuple[Tensor, list[Tensor]]:
    """Run a gated delta rule over `[row, token, ...]` one token at a time."""
    outputs, states = [], [initial_state]
    for place in range(query.shape[1]):
        token = slice(place, place + 1)
        parts = (each[:, token] for each in (query, key, value))
        decays = {"g": g[:, token], "beta": beta[:, token]}
        output, state = step(*parts, **decays, initial_state=states[-1], **options)
        outputs.append(output)
        states.append(state)
    return torch.cat(outputs, dim=1), states[1:]


def _repeat_mamba2(
    step: Step,
    inputs: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    *,
    D: Tensor,
    dt_bias: Tensor,
    initial_states: Tensor,
    **_: Any,
) -> tuple[Tensor, list[Tensor]]:
    """Run a Mamba-2 scan over `[row, token, head, size]` one token at a time."""
    size = inputs.shape[-1]

    def spread(per_head: Tensor) -> Tensor:
        return per_head[..., None].expand(*per_head.shape, size)

    decay = spread(a)[..., None].expand(*a.shape, size, b.shape[-1])
    settings = {"z": None, "dt_bias": spread(dt_bias), "dt_softplus": True}
    outputs, states = [], [initial_states]
    for place in range(inputs.shape[1]):
        state = states[-1].clone()  # changed in place
        token = (inputs[:, place], spread(dt[:, place]), decay, b[:, place], c[:, place], spread(D))
        outputs.append(step(state, *token, **settings))
        states.append(state)
    return torch.stack(outputs, dim=1), states[1:]


SCANS: dict[str, tuple[str, Repeat]] = {
    "torch_chunk_gated_delta_rule": ("torch_recurrent_gated_delta_rule", _repeat_delta_rule),
    "chunk_kimi_delta_attention": ("recurrent_kimi_delta_attention", _repeat_delta_rule),
    "mamba2_chunk_scan": ("mamba2_selective_state_update", _repeat_mamba2),
}
"""By the name of a chunked scan in a module's file, that of its single step, and how to repeat it."""


def record_scans(model: Any) -> None:
    """Replace the scans that the layers of a model call by `RecordedScan`; a second call has no effect.

    Without `recording` these behave as before, for all models of the class.
    """
    for name in {type(module).__module__ for module in model.modules()}:
        functions = vars(sys.modules[name])
        for chunked, (step, repeat) in SCANS.items():
            if chunked in functions and not isinstance(functions[chunked], RecordedScan):
                functions[chunked] = RecordedScan(functions[chunked], functions[step], repeat)
