"""Functions that are captured as CUDA graphs, and the fixed inputs that they read."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Generic, TypeVar

import torch

from secondguess.preparation import preparing
from secondguess.runtime.cuda.operations import MAX_TILES, PassInputs

Result = TypeVar("Result")
MAX_GRAPHS = 64
"""Largest number of graphs that a runtime keeps; the one that was used least recently is dropped."""
ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64)
"""Numbers of rows to which a pass is padded."""
ALIGNMENT = 2
"""Multiple of 8 bytes at which the fields of inputs begin, so that kernels are compiled for one alignment."""


class Graph(Generic[Result]):
    """Function without arguments, captured on a CUDA device; on a CPU it is called.

    Capturing runs it several times.

    Args:
        function: reads tensors whose values change between calls, and returns tensors. It must not read values back
            from the device.
        device: device of these tensors.
        pool, stream: memory pool and stream of all captures of a runtime; None on a CPU.
    """

    def __init__(
        self, function: Callable[[], Result], device: torch.device, pool: Any = None, stream: Any = None
    ) -> None:
        self._function = function
        self._graph: torch.cuda.CUDAGraph | None = None
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()  # earlier work is no part of the preparation
        with preparing():
            if device.type == "cuda":
                self._capture(pool, stream)
            else:
                function()  # so that tests see what capturing changes

    def _capture(self, pool: Any, stream: Any) -> None:
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.stream(stream):
                self._function()  # compiles kernels, and lets libraries allocate their workspaces
                # Other threads may use the device while this one captures.
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                try:
                    self._result = self._function()
                finally:
                    graph.capture_end()
                graph.replay()  # the first time loads the graph to the device
        finally:
            stream.synchronize()
        self._graph = graph

    def __call__(self) -> Result:
        """Run the function; results on a CUDA device are overwritten by the next call."""
        if self._graph is None:
            return self._function()
        self._graph.replay()
        return self._result


class GraphCache:
    """Graphs of a runtime, dropped when the tensors that they read are replaced.

    Args:
        device: device of the runtime.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._graphs: dict[Hashable, Any] = {}
        self._pool = self._stream = None
        if device.type == "cuda":
            self._pool = torch.cuda.graph_pool_handle()
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def get(self, key: Hashable, make: Callable[[], Result]) -> Result:
        """Return what is stored for a key, or what `make` returns."""
        found: Result = self._graphs.pop(key) if key in self._graphs else make()
        self._graphs[key] = found  # the last one used
        if len(self._graphs) > MAX_GRAPHS:
            del self._graphs[next(iter(self._graphs))]
        return found

    def capture(self, function: Callable[[], Result]) -> Graph[Result]:
        """Return a new graph."""
        return Graph(function, self._device, self._pool, self._stream)

    def clear(self) -> None:
        """Drop all graphs, and free their memory."""
        if not self._graphs:
            return
        self._graphs.clear()
        if self._device.type == "cuda":
            self._pool = torch.cuda.graph_pool_handle()
            torch.cuda.empty_cache()


class StaticInputs:
    """Inputs of forward passes of one shape at fixed addresses.

    Args:
        num_rows, width: shape of the pass.
        num_integers, num_floats: size of `integers` and `floats`.
        device: device of the tensors.

    Attributes:
        inputs: of the pass.
        integers, floats: further values, int64 and float64.
    """

    def __init__(
        self, num_rows: int, width: int, device: torch.device, num_integers: int = 0, num_floats: int = 0
    ) -> None:
        num_tokens = num_rows * width
        sizes = [num_rows, num_rows, num_tokens, num_tokens, num_tokens, num_integers, num_floats]
        self._sizes = [-(-size // ALIGNMENT) * ALIGNMENT for size in sizes]
        self._buffer = torch.zeros(sum(self._sizes), dtype=torch.int64, device=device)
        parts = torch.split(self._buffer, self._sizes)
        slots, starts, *token_fields, self.integers, floats = (
            part[:size] for part, size in zip(parts, sizes, strict=True)
        )
        self.floats = floats.view(torch.float64)
        tokens, positions, ancestors = (each.view(num_rows, width) for each in token_fields)
        num_finished = torch.zeros(MAX_TILES, dtype=torch.int32, device=device)
        self.inputs = PassInputs(slots, starts, tokens, positions, ancestors, num_finished)

    def set(
        self, fields: Sequence[Sequence[int]], integers: Sequence[int] = (), floats: Sequence[float] = ()
    ) -> None:
        """Set all values; `fields` are those of the inputs, each as a flat list."""
        as_integers = torch.tensor(floats, dtype=torch.float64).view(torch.int64).tolist()
        values: list[int] = []
        for part, size in zip((*fields, integers, as_integers), self._sizes, strict=True):
            values += [*part, *([0] * (size - len(part)))]
        # The source may be freed: memory that is not pinned is copied before the call returns.
        self._buffer.copy_(torch.tensor(values, dtype=torch.int64), non_blocking=True)


def bucket(number: int, sizes: Sequence[int]) -> int:
    """Return the smallest of ascending `sizes` that is at least `number`, or a multiple of the last."""
    fitting = next((size for size in sizes if size >= number), None)
    return -(-number // sizes[-1]) * sizes[-1] if fitting is None else fitting
