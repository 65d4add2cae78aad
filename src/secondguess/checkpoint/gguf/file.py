"""Header of a GGUF file, and its memory-mapped tensors.

The format is that of ggml, versions 2 and 3 (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md). Every
length is checked against the size of the file before it is used.
"""

from __future__ import annotations

import math
import mmap
import struct
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from secondguess.checkpoint.weight_files import LFS_ADVICE, LFS_POINTER, is_lfs_pointer
from secondguess.errors import CheckpointError

MAGIC, VERSIONS = b"GGUF", (2, 3)
MAX_DIMENSIONS = 4
MAX_ARCHITECTURE = 64
"""Largest number of bytes of the name of an architecture."""
ALIGNMENT = 8
"""Divisor of every `general.alignment`, in bytes."""
STRING, ARRAY = 8, 9
SCALARS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
"""Formats of `struct` by type of a value; `STRING` and `ARRAY` have lengths."""
TENSOR_TYPES = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 40), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8), 28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17), 40: ("NVFP4", 64, 36), 41: ("Q1_0", 128, 18),
}  # fmt: skip
"""Name, numbers of a block and bytes of a block, by type of a tensor."""


@dataclass(frozen=True)
class GgufTensor:
    """Tensor in a GGUF file."""

    name: str
    shape: tuple[int, ...]  # outermost first
    kind: int  # one of TENSOR_TYPES
    offset: int  # first byte in the file

    @property
    def type_name(self) -> str:
        return TENSOR_TYPES[self.kind][0]

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes_per_row(self) -> int:
        _, numbers, size = TENSOR_TYPES[self.kind]
        return self.shape[-1] // numbers * size

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape[:-1]) * self.bytes_per_row

    @property
    def is_quantised(self) -> bool:
        """True for matrices in blocks; vectors in blocks are small enough to be decoded."""
        return TENSOR_TYPES[self.kind][1] > 1 and len(self.shape) > 1


class _Cursor:
    """Position in the header of a file."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data, self._size, self.place = data, len(data), 0

    def read(self, layout: str, count: int = 1) -> tuple[Any, ...]:
        """Read numbers of one type."""
        size = struct.calcsize(f"<{layout}")
        if count * size > self._size - self.place:
            raise ValueError(f"{count:,} values of {size} bytes at byte {self.place:,} of {self._size:,}")
        found = struct.unpack_from(f"<{count}{layout}", self._data, self.place)
        self.place += count * size
        return found

    def read_strings(self, count: int) -> list[str]:
        """Read strings, each with its length before it."""
        if count * 8 > self._size - self.place:
            raise ValueError(f"{count:,} strings at byte {self.place:,} of {self._size:,}")
        data, size, place = self._data, self._size, self.place
        unpack, found = struct.Struct("<Q").unpack_from, []
        for _ in range(count):
            if place + 8 > size:
                raise ValueError(f"a string at byte {place:,} of {size:,}")
            end = place + 8 + unpack(data, place)[0]
            if end > size:
                raise ValueError(f"a string of {end - place - 8:,} bytes at byte {place:,} of {size:,}")
            found.append(data[place + 8 : end].decode("utf-8", "replace"))
            place = end
        self.place = place
        return found

    def read_value(self) -> Any:
        """Read a value with its type before it."""
        (kind,) = self.read("I")
        if kind == STRING:
            return self.read_strings(1)[0]
        if kind in SCALARS:
            return self.read(SCALARS[kind])[0]
        if kind != ARRAY:
            raise ValueError(f"a value of type {kind}")
        (kind,), (count,) = self.read("I"), self.read("Q")
        if kind == STRING:
            return self.read_strings(count)
        if kind not in SCALARS:
            raise ValueError(f"an array of type {kind}")
        return list(self.read(SCALARS[kind], count))


def peek_architecture(path: Path) -> str:
    """Return the architecture of a GGUF file without reading its header; empty if its first field is another.

    Raises:
        OSError: a file that cannot be read.
    """
    key = b"general.architecture"
    before = struct.Struct(
        f"<4sIQQQ{len(key)}sIQ"
    )  # version, numbers of tensors and fields, key, type, length
    with path.open("rb") as opened:
        start = opened.read(before.size)
        if len(start) < before.size:
            return ""
        magic, *_, name, kind, length = before.unpack(start)
        if (magic, name, kind) != (MAGIC, key, STRING) or length > MAX_ARCHITECTURE:
            return ""
        return opened.read(length).decode("utf-8", "replace")


class GgufFile:
    """GGUF file with a whole model: `fields` are the header's values and `tensors` its tensors, by name.

    A broken file, another version or a part of a model raises a CheckpointError.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.fields: dict[str, Any] = {}
        self.tensors: dict[str, GgufTensor] = {}
        try:
            if not path.stat().st_size:
                raise ValueError("an empty file")
            with path.open("rb") as opened:
                self._data = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
            self._read_header()
        except (ValueError, OSError, OverflowError) as error:
            reason, advice = str(error), "copy or download it again"
            if is_lfs_pointer(path):
                reason, advice = LFS_POINTER, LFS_ADVICE
            raise CheckpointError(f"expected a whole GGUF file in {path}, got: {reason}; {advice}") from error
        if (num_parts := self.fields.get("split.count") or 1) > 1:
            raise CheckpointError(
                f"cannot load {path}: it is one of {num_parts} parts of a model. Join them with "
                "`llama-gguf-split --merge FIRST_PART OUT`."
            )

    def _read_header(self) -> None:
        cursor = _Cursor(self._data)
        if self._data[:4] != MAGIC:
            raise ValueError("another format")
        cursor.place = len(MAGIC)
        (version,) = cursor.read("I")
        if version not in VERSIONS:
            raise ValueError(f"version {version}, not {' or '.join(map(str, VERSIONS))}")
        num_tensors, num_fields = cursor.read("Q", 2)
        for _ in range(num_fields):
            (name,) = cursor.read_strings(1)
            self.fields[name] = cursor.read_value()
        found = [self._read_tensor(cursor) for _ in range(num_tensors)]
        alignment = self.fields.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment % ALIGNMENT:
            raise ValueError(f"general.alignment {alignment!r:.40}")
        start = -(-cursor.place // alignment) * alignment
        for name, shape, kind, offset in found:
            tensor = GgufTensor(name, shape, kind, start + offset)
            if offset % alignment:
                raise ValueError(f"{name} at byte {offset:,}, not a multiple of {alignment}")
            if name in self.tensors:
                raise ValueError(f"{name} twice")
            if tensor.offset + tensor.num_bytes > len(self._data):
                raise ValueError(
                    f"{name}, which ends at byte {tensor.offset + tensor.num_bytes:,} of {len(self._data):,}"
                )
            self.tensors[name] = tensor

    def _read_tensor(self, cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
        """Return the name, shape, type and offset of a tensor."""
        (name,), (num_dimensions,) = cursor.read_strings(1), cursor.read("I")
        if not 1 <= num_dimensions <= MAX_DIMENSIONS:
            raise ValueError(f"{name!r:.80} with {num_dimensions} dimensions")
        shape = cursor.read("Q", num_dimensions)[::-1]
        (kind,), (offset,) = cursor.read("I"), cursor.read("Q")
        if kind not in TENSOR_TYPES:
            raise ValueError(f"{name!r:.80} of type {kind}")
        if not all(shape) or shape[-1] % TENSOR_TYPES[kind][1]:
            raise ValueError(f"{name!r:.80} of type {TENSOR_TYPES[kind][0]} with sizes {shape}")
        return name, shape, kind, offset

    @property
    def architecture(self) -> str:
        return str(self.fields.get("general.architecture"))

    @property
    def values(self) -> dict[str, Any]:
        """Fields of the file's architecture, without its name."""
        prefix = f"{self.architecture}."
        return {
            name.removeprefix(prefix): value for name, value in self.fields.items() if name.startswith(prefix)
        }

    def bytes_of(self, tensor: GgufTensor) -> Tensor:
        """Return the bytes `[..., row, byte]` of a tensor, in memory that is mapped from the file and must not be changed."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of memory that cannot be written
            held = torch.frombuffer(
                self._data, dtype=torch.uint8, count=tensor.num_bytes, offset=tensor.offset
            )
        return held.view(*tensor.shape[:-1], tensor.bytes_per_row)
