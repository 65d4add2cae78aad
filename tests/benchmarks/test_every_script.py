"""Every script in benchmarks/ can be imported with the package as it is."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.py")))
def test_the_script_can_be_imported(name: str) -> None:
    assert import_module(name).__doc__
