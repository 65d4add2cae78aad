"""Every script in examples/, and every Python block of README and of the page on Transformers, runs with the built-in pair."""

import re
import runpy
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import secondguess
from secondguess.builtin import builtin_paths

REPOSITORY = Path(__file__).parents[1]
OWN_TEST = ("digits", "ray_serve", "tracking")
"""Examples that need more than the package; `test_digits.py`, `server/test_ray.py` and `continuous` run them."""
EXAMPLES = sorted(path for path in (REPOSITORY / "examples").glob("*.py") if path.stem not in OWN_TEST)
PAGES = ("README.md", "docs/howto-from-transformers.md")
STAND_INS = {"Qwen/Qwen3-8B": str(builtin_paths().target), "Qwen/Qwen3-0.6B": str(builtin_paths().drafter)}
"""Names of models in the blocks, and the built-in models that run in their place."""


def blocks_of(page: str) -> list[str]:
    """Return the Python blocks of a page as they are written."""
    return re.findall(r"```python\n(.*?)```", (REPOSITORY / page).read_text(), re.DOTALL)


@pytest.fixture(scope="module", autouse=True)
def cached_load():
    """Each pair of models is loaded once for all scripts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(secondguess, "load", cache(secondguess.load))
        yield


@pytest.mark.parametrize("path", EXAMPLES, ids=[path.stem for path in EXAMPLES])
def test_example_runs_and_prints(path, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", [str(path)])
    runpy.run_path(str(path), run_name="__main__")
    assert len(capsys.readouterr().out) > 40


@pytest.mark.parametrize("path", EXAMPLES, ids=[path.stem for path in EXAMPLES])
def test_example_is_short_enough_to_read(path):
    assert len(path.read_text().splitlines()) <= 40


@pytest.mark.parametrize("page", PAGES)
def test_blocks_of_a_page_run_one_after_the_other(page, capsys):
    names: dict[str, object] = {}
    for block in blocks_of(page):
        for name, path in STAND_INS.items():
            block = block.replace(f'"{name}"', f'"{path}"').replace(f":{name}", f":{path}")
        exec(compile(block, page, "exec"), names)
        assert capsys.readouterr().out


def test_the_pages_have_blocks_to_run():
    assert [len(blocks_of(page)) for page in PAGES] == [2, 3]


def test_the_first_block_of_the_readme_has_types(tmp_path):
    (tmp_path / "block.py").write_text(blocks_of("README.md")[0])
    command = [sys.executable, "-m", "mypy", "--strict", str(tmp_path / "block.py")]
    checked = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout
