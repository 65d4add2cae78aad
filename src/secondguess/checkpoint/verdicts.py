"""Verdicts of checks at loading, kept for the next time that the same files are loaded.

A check compares the kernels with the module of Transformers. Its result depends on the files, the encoding, the kernels,
the processor and the versions of the libraries; with all of them the same, a model is not checked again.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import torch
import transformers

from secondguess.checkpoint.plan import Checkpoint
from secondguess.runtime.cpu import library
from secondguess.runtime.cpu.check import CheckedPart
from secondguess.runtime.weight_format import WeightFormat

SETTING = "SECONDGUESS_CACHE"
"""Environment variable with the folder of verdicts; empty to keep none."""


@dataclass(frozen=True)
class Verdict:
    """Result of a check.

    Args:
        part: part with the largest error.
        error: this error, relative to that of rounding.
        limit: largest error that passes.
    """

    part: str
    error: float
    limit: float

    @classmethod
    def of_parts(cls, parts: Sequence[CheckedPart]) -> Verdict:
        """Return the verdict on a model: that of its worst part, the first one that fails."""
        failed = [part for part in parts if not part.passes]
        worst = failed[0] if failed else max(parts, key=lambda part: part.error / part.limit)
        return cls(worst.name, worst.error, worst.limit)

    @property
    def passes(self) -> bool:
        return self.error <= self.limit  # NaN does not

    @property
    def description(self) -> str:
        return f"{self.part} has {self.error:.3g} times the error of rounding, more than {self.limit:g}"


def _folder() -> Path | None:
    chosen = os.environ.get(SETTING)
    if chosen is not None:
        return Path(chosen) if chosen else None
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "secondguess" / "checks"
    with suppress(RuntimeError):  # a user without a home directory
        return Path.home() / ".cache" / "secondguess" / "checks"
    return None


@cache
def _hash_of_sources() -> str:
    """Return a hash of the kernels and of all code that reads, packs or checks weights."""
    package = Path(__file__).parents[1]
    files = sorted(
        file
        for folder in ("checkpoint", "runtime")
        for file in (package / folder).rglob("*")
        if file.suffix in (".py", ".h", ".cpp")
    )
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()


def verdict_file(plan: Checkpoint, weight_format: WeightFormat) -> Path | None:
    """Return the file of the verdict on a model; None if none is kept.

    It is named before the model is loaded: Transformers changes the configuration.
    """
    folder = _folder()
    if folder is None:
        return None
    stats = [(str(path.resolve()), path.stat()) for path in plan.files.weight_files]
    about = {
        "files": [(path, stat.st_size, stat.st_mtime_ns) for path, stat in stats],
        "config": plan.config.to_dict(),
        "encoding": weight_format.name,
        "kept": weight_format.keeps_others,
        "sources": _hash_of_sources(),
        "unit": library.units()[0].name,
        "versions": [torch.__version__, transformers.__version__],
    }
    digest = hashlib.sha256(json.dumps(about, sort_keys=True, default=str).encode()).hexdigest()
    return folder / f"{digest[:32]}.json"


def read_verdict(file: Path | None) -> Verdict | None:
    """Return the verdict of an earlier check of the same files; None without one."""
    if file is not None:
        with suppress(OSError, ValueError, TypeError, KeyError):
            kept = json.loads(file.read_bytes())
            return Verdict(str(kept["part"]), float(kept["error"]), float(kept["limit"]))
    return None


def write_verdict(file: Path | None, verdict: Verdict) -> None:
    """Keep the verdict of a check; a folder that cannot be written keeps none."""
    if file is None:
        return
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=file.parent) as folder:
            written = Path(folder) / file.name
            written.write_text(json.dumps(asdict(verdict)), encoding="utf-8")
            written.replace(file)
