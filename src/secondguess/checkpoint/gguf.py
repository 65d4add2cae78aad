"""Quantised weights of GGUF files, which the kernels run without another rounding to fewer bits.

Transformers reads a file and dequantises it, with names and the order of rows as in its modules. Here
the weights of linear layers are read again, and taken if they are the module's to the last bit. Q4_0,
Q4_1, Q4_K and Q8_0 have codes of evenly spaced levels in groups of 32, which are kept. Other types
have levels or groups of their own and are rounded to 8 bits in groups of 32.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from secondguess.checkpoint.weights import gguf_tensors
from secondguess.runtime.stored import GROUP, GroupedWeight, StoredLinear
from secondguess.runtime.weight_format import INT4, INT8_GROUPS, WeightFormat

IN_4_BITS = {"Q4_0", "Q4_1", "Q4_K"}
EMBEDDING, HEAD = "token_embd", "output"


def count_stored(file: Path) -> dict[WeightFormat, int]:
    """Return the number of weights of linear layers by the encoding in which the kernels keep them."""
    tensors = {tensor.name.removesuffix(".weight"): tensor for tensor in gguf_tensors(file)}
    if HEAD in tensors:  # else the embedding is also the head
        tensors.pop(EMBEDDING, None)
    counts: Counter[WeightFormat] = Counter()
    for tensor in filter(_is_quantised, tensors.values()):
        kept = INT4 if tensor.tensor_type.name in IN_4_BITS else INT8_GROUPS
        counts[kept] += int(tensor.n_elements)
    return counts


def keep_codes(model: Any, file: Path) -> None:
    """Replace linear layers of a module, read from a GGUF file, by ones that read their codes from it."""
    tensors = {tensor.name: tensor for tensor in gguf_tensors(file) if _is_quantised(tensor)}
    names = _names_of(model.config)
    layers = [(name, each) for name, each in model.named_modules() if type(each) is nn.Linear]
    for name, linear in layers:
        place = names.get_name(name)
        if place == HEAD and model.config.tie_word_embeddings:
            place = EMBEDDING
        tensor = tensors.get(f"{place}.weight")
        read = None if tensor is None else _reader(tensor, linear, model.config)
        if read is not None:
            stored = StoredLinear(
                read, linear.in_features, linear.out_features, linear.bias, linear.weight.dtype
            )
            model.set_submodule(name, stored)


def _is_quantised(tensor: Any) -> bool:
    from gguf import GGML_QUANT_SIZES

    numbers_per_block, _ = GGML_QUANT_SIZES[tensor.tensor_type]
    return numbers_per_block > 1 and len(tensor.shape) == 2


def _names_of(config: Any) -> Any:
    """Return the map from the names of Transformers' modules to those of the file."""
    import gguf

    architecture = {"mistral": "llama"}.get(config.model_type, config.model_type.replace("_text", ""))
    numbers = {name.replace("-", ""): number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    return gguf.get_tensor_name_map(numbers[architecture.replace("_", "")], config.num_hidden_layers)


def _reader(tensor: Any, linear: nn.Linear, config: Any) -> Callable[[], GroupedWeight] | None:
    """Return a function that reads the weight of a linear layer; None if the module has another one."""
    for order in _orders(linear, config):
        if torch.equal(_dequantised(tensor, order).to(linear.weight.dtype), linear.weight):
            return partial(_decode, tensor, order)
    return None


def _orders(linear: nn.Linear, config: Any) -> list[Tensor | None]:
    """Return orders of rows: as in the file, and with heads whose halves llama.cpp interleaves."""
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if linear.out_features % size:
        return [None]
    return [None, torch.arange(linear.out_features).view(-1, size // 2, 2).transpose(1, 2).flatten()]


def _dequantised(tensor: Any, order: Tensor | None) -> Tensor:
    """Return a weight `[output, input]` in float32 with its rows in an order."""
    from gguf.quants import dequantize

    rows = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type))
    return rows if order is None else rows[order]


def _decode(tensor: Any, order: Tensor | None) -> GroupedWeight:
    kind = tensor.tensor_type.name
    if kind not in DECODERS:
        return GroupedWeight.rounded(_dequantised(tensor, order), INT8_GROUPS)
    rows = torch.from_numpy(np.array(tensor.data))
    return DECODERS[kind](rows if order is None else rows[order])


def _decode_4_bits(num_parameters: int, rows: Tensor) -> GroupedWeight:
    """Decode blocks of a scale in float16, for Q4_1 a minimum, and 16 bytes of two codes each."""
    blocks = rows.view(len(rows), -1, 2 * num_parameters + GROUP // 2)
    parameters = blocks[:, :, : 2 * num_parameters].contiguous().view(torch.float16).float()
    codes = blocks[:, :, 2 * num_parameters :]
    scale = parameters[:, :, 0]
    minimum = parameters[:, :, 1] if num_parameters == 2 else -8 * scale
    return GroupedWeight(torch.cat((codes & 15, codes >> 4), 2).flatten(1), 4, scale, minimum)


def _decode_q4_k(rows: Tensor) -> GroupedWeight:
    """Decode blocks of 8 groups, whose scales and minima have 6 bits and factors of the block in float16."""
    from gguf.quants import Q4_K

    blocks = rows.view(-1, 144)
    factors = blocks[:, :4].contiguous().view(torch.float16).float()
    scales, minima = map(torch.from_numpy, Q4_K.get_scale_min(blocks[:, 4:16].numpy()))
    codes = blocks[:, 16:].view(-1, 4, 1, GROUP)
    return GroupedWeight(
        torch.cat((codes & 15, codes >> 4), 2).view(len(rows), -1),
        4,
        (factors[:, :1] * scales).view(len(rows), -1),
        -(factors[:, 1:] * minima).view(len(rows), -1),
    )


def _decode_q8_0(rows: Tensor) -> GroupedWeight:
    """Decode blocks of a scale in float16 and 32 signed codes."""
    blocks = rows.view(len(rows), -1, 2 + GROUP)
    scale = blocks[:, :, :2].contiguous().view(torch.float16).float()[:, :, 0]
    return GroupedWeight((blocks[:, :, 2:] ^ 128).flatten(1), 8, scale, -128 * scale)


DECODERS: dict[str, Callable[[Tensor], GroupedWeight]] = {
    "Q4_0": partial(_decode_4_bits, 1),
    "Q4_1": partial(_decode_4_bits, 2),
    "Q4_K": _decode_q4_k,
    "Q8_0": _decode_q8_0,
}
"""By type of a tensor. Each takes the bytes `[output, byte]` of a weight."""
