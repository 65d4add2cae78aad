"""Packaging without building: the wheels' tags and files, and the workflows; `make wheel` builds and checks wheels."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
PROGRAM = """
import setuptools
from distutils.core import run_setup
distribution = run_setup("setup.py", script_args=[], stop_after="config")
for name in ("bdist_wheel", "build_ext"):
    distribution.get_command_obj(name).ensure_finalized()
print("-".join(distribution.get_command_obj("bdist_wheel").get_tag()))
print(*sorted(distribution.get_command_obj("build_ext").get_ext_filename(kernels.name)
              for kernels in distribution.ext_modules or ()))
"""


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
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=ROOT,
        env=os.environ | settings,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found_tag, names = done.stdout.splitlines()
    assert found_tag == tag
    assert set(names.split()) == {f"secondguess/runtime/cpu/_{kind}.so" for kind in kernels}


def test_workflows_call_targets_of_make_that_exist():
    targets = set(re.findall(r"^([a-z][a-z -]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    targets = {target for line in targets for target in line.split()}
    called = set()
    for file in (ROOT / ".github" / "workflows").glob("*.yml"):
        jobs = yaml.safe_load(file.read_text())["jobs"]
        text = str(jobs)
        called |= set(re.findall(r"make ([a-z-]+)", text)) | set(
            re.findall(r"'target': '(test-[a-z]+)'", text)
        )
    assert {"check", "test", "test-transformers", "test-oldest", "wheel"} <= called <= targets
