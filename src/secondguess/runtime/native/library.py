"""Compiled kernels (the headers of this folder), and the structures that are passed to them.

The kernels are built for each kind of processor when the package is installed, if there is a C++
compiler for x86 or 64-bit ARM. `units` returns those that this processor can run. If there are none, the fused
runtime computes with torch instead.
"""

from __future__ import annotations

import ctypes
import sysconfig
from ctypes import (
    CFUNCTYPE,
    POINTER,
    Structure,
    c_char_p,
    c_double,
    c_float,
    c_int32,
    c_int64,
    c_uint64,
    c_void_p,
)
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch

from secondguess.errors import SecondGuessError
from secondguess.runtime.native.sources import hash_sources

ENCODINGS = ("bfloat16", "int8", "int4", "int8-groups", "mxfp4")
"""Names of the encodings of weights, in the order of `Encoding` in `product.h`."""


class Weight(Structure):
    _fields_ = [
        ("data", c_void_p),
        ("scale", c_void_p),
        ("sum", c_void_p),
        ("bias", c_void_p),
        ("num_outputs", c_int64),
        ("num_inputs", c_int64),
        ("encoding", c_int64),
    ]


class Source(Structure):
    _fields_ = [
        ("first", c_void_p),
        ("second", c_void_p),
        ("num_rows", c_int64),
        ("width", c_int64),
        ("is_float32", c_int64),
    ]


class Norm(Structure):
    _fields_ = [("weight", c_void_p), ("bias", c_void_p), ("eps", c_float), ("rounds_first", c_int32)]


class Expert(Structure):
    _fields_ = [("gate_up", Weight), ("down", Weight)]


class Layer(Structure):
    _fields_ = [
        ("attention_norm", Norm),
        ("query_norm", Norm),
        ("key_norm", Norm),
        ("attention_output_norm", Norm),
        ("mlp_norm", Norm),
        ("mlp_output_norm", Norm),
        ("qkv", Weight),
        ("output", Weight),
        ("gate_up", Weight),
        ("down", Weight),
        ("window", c_int64),
        ("rotary", c_int64),
        ("router", Weight),
        ("experts", POINTER(Expert)),
        ("sinks", c_void_p),
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
        ("joins_features", c_int64),
        ("residual_is_normalised", c_int64),
        ("output_is_raw", c_int64),
        ("token_norm", Norm),
        ("feature_norm", Norm),
        ("projection", Weight),
        ("attends_both_ways", c_int64),
        ("rotary_size", c_int64),
        ("rotates_pairs", c_int64),
        ("rotary_is_float32", c_int64),
        ("joins_heads_in_norms", c_int64),
        ("is_parallel", c_int64),
        ("has_no_gates", c_int64),
        ("residual_scale", c_float),
        ("score_cap", c_float),
        ("logit_cap", c_float),
        ("logit_divisor", c_float),
        ("num_experts", c_int64),
        ("num_selected", c_int64),
        ("expert_width", c_int64),
        ("normalises_routing_weights", c_int64),
        ("rounds_routing_weights", c_int64),
        ("gate_alpha", c_float),
        ("gate_limit", c_float),
    ]


class Forward(Structure):
    _fields_ = [
        ("num_rows", c_int64),
        ("num_tokens", c_int64),
        ("num_known", c_int64),
        ("num_indices", c_int64),
        ("num_logits", c_int64),
        ("first_layer", c_int64),
        ("last_layer", c_int64),
        ("capacity", c_int64),
        ("context_length", c_int64),
        ("num_threads", c_int64),
        ("caches_only", c_int64),
        ("hidden_is_float32", c_int64),
        ("tokens", c_void_p),
        ("states", c_void_p),
        ("features", c_void_p),
        ("firsts", c_void_p),
        ("starts", c_void_p),
        ("slots", c_void_p),
        ("selected", c_void_p),
        ("places", c_void_p),
        ("closure", c_void_p),
        ("cos_sin", c_void_p),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("hidden", c_void_p),
        ("logits", c_void_p),
        ("experts", c_void_p),
    ]


KEEP_DRAFTING = CFUNCTYPE(None, c_int64, c_double)
"""Type of the function that is called after each node of a chain."""


class Settings(Structure):
    _fields_ = [
        ("temperature", c_double),
        ("is_truncated", c_int64),
        ("top_k", c_int64),
        ("top_p", c_double),
        ("log_min_p", c_double),
    ]


class RowNoise(Structure):
    _fields_ = [("key", c_uint64), ("position", c_int64), ("races", c_int64)]


class StoppingRule(Structure):
    _fields_ = [
        ("num_edges", c_int64),
        ("edges", c_void_p),
        ("own", c_void_p),
        ("following", c_void_p),
        ("least", c_void_p),
        ("groups", c_void_p),
    ]


class Chain(Structure):
    _fields_ = [
        ("num_nodes", c_int64),
        ("vocab_size", c_int64),
        ("settings", Settings),
        ("noise", RowNoise),
        ("target_ids", c_void_p),
        ("target_lengths", c_void_p),
        ("rule", POINTER(StoppingRule)),
        ("keeps_drafting", KEEP_DRAFTING),
        ("answer", c_int64),
        ("tokens", c_void_p),
        ("probs", c_void_p),
    ]


class Verification(Structure):
    _fields_ = [
        ("num_nodes", c_int64),
        ("vocab_size", c_int64),
        ("stride", c_int64),
        ("settings", Settings),
        ("noise", RowNoise),
        ("logits", c_void_p),
        ("draft_probs", c_void_p),
        ("tokens", c_void_p),
        ("next_token", c_int64),
    ]


class DeltaRule(Structure):
    _fields_ = [
        ("num_tokens", c_int64),
        ("num_heads", c_int64),
        ("num_key_heads", c_int64),
        ("key_size", c_int64),
        ("value_size", c_int64),
        ("num_decays", c_int64),
        ("normalises", c_int64),
        ("queries", c_void_p),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("decays", c_void_p),
        ("rates", c_void_p),
        ("before", c_void_p),
        ("after", c_void_p),
        ("outputs", c_void_p),
    ]


class StateSpace(Structure):
    _fields_ = [
        ("num_tokens", c_int64),
        ("num_heads", c_int64),
        ("num_groups", c_int64),
        ("head_size", c_int64),
        ("state_size", c_int64),
        ("inputs", c_void_p),
        ("steps", c_void_p),
        ("writes", c_void_p),
        ("reads", c_void_p),
        ("rates", c_void_p),
        ("skips", c_void_p),
        ("before", c_void_p),
        ("after", c_void_p),
        ("outputs", c_void_p),
    ]


INSTRUCTIONS = {
    "amx": ("amx_tile", "amx_bf16", "amx_int8"),
    "avx512": tuple(f"avx512_{part}" for part in ("f", "bw", "vl", "dq", "vnni", "bf16")),
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


@lru_cache(maxsize=1)
def units() -> tuple[Unit, ...]:
    """Return the units that the kernels can use on this machine, fastest first.

    Empty if the kernels were not built, or the processor supports none of them.

    Raises:
        SecondGuessError: if the kernels were built from other sources than those beside them.
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
    """Return the kernels of a kind, or None if they were not built.

    Raises:
        SecondGuessError: if they were built from other sources.
    """
    folder = Path(__file__).parent
    built = folder / f"_{kind}{sysconfig.get_config_var('EXT_SUFFIX')}"
    if not built.exists():
        return None
    try:
        kernels = ctypes.CDLL(str(built))
    except OSError:
        return None  # built on another machine, for libraries that are missing here
    if not _is_current(kernels, hash_sources(folder)):
        raise SecondGuessError(
            f"expected kernels built from the sources beside them, got others in {built}; rebuild them with "
            "`python setup.py build_ext --inplace --force`, or delete the file to compute with torch"
        )
    kernels.secondguess_workspace.restype = c_void_p
    kernels.secondguess_free.argtypes = [c_void_p]
    kernels.secondguess_run.argtypes = [POINTER(Decoder), POINTER(Forward), c_void_p]
    kernels.secondguess_draft_chain.argtypes = [POINTER(Decoder), POINTER(Forward), c_void_p, POINTER(Chain)]
    kernels.secondguess_draft_chain.restype = c_int64
    kernels.secondguess_unembed.argtypes = [
        *(POINTER(Decoder), c_void_p, c_int64, c_int64, c_void_p, c_int64, c_void_p),
    ]
    rows = c_void_p, c_int64, c_int64, c_int64
    kernels.secondguess_most_likely.argtypes = [*rows, c_void_p, c_void_p]
    kernels.secondguess_most_likely.restype = None
    kernels.secondguess_softmax.argtypes = [*rows, c_float, c_float, c_void_p]
    kernels.secondguess_softmax.restype = None
    kernels.secondguess_truncated_softmax.argtypes = [*rows, c_double, c_int64, c_double, c_double, c_void_p]
    kernels.secondguess_draw.argtypes = [c_void_p, c_int64, c_double]
    kernels.secondguess_draw.restype = c_int64
    kernels.secondguess_race.argtypes = [c_void_p, c_int64, c_uint64, c_void_p]
    kernels.secondguess_race.restype = c_int64
    kernels.secondguess_chain_weights.argtypes = [
        c_void_p,
        c_void_p,
        c_void_p,
        c_int64,
        c_int64,
        c_void_p,
        c_void_p,
    ]
    kernels.secondguess_chain_weights.restype = None
    kernels.secondguess_verify_block.argtypes = [POINTER(Verification)]
    kernels.secondguess_verify_block.restype = c_int64
    kernels.secondguess_residual.argtypes = [c_float, c_void_p, c_void_p, c_int64, c_void_p]
    kernels.secondguess_residual.restype = c_double
    kernels.secondguess_linear.argtypes = [
        *(POINTER(Weight), c_void_p, c_int64, c_int64, c_void_p, c_int64, c_int64, c_int64),
    ]
    kernels.secondguess_pack.argtypes = [POINTER(Weight), POINTER(Source), c_int64]
    kernels.secondguess_pack.restype = None
    kernels.secondguess_repack.argtypes = [POINTER(Weight), POINTER(Weight), c_int64]
    kernels.secondguess_repack.restype = None
    kernels.secondguess_delta_rule.argtypes = [POINTER(DeltaRule), c_int64]
    kernels.secondguess_state_space.argtypes = [POINTER(StateSpace), c_int64]
    kernels.secondguess_read.argtypes = [c_void_p, c_void_p, c_int64, c_int64]
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
        others = (kernels.secondguess_size_of_chain(), kernels.secondguess_size_of_verification())
    except AttributeError:
        return False
    expected_sizes = [ctypes.sizeof(kind) for kind in (*kinds, Chain, Verification)]
    return expected in (None, found.decode()) and [*sizes, *others] == expected_sizes
