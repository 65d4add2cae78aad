"""Weight files of a model: their number of parameters, and their SHA-256 fingerprint.

A fingerprint tells a model that was measured from one that was retrained since.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open
from torch import Tensor

from secondguess.errors import CheckpointError

BYTES_OF_DTYPES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
LFS_POINTER = "a pointer of Git LFS"
LFS_ADVICE = "run `git lfs pull` in its folder, or download the file itself"


def tensor_files(folder: Path, values: Mapping[str, Any] | None = None) -> list[Path]:
    """Return the safetensors files from which a model is loaded; empty for weights in another format.

    They are those from which Transformers loads it. Other files in the folder, such as adapters, older weights or a copy
    in another format, are not read. Only where Transformers finds none, as with names of other programs, all are.

    Args:
        folder: directory of the model.
        values: contents of its `config.json`; None to read it.

    Raises:
        CheckpointError: if the index is broken.
    """
    named = _named_weights(folder, _read_values(folder) if values is None else values)
    whole, index = folder / (named or "model.safetensors"), folder / (named or "model.safetensors.index.json")
    if whole.suffix == ".safetensors" and whole.is_file():
        return [whole]
    if index.suffix != ".json" or not index.is_file():
        return [] if any(folder.glob("pytorch_model*.bin")) else sorted(folder.glob("*.safetensors"))
    try:
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"expected a weight_map in {index}, got: {error!r}; copy or download the checkpoint again"
        ) from error
    return [folder / name for name in names]


def _read_values(folder: Path) -> Mapping[str, Any]:
    values = None
    with suppress(OSError, ValueError):
        values = json.loads((folder / "config.json").read_bytes())
    return values if isinstance(values, dict) else {}


def weight_files(folder: Path) -> list[Path]:
    """Return the weight files of a model or of drafter heads, sorted by name.

    The path of a GGUF file is that of its only file. Pickles are returned if there is no other format.

    Raises:
        CheckpointError: if the index is broken.
    """
    return [folder] if folder.is_file() else tensor_files(folder) or pickle_files(folder)


def pickle_files(folder: Path) -> list[Path]:
    """Return the files of a model's weights in the older pickle format, not those of an optimizer or a trainer."""
    whole = folder / "pytorch_model.bin"
    return [whole] if whole.is_file() else sorted(folder.glob("pytorch_model*.bin"))


def _named_weights(folder: Path, values: Mapping[str, Any]) -> str | None:
    """Return the name of the file with the weights, or their index, if the configuration gives one.

    Raises:
        CheckpointError: a name outside of the folder.
    """
    named = values.get("transformers_weights")
    if not isinstance(named, str):
        return None
    if Path(named).is_absolute() or ".." in Path(named).parts:
        raise CheckpointError(
            f"expected transformers_weights in {folder} to be a file in it, got {named!r}; correct config.json"
        )
    return named


def num_in_pickles(folder: Path, values: Mapping[str, Any]) -> int:
    """Return the number of weights in the older pickle format, estimated from the size of the files and the dtype."""
    text = values.get("text_config") or {}
    named = next(
        (each[key] for each in (values, text) for key in ("dtype", "torch_dtype") if each.get(key)), ""
    )
    size = BYTES_OF_DTYPES.get(str(named).removeprefix("torch."), 2)  # of which none takes fewer
    return sum(file.stat().st_size for file in pickle_files(folder)) // size


class TensorHeader(NamedTuple):
    """Shape and dtype of a tensor in a safetensors file, such as `BF16`."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


class TensorFiles:
    """Opened safetensors files, whose tensors are memory-mapped.

    Args:
        files: their paths.

    Attributes:
        headers: headers of the tensors, by name.

    Raises:
        CheckpointError: a file is not safetensors or is truncated.
    """

    def __init__(self, files: Iterable[Path]) -> None:
        self.headers: dict[str, TensorHeader] = {}
        self._files: dict[str, Any] = {}
        for file in files:
            opened = _open_tensors(file)
            for name in opened.keys():  # noqa: SIM118 - not a dictionary
                part = opened.get_slice(name)
                self.headers[name] = TensorHeader(tuple(part.get_shape()), part.get_dtype())
                self._files[name] = opened

    def read(self, name: str) -> Tensor:
        """Return a tensor in the memory that is mapped from the file."""
        found: Tensor = self._files[name].get_tensor(name)
        return found

    def read_part(self, name: str, index: int) -> Tensor:
        """Return one part of a tensor along its first dimension."""
        found: Tensor = self._files[name].get_slice(name)[index]
        return found


def count_parameters(folder: Path) -> int:
    """Return the number of weights in the safetensors files of a folder, from their headers.

    Raises:
        CheckpointError: if a file is not safetensors or is truncated.
    """
    return sum(header.num_elements for header in TensorFiles(tensor_files(folder)).headers.values())


def _open_tensors(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        reason, advice = str(error), "copy or download the checkpoint again"
        if is_lfs_pointer(file):
            reason, advice = LFS_POINTER, LFS_ADVICE
        elif isinstance(error, PermissionError):
            advice = "allow this user to read it"
        raise CheckpointError(
            f"expected whole safetensors weights in {file}, got: {reason}; {advice}"
        ) from error


def is_lfs_pointer(file: Path) -> bool:
    """Return whether a file is the small one that Git LFS leaves in place of a large one."""
    start = b"version https://git-lfs"
    with suppress(OSError), file.open("rb") as opened:
        return opened.read(len(start)) == start
    return False


def hash_weights(folder: Path) -> str:
    """Return the SHA-256 over a model's weight files, in the order of their names.

    Reads all weights, about a second per gigabyte. The result is cached in the process for as long
    as the sizes and modification times of the files stay the same.
    """
    found = [(file.resolve(), file.stat()) for file in weight_files(folder)]
    return _hash_files(tuple((path, stat.st_size, stat.st_mtime_ns) for path, stat in found))


@lru_cache(maxsize=64)
def _hash_files(stamps: tuple[tuple[Path, int, int], ...]) -> str:
    """Return the SHA-256 over files given as path, size and time of modification."""
    digest = hashlib.sha256()
    for path, _, _ in stamps:
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()
