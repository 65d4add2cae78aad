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


def require_folder(folder: Path, option: str) -> None:
    """See that files can be written into a folder, which may not be there yet, before work that ends in it. Makes nothing.

    Args:
        option: who named it.

    Raises:
        BadInputError: it is a file, or lies where nothing can be written.
    """
    if folder.is_file():
        raise BadInputError(f"expected a folder for {option}, got the file {folder}")
    try:
        # What is missing will be made in the nearest folder that is there.
        nearest = next((each for each in (folder, *folder.parents) if each.exists()), Path())
        with TemporaryFile(dir=nearest):
            pass
    except OSError as error:
        raise BadInputError(
            f"expected a folder for {option} that can be written to, got {folder}: {error.strerror}; name another"
        ) from error
