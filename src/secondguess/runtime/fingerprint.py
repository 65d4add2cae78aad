"""SHA-256 fingerprints of model weights, which differ between a measured and a retrained model."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple


class _Stamp(NamedTuple):
    """Path, size and modification time of a file, which change when the file is rewritten."""

    path: Path
    num_bytes: int
    written: int

    @classmethod
    def of(cls, path: Path) -> _Stamp:
        found = path.stat()
        return cls(path.resolve(), found.st_size, found.st_mtime_ns)


def weight_files(folder: Path) -> list[Path]:
    """Return a model's safetensors files sorted by name, empty for weights in another format."""
    return sorted(folder.glob("*.safetensors"))


def hash_weights(folder: Path) -> str:
    """Return the SHA-256 over a model's weight files, in the order of their names.

    Reads all weights, about a second per gigabyte. The result is cached in the process for as long
    as the sizes and modification times of the files stay the same.
    """
    return _hash_files(tuple([_Stamp.of(path) for path in weight_files(folder)]))


@lru_cache(maxsize=64)
def _hash_files(stamps: tuple[_Stamp, ...]) -> str:
    digest = hashlib.sha256()
    for stamp in stamps:
        with stamp.path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()
