"""Memory of models and their KV caches, estimated and checked before large allocations."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from secondguess.errors import CheckpointError, OutOfMemoryError

GIB = 2**30
HEADER_LIMIT = 100_000_000
INT8_BYTES = 1.02
"""Bytes per weight with int8: one, plus the scales of the output channels."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Memory of a model in bytes.

    Args:
        name: name of the model, for messages.
        weights: bytes of the weights.
        cache: bytes of a KV cache of `num_cached_tokens` tokens over all rows.
        num_cached_tokens: size of the cache in tokens.
        loading: bytes of the checkpoint as read, before its weights are quantised or packed.
    """

    name: str
    weights: int
    cache: int
    num_cached_tokens: int
    loading: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.cache

    @property
    def excess(self) -> int:
        """Bytes that loading temporarily takes beyond the total."""
        return max(0, self.loading - self.total)


def count_parameters(directory: Path) -> int | None:
    """Return the number of parameters in a directory's safetensors files, None for other formats.

    Raises:
        CheckpointError: if a file is not safetensors or is truncated.
    """
    files = sorted(directory.glob("*.safetensors"))
    return sum(_count_in_file(file) for file in files) if files else None


def _count_in_file(file: Path) -> int:
    size = file.stat().st_size
    broken = f"expected whole safetensors weights in {file}, got %s; copy or download the checkpoint again"
    with file.open("rb") as stream:
        header_size = int.from_bytes(stream.read(8), "little")
        if not 0 < header_size <= min(size - 8, HEADER_LIMIT):
            raise CheckpointError(broken % f"{size} bytes without a readable header")
        try:
            header: dict[str, Any] = json.loads(stream.read(header_size))
            tensors = [entry for name, entry in header.items() if name != "__metadata__"]
            end = max((entry["data_offsets"][1] for entry in tensors), default=0)
            count = sum(int(math.prod(entry["shape"])) for entry in tensors)
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise CheckpointError(broken % "a header that cannot be read") from error
    if size < 8 + header_size + end:
        raise CheckpointError(broken % f"{size} of {8 + header_size + end} bytes")
    return count


def estimate_memory(
    name: str,
    config: Any,
    num_parameters: int,
    dtype: torch.dtype,
    *,
    quantized: bool = False,
    packed: bool = False,
    num_cached_tokens: int = 4096,
) -> MemoryEstimate:
    """Return the memory of a model's weights and of the keys and values of all layers.

    Packing gives a head that is tied to the embeddings a copy of its own.
    """
    text = config.get_text_config()
    num_heads = text.num_attention_heads
    num_kv_heads = getattr(text, "num_key_value_heads", None) or num_heads
    head_size = getattr(text, "head_dim", None) or text.hidden_size // num_heads
    cached_numbers = 2 * text.num_hidden_layers * num_kv_heads * head_size * num_cached_tokens
    num_embedded = text.vocab_size * text.hidden_size
    loading = num_parameters * dtype.itemsize
    if packed and text.tie_word_embeddings:
        num_parameters += num_embedded
    if quantized:  # except the embeddings, with a head that shares them
        weights = int((num_parameters - num_embedded) * INT8_BYTES) + num_embedded * dtype.itemsize
    else:
        weights = num_parameters * dtype.itemsize
    return MemoryEstimate(name, weights, cached_numbers * dtype.itemsize, num_cached_tokens, loading)


def available_memory(device: torch.device) -> int | None:
    """Return the bytes that can still be allocated on a device, or None if unknown."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    if "SC_PHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def peak_memory(needs: Iterable[MemoryEstimate]) -> int:
    """Return the peak memory in bytes of models that are loaded one after the other."""
    needs = list(needs)
    return sum(need.total for need in needs) + max((need.excess for need in needs), default=0)


def check_memory(needs: Iterable[MemoryEstimate], device: torch.device) -> None:
    """Check that models fit into memory together.

    Raises:
        OutOfMemoryError: if they do not, with the memory of each model and the memory available.
    """
    needs = list(needs)
    available = available_memory(device)
    total = peak_memory(needs)
    if available is None or total <= available:
        return
    parts = ", ".join(
        f"{need.name}: {_gib(need.weights)} of weights, {_gib(need.cache)} of cache for {need.num_cached_tokens} tokens"
        for need in needs
    )
    raise OutOfMemoryError(
        f"expected models that fit into the {_gib(available)} available on {device}, "
        f"got a need of {_gib(total)} ({parts}); use a smaller model or dtype, or quantize='int8'"
    )


def check_cache_memory(num_tokens: int, bytes_per_token: int, device: torch.device) -> None:
    """Check that the KV caches of prompts fit into memory; outputs are allocated as they grow.

    Args:
        num_tokens: tokens that the cache would have to allocate (`KeyValueCache.num_tokens_to_allocate`).
        bytes_per_token: bytes of a token in the caches of all models.
        device: device of the caches.

    Raises:
        OutOfMemoryError: if they do not fit, with the memory needed and the memory available.
    """
    available = available_memory(device)
    needed = num_tokens * bytes_per_token
    if available is not None and needed > available:
        raise OutOfMemoryError(
            f"expected prompts whose caches fit into the {_gib(available)} available on {device}, got a need of "
            f"{_gib(needed)} for {num_tokens} cached tokens; decode fewer prompts at once, or shorter ones"
        )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.3g} GiB"
