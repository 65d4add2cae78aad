"""Files that list the target layers to skip in self-speculative drafting."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from secondguess.errors import CheckpointError
from secondguess.heads.files import CONFIG, read_config

KIND = "secondguess-layer-skip"


def read_skipped(folder: Path) -> list[int]:
    """Return the skipped layers, counted from 0.

    Raises:
        CheckpointError: the folder does not hold a list of skipped layers.
    """
    config = read_config(folder)
    skipped: Any = config.get("skipped")
    are_layers = isinstance(skipped, list) and all(type(layer) is int and layer >= 0 for layer in skipped)
    if config.get("model_type") != KIND or not are_layers:
        raise CheckpointError(
            f"expected layers found by `secondguess train layer-skip` in {folder}, got {config.get('model_type')} with "
            f"{skipped!r:.60}"
        )
    return list(skipped)


def write_skipped(folder: Path, skipped: Sequence[int], facts: Mapping[str, Any]) -> None:
    """Write the skipped layers and further fields `facts` to `config.json`."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"model_type": KIND, **facts, "skipped": list(skipped)}
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
