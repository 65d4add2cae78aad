"""Every script in benchmarks/ can be imported with the package as it is, and pages name only scripts that exist."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks"
PAGES = [
    ROOT / "Makefile",
    *ROOT.glob("*.md"),
    *(ROOT / "docs").glob("*.md"),
    *FOLDER.glob("*.*"),
    *(FOLDER / "peers").glob("*.*"),
]
REMOVED = "| removed | question | answer |"


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.py")))
def test_the_script_can_be_imported(name: str) -> None:
    assert import_module(name).__doc__


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_scripts_that_a_page_names_exist(page: Path) -> None:
    named = re.findall(r"benchmarks/([\w/]+\.(?:py|sh))", page.read_text(encoding="utf-8"))
    assert [name for name in named if not (FOLDER / name).exists()] == []


def test_the_page_of_benchmarks_lists_the_scripts() -> None:
    present, removed = (FOLDER / "README.md").read_text(encoding="utf-8").split(REMOVED)
    scripts = {path.stem for path in FOLDER.glob("*.py")}
    listed = {Path(name).stem for name in re.findall(r"`(\w+\.py)`", present)}
    assert listed - {path.stem for path in FOLDER.glob("peers/*.py")} == scripts
    gone = re.findall(
        r"`(\w+)`", "".join(line.split("|")[1] for line in removed.split("\n\n")[0].splitlines() if line)
    )
    assert gone
    assert not scripts & set(gone)
