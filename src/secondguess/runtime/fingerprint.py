"""Which weights are these? A hash that tells a retrained model from the one that was measured."""

from __future__ import annotations

import hashlib
from pathlib import Path


def hash_weights(folder: Path) -> str:
    """SHA-256 over the weight files of a model, in the order of their names."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()
