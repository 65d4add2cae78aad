"""The official `openai` package of npm: chat, stream, structured reply, response and errors."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from conftest import serving
from secondguess import load
from secondguess.engine import Engine

PACKAGES = os.environ.get("SECONDGUESS_NPM_PACKAGES", "")


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
@pytest.mark.skipif(
    not PACKAGES or not Path(PACKAGES, "openai", "package.json").is_file(),
    reason="needs SECONDGUESS_NPM_PACKAGES, a folder node_modules with the package openai",
)
def test_the_client_of_npm_works():
    engine = Engine(load())
    try:
        with serving(engine) as url:
            script = Path(__file__).with_name("npm_client.mjs")
            done = subprocess.run(
                ["node", str(script), PACKAGES, url], capture_output=True, text=True, timeout=120, check=False
            )
    finally:
        engine.close()
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr
