"""Decoding of quantised safetensors checkpoints: GPTQ, AWQ, compressed-tensors, FP8 in blocks, and gpt-oss in MXFP4.

The first three store a linear layer `name` as tensors `name.*`: codes packed into int32, and per group
of inputs a scale and a zero point, the weight being `scale * (code - zero)`. The libraries that write
them decode to floats only, so their codes are read here. FP8 is decoded here because Transformers derives the size of a
block from the number of scales, which is wrong where the last block of a weight is smaller than the others.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from secondguess.checkpoint.weight_files import TensorFiles, TensorHeader
from secondguess.errors import CheckpointError, UnsupportedModelError
from secondguess.runtime.decoder.stored import GROUP, GroupedWeight, WeightRows, rows_of
from secondguess.runtime.weight_format import BFLOAT16, INT4_GROUPS, INT8_GROUPS, MXFP4, WeightFormat

AWQ_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]
"""Position in an int32 of each of eight successive outputs."""
BITS = (2, 4, 8)
FP4_LEVELS = torch.tensor([12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0], dtype=torch.uint8)
"""As in `product.h`: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives (OCP Microscaling Formats 1.0), doubled, plus 12."""
FP4_GROUP = 32
INTEGERS = ("I8", "U8")
"""Dtypes of weights that are codes, whether scales lie beside them or not; 8-bit floats without scales are weights."""
LARGEST_EXPONENT = 230
"""Up to which the sums of products of some thousand inputs are finite in float32."""
JOINED = re.compile(r"(?P<layer>.*)\.(?P<name>gate_up|down)_proj_blocks")
PARTS_OF_JOINED = {
    "gate_up": {"gate_proj": slice(0, None, 2), "up_proj": slice(1, None, 2)},
    "down": {"down_proj": slice(None)},
}
"""Outputs of a joined weight of experts, by the name of the linear layer of one expert."""
DECODED = ("gptq", "awq", "compressed-tensors pack-quantized", "fp8", "mxfp4", "gguf")

Parts = Callable[[str], Tensor | None]
"""Maps the last part of a tensor's name to the tensor; None if there is none."""
Headers = Callable[[], Mapping[str, TensorHeader]]
"""Returns the headers of the tensors in a checkpoint, by name."""
FP8_SCALES = "weight_scale_inv"
SMALLEST_FP8_GPU = (8, 9)
"""Compute capability from which Transformers multiplies FP8 weights as they are."""


@dataclass(frozen=True)
class Encoding:
    """Encoding of the quantised weights of a checkpoint.

    Args:
        name: name of the encoding, for messages.
        codes: last part of the names of the tensors that hold codes.
        bits: bits of a code.
        decode: decodes the tensors of one weight, to codes or to numbers.
        shape: returns the shape of a weight.
        word: bits of a number of these tensors.
        scales: last part of the names of other tensors that are not weights, to be left out when these are counted.
        joins_experts: whether its weights are those of all experts together.
        has_levels: whether codes are indices into the table of MXFP4.
        is_kept: whether the kernels take the codes as they are (`GroupedWeight.weight_format`), else in bfloat16.
        has_codes: whether weights are decoded to codes, else to numbers.
    """

    name: str
    codes: str
    bits: int
    decode: Callable[[Parts], GroupedWeight | Tensor]
    shape: Callable[[Parts], tuple[int, int]]
    word: int = 32
    joins_experts: bool = False
    has_levels: bool = False
    scales: str | None = None
    is_kept: bool = True
    has_codes: bool = True

    @property
    def weight_format(self) -> WeightFormat:
        """Encoding in which the kernels keep the weights."""
        if not self.is_kept:
            return BFLOAT16
        if self.has_levels:
            return MXFP4
        return INT4_GROUPS if self.bits <= INT4_GROUPS.bits else INT8_GROUPS


def read_encoding(values: Mapping[str, Any], headers: Headers, device: torch.device) -> Encoding | None:
    """Return the encoding of a checkpoint that is decoded here for a device; None for any other.

    Transformers computes with MXFP4 on all GPUs, and with FP8 on newer ones.

    Args:
        values: contents of `config.json`.
        headers: returns the headers of the tensors.
        device: the device.

    Raises:
        UnsupportedModelError: if it is a variant that is not decoded.
    """
    config = values.get("quantization_config") or values.get("compression_config") or {}
    method = config.get("quant_method")
    if method == "gptq":
        bits, is_second = config.get("bits", 0), config.get("checkpoint_format") == "gptq_v2"
        _require(bits in BITS, f"gptq with {bits!r} bits", f"decoded: {BITS} bits")
        _require(
            config.get("checkpoint_format", "gptq") in ("gptq", "gptq_v2"),
            f"gptq stored as {config.get('checkpoint_format')}",
            "decoded: checkpoint_format gptq or gptq_v2",
        )
        rules = (config.get("dynamic") or {}).values()
        other = next(
            (rule["bits"] for rule in rules if isinstance(rule, dict) and rule.get("bits", bits) != bits),
            bits,
        )
        _require(
            other == bits,
            f"gptq with {bits} bits and {other} for some layers (dynamic)",
            "decoded: the same bits for all",
        )
        is_kept = _is_kept(config.get("group_size"), bool(config.get("desc_act")))
        decode = partial(_decode_gptq, bits, is_second)
        return Encoding(
            "gptq", "qweight", bits, decode, partial(_shape_by_rows, 32 // bits, 1), is_kept=is_kept
        )
    if method == "awq":
        bits, version = config.get("bits", config.get("w_bit", 0)), str(config.get("version", "gemm")).lower()
        _require(
            bits == 4 and version == "gemm",
            f"awq {version} with {bits!r} bits",
            "decoded: version gemm, 4 bits",
        )
        is_kept = _is_kept(config.get("group_size", config.get("q_group_size")))
        return Encoding("awq", "qweight", bits, _decode_awq, partial(_shape_by_rows, 1, 8), is_kept=is_kept)
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
            not config.get("transform_config"),
            "transformed inputs",
            "decoded: weights without transform_config",
        )
        _require(
            not any(group.get("input_activations") for group in groups),
            "quantised activations",
            "decoded: quantised weights only",
        )
        is_kept = all(
            _is_kept(group["weights"].get("group_size"), group["weights"].get("actorder") in (True, "group"))
            for group in groups
        )
        decode = partial(_decode_packed, bits)
        return Encoding("compressed-tensors", "weight_packed", bits, decode, _packed_shape, is_kept=is_kept)
    if method == "mxfp4" and device.type != "cuda":
        return Encoding(
            "mxfp4",
            "_blocks",
            4,
            _decode_mxfp4,
            _mxfp4_shape,
            word=8,
            joins_experts=True,
            has_levels=True,
            scales="_scales",
        )
    if method == "fp8" and config.get("weight_block_size") and not _multiplies_fp8(device):
        return _fp8_encoding(headers(), config["weight_block_size"])
    return None


def _multiplies_fp8(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= SMALLEST_FP8_GPU


def _fp8_encoding(headers: Mapping[str, TensorHeader], block: list[int]) -> Encoding | None:
    """Return the encoding of weights in FP8 with a scale per block; None if Transformers has to decode some of them.

    Those are experts in FP4, and scales that are stored as exponents. Transformers leaves out the scales of joined
    weights of experts.
    """
    _require(
        len(block) == 2 and all(isinstance(size, int) and size > 0 for size in block),
        f"fp8 with weight_block_size {block}",
        "decoded: blocks of outputs and inputs",
    )
    encoding = Encoding(
        "fp8",
        "weight",
        8,
        partial(_decode_fp8, block),
        lambda parts: _matrix_shape(_get(parts, "weight")),
        word=8,
        scales=FP8_SCALES,
        is_kept=False,
        has_codes=False,
    )
    dtypes = {name: header.dtype for name, header in headers.items()}
    floats = (name for name, dtype in dtypes.items() if dtype.startswith("F8_"))
    unscaled = next((name for name in floats if f"{name}_scale_inv" not in dtypes), None)
    _require(unscaled is None, f"fp8 without {unscaled}_scale_inv", "decoded: weights with their scales")
    scales = {name: name.removesuffix("_scale_inv") for name in dtypes if name.endswith("_scale_inv")}
    scales = {name: of_weight for name, of_weight in scales.items() if of_weight in dtypes}
    joined = next((name for name in scales if not name.endswith(f".{FP8_SCALES}")), None)
    _require(
        joined is None, f"fp8 experts in a joined weight ({joined})", "decoded: weights of linear layers"
    )
    if all(dtypes[of_weight] == "F8_E4M3" and dtypes[name] != "U8" for name, of_weight in scales.items()):
        return encoding
    for name, of_weight in scales.items():
        shape, grid = headers[of_weight].shape, headers[name].shape
        _require(
            len(grid) < 2
            or all(size % number == 0 for size, number in zip(shape[-2:], grid[-2:], strict=True)),
            f"fp8 with blocks that do not divide {of_weight} {shape}",
            "decoded: such blocks if all weights are of linear layers in FP8",
        )
    return None


def _is_kept(group_size: int | None, is_ordered: bool = False) -> bool:
    """Return whether groups of inputs are made of whole groups of the kernels; -1 and None are whole rows."""
    return group_size in (None, -1) or not (is_ordered or group_size % GROUP)


def require_unquantised(path: Path, values: Mapping[str, Any], headers: Headers) -> None:
    """Refuse a checkpoint directory with quantised weights that no `quantization_config` describes.

    Transformers would leave out the scales of such weights, without an error.

    Args:
        path: the directory.
        values, headers: as in `read_encoding`.

    Raises:
        UnsupportedModelError: if there are any; names their encoding as the files do.
    """
    without = "config.json has no quantization_config"
    if (path / "hf_quant_config.json").is_file():
        described = json.loads((path / "hf_quant_config.json").read_bytes()).get("quantization") or {}
        if algorithm := described.get("quant_algo"):
            raise encoding_error(f"ModelOpt {algorithm} in hf_quant_config.json", without)
    if described := values.get("quantization"):
        raise encoding_error(f"MLX quantization {described!s:.80}", without)
    if (values.get("text_config") or {}).get("quantization_config"):
        return  # Transformers reads it there, too
    dtypes = {name: header.dtype for name, header in headers().items()}
    scaled = {name.rpartition(".")[0] for name in dtypes if "scale" in name.rpartition(".")[2]}
    for name, dtype in dtypes.items():
        is_scaled = dtype.startswith("F8_") and name.removesuffix(".weight") in scaled
        if name.endswith(".weight") and (dtype in INTEGERS or is_scaled):
            raise encoding_error(f"weights in {dtype}", f"{name} is one; {without}")


def _require(supported: bool, found: str, expected: str) -> None:
    if not supported:
        raise encoding_error(found, expected)


def encoding_error(found: str, reason: str) -> UnsupportedModelError:
    """Return the error for a checkpoint in an encoding that is not decoded."""
    return UnsupportedModelError(
        f"expected a checkpoint in an encoding that is decoded here ({', '.join(DECODED)}), got {found} ({reason}); "
        "use the original checkpoint with quantize='int4', or another quantised version"
    )


def _shape_by_rows(per_row: int, per_column: int, parts: Parts) -> tuple[int, int]:
    """Return the shape of a weight whose codes are packed as `[input, output]`, some in each row and column."""
    num_rows, num_columns = _matrix_shape(_get(parts, "qweight"))
    return num_columns * per_column, num_rows * per_row


def _packed_shape(parts: Parts) -> tuple[int, int]:
    num_outputs, num_inputs = _get(parts, "weight_shape").tolist()
    return num_outputs, num_inputs


def _mxfp4_shape(parts: Parts) -> tuple[int, int]:
    num_outputs, num_groups = _matrix_shape(_get(parts, "scales"))
    return num_outputs, num_groups * FP4_GROUP


def _matrix_shape(matrix: Tensor) -> tuple[int, int]:
    if matrix.dim() != 2:
        raise CheckpointError(f"expected a matrix, got {tuple(matrix.shape)}; download the checkpoint again")
    num_rows, num_columns = matrix.shape
    return num_rows, num_columns


def _decode_gptq(bits: int, is_second: bool, parts: Parts) -> GroupedWeight:
    """Decode a GPTQ weight; the first version of the format stores zero points less one."""
    codes = _unpack(_get(parts, "qweight"), bits, 0).T
    added = 0 if is_second else sum(1 << shift for shift in range(0, 32, bits))
    zeros = _unpack(_get(parts, "qzeros") + added, bits, 1).T  # a zero point of 0 borrows from the next
    scale, groups = _get_scales(parts, "scales").T, parts("g_idx")
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
    return _weight(codes, 4, _get_scales(parts, "scales").T, zeros)


def _decode_packed(bits: int, parts: Parts) -> GroupedWeight:
    """Decode a `pack-quantized` weight, whose codes and zero points are shifted to be positive."""
    num_outputs, num_inputs = _get(parts, "weight_shape").tolist()
    codes = _unpack(_get(parts, "weight_packed"), bits, 1)[:, :num_inputs]
    scale, zeros, groups = (
        _get_scales(parts, "weight_scale"),
        parts("weight_zero_point"),
        parts("weight_g_idx"),
    )
    middle = torch.full(scale.shape, 2 ** (bits - 1))
    zeros = middle if zeros is None else _unpack(zeros, bits, 0)[:num_outputs]
    return _weight(codes, bits, scale, zeros, None if groups is None or (groups < 0).all() else groups.long())


def _decode_fp8(block: list[int], parts: Parts) -> Tensor:
    """Decode a weight in FP8; the last block of outputs and that of inputs may be smaller than the others."""
    codes, scale, (num_outputs, num_inputs) = _get(parts, "weight"), _get(parts, FP8_SCALES), block
    expected = [-(-size // step) for size, step in zip(codes.shape, block, strict=False)]
    if codes.ndim != 2 or list(scale.shape) != expected or not scale.is_floating_point():
        raise CheckpointError(
            f"expected a scale for each block of {num_outputs} outputs and {num_inputs} inputs, got a weight "
            f"{tuple(codes.shape)} and scales {scale.dtype} {tuple(scale.shape)}; download the checkpoint again"
        )
    values, by_input = codes.float(), scale.float().repeat_interleave(num_inputs, 1)[:, : codes.shape[1]]
    for index, factors in enumerate(by_input):
        values[index * num_outputs : (index + 1) * num_outputs].mul_(factors)
    return values


def _decode_mxfp4(parts: Parts) -> GroupedWeight:
    """Decode a weight of `[output, group, 16]` bytes with two codes each, and exponents `[output, group]`."""
    blocks, exponents = _get(parts, "blocks"), _get(parts, "scales")
    if blocks.dtype != torch.uint8 or blocks.shape != (*exponents.shape, 16):
        raise CheckpointError(
            f"expected 16 bytes of codes for each exponent, got {blocks.dtype} {tuple(blocks.shape)} and exponents "
            f"{tuple(exponents.shape)}; download the checkpoint again"
        )
    return mxfp4_weight(torch.stack((blocks & 15, blocks >> 4), -1).flatten(1), exponents)


def mxfp4_weight(codes: Tensor, exponents: Tensor) -> GroupedWeight:
    """Return a weight of codes `[output, input]` and biased exponents `[output, group]` in uint8.

    Raises:
        CheckpointError: an exponent that is too large.
    """
    if (exponents > LARGEST_EXPONENT).any():
        raise CheckpointError(
            f"expected exponents up to {LARGEST_EXPONENT}, got {exponents.max()}; download the checkpoint again"
        )
    scale = torch.ldexp(
        torch.full(exponents.shape, 0.5, dtype=torch.float32), exponents.int() - 127
    )  # levels are doubled
    return GroupedWeight(codes, 4, scale, -12 * scale, levels=FP4_LEVELS)


def _weight(
    codes: Tensor, bits: int, scale: Tensor, zeros: Tensor, groups: Tensor | None = None
) -> GroupedWeight:
    num_outputs, num_inputs = codes.shape
    fits = num_outputs == scale.shape[0] and zeros.shape == scale.shape
    if not fits or (groups is None and num_inputs % scale.shape[1]):
        raise CheckpointError(
            f"expected a scale and a zero point for each output and group, got codes {tuple(codes.shape)}, "
            f"scales {tuple(scale.shape)} and zero points {tuple(zeros.shape)}; download the checkpoint again"
        )
    if groups is not None and (
        groups.shape != (num_inputs,) or groups.min() < 0 or groups.max() >= scale.shape[1]
    ):
        raise CheckpointError(
            f"expected one of {scale.shape[1]} groups for each of {num_inputs} inputs, got {groups.numel()} numbers up to "
            f"{groups.max() if groups.numel() else 'none'}; download the checkpoint again"
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
        raise CheckpointError(f"expected a tensor {name} with the others of its weight, got none")
    return found


def _get_scales(parts: Parts, name: str) -> Tensor:
    found = _get(parts, name)
    if found.ndim != 2 or not found.numel():
        raise CheckpointError(
            f"expected a scale for each output and group, got {name} {tuple(found.shape)}; download the checkpoint again"
        )
    return found


class StoredWeights:
    """Weights in safetensors files, which are memory-mapped.

    Args:
        tensors: opened files of a checkpoint.
        encoding: encoding of its quantised weights; None if there are none.

    Attributes:
        names: names of the weights, those of quantised ones as Transformers names them.
    """

    def __init__(self, tensors: TensorFiles, encoding: Encoding | None) -> None:
        self._tensors, self._encoding = tensors, encoding
        self._quantised = set()
        if encoding is not None:
            mark = encoding.scales or encoding.codes  # a tensor that only quantised weights have
            self._quantised = {
                name.removesuffix(mark) for name in tensors.headers if name.endswith(f".{mark}")
            }
        others = (name for name in tensors.headers if name[: name.rfind(".") + 1] not in self._quantised)
        biases = (f"{prefix}bias" for prefix in self._quantised if f"{prefix}bias" in tensors.headers)
        self.names = [*others, *biases, *(f"{prefix}weight" for prefix in self._quantised)]
        self._known = set(self.names)

    def has(self, name: str) -> bool:
        return name in self._known

    def shape(self, name: str) -> Sequence[int]:
        """Return the shape of a weight."""
        if self._encoding is None or not self.quantises(name):
            return self._tensors.headers[name].shape
        with self._naming(name):
            return self._encoding.shape(partial(self._part, name.removesuffix("weight")))

    def quantises(self, name: str) -> bool:
        """Return whether a weight is quantised."""
        return name.removesuffix("weight") in self._quantised

    def read(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """Return a weight."""
        found = self._stored(name)
        with self._naming(name):
            return (found.dequantised() if isinstance(found, GroupedWeight) else found).to(dtype)

    def rows(self, name: str) -> WeightRows:
        """Return the rows of a weight for the kernels."""
        found = self._stored(name)
        with self._naming(name):
            return rows_of(found)

    def _stored(self, name: str) -> Tensor | GroupedWeight:
        """Return a weight with its codes if it is quantised."""
        if self._encoding is None or not self.quantises(name):
            return self._tensors.read(name)
        with self._naming(name):
            return self._encoding.decode(partial(self._part, name.removesuffix("weight")))

    @contextmanager
    def _naming(self, name: str) -> Iterator[None]:
        """Name the weight in errors of tensors that do not fit each other."""
        try:
            yield
        except (CheckpointError, RuntimeError, IndexError, ValueError, ZeroDivisionError) as error:
            encoding = "" if self._encoding is None else f" ({self._encoding.name})"
            raise CheckpointError(f"{name.removesuffix('.weight')}{encoding}: {error}") from error

    def _part(self, prefix: str, name: str) -> Tensor | None:
        path = prefix + name
        return self._tensors.read(path) if path in self._tensors.headers else None


class _PartOfJoined(NamedTuple):
    """Part of the tensors `name + "_blocks"`, `"_scales"` and `"_bias"` of all experts.

    Args:
        name: common part of their names.
        expert: index of the expert.
        outputs: its outputs.
    """

    name: str
    expert: int
    outputs: slice


class JoinedExperts:
    """Weights of a checkpoint that joins those of all experts, in MXFP4 (gpt-oss).

    Args:
        tensors: opened files of the checkpoint.
        encoding: encoding of the experts.
        by_expert: whether the experts are named one by one, as the linear layers of `ExpertNames`, or
            joined and transposed, as the module of Transformers has them.

    Attributes:
        names: names of the weights.
    """

    def __init__(self, tensors: TensorFiles, encoding: Encoding, by_expert: bool) -> None:
        self._encoding, self._tensors = encoding, tensors
        found = [match for name in tensors.headers if (match := JOINED.fullmatch(name))]
        joined = {match[0].removesuffix("_blocks"): match for match in found}
        self._joined = set() if by_expert else set(joined)
        self._parts: dict[str, _PartOfJoined] = {}
        for name, match in joined.items() if by_expert else ():
            for expert in range(tensors.headers[f"{name}_blocks"].shape[0]):
                for part, outputs in PARTS_OF_JOINED[match["name"]].items():
                    module = f"{match['layer']}.{expert}.{part}"
                    self._parts[f"{module}.weight"] = _PartOfJoined(name, expert, outputs)
                    self._parts[f"{module}.bias"] = _PartOfJoined(name, expert, outputs)
        hidden = {f"{name}{suffix}" for name in joined for suffix in ("_blocks", "_scales")}
        if by_expert:
            hidden |= {f"{name}_bias" for name in joined}
        others = [name for name in tensors.headers if name not in hidden]
        self.names = [*others, *self._joined, *self._parts]
        self._known = set(self.names)

    def has(self, name: str) -> bool:
        return name in self._known

    def shape(self, name: str) -> Sequence[int]:
        """Return the shape of a weight."""
        part = self._parts.get(name)
        if part is None:
            return self._tensors.headers[name].shape
        if name.endswith(".bias"):
            return self._slice(part, "bias").shape
        with self._naming(part.name):
            return self._encoding.shape(partial(self._slice, part))

    def quantises(self, name: str) -> bool:
        """Return whether a weight is quantised."""
        return name in self._joined or (name in self._parts and not name.endswith(".bias"))

    def read(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """Return a weight."""
        if name in self._joined:
            num_experts, num_outputs, num_groups, _ = self._tensors.headers[f"{name}_blocks"].shape
            joined = torch.empty(num_experts, num_groups * FP4_GROUP, num_outputs, dtype=torch.bfloat16)
            for expert in range(num_experts):
                decoded = self._decode(_PartOfJoined(name, expert, slice(None)))
                joined[expert] = decoded.dequantised().T  # exact in bfloat16
            return joined.to(dtype)
        found = self._stored(name)
        return (found.dequantised() if isinstance(found, GroupedWeight) else found).to(dtype)

    def rows(self, name: str) -> WeightRows:
        """Return the rows of a weight for the kernels."""
        return rows_of(self._stored(name))

    def _stored(self, name: str) -> Tensor | GroupedWeight:
        """Return a weight with its codes if it is quantised."""
        if name not in self._parts:
            return self._tensors.read(name)
        part = self._parts[name]
        return self._slice(part, "bias") if name.endswith(".bias") else self._decode(part)

    def _decode(self, part: _PartOfJoined) -> GroupedWeight:
        with self._naming(part.name):
            decoded = self._encoding.decode(partial(self._slice, part))
        assert isinstance(decoded, GroupedWeight)  # MXFP4
        return decoded

    @contextmanager
    def _naming(self, name: str) -> Iterator[None]:
        """Name the weight in errors of tensors that do not fit each other."""
        try:
            yield
        except (CheckpointError, RuntimeError) as error:
            raise CheckpointError(f"{name} ({self._encoding.name}): {error}") from error

    def _slice(self, part: _PartOfJoined, suffix: str) -> Tensor:
        name = f"{part.name}_{suffix}"
        if name not in self._tensors.headers:
            raise CheckpointError(f"expected a tensor {name}, got none; download the checkpoint again")
        return self._tensors.read_part(name, part.expert)[part.outputs]
