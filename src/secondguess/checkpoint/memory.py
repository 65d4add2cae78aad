"""Memory of models and their KV caches, checked before large allocations."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from secondguess.errors import OutOfMemoryError
from secondguess.runtime.system import cgroup

GIB = 2**30


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
    cache: int = 0
    num_cached_tokens: int = 0
    loading: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.cache

    @property
    def excess(self) -> int:
        """Bytes that loading temporarily takes beyond the total."""
        return max(0, self.loading - self.total)


def available_memory(device: torch.device, root: Path = cgroup.ROOT) -> int | None:
    """Return the bytes that can still be allocated on a device, or None if unknown.

    On a CPU the limits of the process (`ulimit -v`) and of its control group count too.

    Args:
        device: the device.
        root: directory that holds `proc` and `sys`.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    limits = (_memory_of_machine(root), _address_space_left(root), cgroup.memory_left(root))
    return min((limit for limit in limits if limit is not None), default=None)


def _memory_of_machine(root: Path) -> int | None:
    meminfo = root / "proc/meminfo"
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    if "SC_PHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def _address_space_left(root: Path) -> int | None:
    """Return the bytes of address space that the process may still take; None without a limit."""
    statm = root / "proc/self/statm"
    if not statm.exists():
        return None
    import resource  # not on every system

    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return None
    return max(0, limit - int(statm.read_text().split()[0]) * resource.getpagesize())


def head_memory(name: str, num_bytes: int) -> MemoryEstimate:
    """Return the memory of a trained head of `num_bytes`, whose module is freed once it is packed."""
    return MemoryEstimate(name, num_bytes, loading=2 * num_bytes)


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
        f"got a need of {_gib(total)} ({parts}); use a smaller model or dtype, or quantize='int8' or 'int4'"
    )


def check_cache_memory(num_tokens: int, bytes_per_token: int, device: torch.device) -> None:
    """Check that the KV caches of prompts fit into memory; outputs are allocated as they grow.

    Args:
        num_tokens: tokens that the cache would have to allocate (`CachedRuntime.num_tokens_to_allocate`).
        bytes_per_token: bytes of a token in the caches of all models.
        device: device of the caches.

    Raises:
        OutOfMemoryError: if they do not fit, with the memory needed and the memory available.
    """
    available = available_memory(device)
    needed = num_tokens * bytes_per_token
    if available is not None and needed > available:
        raise OutOfMemoryError(
            f"expected a prompt whose cache fits into the {_gib(available)} available on {device}, got a need of "
            f"{_gib(needed)} for {num_tokens} cached tokens; shorten the longest prompt, or use a smaller model or drafter"
        )


def return_freed_memory() -> None:
    """Return memory to the system that the allocator keeps after tensors were freed; glibc keeps those of up to 32 MiB."""
    if sys.platform == "linux":
        with suppress(AttributeError):  # of another C library
            ctypes.CDLL(None).malloc_trim(0)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.3g} GiB"
