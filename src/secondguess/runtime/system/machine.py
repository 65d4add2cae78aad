"""Properties of the machine, and of the thread that calls: memory, threads, dtypes and defaults of torch."""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache

import torch

from secondguess.errors import OutOfMemoryError
from secondguess.runtime.system.cgroup import cpu_quota

MAX_THREADS = 1023
"""Largest number of threads of the kernels (see `cpu/team.h`)."""


def allocate_pages(num_bytes: int) -> mmap.mmap:
    """Return zeros in pages that the system clears when they are first used.

    They are private: large pages for shared memory follow another setting, which is usually off.
    """
    try:
        return mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise OutOfMemoryError(
            f"expected {num_bytes / 2**20:,.0f} MiB of memory, got none: {error}; use a smaller model, dtype or batch"
        ) from None


def has_bfloat16(device: torch.device) -> bool:
    """Return whether torch's bfloat16 products are fast on a device.

    Elsewhere they are ten times slower than float32 products.
    """
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    found = torch.cpu.get_capabilities()
    on_arm = found.get("bf16") and torch._C._has_mkldnn and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return bool(found.get("avx512_bf16") or found.get("amx_tile") or on_arm)


_threads_of_parent: int | None = None


def without_gradients() -> AbstractContextManager[object]:
    """Return a context in inference mode, for calls that rounds make in this mode already.

    Entering it again would take as long as a few tensor operations.
    """
    return nullcontext() if torch.is_inference_mode_enabled() else torch.inference_mode()


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Return the dtype to which `torch.autocast` casts the caller's operations on a device; None where it is off."""
    is_on = torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)
    return torch.get_autocast_dtype(device.type) if is_on else None


def without_defaults_of_caller(device: torch.device) -> AbstractContextManager[object]:
    """Return a context without the caller's `torch.autocast` and default device.

    Autocast would cast cached keys and compiled kernels' inputs. Tensors that are made without a device are read by the
    kernels or by NumPy, from the memory of the CPU.
    """
    # A default device is a mode of torch functions; asking for it takes longer.
    is_elsewhere = torch._C._len_torch_function_stack() and torch.get_default_device().type != "cpu"
    return _own_defaults(device) if is_elsewhere or autocast_dtype(device) is not None else nullcontext()


@contextmanager
def _own_defaults(device: torch.device) -> Iterator[None]:
    with torch.autocast(device.type, enabled=False), torch.device("cpu"):
        yield


def num_threads() -> int:
    """Return the number of threads of the kernels: torch's, at most the processors of the cgroup.

    More threads than the quota allows would be stopped together for the rest of each period.
    """
    return min(_requested_threads(), _num_processors_of_cgroup())


def _requested_threads() -> int:
    """Return torch's number of threads, or the parent's in a forked process where torch has the one that it starts with."""
    found = torch.get_num_threads()
    return _threads_of_parent if _threads_of_parent and found == 1 else found


@lru_cache(maxsize=1)
def _num_processors_of_cgroup() -> int:
    quota = cpu_quota()
    return MAX_THREADS if quota is None else max(1, math.ceil(quota))


def keep_num_threads() -> None:
    """Keep the present `num_threads` while torch has one thread."""
    global _threads_of_parent
    _threads_of_parent = _requested_threads()
