"""Configurations that the runtimes with decoders of their own cover."""

from __future__ import annotations

import platform
import sys
from importlib.util import find_spec
from typing import Any

import torch

from secondguess.runtime.cpu import library
from secondguess.runtime.decoder.families import undescribed_reason

MAX_HEAD_SIZE = 512
"""Largest size of heads that the compiled kernels take."""


def unsupported_reason(runtime: str, config: Any, dtype: torch.dtype, device: torch.device) -> str | None:
    """Return why a runtime does not cover a model, None if it does.

    Args:
        runtime: "native", "fused" or "graphs"; others have no decoder of their own.
        config: the model's configuration.
        dtype: dtype of the weights, before they are quantised.
        device: device of the weights.
    """
    if runtime == "graphs":
        return _graphs_reason(dtype, device) or undescribed_reason(config, with_experts=False)
    if device.type != "cpu":
        return f"our own decoders run on a CPU, not on {device}"
    if reason := undescribed_reason(config):
        return reason
    return _kernels_reason(config, dtype) if runtime == "native" else None


def _graphs_reason(dtype: torch.dtype, device: torch.device) -> str | None:
    if device.type != "cuda":
        return f"CUDA graphs need a CUDA device, got {device}"
    if dtype == torch.float64:
        return "the kernels of graphs compute in float32, not in float64"
    if find_spec("triton") is None:
        return "the kernels of graphs need Triton, which is not installed"
    return None


def _kernels_reason(config: Any, dtype: torch.dtype) -> str | None:
    if dtype != torch.bfloat16:
        return f"the kernels compute in bfloat16, not {str(dtype).removeprefix('torch.')}"
    if not library.units():
        return missing_kernels_reason()
    text = config.get_text_config()
    head_size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    if head_size % 2 or head_size > MAX_HEAD_SIZE:
        return f"heads of {head_size} numbers; the kernels take even sizes up to {MAX_HEAD_SIZE}"
    return None


def missing_kernels_reason() -> str:
    """Return why there are no compiled kernels, and how to get them where they exist."""
    if sys.platform != "linux":
        return f"the kernels need Linux, got {platform.system()}"
    if not any(library.processor_supports(kind) for kind in library.INSTRUCTIONS):
        return "this processor has neither AVX2 nor ARM dot products"
    return (
        f"this installation of secondguess has no kernels for {platform.machine()}; install its wheel for this processor "
        "(glibc 2.31 or newer), or install it from source with a C++ compiler"
    )
