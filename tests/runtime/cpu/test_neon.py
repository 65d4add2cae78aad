"""The kernels for ARM, built by a cross compiler and run by an emulator, give the bits of those for AVX2."""

import shutil
import subprocess
from pathlib import Path

import pytest

import secondguess.runtime.cpu
from secondguess.runtime.cpu.library import processor_supports

SOURCE = Path(__file__).parent / "kernel_results.cpp"
FLAGS = [
    *("-std=c++17", "-O1", "-pthread", "-ffp-contract=off", "-w", '-DSECONDGUESS_SOURCES="none"'),
    f"-I{Path(secondguess.runtime.cpu.__file__).parent}",
]


def test_the_kernels_for_arm_give_the_bits_of_those_for_avx2(tmp_path):
    host, cross = shutil.which("c++"), shutil.which("aarch64-linux-gnu-g++")
    emulator = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
    if not (host and cross and emulator):
        pytest.skip("needs c++, and Debian's g++-aarch64-linux-gnu and qemu-user-static")
    if not processor_supports("avx2"):
        pytest.skip("this processor has no AVX2")
    expected = run([host, "-mavx2", "-mfma", "-mf16c"], tmp_path / "avx2")
    found = run([cross, "-march=armv8.2-a+dotprod", "-static"], tmp_path / "neon", emulator)
    assert len(expected) > 60
    assert found == expected


def run(compiler: list[str], program: Path, *emulator: str) -> list[str]:
    """Compile the program with a compiler, and return the lines that it prints."""
    subprocess.run([*compiler, *FLAGS, str(SOURCE), "-o", str(program)], check=True)
    printed = subprocess.run([*emulator, str(program)], check=True, capture_output=True, text=True)
    return printed.stdout.splitlines()
