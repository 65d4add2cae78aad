"""Block verification of the chain of one row by the kernels, from logits to the next token."""

from __future__ import annotations

from functools import lru_cache

from torch import Tensor

from secondguess.runtime.base import RowNoise
from secondguess.runtime.native import library
from secondguess.runtime.native.sampling import KernelSettings, kernels_for


@lru_cache(maxsize=256)
def described_settings(settings: KernelSettings) -> library.Settings:
    """Return the structure of sampling settings; cached, as few occur."""
    temperature, top_k, top_p, log_min_p = settings
    return library.Settings(temperature, settings.truncates, top_k, top_p, log_min_p)


def described_noise(noise: RowNoise) -> library.RowNoise:
    """Return the structure of a row's noise."""
    return library.RowNoise(noise.key, noise.position, noise.races)


def verify_block(
    logits: Tensor, draft_probs: Tensor, tokens: Tensor, settings: KernelSettings, noise: RowNoise
) -> tuple[int, int] | None:
    """Verify the chain of the only row with the target's logits.

    Args:
        logits: `[1, query, vocab]`, after all settings but those of `settings`.
        draft_probs: `[1, node, vocab]`.
        tokens: `[1, node]`.
        settings: with a positive temperature.
        noise: of the row, which is not coupled.

    Returns:
        The number of nodes accepted and the next token; None where the kernels cannot be used, or a
        distribution is not defined.
    """
    kernels, (_, num_nodes, vocab_size) = kernels_for(logits, draft_probs), draft_probs.shape
    if kernels is None or not (draft_probs.is_contiguous() and tokens.is_contiguous()):
        return None
    if logits.shape != (1, num_nodes + 1, vocab_size) or tokens.shape != (1, num_nodes):
        return None
    verification = library.Verification(
        num_nodes,
        vocab_size,
        logits.stride(1),
        described_settings(settings),
        described_noise(noise),
        logits.data_ptr(),
        draft_probs.data_ptr(),
        tokens.data_ptr(),
    )
    accepted = kernels.secondguess_verify_block(verification)
    return None if accepted < 0 else (accepted, verification.next_token)
