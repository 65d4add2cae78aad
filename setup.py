"""The compiled part of the package, for processors and systems that have what it needs; elsewhere it is left out.

The kernels are plain libraries, loaded with ctypes: their files and the wheel serve every version of Python. `optional`
makes a missing compiler a warning: the package then computes with torch, and says so at its first use.

`SECONDGUESS_KERNELS=0` leaves the kernels out, and `_PYTHON_HOST_PLATFORM=linux-aarch64` with `CXX` builds them for
another processor (`tools/build_wheels.py`).
"""

import os
import re
import sysconfig
from glob import glob
from pathlib import Path
from runpy import run_path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

FOLDER = "src/secondguess/runtime/cpu"
X86 = {
    "avx512": [
        *(f"avx512{part}" for part in ("f", "bw", "vl", "dq", "bf16", "vnni", "vbmi")),
        *("fma", "f16c", "amx-tile", "amx-bf16", "amx-int8"),
    ],
    "avx2": ["avx2", "fma", "f16c"],
}
ARM = {"neon": ["arch=armv8.2-a+dotprod"]}
INSTRUCTIONS = {"linux-x86_64": X86, "linux-aarch64": ARM}
PAGES = "https://github.com/secondguess/secondguess"
SOURCES = run_path(f"{FOLDER}/sources.py")["hash_sources"](Path(FOLDER))


class BuildLibraries(build_ext):
    """Names libraries without the version of Python."""

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split("."))) + ".so"


class WheelForEveryPython(bdist_wheel):
    """Tags a wheel with its platform only."""

    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", super().get_tag()[2])


def readme() -> str:
    """Return the README with links that lead somewhere outside the repository, too."""
    text = Path("README.md").read_text(encoding="utf-8")
    text = re.sub(r"(!\[[^]]*\]\()(?!https?:)", rf"\1{PAGES}/raw/main/", text)
    return re.sub(r"(?<!!)(\[[^]]*\]\()(?!https?:|#)", rf"\1{PAGES}/blob/main/", text)


def kernels() -> list[Extension]:
    """Return the libraries that are built for the platform: one for each kind of processor."""
    if os.environ.get("SECONDGUESS_KERNELS") == "0":
        return []
    return [
        Extension(
            f"secondguess.runtime.cpu._{kind}",
            sources=[f"{FOLDER}/{kind}.cpp"],
            depends=glob(f"{FOLDER}/*.h"),
            define_macros=[("SECONDGUESS_SOURCES", f'"{SOURCES}"')],
            language="c++",
            extra_compile_args=[
                "-std=c++17",
                "-O3",
                "-pthread",
                # A row's bits must not depend on which products and sums the compiler joins.
                "-ffp-contract=off",
                # Kernels of two kinds in one process share nothing.
                "-fvisibility=hidden",
                # GCC 12 means its own intrinsics
                "-Wno-uninitialized",
                "-Wno-maybe-uninitialized",
                *(f"-m{instruction}" for instruction in instructions),
            ],
            extra_link_args=["-pthread", "-Wl,--strip-all"],
            optional=True,
        )
        for kind, instructions in INSTRUCTIONS.get(sysconfig.get_platform(), {}).items()
    ]


setup(
    long_description=readme(),
    long_description_content_type="text/markdown",
    ext_modules=kernels(),
    cmdclass={"build_ext": BuildLibraries, "bdist_wheel": WheelForEveryPython},
)
