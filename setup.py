"""The compiled part of the package, for processors and systems that have what it needs; elsewhere it is left out.

`optional` makes a missing compiler a warning: the package then computes with torch.
"""

import platform
import sys
from glob import glob
from pathlib import Path
from runpy import run_path

from setuptools import Extension, setup

FOLDER = "src/secondguess/runtime/cpu"
X86 = {
    "avx512": [
        *(f"avx512{part}" for part in ("f", "bw", "vl", "dq", "bf16", "vnni", "vbmi")),
        *("fma", "f16c", "amx-tile", "amx-bf16", "amx-int8"),
    ],
    "avx2": ["avx2", "fma", "f16c"],
}
ARM = {"neon": ["arch=armv8.2-a+dotprod"]}
INSTRUCTIONS = {"x86_64": X86, "AMD64": X86, "aarch64": ARM} if sys.platform == "linux" else {}
SOURCES = run_path(f"{FOLDER}/sources.py")["hash_sources"](Path(FOLDER))

kernels = [
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
            *(f"-m{each}" for each in instructions),
        ],
        extra_link_args=["-pthread"],
        optional=True,
    )
    for kind, instructions in INSTRUCTIONS.get(platform.machine(), {}).items()
]

setup(ext_modules=kernels)
