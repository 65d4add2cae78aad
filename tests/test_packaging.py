"""Packaging without building: the wheels' tags and files, and the workflows; `make wheel` builds and checks wheels."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
PROGRAM = """
import json, setuptools
from distutils.core import run_setup
distribution = run_setup("setup.py", script_args=[], stop_after="config")
wheel, libraries = (distribution.get_command_obj(name) for name in ("bdist_wheel", "build_ext"))
wheel.ensure_finalized()
libraries.ensure_finalized()
files = [libraries.get_ext_filename(kernels.name) for kernels in distribution.ext_modules or ()]
text = distribution.metadata.get_long_description()
print(json.dumps({"tag": wheel.get_tag(), "files": files, "readme": text}))
"""


def package(settings: dict[str, str]) -> dict[str, Any]:
    """Return what a wheel would be called and contain if it were built with these settings."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=ROOT,
        env=os.environ | settings,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize(
    ("settings", "tag", "kernels"),
    [
        ({"_PYTHON_HOST_PLATFORM": "linux-x86_64"}, "py3-none-linux_x86_64", {"avx2", "avx512"}),
        ({"_PYTHON_HOST_PLATFORM": "linux-aarch64"}, "py3-none-linux_aarch64", {"neon"}),
        ({"_PYTHON_HOST_PLATFORM": "macosx-11.0-arm64"}, "py3-none-any", set()),
        ({"SECONDGUESS_KERNELS": "0"}, "py3-none-any", set()),
    ],
)
def test_wheels_serve_every_python(settings, tag, kernels):
    found = package(settings)
    assert "-".join(found["tag"]) == tag
    assert set(found["files"]) == {f"secondguess/runtime/cpu/_{kind}.so" for kind in kernels}


def test_links_of_the_readme_lead_somewhere_outside_the_repository():
    text = package({})["readme"]
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert len(links) > 10
    assert [link for link in links if not link.startswith(("https://", "#"))] == []
    in_repository = [
        link.partition("/blob/main/")[2].partition("#")[0] for link in links if "/blob/main/" in link
    ]
    assert len(in_repository) > 10
    assert all((ROOT / path).exists() for path in in_repository)


def test_ci_calls_targets_of_make_that_exist():
    targets = set(re.findall(r"^([a-z][a-z -]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    targets = {target for line in targets for target in line.split()}
    called = set(re.findall(r"make ([a-z-]+)", (ROOT / ".ci" / "run").read_text()))
    assert {"docs", "wheel", "try-wheel"} <= called
    for file in (ROOT / ".github" / "workflows").glob("*.yml"):
        jobs = yaml.safe_load(file.read_text())["jobs"]
        text = str(jobs)
        called |= set(re.findall(r"make ([a-z-]+)", text)) | set(
            re.findall(r"'target': '(test-[a-z]+)'", text)
        )
    assert {"check", "test", "test-transformers", "test-oldest"} <= called <= targets
