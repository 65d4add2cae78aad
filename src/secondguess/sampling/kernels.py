"""Probabilities and draws by the kernels of `runtime/cpu/sampling.h`; where they cannot be used, by torch.

The kernels take float32 on the host: a vocabulary is read once or twice instead of once per operation,
and no threads are woken for it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_double, c_int64

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from secondguess.errors import OutOfMemoryError
from secondguess.runtime.cpu.library import units


def kernels_for(*values: Tensor) -> ctypes.CDLL | None:
    """Return the kernels if they can read these tensors `[..., vocab]`, else None."""
    for tensor in values:
        if tensor.dtype is not torch.float32 or not tensor.is_cpu or tensor.stride(-1) != 1:
            return None
    available = units()
    return available[0].kernels if available else None


def with_confidences(logits: Tensor) -> tuple[list[int], list[float]]:
    """Return the most likely token (lowest id among equals) of each row `[row, vocab]`, NaN as the largest, and its softmax."""
    kernels = kernels_for(logits)
    if kernels is None:
        return _with_confidences_in_torch(logits)
    num_rows, width = logits.shape
    tokens, confidences = (c_int64 * num_rows)(), (c_double * num_rows)()
    kernels.secondguess_most_likely(logits.data_ptr(), num_rows, width, logits.stride(0), tokens, confidences)
    found = confidences[:]
    if not all(found):
        return _with_confidences_in_torch(logits)
    return tokens[:], found


def _with_confidences_in_torch(logits: Tensor) -> tuple[list[int], list[float]]:
    tokens = logits.max(-1).indices
    confidences = logits.softmax(-1).gather(-1, tokens[:, None])
    return tokens.tolist(), confidences[:, 0].tolist()


def softmax(kernels: ctypes.CDLL, logits: Tensor, settings: Sequence[tuple[float, float]]) -> Tensor:
    """Return `softmax(logits / temperature)` after min-p, NaN in all places where no token is possible.

    `logits` are `[row, query, vocab]`; `settings` has, per row, the temperature and the logarithm of min-p.
    """
    probs = torch.empty_like(logits, memory_format=torch.contiguous_format)
    for (*row, row_probs), setting in zip(_rows(logits, probs), settings, strict=True):
        kernels.secondguess_softmax(*row, *setting, row_probs)
    return probs


def truncated_softmax(
    kernels: ctypes.CDLL, logits: Tensor, settings: Sequence[tuple[float, int, float, float]]
) -> Tensor:
    """Return the probabilities after top-k, top-p and min-p, in this order.

    `settings` has, per row, the temperature, top-k (0 for none), top-p, and the logarithm of min-p.
    """
    probs = torch.empty_like(logits, memory_format=torch.contiguous_format)
    for (*row, row_probs), setting in zip(_rows(logits, probs), settings, strict=True):
        if kernels.secondguess_truncated_softmax(*row, *setting, row_probs):
            raise OutOfMemoryError("not enough memory to sort the logits; use a smaller batch or top_k")
    return probs


def _rows(logits: Tensor, probs: Tensor) -> list[tuple[int, int, int, int, int]]:
    """Return per row the address, queries, width and stride of its logits, and the address of its probs."""
    num_rows, num_queries, width = logits.shape
    row_stride, stride, _ = logits.stride()
    start, own_start, size = logits.data_ptr(), probs.data_ptr(), logits.element_size()
    return [
        (
            start + size * row_stride * row,
            num_queries,
            width,
            stride,
            own_start + size * num_queries * width * row,
        )
        for row in range(num_rows)
    ]


def draw_by_inversion(dists: Tensor, uniforms: NDArray[numpy.float64]) -> Tensor:
    """Draw from each of `dists` `[..., vocab]`, unnormalised, by inverting its sum up to `uniforms` `[...]` on the host.

    For uniforms of at most 1 - 2^-53, the product with the total rounds to less than the total, so
    the token found always has a positive probability.
    """
    kernels = kernels_for(dists)
    if kernels is not None:
        width, numbers = dists.shape[-1], uniforms.ravel().tolist()
        drawn = [
            kernels.secondguess_draw(address, width, uniform)
            for address, uniform in zip(_addresses(dists), numbers, strict=True)
        ]
        return _shaped(drawn, uniforms.shape)
    totals = dists.cumsum(-1, dtype=torch.float64)
    if uniforms.size == 1:
        wanted = uniforms.item() * totals[..., -1:]
    else:
        wanted = torch.from_numpy(uniforms).to(dists.device)[..., None] * totals[..., -1:]
    return torch.searchsorted(totals, wanted, right=True)[..., 0]


def first_arrivals(
    kernels: ctypes.CDLL, dists: Tensor, hashes: NDArray[numpy.int64], token_ids: Tensor | None = None
) -> Tensor:
    """Return the winners `[...]` of exponential races with rates `[..., vocab]` and `hashes` `[...]`.

    `token_ids` is that of `Noise.draft`.
    """
    ids = None if token_ids is None else token_ids.data_ptr()
    numbers = hashes.view(numpy.uint64).ravel().tolist()
    found = [
        kernels.secondguess_race(address, dists.shape[-1], number, ids)
        for address, number in zip(_addresses(dists), numbers, strict=True)
    ]
    return _shaped(found, hashes.shape)


def residuals(factors: NDArray[numpy.float64], p: Tensor, q: Tensor) -> tuple[Tensor, NDArray[numpy.float64]]:
    """Return `max(factor * p - q, 0)` `[..., vocab]`, and its sums `[...]` on the host, where `factors` `[...]` are, too."""
    kernels = kernels_for(p, q)
    if kernels is None:
        weights = torch.from_numpy(factors).to(p)
        dists = (weights[..., None] * p).sub_(q).clamp_min_(0.0)
        return dists, dists.sum(-1).cpu().numpy().astype(numpy.float64)
    dists = p.new_empty(p.shape)
    return dists, _residual_masses(kernels, factors, p, q, _addresses(dists))


def residual_masses(factors: NDArray[numpy.float64], p: Tensor, q: Tensor) -> NDArray[numpy.float64]:
    """Return the sums of `residuals`; the kernels do not write these."""
    kernels = kernels_for(p, q)
    if kernels is None:
        return residuals(factors, p, q)[1]
    return _residual_masses(kernels, factors, p, q, [None] * factors.size)


def _residual_masses(
    kernels: ctypes.CDLL,
    factors: NDArray[numpy.float64],
    p: Tensor,
    q: Tensor,
    outputs: Sequence[int | None],
) -> NDArray[numpy.float64]:
    arguments = zip(factors.ravel().tolist(), _addresses(p), _addresses(q), outputs, strict=True)
    masses = [
        kernels.secondguess_residual(factor, own, other, p.shape[-1], output)
        for factor, own, other, output in arguments
    ]
    return numpy.array(masses).reshape(factors.shape)


def _shaped(tokens: list[int], shape: tuple[int, ...]) -> Tensor:
    # several times faster than `torch.tensor`
    return torch.from_numpy(numpy.array(tokens, numpy.int64).reshape(shape))


def _addresses(dists: Tensor) -> list[int]:
    """Return the addresses of distributions `[..., vocab]`, in order."""
    start = dists.data_ptr()
    if dists.numel() == dists.shape[-1]:
        return [start]
    offsets = [0]
    for size, stride in zip(dists.shape[:-1], dists.stride()[:-1], strict=True):
        offsets = [offset + number * stride for offset in offsets for number in range(size)]
    return [start + dists.element_size() * offset for offset in offsets]
