"""Weights of GGUF files of the architectures that the kernels run, read one by one from the memory-mapped file.

llama.cpp's names and changes of weights are undone: it reorders the rows of Llama's queries and keys for its own rotary
layout, and adds 1 to the norms of Gemma.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from secondguess.checkpoint.gguf.config import NUM_MODULES, ROPE_TENSORS, count_layers
from secondguess.checkpoint.gguf.file import GgufFile, GgufTensor
from secondguess.errors import CheckpointError, UnsupportedModelError
from secondguess.runtime.cpu import library
from secondguess.runtime.cpu.weights import decode_rows
from secondguess.runtime.decoder.families import FAMILIES, head_size_of
from secondguess.runtime.decoder.stored import WeightRows
from secondguess.runtime.weight_format import INT4_GROUPS, INT8, INT8_GROUPS, MXFP4, WeightFormat

FORMATS = {
    "Q4_0": INT4_GROUPS, "Q4_1": INT4_GROUPS, "Q4_K": INT4_GROUPS, "MXFP4": MXFP4, "Q5_1": INT8_GROUPS, "Q5_K": INT8_GROUPS,
}  # fmt: skip
"""Encodings in which the kernels keep types; others in `INT8`, to which all but Q5_0 and Q8_0 are rounded."""
READ_BY_KERNELS = frozenset([0, 1, 2, 3, 6, 7, 8, 10, 11, 12, 13, 14, 30, 39])
"""Types that the kernels read (`stored.h`)."""
FLOATS = {0: torch.float32, 1: torch.float16, 28: torch.float64, 30: torch.bfloat16}
INTEGERS = {24: torch.int8, 25: torch.int16, 26: torch.int32, 27: torch.int64}
ANGLES = ".attn_rot_embd.inv_freq"
"""Rotary frequencies in old files, which follow from the configuration."""
EMBEDDING, HEAD = "token_embd", "output"
ROTATED = ("attn_q", "attn_k")
"""Parts whose rows llama.cpp reorders in models like Llama."""
TENSOR = re.compile(r"blk\.(?P<layer>\d+)\.(?P<name>\w+)\.(?P<suffix>weight|bias)")
"""Names of the tensors of a layer."""
BLOCK = re.compile(r"blk\.(?P<layer>\d+)\.")
EXPERTS = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
"""Weights of all experts of a layer, `[expert, output, input]`, and their biases: gates, values and outputs."""
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
GEMMA_NAMES = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
NAMES: dict[str, dict[str, str]] = {
    "gemma2": GEMMA_NAMES,
    "gemma3_text": GEMMA_NAMES,
    "phi3": {"ffn_up": "mlp.gate_up_proj"},
    "gpt_oss": {"post_attention_norm": "post_attention_layernorm", "ffn_gate_inp": "mlp.router"},
}
"""Names of the parts of a layer by model type, in addition to `LAYER_NAMES` or instead of them."""
WITHOUT = {"gpt_oss": ("ffn_norm",)}
OUTER_NAMES = {EMBEDDING: "model.embed_tokens", "output_norm": "model.norm", HEAD: "lm_head"}


def count_stored(file: GgufFile) -> dict[WeightFormat, int]:
    """Return the number of weights of linear layers by the encoding in which the kernels keep them."""
    tensors = {name.removesuffix(".weight"): tensor for name, tensor in file.tensors.items()}
    if HEAD in tensors:  # else the embedding is also the head
        tensors.pop(EMBEDDING, None)
    counts: Counter[WeightFormat] = Counter()
    for tensor in tensors.values():
        if tensor.is_quantised:
            counts[FORMATS.get(tensor.type_name, INT8)] += tensor.num_elements
    return counts


class GgufWeights:
    """Weights in a GGUF file; `names` are those of a checkpoint of Transformers, those of experts one by one.

    A tensor that the model does not have raises an UnsupportedModelError.
    """

    def __init__(self, file: GgufFile, config: Any) -> None:
        self._file, self._config = file, config
        self._sources: dict[str, tuple[GgufTensor, int | None]] = {}
        """Tensor of each weight, and the expert in it."""
        for tensor in file.tensors.values():
            for name, expert in self._names_of(tensor):
                self._sources[name] = tensor, expert
        self.names = list(self._sources)

    def _names_of(self, tensor: GgufTensor) -> Iterator[tuple[str, int | None]]:
        """Yield the names of the weights in a tensor, with the numbers of experts."""
        kind, name = self._config.model_type, tensor.name
        if name in ROPE_TENSORS or name.endswith(ANGLES):
            return
        stem, _, suffix = name.rpartition(".")
        if stem in OUTER_NAMES:
            yield f"{OUTER_NAMES[stem]}.{suffix}", None
            return
        if self._is_of_module(name):
            return
        found = TENSOR.fullmatch(name)
        layer = "" if found is None else f"model.layers.{found['layer']}"
        part = "" if found is None else found["name"]
        experts = FAMILIES[kind].experts
        known = {
            key: value for key, value in LAYER_NAMES.items() if key not in WITHOUT.get(kind, ())
        } | NAMES.get(kind, {})
        if part in EXPERTS and experts is not None and len(tensor.shape) > 1:
            for expert in range(tensor.shape[0]):
                yield f"{layer}.{experts.names[EXPERTS.index(part)].format(expert)}.{suffix}", expert
        elif part == "attn_sinks" and FAMILIES[kind].has_sinks:
            yield f"{layer}.self_attn.sinks", None
        elif part in known and not (
            "_norm" in part and "self_attn" in known[part] and not FAMILIES[kind].has_qk_norm
        ):
            yield f"{layer}.{known[part]}.{suffix}", None
        else:
            raise UnsupportedModelError(
                f"expected a GGUF file with the weights of a {kind}, got {name}, which it does not have; use the "
                "safetensors checkpoint of the model"
            )

    def _is_of_module(self, name: str) -> bool:
        """Return whether a tensor is of a multi-token-prediction module, which the target does not run."""
        block = BLOCK.match(name)
        num_modules = self._file.values.get(NUM_MODULES, 0)
        return block is not None and num_modules > 0 and int(block["layer"]) >= count_layers(self._file)

    def has(self, name: str) -> bool:
        return name in self._sources

    def shape(self, name: str) -> Sequence[int]:
        """Return the shape of a weight."""
        tensor, expert = self._sources[name]
        return tensor.shape if expert is None else tensor.shape[1:]

    def quantises(self, name: str) -> bool:
        """Return whether a weight is quantised."""
        return self._sources[name][0].is_quantised

    def read(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """Return a weight."""
        tensor, expert = self._sources[name]
        with self._naming(name):
            order = self._order(name)
            found = decode_tensor(self._file, tensor, dtype, expert)
            found = found if order is None else found[order]
            if found.dim() == 1 and "gemma" in self._config.model_type:
                found = found.float() - 1
            return found.to(dtype or torch.float32, copy=tensor.kind in FLOATS)

    def rows(self, name: str) -> WeightRows:
        """Return the rows of the weight `[output, input]` of a linear layer for the kernels."""
        with self._naming(name):
            rows, order = _stored_rows(self._file, *self._sources[name]), self._order(name)
            return rows if order is None else rows[order]

    def _order(self, name: str) -> Tensor | None:
        """Return the rows of the file in the order of Transformers; None if it is that of the file."""
        part = self._sources[name][0].name.split(".")[-2]
        if self._config.model_type != "llama" or part not in ROTATED:
            return None
        return rotary_order(self.shape(name)[0], head_size_of(self._config))

    @contextmanager
    def _naming(self, name: str) -> Iterator[None]:
        """Name the file and the tensor in errors of weights that do not fit the configuration."""
        try:
            yield
        except ValueError as error:
            raise CheckpointError(
                f"expected a GGUF file whose weights have the shapes that its fields say, got {self._file.path} with "
                f"{self._sources[name][0].name} that does not fit: {error}; copy or download it again"
            ) from error


def rotary_order(count: int, size: int) -> Tensor:
    """Return the rows, in the order of Transformers, of llama.cpp's queries or keys of Llama with heads of a size.

    llama.cpp puts the two numbers that are rotated together next to each other.

    Raises:
        ValueError: the rows are no whole heads.
    """
    if count % size:
        raise ValueError(f"{count} outputs are no heads of {size} numbers")
    return torch.arange(count).view(-1, size // 2, 2).transpose(1, 2).flatten()


def decode_tensor(
    file: GgufFile, tensor: GgufTensor, dtype: torch.dtype | None = None, expert: int | None = None
) -> Tensor:
    """Return a tensor, or that of one expert; quantised ones in float32, or in bfloat16 if that is wanted, others as stored."""
    shape = tensor.shape if expert is None else tensor.shape[1:]
    if tensor.kind in FLOATS | INTEGERS:
        found = _bytes_of(file, tensor, expert).reshape(-1)
        return found.view((FLOATS | INTEGERS)[tensor.kind]).view(*shape)
    if library.units() and tensor.kind in READ_BY_KERNELS and len(shape) > 1:
        wanted = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
        return decode_rows(_stored_rows(file, tensor, expert), wanted)
    return _dequantised(file, tensor, expert)


def _stored_rows(file: GgufFile, tensor: GgufTensor, expert: int | None) -> WeightRows:
    """Return rows in the order of the file."""
    weight_format = FORMATS.get(tensor.type_name, INT8) if tensor.is_quantised else None
    if tensor.kind in READ_BY_KERNELS:
        held = _bytes_of(file, tensor, expert)
        return WeightRows.of_memory(held, tensor.bytes_per_row, tensor.shape[-1], tensor.kind, weight_format)
    rows = WeightRows.of_tensor(_dequantised(file, tensor, expert))
    return replace(rows, weight_format=weight_format)


def _bytes_of(file: GgufFile, tensor: GgufTensor, expert: int | None) -> Tensor:
    """Return the bytes `[output, byte]` of a tensor; a vector is one row."""
    held = file.bytes_of(tensor)
    return held if expert is None else held[expert]


def _dequantised(file: GgufFile, tensor: GgufTensor, expert: int | None) -> Tensor:
    """Return a tensor that is decoded by the library of llama.cpp, in float32."""
    try:
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize
    except ImportError as error:
        raise UnsupportedModelError(
            f"cannot read weights in {tensor.type_name}: the package gguf is not installed. Run "
            "`pip install secondguess[gguf]`."
        ) from error
    kind = GGMLQuantizationType(tensor.kind)
    found = torch.from_numpy(dequantize(_bytes_of(file, tensor, expert).numpy(), kind))
    return found.view(*(tensor.shape if expert is None else tensor.shape[1:]))
