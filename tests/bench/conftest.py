"""Fixtures of the tests of benchmarks."""

from __future__ import annotations

from pathlib import Path

import pytest

from secondguess.bench.systems import Models


@pytest.fixture(scope="module")
def models(tiny_checkpoint: Path) -> Models:
    """The tiny target, loaded once for a file's systems."""
    return Models(str(tiny_checkpoint), "float32", "cpu")
