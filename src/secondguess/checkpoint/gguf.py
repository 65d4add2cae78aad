"""Weights of GGUF files, read one by one from the memory-mapped file.

Transformers knows the names of each architecture's weights, and what llama.cpp changes in them.
Codes of linear layers in Q4_0, Q4_1, Q4_K and Q8_0, which have evenly spaced levels in groups of 32, and
in MXFP4 are kept for the kernels. Other quantised types have levels or groups of their own and are rounded to 8
bits in groups of 32.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from secondguess.checkpoint.experts import expert_weight_names
from secondguess.checkpoint.gguf_config import ARCHITECTURES, ROPE_TENSORS
from secondguess.checkpoint.quantised import mxfp4_weight
from secondguess.checkpoint.weights import forget_gguf_readers, gguf_reader
from secondguess.errors import CheckpointError, UnsupportedModelError
from secondguess.runtime.families import FAMILIES
from secondguess.runtime.stored import GROUP, GroupedWeight
from secondguess.runtime.weight_format import INT4_GROUPS, INT8_GROUPS, MXFP4, WeightFormat

PROCESSED = {"llama", "qwen3moe", "gemma2", "gemma3"}
"""Architectures of which llama.cpp changes weights, which a class of Transformers undoes."""
KEPT = {"Q4_0": INT4_GROUPS, "Q4_1": INT4_GROUPS, "Q4_K": INT4_GROUPS, "MXFP4": MXFP4}
"""Encodings in which the kernels keep the codes of types in 4 bits."""
BYTES_OF_SLICE = 1 << 20
"""Bytes of a weight that are decoded at a time: in between, a weight takes up to 24 bytes.

Memory of tensors up to 32 MiB is used again by the next ones, without page faults.
"""
ANGLES = ".attn_rot_embd.inv_freq"
"""Rotary frequencies in old files, which follow from the configuration."""
EMBEDDING, HEAD = "token_embd", "output"
EXPERTS = re.compile(r"blk\.(\d+)\.ffn_(gate|up|down)_exps\.(weight|bias)")
"""Names of the weights of all experts of a layer, `[expert, output, input]`, and of their biases."""


def count_stored(file: Path) -> dict[WeightFormat, int]:
    """Return the number of weights of linear layers by the encoding in which the kernels keep them."""
    tensors = {tensor.name.removesuffix(".weight"): tensor for tensor in gguf_reader(file).tensors}
    if HEAD in tensors:  # else the embedding is also the head
        tensors.pop(EMBEDDING, None)
    counts: Counter[WeightFormat] = Counter()
    for tensor in filter(_is_quantised, tensors.values()):
        counts[KEPT.get(tensor.tensor_type.name, INT8_GROUPS)] += int(tensor.n_elements)
    return counts


class GgufWeights:
    """Weights in a GGUF file.

    Args:
        file: the file.
        outline: Transformers' module without memory.

    Attributes:
        names: names of the weights in the module, those of experts one by one. A head that shares the
            embeddings is named if it is quantised.
    """

    def __init__(self, file: Path, outline: Any) -> None:
        from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor

        self._file = file
        reader = gguf_reader(file)
        architecture = reader.fields["general.architecture"].contents()
        if architecture not in ARCHITECTURES:
            raise UnsupportedModelError(
                f"expected a GGUF file of an architecture whose weights the kernels read ({', '.join(ARCHITECTURES)}), "
                f"got {architecture}; use the safetensors checkpoint of the model"
            )
        processor = TENSOR_PROCESSORS[architecture] if architecture in PROCESSED else TensorProcessor
        self._processor = processor(outline.config.to_dict())
        names = _weight_names(outline, architecture)
        self._sources: dict[str, tuple[Any, int | None]] = {}
        """Tensor of each weight, and the expert in it."""
        for tensor in reader.tensors:
            if found := EXPERTS.fullmatch(tensor.name):
                if FAMILIES[outline.config.model_type].experts is None:
                    raise UnsupportedModelError(
                        f"expected no experts in a GGUF file of architecture {architecture}, got {tensor.name}; "
                        "use the safetensors checkpoint of the model"
                    )
                part = ("gate", "up", "down").index(found[2])
                for expert in range(len(tensor.data)):
                    weight = expert_weight_names(outline, int(found[1]), expert)[part]
                    self._sources[weight.removesuffix("weight") + found[3]] = tensor, expert
            elif name := names.get(tensor.name) or names.get(tensor.name.removesuffix(".weight")):
                self._sources[name] = tensor, None
            elif tensor.name not in ROPE_TENSORS and not tensor.name.endswith(ANGLES):
                raise UnsupportedModelError(
                    f"expected a GGUF file with the weights of a {outline.config.model_type}, got {tensor.name}, which "
                    "Transformers does not read; use the safetensors checkpoint of the model"
                )
        if outline.config.tie_word_embeddings:
            embedding, _ = self._sources[f"{_name_of(outline, outline.get_input_embeddings())}.weight"]
            if _is_quantised(embedding):
                self._sources[f"{_name_of(outline, outline.get_output_embeddings())}.weight"] = (
                    embedding,
                    None,
                )
        self.names = list(self._sources)
        forget_gguf_readers()

    def quantises(self, name: str) -> bool:
        """Return whether a weight is quantised."""
        return _is_quantised(self._sources[name][0])

    def read(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """Return a weight."""
        with self._naming(name):
            return self._read(name, dtype or torch.float32)

    def _read(self, name: str, dtype: torch.dtype) -> Tensor:
        from gguf.quants import dequantize

        tensor, _ = self._sources[name]
        kind, rows = tensor.tensor_type, self._rows(name)
        if rows is None:
            return torch.from_numpy(np.array(self._in_order(name, dequantize(self._data(name), kind)))).to(
                dtype
            )
        weight = torch.empty(len(rows), int(tensor.shape[0]), dtype=dtype)
        for part in _slices(rows):
            weight[part] = _dequantise(rows[part], kind)
        return weight

    def read_codes(self, name: str) -> Tensor | GroupedWeight:
        """Return the weight `[output, input]` of a linear layer for the kernels."""
        with self._naming(name):
            return self._read_codes(name)

    @contextmanager
    def _naming(self, name: str) -> Iterator[None]:
        """Name the file and the tensor in errors of weights that do not fit the configuration."""
        try:
            yield
        except ValueError as error:
            raise CheckpointError(
                f"expected a GGUF file whose weights have the shapes that its fields say, got {self._file} with "
                f"{self._sources[name][0].name} that does not fit: {error}; copy or download it again"
            ) from error

    def _read_codes(self, name: str) -> Tensor | GroupedWeight:
        kind = self._sources[name][0].tensor_type
        if not self.quantises(name):
            return self._read(name, torch.float32)
        rows = self._rows(name)
        if rows is None:
            return GroupedWeight.rounded(self._read(name, torch.float32))
        slices = (np.array(rows[part]) for part in _slices(rows))
        if decode := DECODERS.get(kind.name):
            return GroupedWeight.joined([decode(torch.from_numpy(each)) for each in slices])
        return GroupedWeight.joined([GroupedWeight.rounded(_dequantise(each, kind)) for each in slices])

    def _rows(self, name: str) -> Any:
        """Return the rows of a matrix as they are stored, in the module's order; None if rows are changed."""
        rows = self._data(name)
        if rows.ndim != 2:
            return None
        indices = np.arange(len(rows), dtype=np.float32)[:, None]
        order = self._in_order(name, indices)
        if np.array_equal(order, indices):
            return rows
        return rows[order[:, 0].astype(np.int64)] if np.array_equal(np.sort(order, 0), indices) else None

    def _data(self, name: str) -> Any:
        tensor, expert = self._sources[name]
        return tensor.data if expert is None else tensor.data[expert]

    def _in_order(self, name: str, weight: Any) -> Any:
        """Return a weight as the module has it."""
        return self._processor.process(weights=weight, name=self._sources[name][0].name).weights


def _weight_names(outline: Any, architecture: str) -> dict[str, str]:
    """Return the module's name of each weight by its name in a file.

    Transformers' function builds gguf's table of names once per submodule: several seconds for 32 layers.
    """
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    kind = next(kind for kind, name in MODEL_ARCH_NAMES.items() if name == architecture)
    table = get_tensor_name_map(kind, outline.config.num_hidden_layers)
    found = {table.get_name(name, (".weight", ".bias")): name for name in outline.state_dict()}
    return {stored: name for stored, name in found.items() if stored is not None}


def _name_of(outline: Any, module: Any) -> str:
    return next(str(name) for name, each in outline.named_modules() if each is module)


def _is_quantised(tensor: Any) -> bool:
    from gguf import GGML_QUANT_SIZES

    numbers_per_block, _ = GGML_QUANT_SIZES[tensor.tensor_type]
    return numbers_per_block > 1 and len(tensor.shape) > 1


def _slices(rows: Any) -> Iterator[slice]:
    """Yield ranges of rows of `BYTES_OF_SLICE`, and at least one row each."""
    num_rows = max(BYTES_OF_SLICE // rows[0].nbytes, 1)
    return (slice(start, start + num_rows) for start in range(0, len(rows), num_rows))


def _dequantise(rows: Any, kind: Any) -> Tensor:
    from gguf.quants import dequantize

    if kind.name in DECODERS:
        return DECODERS[kind.name](torch.from_numpy(np.array(rows))).dequantised()
    return torch.from_numpy(np.array(dequantize(rows, kind)))


def _decode_4_bits(num_parameters: int, rows: Tensor) -> GroupedWeight:
    """Decode blocks of a scale in float16, for Q4_1 a minimum, and 16 bytes of two codes each."""
    blocks = rows.view(len(rows), -1, 2 * num_parameters + GROUP // 2)
    parameters = rows.view(torch.float16).view(*blocks.shape[:2], -1)[:, :, :num_parameters].float()
    codes = blocks[:, :, 2 * num_parameters :]
    scale = parameters[:, :, 0]
    minimum = parameters[:, :, 1] if num_parameters == 2 else -8 * scale
    return GroupedWeight(torch.cat((codes & 15, codes >> 4), 2).flatten(1), 4, scale, minimum)


def _decode_q4_k(rows: Tensor) -> GroupedWeight:
    """Decode blocks of 8 groups, whose scales and minima have 6 bits and factors of the block in float16."""
    from gguf.quants import Q4_K

    blocks = rows.view(-1, 144)
    factors = rows.view(torch.float16).view(len(blocks), -1)[:, :2].float()
    scales, minima = map(torch.from_numpy, Q4_K.get_scale_min(blocks[:, 4:16].numpy()))
    codes = blocks[:, 16:].view(-1, 4, 1, GROUP)
    return GroupedWeight(
        torch.cat((codes & 15, codes >> 4), 2).view(len(rows), -1),
        4,
        (factors[:, :1] * scales).view(len(rows), -1),
        -(factors[:, 1:] * minima).view(len(rows), -1),
    )


def _decode_mxfp4(rows: Tensor) -> GroupedWeight:
    """Decode blocks of a biased exponent and 16 bytes of two codes each."""
    blocks = rows.view(len(rows), -1, 1 + GROUP // 2)
    codes = blocks[:, :, 1:]
    return mxfp4_weight(torch.cat((codes & 15, codes >> 4), 2).flatten(1), blocks[:, :, 0])


def _decode_q8_0(rows: Tensor) -> GroupedWeight:
    """Decode blocks of a scale in float16 and 32 signed codes."""
    blocks = rows.view(len(rows), -1, 2 + GROUP)
    scale = rows.view(torch.float16).view(*blocks.shape[:2], -1)[:, :, 0].float()
    return GroupedWeight((blocks[:, :, 2:] ^ 128).flatten(1), 8, scale, -128 * scale)


DECODERS: dict[str, Callable[[Tensor], GroupedWeight]] = {
    "Q4_0": partial(_decode_4_bits, 1),
    "Q4_1": partial(_decode_4_bits, 2),
    "Q4_K": _decode_q4_k,
    "Q8_0": _decode_q8_0,
    "MXFP4": _decode_mxfp4,
}
"""By type of a tensor. Each takes the bytes `[output, byte]` of a weight."""
