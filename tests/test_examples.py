"""Every script in examples/ and every Python block of the README runs, with the built-in pair."""

import re
import runpy
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import secondguess

REPOSITORY = Path(__file__).parents[1]
OWN_TEST = ("digits", "ray_serve", "tracking")
"""Examples that need more than the package; `test_digits.py`, `server/test_ray.py` and `continuous` run them."""
EXAMPLES = sorted(path for path in (REPOSITORY / "examples").glob("*.py") if path.stem not in OWN_TEST)
README_BLOCKS = re.findall(r"```python\n(.*?)```", (REPOSITORY / "README.md").read_text(), re.DOTALL)


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


@pytest.mark.parametrize("block", README_BLOCKS, ids=range(len(README_BLOCKS)))
def test_readme_block_runs(block, capsys):
    exec(compile(block, "README.md", "exec"), {})
    assert capsys.readouterr().out


def test_the_readme_has_blocks_to_run():
    assert len(README_BLOCKS) >= 2


def test_the_first_block_of_the_readme_has_types(tmp_path):
    (tmp_path / "block.py").write_text(README_BLOCKS[0])
    command = [sys.executable, "-m", "mypy", "--strict", str(tmp_path / "block.py")]
    checked = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout
