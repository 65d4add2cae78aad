"""Decoding of quantised safetensors checkpoints: GPTQ, AWQ and compressed-tensors.

Each stores a linear layer `name` as tensors `name.*`: codes packed into int32, and per group of
inputs a scale and a zero point, the weight being `scale * (code - zero)`. The libraries that write
them decode to floats only, so their codes are read here.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from secondguess.checkpoint.weights import tensor_files
from secondguess.errors import CheckpointError, UnsupportedModelError
from secondguess.runtime.stored import GroupedWeight

AWQ_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]
"""Place in an int32 of each of eight successive outputs."""
BITS = (2, 4, 8)
DECODED = ("gptq", "awq", "compressed-tensors pack-quantized", "gguf")

Parts = Callable[[str], Tensor | None]
"""Maps the last part of a tensor's name to the tensor; None if there is none."""


@dataclass(frozen=True)
class Encoding:
    """Encoding of the quantised weights of a checkpoint.

    Args:
        name: name of the encoding, for messages.
        codes: last part of the names of the tensors that hold codes.
        bits: bits of a code.
        decode: decodes the tensors of one weight.
    """

    name: str
    codes: str
    bits: int
    decode: Callable[[Parts], GroupedWeight]


def read_encoding(path: Path) -> Encoding | None:
    """Return the encoding of a checkpoint that is decoded here; None for any other.

    Raises:
        UnsupportedModelError: if it is a variant that is not decoded.
    """
    config = quantization_of(path)
    method = config.get("quant_method")
    if method == "gptq":
        bits, is_second = config.get("bits", 0), config.get("checkpoint_format") == "gptq_v2"
        _require(bits in BITS, f"gptq with {bits} bits", f"decoded: {BITS} bits")
        _require(
            config.get("checkpoint_format", "gptq") in ("gptq", "gptq_v2"),
            f"gptq stored as {config.get('checkpoint_format')}",
            "decoded: checkpoint_format gptq or gptq_v2",
        )
        return Encoding("gptq", "qweight", bits, partial(_decode_gptq, bits, is_second))
    if method == "awq":
        bits, version = config.get("bits", config.get("w_bit", 0)), str(config.get("version", "gemm")).lower()
        _require(
            bits == 4 and version == "gemm",
            f"awq {version} with {bits} bits",
            "decoded: version gemm, 4 bits",
        )
        return Encoding("awq", "qweight", bits, _decode_awq)
    if method == "compressed-tensors" and config.get("format") == "pack-quantized":
        groups = list(config["config_groups"].values())
        all_bits = {group["weights"]["num_bits"] for group in groups}
        bits = all_bits.pop()
        _require(
            not all_bits and bits in BITS and all(group["weights"]["type"] == "int" for group in groups),
            "pack-quantized weights of several or other types",
            f"decoded: integers of one of {BITS} bits",
        )
        _require(
            not any(group.get("input_activations") for group in groups),
            "quantised activations",
            "decoded: quantised weights only",
        )
        return Encoding("compressed-tensors", "weight_packed", bits, partial(_decode_packed, bits))
    return None


def quantization_of(path: Path) -> dict[str, Any]:
    """Return the `quantization_config` of a checkpoint directory, empty if it has none."""
    if not (path / "config.json").is_file():
        return {}
    config = json.loads((path / "config.json").read_bytes())
    return config.get("quantization_config") or config.get("compression_config") or {}


def _require(supported: bool, found: str, expected: str) -> None:
    if not supported:
        raise encoding_error(found, expected)


def encoding_error(found: str, reason: str) -> UnsupportedModelError:
    """Return the error for a checkpoint in an encoding that is not decoded."""
    return UnsupportedModelError(
        f"expected a checkpoint in an encoding that is decoded here ({', '.join(DECODED)}), got {found} ({reason}); "
        "use the original checkpoint with quantize='int4', or another quantised version"
    )


def _decode_gptq(bits: int, is_second: bool, parts: Parts) -> GroupedWeight:
    """Decode a GPTQ weight; the first version of the format stores zero points less one."""
    codes = _unpack(_get(parts, "qweight"), bits, 0).T
    added = 0 if is_second else sum(1 << shift for shift in range(0, 32, bits))
    zeros = _unpack(_get(parts, "qzeros") + added, bits, 1).T  # a zero point of 0 borrows from the next
    scale, groups = _get(parts, "scales").T, parts("g_idx")
    if groups is not None:
        size = -(-codes.shape[1] // scale.shape[1])
        in_order = torch.equal(groups.long(), torch.arange(codes.shape[1]) // size)
        groups = None if in_order else groups.long()
    return _weight(codes, bits, scale, zeros, groups)


def _decode_awq(parts: Parts) -> GroupedWeight:
    codes, zeros = (
        _unpack(packed, 4, 1).view(*packed.shape, 8)[:, :, AWQ_PLACES].flatten(1).T
        for packed in (_get(parts, "qweight"), _get(parts, "qzeros"))
    )
    return _weight(codes, 4, _get(parts, "scales").T, zeros)


def _decode_packed(bits: int, parts: Parts) -> GroupedWeight:
    """Decode a `pack-quantized` weight, whose codes and zero points are shifted to be positive."""
    num_outputs, num_inputs = _get(parts, "weight_shape").tolist()
    codes = _unpack(_get(parts, "weight_packed"), bits, 1)[:, :num_inputs]
    scale, zeros, groups = _get(parts, "weight_scale"), parts("weight_zero_point"), parts("weight_g_idx")
    middle = torch.full(scale.shape, 2 ** (bits - 1))
    zeros = middle if zeros is None else _unpack(zeros, bits, 0)[:num_outputs]
    return _weight(codes, bits, scale, zeros, None if groups is None or (groups < 0).all() else groups.long())


def _weight(
    codes: Tensor, bits: int, scale: Tensor, zeros: Tensor, groups: Tensor | None = None
) -> GroupedWeight:
    if codes.shape[0] != scale.shape[0] or zeros.shape != scale.shape or codes.shape[1] % scale.shape[1]:
        raise CheckpointError(
            f"expected a scale and a zero point for each output and group, got codes {tuple(codes.shape)}, "
            f"scales {tuple(scale.shape)} and zero points {tuple(zeros.shape)}; download the checkpoint again"
        )
    return GroupedWeight(codes.contiguous(), bits, scale.float(), -scale.float() * zeros, groups)


def _unpack(packed: Tensor, bits: int, dim: int) -> Tensor:
    """Return the codes in int32 numbers as uint8, the lowest bits first along a dimension."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    parts = [((packed >> shift) & (2**bits - 1)).to(torch.uint8) for shift in shifts]
    return torch.stack(parts, dim + 1).flatten(dim, dim + 1)


def _get(parts: Parts, name: str) -> Tensor:
    found = parts(name)
    if found is None:
        raise CheckpointError(f"expected a tensor {name} beside the others of its weight, got none")
    return found


def _open(path: Path) -> Any:
    return safe_open(path, framework="pt")


class StoredWeights:
    """Weights in the safetensors files of a checkpoint, read from memory-mapped files.

    Args:
        folder: directory of the checkpoint.
        encoding: encoding of its quantised weights; None if there are none.

    Attributes:
        names: names of the weights, those of quantised ones as Transformers names them.
    """

    def __init__(self, folder: Path, encoding: Encoding | None) -> None:
        self._encoding = encoding
        self._files: dict[str, Any] = {
            name: file
            for file in map(_open, tensor_files(folder))
            for name in file.keys()  # noqa: SIM118 - not a dictionary
        }
        self._quantised = set()
        if encoding is not None:
            self._quantised = {
                name.removesuffix(encoding.codes)
                for name in self._files
                if name.endswith(f".{encoding.codes}")
            }
        others = (name for name in self._files if name[: name.rfind(".") + 1] not in self._quantised)
        biases = (f"{prefix}bias" for prefix in self._quantised if f"{prefix}bias" in self._files)
        self.names = [*others, *biases, *(f"{prefix}weight" for prefix in self._quantised)]

    def quantises(self, name: str) -> bool:
        """Return whether a weight is quantised."""
        return name.removesuffix("weight") in self._quantised

    def read(self, name: str) -> Tensor:
        """Return a weight."""
        found = self.read_codes(name)
        return found.dequantised() if isinstance(found, GroupedWeight) else found

    def read_codes(self, name: str) -> Tensor | GroupedWeight:
        """Return a weight with its codes if it is quantised."""
        prefix = name.removesuffix("weight")
        if self._encoding is None or prefix not in self._quantised:
            tensor: Tensor = self._files[name].get_tensor(name)
            return tensor
        try:
            return self._encoding.decode(partial(self._part, prefix))
        except (CheckpointError, RuntimeError) as error:
            raise CheckpointError(f"{prefix.removesuffix('.')} ({self._encoding.name}): {error}") from error

    def _part(self, prefix: str, name: str) -> Tensor | None:
        file = self._files.get(prefix + name)
        return None if file is None else file.get_tensor(prefix + name)
