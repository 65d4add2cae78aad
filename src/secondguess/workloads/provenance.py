"""Provenance of a result, for repeating it; without host names and absolute paths."""

from __future__ import annotations

import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from secondguess.checkpoint.weight_files import hash_weights

LIBRARIES = ("secondguess", "torch", "transformers", "tokenizers", "numpy")


def public_name(name: str) -> str:
    """Return a model or drafter name, or another option, for reports: absolute paths become their last component.

    Server addresses are kept.

    >>> public_name("model:/data/tiny,dtype=float32"), public_name("some/model"), public_name("http://host/v1")
    ('model:tiny,dtype=float32', 'some/model', 'http://host/v1')
    """
    return re.sub(r"(^|[=:](?!//))/(?:[^+]*/)?(?=[^/])", r"\1", name)


@dataclass(frozen=True)
class Provenance:
    """Provenance of a run: command, code and library versions, machine and models."""

    date: str
    command: str
    commit: str | None
    dirty: bool | None
    python: str
    versions: dict[str, str | None]
    processor: str
    num_cores: int | None
    num_threads: int
    device: str
    dtype: str
    seed: int
    model_sha256: dict[str, str]
    runtimes: dict[str, str]

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


def collect_provenance(
    *,
    num_threads: int,
    device: str,
    dtype: str,
    seed: int,
    models: Mapping[str, Path],
    runtimes: Mapping[str, str],
) -> Provenance:
    """Collect the provenance of this run, with hashes of the weights in each model's directory."""
    commit, dirty = _git_state(Path(__file__).parents[1])
    return Provenance(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        command=shlex.join(map(public_name, sys.argv)),
        commit=commit,
        dirty=dirty,
        python=platform.python_version(),
        versions={name: _version(name) for name in LIBRARIES},
        processor=_processor(),
        num_cores=os.cpu_count(),
        num_threads=num_threads,
        device=device,
        dtype=dtype,
        seed=seed,
        model_sha256={name: hash_weights(folder) for name, folder in models.items()},
        runtimes=dict(runtimes),
    )


def _git_state(folder: Path) -> tuple[str | None, bool | None]:
    """Return the commit and whether the working tree differs; (None, None) outside a checkout."""
    try:
        _git(folder, "ls-files", "--error-unmatch", "core.py")
        changes = _git(folder, "status", "--porcelain", "--", ":/", ":(top,exclude)benchmarks/results")
        return _git(folder, "rev-parse", "HEAD"), bool(changes)
    except (OSError, subprocess.CalledProcessError):
        return None, None


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def _version(library: str) -> str | None:
    try:
        return version(library)
    except PackageNotFoundError:
        return None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
