"""Install a wheel into an empty environment, and generate there without a compiler: `python tools/try_wheel.py WHEEL`.

The text is the built-in target's; `--model` names a folder or GGUF file. Dependencies come from pip's index;
`PIP_EXTRA_INDEX_URL` and `PIP_CONSTRAINT` choose others.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

PROGRAM = """
import sys, time
import secondguess
from secondguess.runtime.cpu.library import units
start, *models = sys.argv[1:]
text = ""
for piece in secondguess.load(*models).stream("def add(a, b):", max_tokens=5):
    if not text:
        print(f"first text after {time.time() - float(start):.1f} s")
    text += piece.text
print(f"{secondguess.__version__} on Python {sys.version.split()[0]}: {text!r}")
print("kernels:", *(unit.name for unit in units()))
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--model", type=Path, help="folder or GGUF file; by default the built-in target")
    options = parser.parse_args()
    wheel: Path = options.wheel.resolve(strict=True)
    models = [str(options.model.resolve(strict=True))] if options.model else []
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        programs = Path(folder) / ("Scripts" if os.name == "nt" else "bin")
        start = time.monotonic()
        pip = [str(programs / "python"), "-m", "pip"]
        subprocess.run([*pip, "install", "--quiet", f"{wheel}[gguf]" if models else str(wheel)], check=True)
        subprocess.run([*pip, "check"], check=True)
        print(f"installed in {time.monotonic() - start:.0f} s", flush=True)
        # No PYTHONPATH, no compiler, no verdicts of earlier checks
        kept = {
            name: value for name, value in os.environ.items() if name.upper() in ("SYSTEMROOT", "TEMP", "TMP")
        }
        environment = {**kept, "PATH": str(programs), "SECONDGUESS_CACHE": ""}
        command = [str(programs / "python"), "-c", PROGRAM, str(time.time()), *models]
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, check=False
        )
    print(done.stdout + done.stderr, end="")
    if done.returncode:
        return done.returncode
    has_kernels = "kernels: " in done.stdout
    if has_kernels == ("any" in wheel.stem.split("-")):
        print(f"expected {'no ' if has_kernels else ''}kernels in {wheel.name}", file=sys.stderr)
        return 1
    if not has_kernels and "several times slower" not in done.stderr:
        print("expected a warning that there are no kernels", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
