"""Functions of Transformers' linear layers that are replaced in passes of `RecurrentForward`.

These layers run several tokens as chunks, padded to 64 or 256 tokens, and return the last state
only. For the few tokens of a draft, one token after the other costs less, equals passes over single
tokens to the last bit, and has every state on its way. The kernels run them if they can; elsewhere
the layer's own single step is repeated.
"""

from __future__ import annotations

import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from secondguess.runtime.cpu.recurrence import (
    Recurrence,
    StatesByToken,
    can_run,
    delta_rule,
    state_space,
)
from secondguess.runtime.decoder.products import can_pack
from secondguess.runtime.system.quiet import quiet

with quiet():
    from transformers.activations import ACT2FN

Function = Callable[..., Any]
Record = Callable[[Sequence[Tensor]], None]
MAX_RECORDED = 32
"""Largest number of tokens in one pass whose states are recorded, so that their memory is bounded."""


class _Current(threading.local):
    is_ours = False
    record: Record | None = None


_current = _Current()


@contextmanager
def recording(record: Record | None) -> Iterator[None]:
    """Use the replaced functions in this thread; `record` takes the states after each token but the last.

    Without it, scans run in chunks.
    """
    _current.is_ours, _current.record = True, record
    try:
        yield
    finally:
        _current.is_ours, _current.record = False, None


class RecordedScan(ABC):
    """Scan over chunks, or over single tokens while states are recorded.

    Args:
        chunked: the layer's function for several tokens.
        step: its function for single tokens.
    """

    def __init__(self, chunked: Function, step: Function) -> None:
        self.chunked = chunked
        self.step = step

    def __call__(self, *inputs: Tensor, **options: Any) -> Any:
        state = options.get("initial_state", options.get("initial_states"))
        if _current.record is None or state is None:
            return self.chunked(*inputs, **options)
        if not can_run(state):
            outputs, states = self.repeat(*inputs, **options)
            _current.record(states[:-1])
            return outputs, states[-1]
        recurrence = self.recurrence(*inputs, **options)
        _current.record(StatesByToken(recurrence, state))
        last = torch.empty_like(state)
        outputs = recurrence.advance(state, last, recurrence.output_shape[0])
        return outputs.to(inputs[0].dtype), last

    @abstractmethod
    def recurrence(self, *inputs: Any, **options: Any) -> Recurrence:
        """Return the inputs of several tokens as the kernels take them."""

    @abstractmethod
    def repeat(self, *inputs: Any, **options: Any) -> tuple[Tensor, list[Tensor]]:
        """Call `step` for each of several tokens; return the outputs and the state after each."""

    @abstractmethod
    def run_step(self, *inputs: Any, **options: Any) -> Any:
        """Replace `step`: run a single token as one of several."""


class DeltaRuleScan(RecordedScan):
    """Gated delta rule over `[row, token, ...]`."""

    def recurrence(self, *inputs: Any, **options: Any) -> Recurrence:
        query, key, value = inputs
        normalises = options.get("use_qk_l2norm_in_kernel", False)
        return delta_rule(query, key, value, options["g"], options["beta"], normalises)

    def repeat(
        self,
        *inputs: Tensor,
        g: Tensor,
        beta: Tensor,
        initial_state: Tensor,
        **options: Any,
    ) -> tuple[Tensor, list[Tensor]]:
        outputs, states = [], [initial_state]
        for step in range(g.shape[1]):
            token = slice(step, step + 1)
            parts = (each[:, token] for each in inputs)
            decays = {"g": g[:, token], "beta": beta[:, token]}
            output, state = self.step(*parts, **decays, initial_state=states[-1], **options)
            outputs.append(output)
            states.append(state)
        return torch.cat(outputs, dim=1), states[1:]

    def run_step(self, *inputs: Any, **options: Any) -> Any:
        if _current.record is None or not can_run(options["initial_state"]):
            return self.step(*inputs, **options)
        return self(*inputs, **options)


class Mamba2Scan(RecordedScan):
    """Mamba-2 scan over `[row, token, head, size]`; its single step changes the state in place."""

    def recurrence(self, *inputs: Any, **options: Any) -> Recurrence:
        values, dt, a, b, c = inputs
        return state_space(values, dt, a, b, c, options["D"], options["dt_bias"])

    def repeat(
        self,
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
        size = inputs.shape[-1]

        def spread(per_head: Tensor) -> Tensor:
            return per_head[..., None].expand(*per_head.shape, size)

        decay = spread(a)[..., None].expand(*a.shape, size, b.shape[-1])
        settings = {"z": None, "dt_bias": spread(dt_bias), "dt_softplus": True}
        outputs, states = [], [initial_states]
        for step in range(inputs.shape[1]):
            state = states[-1].clone()
            token = (inputs[:, step], spread(dt[:, step]), decay, b[:, step], c[:, step], spread(D))
            outputs.append(self.step(state, *token, **settings))
            states.append(state)
        return torch.stack(outputs, dim=1), states[1:]

    def run_step(self, *inputs: Any, **options: Any) -> Any:
        state, values, dt, a, b, c, d = inputs
        if _current.record is None or not can_run(state):
            return self.step(*inputs, **options)
        # the module repeats one number for each of a head
        dt, a, d, dt_bias = dt[:, None, :, 0], a[:, 0, 0], d[:, 0], options["dt_bias"][:, 0]
        recurrence = state_space(values[:, None], dt, a, b[:, None], c[:, None], d, dt_bias)
        outputs = recurrence.advance(state, state, 1)[:, 0].to(values.dtype)
        gate = options["z"]
        return outputs if gate is None else outputs * functional.silu(gate)


class Convolution:
    """Causal convolution of each channel, by one product per tap where torch's own is slow.

    Without bfloat16 instructions torch convolves one channel of bfloat16 numbers after the other,
    which takes ten times as long as the rest of a pass.

    Args:
        original: the layer's function.
        updates: whether it takes a state, which it updates in place.
    """

    def __init__(self, original: Function, updates: bool) -> None:
        self.original = original
        self.updates = updates

    def __call__(self, values: Tensor, *others: Any, **options: Any) -> Any:
        is_fast = values.dtype is not torch.bfloat16 or can_pack(values.dtype, values.device)
        if is_fast or not _current.is_ours or not values.is_cpu:
            return self.original(values, *others, **options)
        if not self.updates:
            return convolve(values, *others, **options)
        state, *others_than_state = others
        whole = torch.cat([state, values], dim=-1)
        state.copy_(whole[..., -state.shape[-1] :])
        return convolve(whole, *others_than_state, **options)[..., -values.shape[-1] :]


def convolve(
    values: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **_: Any
) -> Tensor:
    """Return the causal convolution of each channel of `[row, channel, token]`, in float32 up to the activation."""
    wide = values.float()
    *earlier, last = weight.float().t().contiguous()[:, :, None]
    found = wide * last
    for distance, tap in enumerate(reversed(earlier), start=1):
        found[..., distance:].addcmul_(wide[..., :-distance], tap)
    if bias is not None:
        found += bias[:, None]
    result: Tensor = found.to(values.dtype)
    return result if activation is None else ACT2FN[activation](result)


SCANS: dict[str, tuple[str, type[RecordedScan]]] = {
    "torch_chunk_gated_delta_rule": ("torch_recurrent_gated_delta_rule", DeltaRuleScan),
    "chunk_kimi_delta_attention": ("recurrent_kimi_delta_attention", DeltaRuleScan),
    "mamba2_chunk_scan": ("mamba2_selective_state_update", Mamba2Scan),
}
"""By the name of a chunked scan in a module's file, that of its single step, and its replacement."""
CONVOLUTIONS = {"causal_conv1d_fn": False, "causal_conv1d_update": True}
"""Names of convolutions in a module's file, and whether they update a state."""


def replace_functions(model: Any) -> None:
    """Replace the scans and convolutions that the layers of a model call; a second call has no effect.

    Without `recording` these behave as before, for all models of the class.
    """
    for name in {type(module).__module__ for module in model.modules()}:
        functions = vars(sys.modules[name])
        for chunked, (step, scan_class) in SCANS.items():
            if chunked in functions and not isinstance(functions[chunked], RecordedScan):
                scan = scan_class(functions[chunked], functions[step])
                functions[chunked], functions[step] = scan, scan.run_step
        for convolution, updates in CONVOLUTIONS.items():
            if convolution in functions and not isinstance(functions[convolution], Convolution):
                functions[convolution] = Convolution(functions[convolution], updates)
