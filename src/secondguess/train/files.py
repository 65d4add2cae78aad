"""Files that are either whole or absent, in folders that were tried before the work began."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import BinaryIO

from secondguess.errors import BadInputError


@contextmanager
def write_atomically(path: Path) -> Iterator[BinaryIO]:
    """Write beside ``path`` and rename at the end: an interruption leaves the earlier file as it was."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with temporary.open("wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def refuse_file(folder: Path, option: str) -> None:
    """Refuse what is there and no folder, without making one.

    Raises:
        BadInputError: naming it.
    """
    if folder.exists() and not folder.is_dir():
        raise BadInputError(f"expected a folder for {option}, got the file {folder}")


def require_folder(folder: Path, option: str) -> None:
    """Make the folder, if there is none, and see that it can be written to: before work that ends in it.

    Raises:
        BadInputError: it cannot be made or written to.
    """
    refuse_file(folder, option)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise BadInputError(
            f"expected a folder that can be written to for {option}, got {folder}: {error.strerror}; name another"
        ) from error
