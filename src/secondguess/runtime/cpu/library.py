"""Compiled kernels (the headers of this folder), and the structures that are passed to them.

The kernels are built for each kind of processor when the package is installed, if there is a C++
compiler for x86 or 64-bit ARM. `units` returns those that this processor can run. If there are none, the fused
runtime computes with torch instead.
"""

from __future__ import annotations

import ctypes
from ctypes import (
    CFUNCTYPE,
    POINTER,
    Structure,
    c_char_p,
    c_double,
    c_float,
    c_int,
    c_int64,
    c_uint64,
    c_void_p,
)
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch

from secondguess.errors import SecondGuessError
from secondguess.runtime.cpu.sources import hash_sources

ENCODINGS = ("bfloat16", "int8", "int4", "int8-groups", "mxfp4", "int4-groups")
"""Names of the encodings of weights, in the order of `Encoding` in `product.h`."""


def float32_buffer(*shape: int) -> torch.Tensor:
    """Return an uninitialised tensor for the kernels, which write float32, whatever torch's default dtype is.

    The default is global: Transformers changes it while it loads a model, perhaps in another thread.
    """
    return torch.empty(shape, dtype=torch.float32, device="cpu")


def _fields(kind: type, names: str) -> list[tuple[str, type]]:
    """Return fields of one type."""
    return [(name, kind) for name in names.split()]


class Weight(Structure):
    _fields_ = [
        *_fields(c_void_p, "data bias"),
        *_fields(c_int64, "num_outputs num_inputs encoding"),
    ]


class Source(Structure):
    _fields_ = [*_fields(c_void_p, "rows types"), *_fields(c_int64, "width")]


class Norm(Structure):
    _fields_ = [*_fields(c_void_p, "weight bias"), ("eps", c_float)]


class Expert(Structure):
    _fields_ = [*_fields(Weight, "gate_up down")]


class Layer(Structure):
    _fields_ = [
        *_fields(Norm, "attention_norm query_norm key_norm attention_output_norm mlp_norm mlp_output_norm"),
        *_fields(Weight, "qkv output gate_up down"),
        *_fields(c_int64, "window rotary"),
        ("router", Weight),
        ("experts", POINTER(Expert)),
        ("sinks", c_void_p),
    ]


class Decoder(Structure):
    _fields_ = [
        ("layers", POINTER(Layer)),
        *_fields(c_int64, "num_layers width inner_width num_queries num_keys head_size activation"),
        *_fields(c_int64, "num_embedded amx"),
        *_fields(c_float, "scaling embedding_scale"),
        ("embedding", c_void_p),
        ("norm", Norm),
        ("head", Weight),
        *_fields(c_int64, "joins_features residual_is_normalised output_is_raw"),
        *_fields(Norm, "token_norm feature_norm"),
        ("projection", Weight),
        *_fields(c_int64, "is_bidirectional rotary_size is_interleaved"),
        *_fields(c_int64, "joins_heads_in_norms is_parallel has_no_gates"),
        *_fields(c_float, "residual_scale score_cap logit_cap logit_divisor"),
        *_fields(c_int64, "num_experts num_selected expert_width normalises_routing_weights"),
        *_fields(c_float, "gate_alpha gate_limit"),
    ]


class Forward(Structure):
    _fields_ = [
        *_fields(c_int64, "num_rows num_tokens num_known num_indices num_logits first_layer last_layer"),
        *_fields(c_int64, "capacity context_length num_threads caches_only"),
        *_fields(c_void_p, "tokens states features firsts starts slots selected places closure cos_sin keys"),
        *_fields(c_void_p, "values hidden logits experts"),
    ]


KEEP_DRAFTING = CFUNCTYPE(None, c_int64)
"""Type of the function that is called after the nodes of each depth of chains."""


class Settings(Structure):
    _fields_ = [
        ("temperature", c_double),
        *_fields(c_int64, "is_truncated top_k"),
        *_fields(c_double, "top_p log_min_p"),
    ]


class Chains(Structure):
    _fields_ = [
        *_fields(c_int64, "num_nodes vocab_size"),
        *_fields(c_void_p, "limits settings noises target_ids target_lengths"),
        ("keeps_drafting", KEEP_DRAFTING),
        *_fields(c_void_p, "confidences answers lengths tokens probs"),
    ]


class DeltaRule(Structure):
    _fields_ = [
        *_fields(c_int64, "num_tokens num_heads num_key_heads key_size value_size num_decays normalises"),
        *_fields(c_void_p, "queries keys values decays rates before after outputs"),
    ]


class StateSpace(Structure):
    _fields_ = [
        *_fields(c_int64, "num_tokens num_heads num_groups head_size state_size"),
        *_fields(c_void_p, "inputs steps writes reads rates skips before after outputs"),
    ]


ROWS = (c_void_p, c_int64, c_int64, c_int64)
SIGNATURES: dict[str, tuple[type | None, list[type]]] = {
    "workspace": (c_void_p, []),
    "free": (None, [c_void_p]),
    "run": (c_int, [POINTER(Decoder), POINTER(Forward), c_void_p]),
    "draft_chains": (c_int64, [POINTER(Decoder), POINTER(Forward), c_void_p, POINTER(Chains)]),
    "unembed": (c_int, [POINTER(Decoder), c_void_p, c_int64, c_int64, c_void_p, c_int64, c_void_p]),
    "most_likely": (None, [*ROWS, c_void_p, c_void_p]),
    "softmax": (None, [*ROWS, c_float, c_float, c_void_p]),
    "truncated_softmax": (c_int, [*ROWS, c_double, c_int64, c_double, c_double, c_void_p]),
    "draw": (c_int64, [c_void_p, c_int64, c_double]),
    "race": (c_int64, [c_void_p, c_int64, c_uint64, c_void_p]),
    "residual": (c_double, [c_float, c_void_p, c_void_p, c_int64, c_void_p]),
    "linear": (c_int, [POINTER(Weight), c_void_p, c_int64, c_int64, c_void_p, c_int64, c_int64, c_int64]),
    "pack": (None, [POINTER(Weight), POINTER(Source), c_int64]),
    "repack": (None, [POINTER(Weight), POINTER(Weight), c_int64]),
    "unpack": (None, [POINTER(Weight), c_void_p, c_int64, c_int64]),
    "decode": (None, [POINTER(Source), c_int64, c_void_p, c_int64, c_int64]),
    "delta_rule": (c_int, [POINTER(DeltaRule), c_int64]),
    "state_space": (c_int, [POINTER(StateSpace), c_int64]),
}
"""Result and arguments of the functions `secondguess_NAME`."""

INSTRUCTIONS = {
    "amx": ("amx_tile", "amx_bf16", "amx_int8"),
    "avx512": tuple(f"avx512_{part}" for part in ("f", "bw", "vl", "dq", "vnni", "vbmi", "bf16")),
    "avx2": ("avx2", "fma3", "f16c"),
    "neon": ("neon", "dot"),
}
"""Required processor features by kind of kernels, in torch's names, fastest first.

Matrix tiles (`amx`) require the features of `avx512` too.
"""


@dataclass(frozen=True)
class Unit:
    """Processor unit that computes products, with the kernels compiled for it.

    Args:
        name: a kind of `INSTRUCTIONS`.
        kernels: the functions of the headers.
    """

    name: str
    kernels: ctypes.CDLL

    @property
    def has_tiles(self) -> bool:
        return self.name == "amx"

    @property
    def rounds_inputs(self) -> bool:
        """True if inputs of products with weights in bfloat16 are rounded to it; else they are in float32."""
        return self.name in ("amx", "avx512")


@lru_cache(maxsize=1)
def units() -> tuple[Unit, ...]:
    """Return the units that the kernels can use on this machine, fastest first.

    Empty if the kernels were not built, or the processor supports none. Those built from other sources are refused.
    """
    opened = {kind: _open(kind) for kind in ("avx512", "avx2", "neon") if processor_supports(kind)}
    found = [Unit(kind, kernels) for kind, kernels in opened.items() if kernels]
    if _has_tiles() and (kernels := opened.get("avx512")):
        found.insert(0, Unit("amx", kernels))
    return tuple(found)


def processor_supports(kind: str) -> bool:
    """Return whether this processor has the features that a kind of kernels requires."""
    found = torch.cpu.get_capabilities()
    return all(found.get(each) for each in INSTRUCTIONS[kind])


def _has_tiles() -> bool:
    """Return whether there are matrix tiles and the system lets this process use them."""
    return processor_supports("amx") and bool(torch.cpu._init_amx())


def _open(kind: str) -> ctypes.CDLL | None:
    """Return the kernels of a kind, or None if they were not built; refuse those built from other sources."""
    folder = Path(__file__).parent
    built = folder / f"_{kind}.so"
    if not built.exists():
        return None
    try:
        kernels = ctypes.CDLL(str(built))
    except OSError:
        return None  # built on another machine, for libraries that are missing here
    if not _is_current(kernels, hash_sources(folder)):
        raise SecondGuessError(
            f"expected kernels built from the sources next to them, got others in {built}; rebuild them with "
            "`python setup.py build_ext --inplace --force`, or delete the file to compute with torch"
        )
    for name, (result, arguments) in SIGNATURES.items():
        function = getattr(kernels, f"secondguess_{name}")
        function.restype, function.argtypes = result, arguments
    return kernels


def _is_current(kernels: ctypes.CDLL, expected: str | None) -> bool:
    """Return whether kernels were built from sources with this hash; None if the sources are absent.

    The structures of this file must have the same sizes as theirs.
    """
    kinds = (Weight, Norm, Layer, Decoder, Forward, DeltaRule, StateSpace, Expert, Source)
    sizes = (c_int64 * len(kinds))()
    try:
        kernels.secondguess_sources.restype = c_char_p
        found: bytes = kernels.secondguess_sources()
        kernels.secondguess_sizes(sizes)
        size_of_chains: int = kernels.secondguess_size_of_chains()
    except AttributeError:
        return False
    expected_sizes = [ctypes.sizeof(kind) for kind in (*kinds, Chains)]
    return expected in (None, found.decode()) and [*sizes, size_of_chains] == expected_sizes
