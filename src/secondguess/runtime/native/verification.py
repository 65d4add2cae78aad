"""Verification of the chains of a batch by the kernels, from logits to the next tokens."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import Array, c_int64, c_uint64
from enum import IntEnum
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from secondguess.runtime.base import RowNoise
from secondguess.runtime.native import library
from secondguess.runtime.native.sampling import KernelSettings, kernels_for
from secondguess.runtime.support import num_threads


class KernelRule(IntEnum):
    """Verification rule of the kernels."""

    BLOCK = 0
    """Block verification of nodes drawn from `probs`."""
    MATCH = 1
    """Sample and match."""


class KernelVerdict(NamedTuple):
    """Result of verification by the kernels.

    Args:
        lengths: per row, the number of nodes accepted.
        next_tokens: per row, the token after them.
        samples: per row, the tokens sampled at its queries; empty for the rule `BLOCK`.
    """

    lengths: list[int]
    next_tokens: list[int]
    samples: list[list[int]]


def noises_of_rows(noises: Sequence[RowNoise]) -> Array[c_uint64]:
    """Return the noise of the rows of a batch as the kernels take it: three numbers per row."""
    numbers = [number for noise in noises for number in noise]
    return (c_uint64 * len(numbers))(*numbers)


@lru_cache(maxsize=256)
def settings_of_rows(settings: tuple[KernelSettings, ...]) -> Array[library.Settings]:
    """Return the settings of the rows of a batch as the kernels take them; cached, as few occur."""
    return (library.Settings * len(settings))(
        *[library.Settings(each.temperature, each.truncates, *each[1:]) for each in settings]
    )


def verify_chains(
    logits: Tensor,
    draft_probs: Tensor | None,
    tokens: Tensor,
    lengths: Tensor,
    settings: Array[library.Settings],
    noises: Sequence[RowNoise],
    rules: Sequence[KernelRule],
) -> KernelVerdict | None:
    """Verify the chains of a batch with the target's logits.

    Args:
        logits: `[row, node + 1, vocab]`, after all settings but `settings`.
        draft_probs: `[row, node, vocab]`; None if no row has the rule `BLOCK`.
        tokens: `[row, node]` int64.
        lengths: `[row]` int64, number of real nodes.
        settings: from `settings_of_rows`. Rows with the rule `BLOCK` have a positive temperature.
        noises: of the rows. Those with the rule `BLOCK` are not coupled.

    Returns:
        None where the kernels cannot be used, a distribution is not defined, or it lacks a token.
    """
    draft_dists = [] if draft_probs is None else [draft_probs]
    kernels, (num_rows, num_queries, vocab_size) = kernels_for(logits, *draft_dists), logits.shape
    num_nodes = num_queries - 1
    if kernels is None or tokens.shape != (num_rows, num_nodes):
        return None
    if not tokens.dtype == lengths.dtype == torch.int64:
        return None
    if any([each.shape != (num_rows, num_nodes, vocab_size) for each in draft_dists]):
        return None
    if not (tokens.is_contiguous() and lengths.is_contiguous()):
        return None
    probs_stride = draft_dists[0].stride(0) if draft_dists else 0
    if any([each.stride(1) != vocab_size for each in draft_dists]):
        return None
    per_row, per_query = c_int64 * num_rows, c_int64 * (num_rows * num_queries)
    accepted, next_tokens, samples, row_rules = per_row(), per_row(), per_query(), per_row(*rules)
    row_noises = noises_of_rows(noises)
    verification = library.Verification(
        num_rows,
        num_nodes,
        vocab_size,
        *logits.stride()[:2],
        probs_stride,
        num_threads(),
        logits.data_ptr(),
        draft_probs.data_ptr() if draft_probs is not None else None,
        tokens.data_ptr(),
        lengths.data_ptr(),
        *[
            ctypes.addressof(each)
            for each in (row_rules, settings, row_noises, accepted, next_tokens, samples)
        ],
    )
    kernels.secondguess_verify(verification)
    found = accepted[:]
    if min(found) < 0:
        return None
    sampled, starts = samples[:], range(0, num_rows * num_queries, num_queries)
    row_samples = [
        sampled[start : start + length + 1] if rule is KernelRule.MATCH else []
        for start, length, rule in zip(starts, lengths.tolist(), rules, strict=True)
    ]
    return KernelVerdict(found, next_tokens[:], row_samples)
