"""4-bit weights of GGUF files (Q4_0 and Q4_1), whose codes the kernels run as they are.

Transformers reads a file and dequantises it, with names and the order of rows as in its modules. Here
only the codes of these two types are read again: both have the kernels' own form. A weight is taken
if its codes give the module's weight to the last bit. Other types have scales within scales (`Q4_K`
and its like), levels that are not evenly spaced, or more bits; they stay dequantised.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from secondguess.checkpoint.weights import gguf_tensors
from secondguess.runtime.stored import GROUP, GroupedWeight, StoredLinear

KEPT = {"Q4_0", "Q4_1"}
CODE_BYTES = GROUP // 2


def count_kept(file: Path) -> int:
    """Return the number of weights of linear layers whose codes are kept."""
    return sum(int(tensor.n_elements) for tensor in gguf_tensors(file) if _is_kept(tensor))


def keep_codes(model: Any, file: Path) -> None:
    """Replace linear layers of a module, read from a GGUF file, by ones that read their codes from it."""
    tensors = {tensor.name: tensor for tensor in gguf_tensors(file) if _is_kept(tensor)}
    names = _names_of(model.config)
    layers = [(name, each) for name, each in model.named_modules() if type(each) is nn.Linear]
    for name, linear in layers:
        tensor = tensors.get(f"{names.get_name(name)}.weight")
        for order in [] if tensor is None else _orders(linear, model.config):
            stored = StoredLinear(
                partial(_decode, tensor, order),
                linear.in_features,
                linear.out_features,
                linear.bias,
                linear.weight.dtype,
            )
            if torch.equal(stored.weight, linear.weight):
                model.set_submodule(name, stored)
                break


def _is_kept(tensor: Any) -> bool:
    return tensor.tensor_type.name in KEPT and not tensor.name.startswith("token_embd")


def _names_of(config: Any) -> Any:
    """Return the map from the names of Transformers' modules to those of the file."""
    import gguf

    architecture = {"mistral": "llama"}.get(config.model_type, config.model_type.replace("_text", ""))
    numbers = {name.replace("-", "_"): number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    return gguf.get_tensor_name_map(numbers[architecture], config.num_hidden_layers)


def _orders(linear: nn.Linear, config: Any) -> list[Tensor | None]:
    """Return orders of rows: as in the file, and with heads whose halves llama.cpp interleaves."""
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if linear.out_features % size:
        return [None]
    return [None, torch.arange(linear.out_features).view(-1, size // 2, 2).transpose(1, 2).flatten()]


def _decode(tensor: Any, order: Tensor | None) -> GroupedWeight:
    """Decode blocks of a scale in float16, for Q4_1 a minimum, and 16 bytes of two codes each."""
    rows = torch.from_numpy(np.array(tensor.data))
    size = int(tensor.n_bytes) * GROUP // int(tensor.n_elements)
    blocks = (rows if order is None else rows[order]).view(len(rows), -1, size)
    numbers = blocks[:, :, :-CODE_BYTES].contiguous().view(torch.float16).float()
    codes = blocks[:, :, -CODE_BYTES:]
    scale = numbers[:, :, 0]
    minimum = -8 * scale if tensor.tensor_type.name == "Q4_0" else numbers[:, :, 1]
    return GroupedWeight(torch.cat((codes & 15, codes >> 4), 2).flatten(1), 4, scale, minimum)
