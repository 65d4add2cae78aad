"""Atomic files."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from secondguess.files import write_atomically


def test_an_interrupted_write_keeps_the_earlier_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"earlier")

    def interrupted() -> None:
        with write_atomically(path) as stream:
            stream.write(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert path.read_bytes() == b"earlier"
    assert list(tmp_path.iterdir()) == [path]


def test_what_a_killed_process_has_left_is_removed_by_the_next_write(tmp_path: Path) -> None:
    abandoned, running = left = [tmp_path / f".file.{number}.partial" for number in (7, 8)]
    for path in left:
        path.write_bytes(b"half")
    hours_ago = time.time() - 7200
    os.utime(abandoned, (hours_ago, hours_ago))
    with write_atomically(tmp_path / "file") as stream:
        stream.write(b"whole")
    assert sorted(tmp_path.iterdir()) == sorted([running, tmp_path / "file"])
