"""Weights that stay in the files of a checkpoint until they are read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from secondguess.runtime.weight_format import INT4_GROUPS, INT8, INT8_GROUPS, MXFP4, WeightFormat

GROUP = INT4_GROUPS.group_size or 0

TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 30}
"""Types of rows by dtype, as `stored.h` numbers them."""
CODES_4, CODES_8, LEVELS = 200, 201, 202
"""Types of rows as `GroupedWeight.rows` makes them."""
TILE = 16
"""Outputs of a tile of the kernels' blocks."""


@dataclass(frozen=True)
class WeightRows:
    """Rows of a weight where they lie in memory, as the kernels read them (`stored.h`).

    Args:
        addresses: `[output]` in int64; 0 for a row of zeros.
        types: `[output]` in uint8.
        width: numbers of a row.
        owners: objects that keep the memory.
        weight_format: encoding in which the kernels keep the codes of the rows; None if they are not quantised.
    """

    addresses: Tensor
    types: Tensor
    width: int
    owners: tuple[object, ...]
    weight_format: WeightFormat | None = None

    @classmethod
    def of_tensor(cls, weight: Tensor) -> WeightRows:
        """Return the rows of a weight `[output, input]` in float32, float16 or bfloat16, or converted to float32."""
        held = weight.detach()
        held = held if held.dtype in TYPES else held.float()
        held = held if held.stride(-1) == 1 else held.contiguous()
        return cls.of_memory(held, held.stride(0) * held.itemsize, held.shape[1], TYPES[held.dtype])

    @classmethod
    def of_memory(
        cls, held: Tensor, num_bytes: int, width: int, kind: int, weight_format: WeightFormat | None = None
    ) -> WeightRows:
        """Return rows of a type that follow each other in a tensor `[output, ...]`, each `num_bytes` after the one before."""
        addresses = held.data_ptr() + num_bytes * torch.arange(len(held))
        return cls(
            addresses, torch.full((len(held),), kind, dtype=torch.uint8), width, (held,), weight_format
        )

    @classmethod
    def joined(cls, parts: Sequence[WeightRows]) -> WeightRows:
        """Return the rows of several weights with the same inputs, one weight after the other."""
        return cls(
            torch.cat([part.addresses for part in parts]),
            torch.cat([part.types for part in parts]),
            parts[0].width,
            tuple(owner for part in parts for owner in part.owners),
            _common_format([part.weight_format for part in parts]),
        )

    def __len__(self) -> int:
        return len(self.addresses)

    def __getitem__(self, order: Tensor) -> WeightRows:
        """Return some rows, in this order."""
        return replace(self, addresses=self.addresses[order], types=self.types[order])

    def padded(self, multiple: int) -> WeightRows:
        """Return the rows with rows of zeros appended, up to a multiple."""
        missing = (0, -len(self) % multiple)
        addresses, types = (functional.pad(column, missing) for column in (self.addresses, self.types))
        return replace(self, addresses=addresses, types=types)

    def interleaved(self) -> WeightRows:
        """Return gates and the values that they multiply, 16 of each in turn; the gates are the first half of the rows."""
        gates, values = (self[part].padded(TILE) for part in torch.arange(len(self)).chunk(2))
        joined = WeightRows.joined([gates, values])
        return joined[torch.arange(len(joined)).view(2, -1, TILE).transpose(0, 1).flatten()]


def _common_format(formats: Sequence[WeightFormat | None]) -> WeightFormat | None:
    """Return the smallest encoding that keeps the codes of joined weights; None if there is none."""
    kinds = set(formats)
    if len(kinds) == 1:
        return formats[0]
    if None in kinds or MXFP4 in kinds:
        return None
    return INT8_GROUPS if any(kind is not None and kind.has_minima for kind in kinds) else INT8


@dataclass(frozen=True)
class GroupedWeight:
    """Quantised weight: `scale * level + minimum`, with scales and minima per group of inputs.

    Args:
        codes: `[output, input]` in uint8.
        bits: bits of a code.
        scale, minimum: `[output, group]` in float32.
        groups: `[input]`, the group of each input; None if each group is a range of inputs.
        levels: `[code]` in uint8, level of each code; None if they are the codes.
    """

    codes: Tensor
    bits: int
    scale: Tensor
    minimum: Tensor
    groups: Tensor | None = None
    levels: Tensor | None = None

    def dequantised(self) -> Tensor:
        """Return the weight `[output, input]` in float32."""
        codes = self.codes
        if self.levels is not None:  # in an eighth of the time of an index
            codes = self.levels.float().expand(len(codes), -1).gather(1, codes.long())
        if self.groups is not None:
            return codes * self.scale[:, self.groups] + self.minimum[:, self.groups]
        # in place, which takes a third of the time of one expression
        values = codes.view(*self.scale.shape, -1).float()
        return values.mul_(self.scale[:, :, None]).add_(self.minimum[:, :, None]).flatten(1)

    @property
    def weight_format(self) -> WeightFormat | None:
        """Encoding in which the kernels take the codes as they are.

        None if there is none, because groups are not made of whole groups of the kernels.
        """
        if self.groups is not None or self.codes.shape[1] // self.scale.shape[1] % GROUP:
            return None
        if self.levels is not None:
            return MXFP4
        return INT4_GROUPS if self.bits <= INT4_GROUPS.bits else INT8_GROUPS

    def rows(self) -> WeightRows:
        """Return the rows for the kernels; the weight must have a `weight_format`.

        Each group has its codes, one per byte, then its scale and its minimum in float16; with levels, its scale in
        bfloat16. Larger groups are repeated. Codes of 8 bits are signed.
        """
        codes, minimum, kind = self.codes, self.minimum, CODES_4
        if self.bits > INT4_GROUPS.bits:
            codes, minimum, kind = codes ^ 128, minimum + 128 * self.scale, CODES_8  # 128 less
        parameters = [self.scale.half(), minimum.half()]
        if self.levels is not None:
            parameters, kind = [self.scale.bfloat16()], LEVELS
        codes = codes.view(len(codes), -1, GROUP)
        repeats = codes.shape[1] // self.scale.shape[1]
        repeated = [
            values.repeat_interleave(repeats, 1)[:, :, None].view(torch.uint8) for values in parameters
        ]
        held = torch.cat((codes, *repeated), 2)
        return WeightRows.of_memory(held, held[0].numel(), self.codes.shape[1], kind, self.weight_format)


def rows_of(weight: Tensor | GroupedWeight) -> WeightRows:
    """Return the rows of a weight for the kernels, with its codes if they keep them."""
    if isinstance(weight, Tensor):
        return WeightRows.of_tensor(weight)
    return WeightRows.of_tensor(weight.dequantised()) if weight.weight_format is None else weight.rows()


class WeightSource(Protocol):
    """Weights of a checkpoint, read one by one.

    Attributes:
        names: names of the weights.
    """

    names: list[str]

    def has(self, name: str) -> bool:
        """Return whether there is a weight of this name."""

    def shape(self, name: str) -> Sequence[int]:
        """Return the shape of a weight."""

    def quantises(self, name: str) -> bool:
        """Return whether a weight is quantised."""

    def read(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """Return a weight in a dtype, by default in that of the file, or in float32 if it is decoded."""

    def rows(self, name: str) -> WeightRows:
        """Return the rows of the weight of a linear layer for the kernels."""


class StoredModule:
    """Module of a model whose weights are in files, as far as its parts are named by them.

    Parts and weights are attributes; a list of layers is indexed. A linear layer without bias has the bias None.

    Args:
        source: weights of the model.
        prefix: first part of the names of this module's weights; empty for the whole model.
        dtype: dtype of matrices that are read; vectors, such as weights of norms, stay in that of the file.
    """

    def __init__(self, source: WeightSource, prefix: str, dtype: torch.dtype) -> None:
        self._source, self._prefix, self._dtype = source, prefix, dtype

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        path = f"{self._prefix}{name}"
        if self._source.has(path):
            is_vector = len(self._source.shape(path)) == 1
            return self._source.read(path, None if is_vector else self._dtype)
        return None if name == "bias" else StoredModule(self._source, f"{path}.", self._dtype)

    def __getitem__(self, index: int) -> StoredModule:
        return StoredModule(self._source, f"{self._prefix}{index}.", self._dtype)

    def at(self, name: str) -> Any:
        """Return a part of this module by its name with dots."""
        return StoredModule(self._source, f"{self._prefix}{name}.", self._dtype)

    @property
    def in_features(self) -> int:
        return self._source.shape(f"{self._prefix}weight")[1]

    @property
    def out_features(self) -> int:
        return self._source.shape(f"{self._prefix}weight")[0]

    def rows(self) -> WeightRows:
        """Return the rows of a linear layer's weight for the kernels."""
        return self._source.rows(f"{self._prefix}weight")


class StoredModel(StoredModule):
    """Model whose weights are in files.

    Args:
        config: its configuration.
        source, dtype: as in `StoredModule`.
    """

    def __init__(self, config: Any, source: WeightSource, dtype: torch.dtype) -> None:
        super().__init__(source, "", dtype)
        self.config = config
