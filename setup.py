"""The compiled part of the package, for processors and systems that have what it needs; elsewhere it is left out.

`optional` makes a missing compiler a warning: the package then computes with torch.
"""

import platform
import sys

from setuptools import Extension, setup

FOLDER = "src/secondguess/runtime/native"
SUPPORTED = platform.machine() in ("x86_64", "AMD64") and sys.platform == "linux"
FEATURES = (
    "avx512f",
    "avx512bw",
    "avx512vl",
    "avx512dq",
    "avx512bf16",
    "avx512vnni",
    "fma",
    "amx-tile",
    "amx-bf16",
    "amx-int8",
)

kernels = Extension(
    "secondguess.runtime.native._kernels",
    sources=[f"{FOLDER}/decoder.cpp"],
    depends=[f"{FOLDER}/{name}.h" for name in ("vectors", "product", "attention")],
    language="c++",
    extra_compile_args=[
        "-std=c++17",
        "-O3",
        "-fopenmp",
        "-Wno-maybe-uninitialized",
        *(f"-m{each}" for each in FEATURES),
    ],
    extra_link_args=["-fopenmp"],
    optional=True,
)

setup(ext_modules=[kernels] if SUPPORTED else [])
