"""Weight files of a model: their number of parameters, and their SHA-256 fingerprint.

A fingerprint tells a model that was measured from one that was retrained since.
"""

from __future__ import annotations

import hashlib
import math
from functools import lru_cache
from pathlib import Path

from safetensors import SafetensorError, safe_open

from secondguess.errors import CheckpointError


def weight_files(folder: Path) -> list[Path]:
    """Return a model's safetensors files sorted by name, empty for weights in another format."""
    return sorted(folder.glob("*.safetensors"))


def count_parameters(folder: Path) -> int:
    """Return a model's number of parameters, from the headers of its weight files.

    For weights in the older pickle format it is estimated: they rarely take more than two bytes
    each.

    Raises:
        CheckpointError: if a file is not safetensors or is truncated.
    """
    files = weight_files(folder)
    if not files:
        return sum(file.stat().st_size for file in folder.glob("*.bin")) // 2
    return sum(map(_count_in_file, files))


def _count_in_file(file: Path) -> int:
    try:
        with safe_open(file, framework="numpy") as tensors:
            return sum(math.prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"expected whole safetensors weights in {file}, got: {error}; copy or download the checkpoint again"
        ) from error


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
