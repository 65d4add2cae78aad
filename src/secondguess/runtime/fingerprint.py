"""Which weights are these? A hash that tells a retrained model from the one that was measured."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple


class _Stamp(NamedTuple):
    """A file as it was when it was hashed: one that was written since has another."""

    path: Path
    num_bytes: int
    written: int

    @classmethod
    def of(cls, path: Path) -> _Stamp:
        found = path.stat()
        return cls(path.resolve(), found.st_size, found.st_mtime_ns)


def weight_files(folder: Path) -> list[Path]:
    """The files that `hash_weights` reads, in the order of their names; none for weights in another format."""
    return sorted(folder.glob("*.safetensors"))


def hash_weights(folder: Path) -> str:
    """SHA-256 over the weight files of a model, in the order of their names.

    Reads all weights, about a second per gigabyte, but only once in a process while the files stay as they are.
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
