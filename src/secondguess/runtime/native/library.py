"""The compiled kernels of `decoder.cpp`, and the structures that they read.

They are built when the package is installed, where there is a C++ compiler for x86; elsewhere, or on a processor that lacks
what they need, `library` says so and the fused runtime computes with torch instead.
"""

from __future__ import annotations

import ctypes
import sysconfig
from ctypes import POINTER, Structure, c_float, c_int32, c_int64, c_void_p
from functools import lru_cache
from pathlib import Path

import torch


class Weight(Structure):
    _fields_ = [
        ("data", c_void_p),
        ("scale", c_void_p),
        ("sum", c_void_p),
        ("bias", c_void_p),
        ("num_outputs", c_int64),
        ("num_inputs", c_int64),
    ]


class Norm(Structure):
    _fields_ = [("weight", c_void_p), ("eps", c_float), ("rounds_first", c_int32)]


class Layer(Structure):
    _fields_ = [
        ("attention_norm", Norm),
        ("query_norm", Norm),
        ("key_norm", Norm),
        ("attention_output_norm", Norm),
        ("mlp_norm", Norm),
        ("mlp_output_norm", Norm),
        ("joint", Weight),
        ("output", Weight),
        ("gate_up", Weight),
        ("down", Weight),
        ("window", c_int64),
        ("rotary", c_int64),
    ]


class Decoder(Structure):
    _fields_ = [
        ("layers", POINTER(Layer)),
        ("num_layers", c_int64),
        ("width", c_int64),
        ("inner_width", c_int64),
        ("num_queries", c_int64),
        ("num_keys", c_int64),
        ("head_size", c_int64),
        ("activation", c_int64),
        ("num_embedded", c_int64),
        ("amx", c_int64),
        ("scaling", c_float),
        ("embedding_scale", c_float),
        ("embedding", c_void_p),
        ("norm", Norm),
        ("head", Weight),
    ]


class Forward(Structure):
    _fields_ = [
        ("num_rows", c_int64),
        ("num_tokens", c_int64),
        ("num_logits", c_int64),
        ("capacity", c_int64),
        ("context_length", c_int64),
        ("num_threads", c_int64),
        ("tokens", c_void_p),
        ("starts", c_void_p),
        ("slots", c_void_p),
        ("closure", c_void_p),
        ("turns", c_void_p),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("hidden", c_void_p),
        ("logits", c_void_p),
    ]


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL | None:
    """The kernels, ready to be called; None where they were not built or this processor cannot run them."""
    built = Path(__file__).parent / f"_kernels{sysconfig.get_config_var('EXT_SUFFIX')}"
    if not built.exists() or not processor_can():
        return None
    try:
        # torch has been imported, so that both use one pool of threads.
        kernels = ctypes.CDLL(str(built))
    except OSError:
        return None  # built elsewhere, for libraries that are not here
    kernels.secondguess_workspace.restype = c_void_p
    kernels.secondguess_free.argtypes = [c_void_p]
    kernels.secondguess_run.argtypes = [POINTER(Decoder), POINTER(Forward), c_void_p]
    kernels.secondguess_read.argtypes = [c_void_p, c_void_p, c_int64, c_int64]
    sizes = (c_int64 * 5)()
    kernels.secondguess_sizes(sizes)
    expected = [ctypes.sizeof(kind) for kind in (Weight, Norm, Layer, Decoder, Forward)]
    return kernels if list(sizes) == expected else None  # built from another version of the sources


def processor_can() -> bool:
    """Whether this processor has what the kernels are compiled for."""
    found = torch.cpu.get_capabilities()
    return all(found.get(f"avx512_{part}") for part in ("f", "bw", "vl", "dq", "vnni", "bf16"))


@lru_cache(maxsize=1)
def has_amx() -> bool:
    """Whether the processor has matrix tiles and the system lets this process use them."""
    found = torch.cpu.get_capabilities()
    tiles = all(found.get(f"amx_{part}") for part in ("tile", "bf16", "int8"))
    return tiles and bool(torch.cpu._init_amx())
