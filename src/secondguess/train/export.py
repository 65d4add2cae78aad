"""Transformers model directories, written atomically."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from secondguess.checkpoint.resolve import DTYPE_NAMES
from secondguess.runtime.quiet import no_progress_bars


@contextmanager
def write_folder_atomically(directory: Path) -> Iterator[Path]:
    """Yield a temporary folder whose files are then moved to `directory`, each atomically.

    No file is moved if writing fails.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory) as temporary:
        fresh = Path(temporary)
        yield fresh
        for path in sorted(fresh.iterdir()):
            # A copy has the default permissions, a file written as temporary is private.
            shutil.copyfile(path, f"{path}.whole")
            os.replace(f"{path}.whole", directory / path.name)


def saved_dtype(config: Mapping[str, Any]) -> torch.dtype:
    """Return the dtype that a configuration names; float32 if it names none or an unknown one."""
    name = str(config.get("dtype") or "float32").removeprefix("torch.")
    found: torch.dtype = getattr(torch, name if name in DTYPE_NAMES else "float32")
    return found


def save_model(model: Any, directory: Path, dtype: torch.dtype) -> None:
    """Write a Transformers model without its tokenizer, each file atomically.

    The model is converted to `dtype` in place.
    """
    with write_folder_atomically(directory) as fresh, no_progress_bars():
        model.to(dtype).save_pretrained(fresh)
