"""Atomic writing of files, and a check that an output folder can be written to."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from glob import escape
from pathlib import Path
from tempfile import TemporaryFile
from typing import BinaryIO

from secondguess.errors import BadInputError

ABANDONED_SECONDS = 3600
"""Seconds without a write after which a temporary file is that of a process that was killed."""


@contextmanager
def write_atomically(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file that replaces ``path``, or the file that it links to, at the end.

    An interruption leaves the previous file unchanged.

    Raises:
        OSError: the file cannot be written; the error names it.
    """
    path = path.resolve()
    for left in path.parent.glob(f".{escape(path.name)}.*.partial"):
        with suppress(FileNotFoundError):
            if time.time() - left.stat().st_mtime > ABANDONED_SECONDS:
                left.unlink()
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with temporary.open("wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except OSError as error:
        if error.errno and error.filename is None:  # a write, which fails on a full disk
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise
    finally:
        temporary.unlink(missing_ok=True)


def require_folder(folder: Path, option: str) -> None:
    """Check that files can be written into a folder, which may not exist yet; create nothing.

    Called before long work, so that an unusable output folder is reported at once.

    Args:
        folder: output folder.
        option: command-line option that names it, for the error message.

    Raises:
        BadInputError: the folder is a file, or it cannot be created or written to.
    """
    if folder.is_file():
        raise BadInputError(f"expected a folder for {option}, got the file {folder}")
    try:
        # Missing folders will be created in the nearest existing one.
        nearest = next((each for each in (folder, *folder.parents) if each.exists()), Path())
        with TemporaryFile(dir=nearest):
            pass
    except OSError as error:
        raise BadInputError(
            f"expected a folder for {option} that can be written to, got {folder}: {error.strerror}; name another"
        ) from error
