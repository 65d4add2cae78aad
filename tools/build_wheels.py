"""Build the source distribution and every wheel: `python tools/build_wheels.py dist`.

There is a wheel for each processor with kernels, and one without kernels for all other systems. A wheel serves every
supported version of Python. A processor is left out, with a line that says so, if its compiler is not installed.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
KERNELS = {"x86_64": {"_avx2.so", "_avx512.so"}, "aarch64": {"_neon.so"}}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path, help="folder for the files, which are replaced")
    output: Path = parser.parse_args().output.resolve()
    shutil.rmtree(output, ignore_errors=True)
    with tempfile.TemporaryDirectory() as folder:
        sources = make_sources(output, Path(folder))
        make_wheel(sources, output, {"SECONDGUESS_KERNELS": "0"})
        for processor, names in KERNELS.items():
            if (compilers := compilers_for(processor)) is None:
                print(f"no wheel for {processor}: there is no {processor}-linux-gnu-g++", file=sys.stderr)
                continue
            built = make_wheel(sources, Path(folder) / processor, compilers)
            require_kernels(built, names)
            run("auditwheel", "repair", "--plat", "auto", "--wheel-dir", output, built)
    for path in sorted(output.iterdir()):
        if "manylinux" in path.name:
            run("auditwheel", "show", path)
        print(f"{path.name}: {path.stat().st_size / 1e6:.1f} MB", flush=True)
    run("twine", "check", "--strict", *output.iterdir())
    return 0


def make_sources(output: Path, folder: Path) -> Path:
    """Write the source distribution to the output, and return its unpacked folder.

    Wheels are built from it: what it lacks, they lack, and files of earlier builds are not packed.
    """
    run(sys.executable, "-m", "build", "--no-isolation", "--sdist", "--outdir", output, ROOT)
    (archive,) = output.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        opened.extractall(folder, filter="data")
    return folder / archive.name.removesuffix(".tar.gz")


def compilers_for(processor: str) -> dict[str, str] | None:
    """Return the environment in which setuptools builds for a processor, or None if there is no compiler."""
    environment = {"LDFLAGS": "-Wl,--strip-all", "_PYTHON_HOST_PLATFORM": f"linux-{processor}"}
    if processor == platform.machine():
        return environment if shutil.which("c++") else None
    prefix = f"{processor}-linux-gnu-"
    if shutil.which(f"{prefix}g++") is None:
        return None
    return environment | {
        "CC": f"{prefix}gcc",
        "CXX": f"{prefix}g++",
        "LDSHARED": f"{prefix}gcc -shared",
        "LDCXXSHARED": f"{prefix}g++ -shared",
    }


def make_wheel(sources: Path, output: Path, environment: dict[str, str]) -> Path:
    """Build a wheel in an environment, and return it."""
    before = set(output.glob("*.whl"))
    command = (sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", output, sources)
    run(*command, environment=environment)
    (built,) = set(output.glob("*.whl")) - before
    return built


def require_kernels(wheel: Path, names: set[str]) -> None:
    """Refuse a wheel without kernels: a failed compilation is only a warning of setuptools."""
    with zipfile.ZipFile(wheel) as opened:
        found = {Path(name).name for name in opened.namelist() if name.endswith(".so")}
    if found != names:
        raise SystemExit(f"expected the kernels {sorted(names)} in {wheel.name}, got {sorted(found)}")


def run(*command: object, environment: dict[str, str] | None = None) -> None:
    subprocess.run([str(part) for part in command], check=True, env=os.environ | (environment or {}))


if __name__ == "__main__":
    sys.exit(main())
